// How a VM is doing, in a word with a mark of its own and, where there is one, a sentence; and its node's agent.

import { h } from "./dom.js";

const MARKS = { Pinned: "✓", NotPinned: "!", Waiting: "…", Bound: "…", Running: "?", Floating: "~", Ending: "×", Ended: "×", Failed: "!" };
const WORDS = {
  Pinned: "pinned",
  NotPinned: "not where placed",
  Waiting: "waiting for a node",
  Bound: "starting",
  Running: "not checked by an agent yet",
  Floating: "floating, without cores of its own",
  Ending: "ending",
  Ended: "ended",
  Failed: "failed",
};

export function badge(vm) {
  return h("span", { class: `state ${vm.state}` },
    h("b", { "aria-hidden": "true" }, MARKS[vm.state] ?? ""), ` ${WORDS[vm.state] ?? vm.state}`,
    vm.moving ? ", getting other cores" : null,
    vm.sentence ? h("small", {}, `: ${vm.sentence}`) : null);
}

// What is wrong with the agent of a node: then what is shown of threads may be old.
export function agentTrouble({ agent }) {
  if (!agent) return null;
  return h("p", { class: "alarm" }, h("span", { "aria-hidden": "true" }, "! "), `${agent[0].toUpperCase()}${agent.slice(1)}.`);
}
