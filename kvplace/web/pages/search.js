// The search field: names of nodes and VMs, found by the server while one types.

import { ask } from "./cluster.js";
import { h, nodeLink, vmLink } from "./dom.js";

const PAUSE_MS = 120;

export function searching(field, list, words) {
  let timer = null;
  let asked = 0;
  let chosen = -1;
  let shown = ""; // the text for which the list is
  let hurried = false; // Enter was pressed before the list for the text was there

  const options = () => [...list.querySelectorAll("[role=option]")];
  const close = () => {
    list.hidden = true;
    field.setAttribute("aria-expanded", "false");
    field.removeAttribute("aria-activedescendant");
    chosen = -1;
  };
  const choose = (index) => {
    const all = options();
    if (!all.length) return;
    chosen = (index + all.length) % all.length;
    all.forEach((one, place) => one.setAttribute("aria-selected", String(place === chosen)));
    field.setAttribute("aria-activedescendant", all[chosen].id);
    all[chosen].scrollIntoView({ block: "nearest" });
  };
  const go = (option) => {
    location.hash = option.dataset.to;
    field.value = "";
    close();
    field.blur();
  };
  const enter = () => {
    const all = options();
    if (all.length) go(all[Math.max(0, chosen)]);
  };
  const option = (to, ...children) => ({ to, children });
  const show = (found) => {
    const entries = [
      ...found.nodes.map((name) => option(nodeLink(name), name, h("small", {}, " node"))),
      ...found.vms.map((vm) => option(vmLink(vm.namespace, vm.name), `${vm.namespace}/${vm.name}`, h("small", {}, vm.node ? ` on ${vm.node}` : " waiting"))),
    ];
    list.replaceChildren(...entries.map(({ to, children }, index) =>
      h("li", { role: "option", id: `found-${index}`, "aria-selected": "false", "data-to": to, on: { pointerdown: (event) => { event.preventDefault(); go(event.currentTarget); } } }, ...children)));
    if (found.more) list.append(h("li", { class: "words", role: "presentation" }, "and more: type another word"));
    if (!entries.length) list.append(h("li", { class: "words", role: "presentation" }, "nothing of that name"));
    words.textContent = entries.length ? `${entries.length} found` : "nothing of that name";
    list.hidden = false;
    field.setAttribute("aria-expanded", "true");
    chosen = -1;
  };

  field.addEventListener("input", () => {
    clearTimeout(timer);
    const text = field.value.trim();
    const mine = ++asked;
    hurried = false;
    if (!text) {
      close();
      return;
    }
    timer = setTimeout(async () => {
      try {
        const found = await ask(`api/search?q=${encodeURIComponent(text)}`);
        if (mine !== asked) return;
        show(found);
        shown = text;
        if (hurried) enter();
      } catch (failure) {
        if (mine === asked) words.textContent = failure.message;
      }
    }, PAUSE_MS);
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") choose(chosen + 1);
    else if (event.key === "ArrowUp") choose(chosen - 1);
    else if (event.key === "Enter") {
      if (shown === field.value.trim()) enter();
      else hurried = true;
    } else if (event.key === "Escape") {
      asked += 1; // what is under way is not wanted any more
      field.value = "";
      close();
      field.blur();
    } else return;
    event.preventDefault();
  });
  field.addEventListener("blur", close);
}
