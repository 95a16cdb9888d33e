// Elements from values. All text goes in as text: nothing here, or anywhere, makes HTML from strings.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "vars") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...shown(children));
  return element;
}

const shown = (children) => children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);

export const nodeLink = (name) => `#/node/${encodeURIComponent(name)}`;
export const vmLink = (namespace, name) => `#/vm/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}`;

const collator = new Intl.Collator("en", { numeric: true });
export const byName = (one, other) => collator.compare(one, other);

export const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

export function bytes(count) {
  const units = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
  const [unit, size] = units.find(([, size]) => count >= size) ?? ["B", 1];
  return `${Number((count / size).toFixed(1)).toLocaleString("en")} ${unit}`;
}

// A list of CPUs that is broken after its commas only, never inside a range.
export const cpuList = (text) => text.split(",").map((range, place) => [place ? [",", h("wbr")] : null, h("span", { class: "range" }, range)]);

// A moment as the API server writes it, and how long ago it was or how far away it is.
export function moment(text) {
  const seconds = (Date.now() - new Date(text).getTime()) / 1000;
  if (Number.isNaN(seconds)) return text;
  const [unit, size] = [["d", 86400], ["h", 3600], ["min", 60]].find(([, size]) => Math.abs(seconds) >= size) ?? ["s", 1];
  const age = `${Math.floor(Math.abs(seconds) / size)} ${unit}`;
  return `${text} (${seconds < 0 ? `in ${age}` : `${age} ago`})`;
}

// One stop of the Tab key for many elements; arrows, Home and End move among them. `boxOf` gives the element that
// finds where one of them is: to measure what is off the screen, the browser would have to lay it out first.
export function roving(container, selector, boxOf = (element) => element) {
  const stop = (element) => {
    for (const other of container.querySelectorAll(`${selector}[tabindex="0"]`)) other.tabIndex = -1;
    element.tabIndex = 0;
  };
  const first = container.querySelector(selector);
  if (first) first.tabIndex = 0;
  container.addEventListener("focusin", (event) => {
    const element = event.target.closest(selector);
    if (element) stop(element);
  });
  container.addEventListener("keydown", (event) => {
    const here = event.target.closest(selector);
    if (!here || event.ctrlKey || event.metaKey || event.altKey) return;
    const all = [...container.querySelectorAll(selector)];
    const place = all.indexOf(here);
    let next = null;
    if (event.key === "ArrowRight") next = all[place + 1];
    else if (event.key === "ArrowLeft") next = all[place - 1];
    else if (event.key === "Home") next = all[0];
    else if (event.key === "End") next = all[all.length - 1];
    else if (event.key === "ArrowDown") next = vertically(all, here, 1, boxOf);
    else if (event.key === "ArrowUp") next = vertically(all, here, -1, boxOf);
    else return;
    event.preventDefault();
    if (next) next.focus();
  });
  return stop;
}

function vertically(all, here, direction, boxOf) {
  const from = boxOf(here).getBoundingClientRect();
  let best = null;
  let least = Infinity;
  for (const one of all) {
    const to = boxOf(one).getBoundingClientRect();
    const down = (to.top - from.top) * direction;
    if (down < from.height / 2) continue;
    const far = down * 1000 + Math.abs(to.left - from.left);
    if (far < least) [best, least] = [one, far];
  }
  return best;
}

// Puts new content into a place without losing the reader's: focus stays on the element with the same key, what
// was opened stays open, and equal content stays as it is, or screen readers would read it out again.
export function replace(place, ...children) {
  const next = h("div", {}, ...children);
  if (said(next) === said(place)) return;
  const key = place.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const opened = [...place.querySelectorAll("details")].map((one) => one.open);
  place.replaceChildren(...next.childNodes);
  place.querySelectorAll("details").forEach((one, index) => { one.open = opened[index] ?? false; });
  if (key) place.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
}

// The content of an element, without what its reader has done to it: opened, lit up, gone to with a key.
const writer = new XMLSerializer();
const said = (element) => [...element.childNodes].map((child) => writer.serializeToString(child)).join("")
  .replace(/ (?:open|tabindex|data-lit)="[^"]*"/g, "").replace(/ (?:lit|dim)\b/g, "");
