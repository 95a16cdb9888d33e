// The state of a VM in the words of `kvplace get`, with a mark of its own, its meaning and the next step; and its
// node's agent.

import { h } from "./dom.js";

const STATES = {
  NotCreated: ["…", "KubeVirt has not created its pod"],
  Waiting: ["…", "it has no node"],
  Bound: ["…", "node and cores are chosen, and the pod does not run yet"],
  Starting: ["…", "its pod runs, and KubeVirt has not started its guest yet"],
  Running: ["?", "no agent has measured its threads yet"],
  Pinned: ["✓", "every thread was read back on the cores of the newest placement"],
  NotPinned: ["!", "threads may run on other CPUs"],
  Floating: ["~", "it runs without cores of its own"],
  Ending: ["×", "it is being stopped"],
  Ended: ["×", "it has ended"],
  Failed: ["!", "it has failed"],
};

// The next step for a VM in each state: a sentence, and a command for it.
const NEXT = {
  NotCreated: ["The conditions of the VMI name what KubeVirt waits for.", (vm) => `kubectl -n ${vm.namespace} describe vmi ${vm.name}`],
  Waiting: ["See which changes would make it fit.", explain],
  Bound: ["If this lasts, the events of the pod name the reason.", (vm) => `kubectl -n ${vm.namespace} describe pod ${vm.pod}`],
  Starting: ["If this lasts, the events of the VMI name the reason.", (vm) => `kubectl -n ${vm.namespace} describe vmi ${vm.name}`],
  Running: ["If this lasts, check that the agent of its node runs.", () => "kubectl kvplace doctor"],
  NotPinned: ["The agent repairs drift within seconds. If this lasts, see the reason.", explain],
  Floating: ["See which nodes have cores for it, then restart it.", explain],
  Failed: ["The status of the pod names the reason.", (vm) => `kubectl -n ${vm.namespace} describe pod ${vm.pod}`],
};

function explain(vm) {
  return `kubectl kvplace explain ${vm.kind === "VM" ? "vm" : "pod"}/${vm.name} -n ${vm.namespace}`;
}

export function badge(vm, { meaning = false } = {}) {
  const [mark, words] = STATES[vm.state] ?? ["", ""];
  const said = vm.sentence || (meaning ? words : "");
  return h("span", { class: `state ${vm.state}`, title: words },
    h("b", { "aria-hidden": "true" }, mark), ` ${vm.state}`,
    vm.moving ? ", getting other cores" : null,
    said ? h("small", {}, `: ${said}`) : null);
}

export function nextStep(vm) {
  const [words, command] = NEXT[vm.state] ?? [];
  return words ? h("p", { class: "next" }, h("b", {}, "Next step: "), words, h("code", {}, command(vm))) : null;
}

// The fault of the agent of a node. Its measurements of threads may then be old.
export function agentTrouble({ agent }) {
  if (!agent) return null;
  return h("p", { class: "alarm" }, h("span", { "aria-hidden": "true" }, "! "), `${agent[0].toUpperCase()}${agent.slice(1)}.`);
}
