/** Text saved in the browser, so that it survives reloads and closed tabs.
 *
 * Every tab has its own text. A new tab continues the most recent text that no other tab has open.
 */

const PREFIX = "simulmt.text.";
const TAB = "simulmt.tab";
const SAVE_MS = 500;
const SAVING_SHARE = 0.02; // maximum fraction of time spent saving
const HEARTBEAT_MS = 30_000;
const ABANDONED_MS = 5 * 60_000; // without a heartbeat; hidden tabs have few
const MOST_TEXTS = 8;

/** @typedef {{isOpen: boolean, savedAt: number, text: any}} Entry */

export class TextStorage {
  #key;
  #read;
  #timer = 0;
  #lastTook = 0; // milliseconds
  #isLeft = false; // its tab is closed or shows another page
  /** @type {any} the saved text, if any */
  saved;

  /** @param {() => any} read returns the state to save, null for an empty text */
  constructor(read) {
    this.#read = read;
    const tab = attempt(() => sessionStorage.getItem(TAB));
    const own = tab ? entry(tab) : null;
    const isCopy = own !== null && isInUse(own); // the tab was duplicated, including its session storage
    const adopted = own && !isCopy ? tab : unused()[0];
    const isOwn = !isCopy && adopted !== undefined;
    this.#key = isOwn ? adopted : `${PREFIX}${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
    this.saved = isCopy ? withoutSession(own.text) : isOwn ? entry(this.#key)?.text : null;
    attempt(() => sessionStorage.setItem(TAB, this.#key));
    addEventListener("pagehide", () => this.#leave(true));
    addEventListener("pageshow", () => this.#leave(false));
    document.addEventListener("visibilitychange", () => this.#save());
    setInterval(() => this.#save(), HEARTBEAT_MS);
  }

  /** Save soon. */
  changed() {
    this.#timer ||= setTimeout(() => this.#save(), Math.max(SAVE_MS, this.#lastTook / SAVING_SHARE));
  }

  /** @param {boolean} isLeft */
  #leave(isLeft) {
    this.#isLeft = isLeft;
    this.#save();
  }

  #save() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const began = performance.now();
    const text = this.#read();
    if (text === undefined) return; // the page is not set up yet
    if (text === null) return attempt(() => localStorage.removeItem(this.#key));
    const content = JSON.stringify({ isOpen: !this.#isLeft, savedAt: Date.now(), text });
    attempt(() => {
      unused().slice(MOST_TEXTS).forEach((key) => localStorage.removeItem(key));
      try {
        localStorage.setItem(this.#key, content);
      } catch {
        unused().forEach((key) => localStorage.removeItem(key)); // full: delete older texts
        localStorage.setItem(this.#key, content);
      }
    });
    this.#lastTook = performance.now() - began;
  }
}

/** Get, or with a value set, a setting shared by all tabs. @param {string} name @param {string} [value] */
export function preference(name, value) {
  return attempt(() => {
    if (value !== undefined) localStorage.setItem(`simulmt.${name}`, value);
    return localStorage.getItem(`simulmt.${name}`);
  });
}

/** Get, or with a value set, a setting of this tab.
 *  @param {string} name @param {string} [value] */
export function tabSetting(name, value) {
  return attempt(() => {
    if (value !== undefined) sessionStorage.setItem(`simulmt.${name}`, value);
    return sessionStorage.getItem(`simulmt.${name}`);
  });
}

/** Return the keys of texts that no tab has open, newest first. */
function unused() {
  const keys = attempt(() => Object.keys(localStorage).filter((key) => key.startsWith(PREFIX))) ?? [];
  const entries = keys.map((key) => ({ key, entry: entry(key) })).filter(({ entry }) => entry && !isInUse(entry));
  return entries.sort((one, other) => other.entry.savedAt - one.entry.savedAt).map(({ key }) => key);
}

/** @param {string} key @returns {Entry | null} */
function entry(key) {
  return attempt(() => JSON.parse(localStorage.getItem(key) ?? "null"));
}

/** @param {Entry} entry */
function isInUse({ isOpen, savedAt }) {
  return isOpen && Date.now() - savedAt < ABANDONED_MS;
}

/** Return a copy of a text that starts a new session, without a room. */
function withoutSession(text) {
  const copy = structuredClone(text);
  delete copy.room;
  copy.lane.session.session = null;
  copy.lane.session.start = { model: copy.lane.session.start.model, delay: copy.lane.session.start.delay };
  return copy;
}

/** Return a result, or null if storage is disabled. @template T @param {() => T} act */
function attempt(act) {
  try {
    return act();
  } catch {
    return null;
  }
}
