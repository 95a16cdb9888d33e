// A node: its core map, and its VMs.

import { ask } from "./cluster.js";
import { drawMap, swatch } from "./core_map.js";
import { byName, bytes, cpuList, h, plural, replace, vmLink } from "./dom.js";
import { agentTrouble, badge } from "./states.js";

const ENFORCED = {
  none: "no agent keeps other containers off owned CPUs",
  cgroup: "the agent keeps other containers off owned CPUs (cgroups)",
  nri: "the agent keeps other containers off owned CPUs (NRI)",
};

export class NodePage {
  #name;
  #place = null;

  constructor(name) {
    this.#name = name;
    this.title = name;
  }

  async show(place) {
    this.#place = place;
    await this.#load();
  }

  concerns(names) {
    return names.has(this.#name);
  }

  async changed() {
    await this.#load();
  }

  async #load() {
    const node = await ask(`api/nodes/${encodeURIComponent(this.#name)}`);
    const map = node.map ? drawMap(node.map) : null;
    replace(this.#place,
      h("nav", { "aria-label": "Where" }, h("a", { href: "#/" }, "cluster"), " / ", node.name),
      h("h1", {}, node.name),
      h("p", { class: node.problem ? "alarm" : "facts" }, this.#words(node)),
      agentTrouble(node),
      map?.faults,
      map ? h("div", { class: "beside map-first" },
        h("div", {}, map.drawing),
        h("div", {}, node.vms.length ? this.#vms(node) : null, map.key)) : null);
  }

  #words(node) {
    if (node.problem) return `No VM can be placed here: ${node.problem}.`;
    const words = [`${node.free} of ${plural(node.allocatable, "CPU")} free`, plural(node.vms.length, "VM")];
    if (node.enforcement && !node.agent) words.push(ENFORCED[node.enforcement] ?? node.enforcement);
    return words.join(" · ");
  }

  #vms(node) {
    const devices = new Map(node.map.legend.map((entry) => [entry.label, entry.devices ?? []]));
    const vms = [...node.vms].sort((one, other) => byName(one.label.padStart(3), other.label.padStart(3)));
    return h("table", { class: "vms" },
      h("caption", {}, "VMs on this node"),
      h("thead", {}, h("tr", {}, ["", "VM", "state", "CPUs"].map((words) => h("th", { scope: "col" }, words)))),
      h("tbody", {}, vms.map((vm) => h("tr", {},
        h("td", {}, swatch(node.map, vm.label)),
        h("th", { scope: "row" }, h("a", { href: vmLink(vm.namespace, vm.name), "data-key": `vm-${vm.pod}` }, `${vm.namespace}/${vm.name}`),
          h("small", { class: "line" }, [vm.policy, ...Object.entries(vm.memory).map(([id, amount]) => `${bytes(amount)} on NUMA ${id}`), ...devices.get(vm.label) ?? []].join(" · "))),
        h("td", {}, badge(vm)),
        h("td", { class: "cpus" }, cpuList(vm.cpus))))));
  }
}
