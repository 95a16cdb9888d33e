// The core map of a node: sockets, NUMA nodes, L3 groups, cores and threads as nested boxes. Each state has a
// shape, pattern or mark of its own beside its colour, as in the maps of `kvplace map`.

import { bytes, h, plural, roving, vmLink } from "./dom.js";

const MARKS = { isolated: ":", reserved: "#", foreign: "%" };
const MEANINGS = {
  owned: "owned by the VM of this letter",
  idle: "kept idle by its owner",
  emulator: "for QEMU's own threads of this VM",
  kept: "kept for this VM, which waits",
  shared: "shared, used by this VM; ×2: by two",
  free: "free",
  isolated: "free, isolated by the kernel",
  reserved: "reserved for the host",
  foreign: "in use outside of kvplace",
};
const COLOURS = 20;

export const nameOf = (vm) => `${vm.namespace}/${vm.vmi || vm.pod}`;

export function colours(map) {
  return new Map(map.legend.map((entry, index) => [entry.label, `vm${index % COLOURS}`]));
}

export function swatch(map, label) {
  const again = map.legend.findIndex((entry) => entry.label === label) >= COLOURS ? "again" : "";
  return h("span", { class: `thread small owned ${again} ${colours(map).get(label) ?? ""}`, "aria-hidden": "true" }, h("b", {}, label));
}

export function drawMap(map, { highlight = "", name = map.name } = {}) {
  const legend = new Map(map.legend.map((entry, index) => [entry.label, { ...entry, index }]));
  const seen = new Set();
  const thread = (one) => drawThread(one, legend, seen);
  const core = (threads) => h("span", { class: threads.length > 2 ? "core wide" : "core" }, threads.map(thread));
  const l3 = (group) =>
    h("div", { class: "l3", role: "group", "aria-label": `L3 ${group.index}` },
      h("span", { class: "box-name" }, `L3 ${group.index}${group.part ? " (part)" : ""}`),
      h("div", { class: "cores", vars: { "--columns": Math.min(group.cores.length, Math.max(4, Math.ceil(Math.sqrt(2 * group.cores.length)))) } },
        group.cores.map(core)));
  const node = (numa) =>
    h("section", { class: "numa", "aria-label": `NUMA node ${numa.id}` },
      h("h4", {}, `NUMA ${numa.id}${numa.part ? " (part)" : ""}`, facts(numa).map((words, index) => h("small", { class: index ? "line" : "" }, ` ${words}`))),
      h("div", { class: "l3s", vars: { "--columns": Math.ceil(Math.sqrt(numa.l3Groups.length)) || 1 } }, numa.l3Groups.map(l3)));
  const drawing = h("div", { class: "map", role: "group", "aria-label": `Core map of ${name}` },
    map.sockets.map((socket) =>
      h("section", { class: "socket", "aria-label": `socket ${socket.id}` },
        h("h3", {}, `socket ${socket.id}`),
        h("div", { class: "numas" }, socket.numaNodes.map(node)))),
    map.memoryOnlyNodes.map(node));
  const stop = roving(drawing, ".thread");
  const first = highlight && drawing.querySelector(`[data-vms~="${CSS.escape(highlight)}"]`);
  if (first) stop(first);
  light(drawing, highlight);
  const follow = (event) => light(drawing, event.target.closest(".thread")?.dataset.vms?.split(" ")[0] || highlight);
  drawing.addEventListener("pointerover", follow);
  drawing.addEventListener("focusin", follow);
  drawing.addEventListener("pointerleave", () => light(drawing, highlight));
  return { faults: faults(map), drawing, key: key(seen) };
}

// Dims the threads of all other VMs.
function light(drawing, label) {
  if (drawing.dataset.lit === label) return;
  drawing.dataset.lit = label;
  for (const one of drawing.querySelectorAll(".thread")) {
    const labels = (one.dataset.vms ?? "").split(" ");
    one.classList.toggle("lit", label !== "" && labels.includes(label));
    one.classList.toggle("dim", label !== "" && !labels.includes(label));
  }
}

function drawThread(one, legend, seen) {
  const labels = one.vms ?? [];
  const vms = labels.map((label) => legend.get(label)).filter(Boolean);
  let mark = labels.length > 1 && one.state === "shared" ? `×${labels.length}` : MARKS[one.state] ?? labels.join("/");
  if (one.state === "idle") mark = mark.toLowerCase();
  if (one.state === "kept") mark += "?";
  if (one.fault) mark += "!";
  mark += (one.strays ?? []).join("/");
  const words = [`CPU ${one.cpu}: ${one.state}`];
  if (vms.length) words.push(`${one.state === "kept" ? "for" : "by"} ${vms.map((vm) => `${vm.label} ${nameOf(vm)}`).join(", ")}`);
  if (one.strays) words.push(`with threads of ${one.strays.map((label) => `${label} ${nameOf(legend.get(label))}`).join(", ")}`);
  if (one.qemu) {
    const vms = one.qemu.map((label) => `${label} ${nameOf(legend.get(label))}`);
    words.push(`with QEMU's own threads of ${vms.length > 4 ? `${vms.length} VMs` : vms.join(", ")}`);
  }
  if (one.fault) words.push(`(${one.fault})`);
  const colour = vms.length === 1 ? `vm${vms[0].index % COLOURS}${vms[0].index >= COLOURS ? " again" : ""}` : "";
  seen.add(one.fault ? "fault" : "").add(one.qemu ? "qemu" : "").add(one.state);
  const sentence = words.join(" ");
  const long = mark.length > 2 ? " long" : "";
  return h(vms.length ? "a" : "span",
    {
      class: `thread ${one.state} ${colour}${one.fault ? " fault" : ""}${one.qemu ? " qemu" : ""}`,
      href: vms.length ? vmLink(vms[0].namespace, vms[0].vmi || vms[0].pod) : null,
      role: vms.length ? null : "img",
      "aria-label": sentence,
      title: sentence,
      tabindex: -1,
      "data-key": `cpu-${one.cpu}`,
      "data-cpu": one.cpu,
      "data-vms": [...labels, ...(one.strays ?? [])].join(" "),
    },
    h("span", { class: "cpu" }, one.cpu),
    mark ? h("b", { class: `mark${long}` }, mark) : null);
}

function key(seen) {
  const entries = Object.entries(MEANINGS).filter(([state]) => seen.has(state));
  const letters = { owned: "A", idle: "a", emulator: "A", kept: "A?", shared: "A" };
  return h("ul", { class: "key", "aria-label": "Key of the map" },
    h("li", {}, h("b", {}, "Key")),
    entries.map(([state, meaning]) =>
      h("li", {},
        h("span", { class: `thread small ${state} ${state === "emulator" ? "qemu" : ""} ${state in letters ? "vm0" : ""}`, "aria-hidden": "true" },
          h("b", {}, letters[state] ?? MARKS[state] ?? "")),
        meaning)),
    seen.has("qemu") ? h("li", {}, h("span", { class: "thread small qemu", "aria-hidden": "true" }), "QEMU's own threads run here") : null,
    seen.has("fault") ? h("li", {}, h("span", { class: "thread small fault", "aria-hidden": "true" }, h("b", {}, "!")), "conflict or drift") : null);
}

function faults(map) {
  if (!map.faults.length) return null;
  return h("ul", { class: "faults", "aria-label": "Conflicts and drift" },
    map.faults.map((fault) => h("li", {}, `! ${fault.kind}: ${fault.message}`)));
}

// Free memory, what is set aside as huge pages, and the distances to other nodes.
function facts(numa) {
  const sizes = Object.entries(numa.hugePages).filter(([, pages]) => pages.count);
  const plain = sizes.reduce((left, [size, pages]) => left - size * pages.count, numa.memory);
  const parts = numa.memory ? [`${bytes(numa.freeMemory)} of ${bytes(Math.max(0, plain))} free`] : ["memory unknown"];
  for (const [size, pages] of sizes) {
    parts.push(`${bytes(size * pages.count)} set aside: ${pages.free} of ${plural(pages.count, "huge page")} of ${bytes(Number(size))} free`);
  }
  for (const [resource, count] of Object.entries(numa.devices ?? {})) parts.push(`${count.free} of ${count.count} ${resource} free`);
  const near = distances(numa);
  return near ? [...parts, `distance ${near}`] : parts;
}

// The other NUMA nodes by their distance, the nearest first.
function distances(numa) {
  const nodes = new Map();
  for (const [id, distance] of Object.entries(numa.distances)) {
    if (Number(id) !== numa.id) nodes.set(distance, [...(nodes.get(distance) ?? []), id]);
  }
  return [...nodes].sort(([one], [other]) => one - other).map(([distance, ids]) => `${distance} to NUMA ${ids.join(", ")}`).join("; ");
}
