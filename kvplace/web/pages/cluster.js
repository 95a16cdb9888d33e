// What the page knows of the cluster, and how it stays true: one load, then the events that follow it.

const LONGEST_PAUSE_MS = 30000;
const HIDDEN_FOR_MS = 30000;

export class Failure extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

export async function ask(path) {
  const answer = await fetch(path, { headers: { Accept: "application/json" } }).catch(() => {
    throw new Failure(0, "no connection to kvplace");
  });
  const document = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Failure(answer.status, document.error ?? `HTTP ${answer.status}`);
  return document;
}

export class Cluster extends EventTarget {
  nodes = new Map();
  totals = null;
  name = "";
  #outage = "";
  #position = "";
  #source = null;
  #pause = 1000;
  #retry = null;

  constructor() {
    super();
    let hidden = null;
    document.addEventListener("visibilitychange", () => {
      clearTimeout(hidden);
      // A hidden page follows nothing: browsers allow six connections to a host.
      if (document.hidden) hidden = setTimeout(() => this.#hangUp("asleep while hidden"), HIDDEN_FOR_MS);
      else if (this.#source === null && this.totals !== null) this.#follow();
    });
  }

  async load() {
    this.#hangUp("loading");
    try {
      const all = await ask("api/cluster");
      this.nodes = new Map(all.nodes.map((row) => [row.name, row]));
      ({ name: this.name, totals: this.totals } = all);
      this.#outage = all.outage;
      this.#position = all.position;
    } catch (failure) {
      this.#later(failure);
      return;
    }
    this.dispatchEvent(new CustomEvent("loaded"));
    this.#follow();
  }

  #follow() {
    const source = new EventSource(`api/events?since=${encodeURIComponent(this.#position)}`);
    this.#source = source;
    source.addEventListener("open", () => {
      this.#pause = 1000;
      this.#sayHowLive();
    });
    source.addEventListener("heartbeat", (event) => {
      this.#outage = JSON.parse(event.data).outage;
      this.#sayHowLive();
    });
    source.addEventListener("changes", (event) => {
      const changes = JSON.parse(event.data);
      this.#position = event.lastEventId;
      for (const row of changes.nodes) this.nodes.set(row.name, row);
      for (const name of changes.gone) this.nodes.delete(name);
      this.totals = changes.totals;
      const names = new Set([...changes.nodes.map((row) => row.name), ...changes.gone]);
      this.dispatchEvent(new CustomEvent("changed", { detail: { names, gone: changes.gone } }));
    });
    source.addEventListener("reload", () => this.load());
    source.addEventListener("error", () => {
      this.#say("lost", "connection lost, trying again");
      if (source.readyState === EventSource.CLOSED && this.#source === source) this.#later();
    });
  }

  #later(failure = null) {
    this.#hangUp("lost", failure ? `${failure.message}, trying again` : "connection lost, trying again");
    if (failure !== null && this.totals === null) {
      this.dispatchEvent(new CustomEvent("failed", { detail: failure }));
    }
    clearTimeout(this.#retry);
    this.#retry = setTimeout(() => this.load(), this.#pause * (0.75 + Math.random() / 2));
    this.#pause = Math.min(this.#pause * 2, LONGEST_PAUSE_MS);
  }

  #hangUp(state, words = state) {
    this.#source?.close();
    this.#source = null;
    this.#say(state, words);
  }

  // The connection to kvplace may work while kvplace's to the API server does not.
  #sayHowLive() {
    if (this.#outage) this.#say("lost", `may be old: ${this.#outage}`);
    else this.#say("live", "live");
  }

  #say(state, words) {
    this.dispatchEvent(new CustomEvent("state", { detail: { state, words } }));
  }
}
