// The cluster: its free blocks, and every node as a tile.

import { byName, h, nodeLink, plural, replace, roving, vmLink } from "./dom.js";

const SCOPES = { l3: "L3 cache", numa: "NUMA node", socket: "socket" };
const ORDERS = {
  name: ["name", () => 0],
  free: ["most free CPUs", (row) => -(row.free ?? -1)],
  block: ["largest free block in a NUMA node", (row) => -(row.freeBlocks?.numa[0] ?? -1)],
  scattered: ["most fragmented", (row) => -fragmentation(row)],
  trouble: ["trouble first", (row) => -((row.problem ? 1e6 : 0) + (row.agent ? 1e3 : 0) + row.notPinned + row.moving / 1000)],
};
const NAMED = 6; // nodes with trouble, and waiting VMs, that are named

const fragmentation = (row) => (row.freeBlocks?.numa[2] ? 1 - row.freeBlocks.numa[0] / row.freeBlocks.numa[2] : 0);
const troubles = (row) => [row.notPinned && `${plural(row.notPinned, "VM")} NotPinned`, row.agent].filter(Boolean);
const percent = (share) => `${Math.round(share * 100)} %`;

export class Overview {
  #cluster;
  #order = "name";
  #wanted = null;
  #orders = null;
  #tiles = new Map();
  #summary = h("section", { "aria-label": "Summary", class: "summary" });
  #list = h("ul", { class: "tiles", "aria-label": "Nodes" });
  #words = h("p", { class: "words", role: "status" });
  #stop;

  title = "cluster";

  constructor(cluster) {
    this.#cluster = cluster;
  }

  show(place) {
    this.#orders = h("select", { id: "order", on: { change: (event) => this.#sort(event.target.value) } },
      Object.entries(ORDERS).map(([value, [words]]) => h("option", { value }, words)));
    place.replaceChildren(
      h("h1", { class: "hidden" }, "Cluster"),
      this.#summary,
      h("div", { class: "tools" }, h("h2", {}, "Nodes"), h("label", {}, "sorted by ", this.#orders), this.#words,
        h("p", { class: "legend words" }, h("span", { class: "used", vars: { "--share": 0.6 }, "aria-hidden": "true" }), "a bar is a NUMA node, filled where its CPUs are taken; blocks are those of NUMA nodes")),
      this.#list);
    this.#summarise();
    for (const row of this.#cluster.nodes.values()) this.#tile(row);
    this.#arrange();
    this.#stop = roving(this.#list, ".tile", (tile) => tile.parentElement);
  }

  changed(names, gone) {
    this.#summarise();
    for (const name of gone) {
      this.#tiles.get(name)?.remove();
      this.#tiles.delete(name);
    }
    let isNew = false;
    for (const name of names) {
      const row = this.#cluster.nodes.get(name);
      if (!row) continue;
      isNew ||= !this.#tiles.has(name);
      this.#tile(row);
    }
    if (isNew || gone.length || this.#order !== "name" || this.#wanted) this.#arrange();
    if (!this.#list.querySelector('.tile[tabindex="0"]') && this.#list.firstChild) this.#stop(this.#list.querySelector(".tile"));
  }

  #sort(order) {
    this.#order = order;
    this.#orders.value = order;
    this.#arrange();
  }

  #summarise() {
    const { totals } = this.#cluster;
    const noun = (count, one) => plural(count, one).replace(/^\S+ /, "");
    const number = (value, words, mark = "") => h("li", { class: mark }, h("b", {}, value.toLocaleString("en")), ` ${words}`);
    replace(this.#summary,
      h("ul", { class: "numbers" },
        number(totals.nodes, totals.usable === totals.nodes ? noun(totals.nodes, "node") : `${noun(totals.nodes, "node")}, ${totals.nodes - totals.usable} unusable`),
        number(totals.free, `of ${plural(totals.allocatable, "CPU")} free`),
        number(totals.vms, `${noun(totals.vms, "VM")} with cores`),
        number(totals.waiting, `${noun(totals.waiting, "VM")} Waiting`, totals.waiting ? "notice" : ""),
        number(totals.moving, `${noun(totals.moving, "VM")} relocating`),
        number(totals.notPinned, `${noun(totals.notPinned, "VM")} NotPinned`, totals.notPinned ? "alarm" : "")),
      h("div", { class: "panels" }, this.#freeBlocks(totals), this.#trouble(totals)));
  }

  // Nodes with trouble, and VMs that wait.
  #trouble(totals) {
    const [, rank] = ORDERS.trouble;
    const nodes = [...this.#cluster.nodes.values()].filter((row) => row.problem || row.notPinned || row.agent)
      .sort((one, other) => rank(one) - rank(other) || byName(one.name, other.name));
    const waiting = totals.firstWaiting.slice(0, NAMED);
    if (!nodes.length && !waiting.length) return null;
    return h("section", { class: "panel", "aria-labelledby": "trouble-title" },
      h("h2", { id: "trouble-title" }, "Needs attention"),
      h("ul", { class: "trouble" },
        nodes.slice(0, NAMED).map((row) => h("li", {},
          h("b", { class: "alarm", "aria-hidden": "true" }, "! "),
          h("a", { href: nodeLink(row.name), "data-key": `trouble-${row.name}` }, row.name),
          h("small", {}, ` ${row.problem ? `unusable: ${row.problem}` : troubles(row).join("; ")}`))),
        waiting.map(([namespace, name]) => h("li", {},
          h("b", { "aria-hidden": "true" }, "… "),
          h("a", { href: vmLink(namespace, name), "data-key": `waiting-${namespace}-${name}` }, `${namespace}/${name}`),
          h("small", {}, " Waiting")))),
      nodes.length > NAMED
        ? h("button", { type: "button", "data-key": "all-trouble", on: { click: () => this.#sort("trouble") } }, `all ${plural(nodes.length, "node")} first in the list`)
        : null,
      totals.waiting > waiting.length ? h("p", { class: "words" }, `${plural(totals.waiting - waiting.length, "more VM")} waiting`) : null);
  }

  #freeBlocks(totals) {
    const cell = (scope, size, count) => {
      const pressed = this.#wanted?.scope === scope && this.#wanted.size === size;
      return h("td", {},
        h("button", {
          type: "button",
          tabindex: -1,
          "aria-pressed": String(pressed),
          "aria-label": `${plural(count, "node")} with ${plural(size, "free CPU")} or more in one ${SCOPES[scope]}`,
          "data-key": `${scope}-${size}`,
          vars: { "--share": totals.usable ? count / totals.usable : 0 },
          on: { click: () => { this.#wanted = pressed ? null : { scope, size }; this.#summarise(); this.#arrange(); } },
        }, count.toLocaleString("en")));
    };
    const numbers = h("table", { class: "blocks", "aria-labelledby": "blocks-title" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "CPUs in one"),
        totals.sizes.map((size) => h("th", { scope: "col" }, size)),
        h("th", { scope: "col" }, "largest free block"), h("th", { scope: "col" }, "fragmentation"))),
      h("tbody", {}, Object.entries(SCOPES).map(([scope, words]) => {
        const block = totals.freeBlocks[scope];
        return h("tr", {}, h("th", { scope: "row" }, words),
          totals.sizes.map((size, index) => cell(scope, size, block.nodesWith[index])),
          h("td", {}, `${plural(block.cpus, "CPU")}, ${plural(block.cores, "core")}`),
          h("td", {}, percent(block.fragmentation)));
      })));
    roving(numbers, "button"); // a stop of the Tab key each would be two dozen before the nodes
    return h("section", { class: "panel", "aria-labelledby": "blocks-title" },
      h("h2", { id: "blocks-title" }, "Free blocks"),
      h("p", { class: "words" }, "Number of nodes with a free block for a VM of this many CPUs. Press a number to list these nodes."),
      numbers,
      h("p", { class: "words" }, h("b", {}, "Free block: "), "free CPUs inside one L3 cache, NUMA node or socket. A VM with this scope must fit into one. ",
        h("b", {}, "Fragmentation: "), "0 % if the largest free block of each node is as large as its free CPUs could form."));
  }

  #tile(row) {
    let item = this.#tiles.get(row.name);
    if (!item) {
      item = h("li", {}, h("a", { class: "tile", href: nodeLink(row.name), tabindex: -1 }));
      this.#tiles.set(row.name, item);
    }
    const link = item.firstChild;
    const largest = row.freeBlocks?.numa[0] ?? 0;
    const scattered = percent(fragmentation(row));
    const trouble = [row.notPinned && `${row.notPinned} NotPinned`, row.moving && `${row.moving} moving`, row.agent].filter(Boolean);
    const words = row.problem
      ? `unusable: ${row.problem}`
      : [`${row.free} of ${plural(row.allocatable, "CPU")} free`, `largest free block in a NUMA node: ${plural(largest, "CPU")}`, `${scattered} fragmented`, plural(row.vms, "VM"), ...trouble].join(", ");
    link.setAttribute("aria-label", `${row.name}: ${words}`);
    link.title = `${row.name}: ${words}`;
    link.classList.toggle("unusable", Boolean(row.problem));
    link.replaceChildren(
      h("span", { class: "line" }, h("span", { class: "name" }, row.name), row.agent ? h("b", { class: "alarm" }, "! agent") : null, row.notPinned ? h("b", { class: "alarm" }, `! ${row.notPinned} NotPinned`) : null),
      h("span", { class: "bars" }, (row.numa ?? []).map(([free, all]) =>
        h("span", { class: "used", vars: { "--share": all ? 1 - free / all : 1, "--size": all } }))),
      ...(row.problem
        ? [h("small", { class: "problem" }, `unusable: ${row.problem}`)]
        : [
            h("span", { class: "line" }, h("span", {}, h("b", {}, row.free), ` of ${plural(row.allocatable, "CPU")} free`), h("span", {}, plural(row.vms, "VM"))),
            h("small", { class: "line" }, h("span", {}, `largest block ${largest}`), h("span", {}, `${scattered} fragmented`)),
          ]));
    return item;
  }

  #arrange() {
    const [, rank] = ORDERS[this.#order];
    const rows = [...this.#cluster.nodes.values()]
      .filter((row) => !this.#wanted || (row.freeBlocks?.[this.#wanted.scope][0] ?? 0) >= this.#wanted.size)
      .sort((one, other) => rank(one) - rank(other) || byName(one.name, other.name));
    const focused = this.#list.contains(document.activeElement) ? document.activeElement : null;
    this.#list.replaceChildren(...rows.map((row) => this.#tiles.get(row.name)));
    focused?.focus({ preventScroll: true });
    const all = this.#cluster.nodes.size;
    const words = all === 0
      ? "The cluster has no nodes."
      : this.#wanted
        ? `${plural(rows.length, "node")} with ${plural(this.#wanted.size, "free CPU")} or more in one ${SCOPES[this.#wanted.scope]}, of ${all.toLocaleString("en")}`
        : plural(all, "node");
    if (this.#words.textContent !== words) this.#words.textContent = words; // else it would be read out again
  }
}
