// A VM: where it sits, whether it really runs there, and its neighbours.

import { ask } from "./cluster.js";
import { drawMap, swatch } from "./core_map.js";
import { bytes, cpuList, h, moment, nodeLink, plural, replace, vmLink } from "./dom.js";
import { agentTrouble, badge, nextStep } from "./states.js";

const OVER = ["Ended", "Failed"];
// Hidden: the values that a VM has without its own annotation.
const USUAL = { smt: "prefer", emulatorThreads: "shared", numaMemory: "preferred", guestNuma: "off", deviceNuma: "preferred", onFailure: "wait" };

export class VmPage {
  #namespace;
  #name;
  #place = null;
  #nodes = new Set();
  #settled = false;

  constructor(namespace, name) {
    this.#namespace = namespace;
    this.#name = name;
    this.title = `${namespace}/${name}`;
  }

  async show(place) {
    this.#place = place;
    await this.#load();
  }

  // A VM without a node may get one anywhere.
  concerns(names) {
    return !this.#settled || [...names].some((name) => this.#nodes.has(name));
  }

  async changed() {
    await this.#load();
  }

  async #load() {
    const path = [this.#namespace, this.#name].map(encodeURIComponent).join("/");
    const vm = await ask(`api/vms/${path}`);
    this.#nodes = new Set(vm.pods.map((pod) => pod.node));
    this.#settled = vm.pods.length > 0 && vm.pods.every((pod) => pod.node);
    const present = vm.pods.filter((pod) => !OVER.includes(pod.state)).length; // what a migration leaves stays for long
    replace(this.#place,
      h("nav", { "aria-label": "Where" }, h("a", { href: "#/" }, "cluster"), " / ", this.title),
      h("h1", {}, this.title),
      present > 1 ? h("p", {}, `${plural(present, "pod")}: it is moving from one node to another.`) : null,
      vm.pods.length ? vm.pods.map((pod) => this.#pod(vm, pod)) : [h("p", {}, badge(vm, { meaning: true })), nextStep(vm)]);
  }

  #pod(vm, pod) {
    const seat = pod.node || pod.reservedOn;
    const map = pod.map ? drawMap(pod.map, { highlight: pod.label, name: `${seat} with ${this.title} as ${pod.label}` }) : null;
    const next = nextStep({ ...pod, kind: vm.kind, namespace: this.#namespace, name: this.#name });
    return h("article", { "aria-label": `pod ${pod.pod}` },
      h("p", {}, badge(pod, { meaning: true })),
      next,
      agentTrouble(pod),
      map?.faults,
      h("div", { class: "beside" },
        h("div", {},
          h("dl", { class: "facts" }, this.#facts(vm, pod, next === null).map(([term, value]) => [h("dt", {}, term), h("dd", {}, value)])),
          map?.key,
          pod.neighbours ? this.#neighbours(pod) : null),
        map ? h("div", {}, h("h2", { class: "seat" }, pod.node ? "On " : "Room is made on ", h("a", { href: nodeLink(seat), "data-key": `node-${pod.pod}` }, seat),
          " this VM is ", swatch(pod.map, pod.label), h("span", { class: "hidden" }, pod.label)), map.drawing) : null),
      pod.placement?.vcpus.length ? this.#vcpus(pod) : null,
      pod.conditions.length ? this.#conditions(pod) : null);
  }

  #facts(vm, pod, more) {
    const facts = [["node", pod.node ? h("a", { href: nodeLink(pod.node), "data-key": "node" }, pod.node) : "none yet"], ["pod", `${pod.pod}, ${pod.phase}`]];
    const { claim, seat, placement, measured } = pod;
    if (seat) {
      facts.push([pod.node ? "sits on" : "will sit on", [
        `${seat.sockets.length > 1 ? "sockets" : "socket"} ${seat.sockets.join(", ")}`,
        `NUMA ${seat.numaNodes.join(", ")}`,
        `L3 ${seat.l3Groups.join(", ")}`,
        `${plural(seat.cores, "core")}, ${seat.wholeCores === seat.cores ? "all whole" : `${seat.wholeCores} whole`}`,
      ].join(" · ")]);
    }
    if (claim?.reserved) {
      const { owned, stillInUse, until } = claim.reserved;
      facts.push(["reserved", ["CPU ", cpuList(owned), stillInUse ? ["; still in use: ", cpuList(stillInUse)] : null, `; until ${moment(until)}`]]);
    } else if (claim) {
      facts.push(["CPUs", [cpuList(claim.cpus), claim.owned ? ["; owns ", cpuList(claim.owned)] : null]]);
      facts.push(["policy", claim.policy]);
      facts.push(["revision", `${claim.revision}, claimed ${moment(claim.since)}`]);
      const memory = Object.entries(claim.memory).map(([id, amount]) => `${bytes(amount)} on NUMA ${id}`);
      if (memory.length) facts.push(["memory", memory.join(", ")]);
    }
    if (placement?.emulatorCpus) facts.push(["QEMU's own threads", ["CPU ", cpuList(placement.emulatorCpus)]]);
    if (measured?.cpus) facts.push(["measured", ["threads may run on CPU ", cpuList(measured.cpus), ` (revision ${measured.revision})`]]);
    if (pod.devices?.length) facts.push(["devices", pod.devices.map((one) => h("div", {}, device(one)))]);
    facts.push(["requested", this.#asked(pod.request)]);
    if (more) facts.push(["more", h("code", {}, `kubectl kvplace explain ${vm.kind === "VM" ? "vm" : "pod"}/${this.#name} -n ${this.#namespace}`)]);
    return facts;
  }

  #asked(text) {
    let request = null;
    try {
      request = JSON.parse(text);
    } catch {
      // It is shown as it stands.
    }
    if (typeof request?.vcpus !== "number") return text;
    const { version, vcpus, cpuSet, policy, memory, hugepages, vmi, ...options } = request;
    const words = [plural(vcpus, "vCPU"), cpuSet, policy];
    if (memory) words.push(`${bytes(memory)} of memory`);
    for (const [size, count] of Object.entries(hugepages ?? {})) words.push(`${plural(count, "huge page")} of ${size}`);
    for (const [key, value] of Object.entries(options)) {
      if (!value || value === USUAL[key] || (typeof value === "object" && !Object.keys(value).length)) continue;
      const name = key.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`);
      words.push(value === true ? name : `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`);
    }
    return words.filter(Boolean).join(" · ");
  }

  #neighbours(pod) {
    if (!pod.neighbours.length) return h("p", {}, "No other VM shares a socket with it.");
    return h("table", { class: "vms" },
      h("caption", {}, "Neighbours, the closest first"),
      h("thead", {}, h("tr", {}, ["", "VM", "shares", "CPUs"].map((words) => h("th", { scope: "col" }, words)))),
      h("tbody", {}, pod.neighbours.map((one) => h("tr", {},
        h("td", {}, swatch(pod.map, one.label)),
        h("th", { scope: "row" }, h("a", { href: vmLink(one.namespace, one.name) }, `${one.namespace}/${one.name}`), " ", h("small", {}, one.policy)),
        h("td", {}, one.nearness),
        h("td", { class: "cpus" }, cpuList(one.cpus))))));
  }

  #vcpus(pod) {
    const at = new Map();
    for (const socket of pod.map?.sockets ?? []) {
      for (const numa of socket.numaNodes) {
        for (const l3 of numa.l3Groups) {
          for (const core of l3.cores) {
            for (const thread of core) {
              at.set(thread.cpu, [socket.id, numa.id, l3.index, core.map((one) => one.cpu).join(",")]);
            }
          }
        }
      }
    }
    return h("details", {}, h("summary", {}, `The CPU of each of its ${plural(pod.placement.vcpus.length, "vCPU")}`),
      h("table", { class: "vms" },
        h("thead", {}, h("tr", {}, ["vCPU", "CPU", "socket", "NUMA", "L3", "core"].map((words) => h("th", { scope: "col" }, words)))),
        h("tbody", {}, pod.placement.vcpus.map((cpu, vcpu) => h("tr", {},
          h("th", { scope: "row" }, vcpu), h("td", {}, cpu), (at.get(cpu) ?? []).map((one) => h("td", {}, one)))))));
  }

  #conditions(pod) {
    return h("table", { class: "vms" },
      h("caption", {}, "Conditions"),
      h("tbody", {}, pod.conditions.map((one) => h("tr", {},
        h("th", { scope: "row" }, one.type), h("td", {}, one.status), h("td", {}, one.reason), h("td", {}, one.message)))));
  }
}

// A device that the kubelet has given to the VM, and whether it is beside the VM's cores.
function device({ resource, address, numaNode, local }) {
  const place = numaNode < 0 ? "on no known NUMA node" : `on NUMA ${numaNode}`;
  const text = [resource, address, place].filter(Boolean).join(" ");
  if (local === null) return text;
  return local ? `${text} (local)` : h("span", { class: "alarm" }, `${text} (not local)`);
}
