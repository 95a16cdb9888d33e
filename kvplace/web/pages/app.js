// The page: its views, its keys, and its reaction to changes of the cluster.

import { Cluster } from "./cluster.js";
import { h } from "./dom.js";
import { NodePage } from "./node.js";
import { Overview } from "./overview.js";
import { searching } from "./search.js";
import { VmPage } from "./vm.js";

const LEAST_PAUSE_MS = 1000; // between two loads of the view that is shown

const by = (id) => document.getElementById(id);
const content = by("content");
const cluster = new Cluster();
let view = null;
let pending = null;

function decoded(name) {
  try {
    return decodeURIComponent(name);
  } catch {
    return name; // written by hand, or cut off
  }
}

function viewOf(hash) {
  const [, kind, ...names] = hash.split("/");
  const [one, other] = names.map(decoded);
  if (kind === "node" && one) return new NodePage(one);
  if (kind === "vm" && one && other) return new VmPage(one, other);
  return new Overview(cluster);
}

function say(failure) {
  content.replaceChildren(h("nav", {}, h("a", { href: "#/" }, "cluster")), h("p", { class: "alarm", role: "alert" }, failure.message));
}

async function show({ focus = true } = {}) {
  const wanted = viewOf(location.hash);
  view = wanted;
  document.title = [wanted.title, cluster.name, "kvplace"].filter(Boolean).join(" · ");
  content.setAttribute("aria-busy", "true");
  try {
    await wanted.show(content);
  } catch (failure) {
    if (view === wanted) say(failure);
  }
  if (view !== wanted) return;
  content.removeAttribute("aria-busy");
  if (focus) {
    content.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
}

cluster.addEventListener("loaded", () => {
  by("cluster-name").textContent = cluster.name;
  show({ focus: false });
});
cluster.addEventListener("failed", (event) => say(event.detail));
cluster.addEventListener("state", (event) => {
  by("live").dataset.state = event.detail.state;
  by("live").textContent = event.detail.words;
});
cluster.addEventListener("changed", (event) => {
  const { names, gone } = event.detail;
  if (view instanceof Overview) view.changed(names, gone);
  else if (view?.concerns(names) && pending === null) {
    const mine = view;
    pending = setTimeout(async () => {
      pending = null;
      if (view !== mine) return;
      try {
        await mine.changed();
      } catch (failure) {
        if (view === mine) say(failure);
      }
    }, LEAST_PAUSE_MS);
  }
});

window.addEventListener("hashchange", () => show());
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog[open]")) return;
  if (event.key === "/") by("search").focus();
  else if (event.key === "?") by("key-help").showModal();
  else if (event.key === "g") location.hash = "#/";
  else return;
  event.preventDefault();
});
by("keys").addEventListener("click", () => by("key-help").showModal());
by("skip").addEventListener("click", () => content.focus());
by("theme").value = document.documentElement.dataset.theme ?? "";
by("theme").addEventListener("change", (event) => {
  const chosen = event.target.value;
  if (chosen) {
    document.documentElement.dataset.theme = chosen;
    localStorage.setItem("kvplace-theme", chosen);
  } else {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem("kvplace-theme");
  }
});
searching(by("search"), by("found"), by("found-words"));
cluster.load();
