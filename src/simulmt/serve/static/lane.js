/** A lane: one translation of the source at one delay, with controls, lag and read/write path. */

import { Session } from "./connection.js";
import { copy, download, plainText } from "./export.js";
import { Meter } from "./meter.js";
import { languageName, languageTag, secondsOfSpeech } from "./models.js";
import { Path } from "./path.js";
import { Transcript } from "./transcript.js";
import { splitWords } from "./words.js";

const CONFIRMATION_MS = 1500;

/** @typedef {import("./connection.js").Message} Message */
/** @typedef {import("./connection.js").Commit} Commit */
/** @typedef {import("./subtitles.js").TimedCommit & {sentence: number, words: number}} Written */
/** @typedef {{session: import("./connection.js").Saved, written: any[][], startedAt: number}} SavedLane */
/** @typedef {{state: import("./connection.js").Listener["state"], changed?(): void, sentence?(text: string): void,
 *             undone?: import("./connection.js").Listener["undone"]}} Listener */

export class Lane {
  /** @type {Written[]} */
  #written = [];
  #root = instance("lane");
  #details = instance("details");
  #session;
  #transcript;
  #meter;
  #path;
  #listener;
  #startedAt;
  #delay;
  /** @type {Set<number>} */
  #struck;

  /**
   * @param {{text: HTMLElement, details: HTMLElement}} places where the lane goes
   * @param {import("./models.js").Model} model
   * @param {string} name to tell the controls of two lanes apart
   * @param {SavedLane} saved
   * @param {string | null} apiKey
   * @param {Listener} listener
   */
  constructor(places, model, name, saved, apiKey, listener) {
    this.#listener = listener;
    this.#startedAt = saved.startedAt;
    this.#struck = new Set(saved.session.undone);
    places.text.append(this.#root);
    places.details.append(this.#details);
    this.#transcript = new Transcript(this.#find(".translation"));
    this.#meter = new Meter(this.#find(".lag"), this.#details.querySelector(".meter"));
    this.#path = new Path(this.#details.querySelector("svg"));
    this.#label(model, name);
    this.#delay = delayOf(saved.session);
    this.#offerDelays(model.delays);
    this.#offerExports(model.name);
    saved.session.log.forEach((message) => this.#read(message));
    saved.written.forEach((row) => this.#show(unpacked(row)));
    this.#struck.forEach((sentence) => this.#transcript.strike(sentence));
    this.#session = new Session(saved.session, apiKey, {
      state: listener.state,
      commit: (commit) => this.#commit(commit),
      sentence: () => this.#endSentence(),
      undone: (sentence, source) => this.#takeBack(sentence, source),
    });
  }

  /** Return the state of a new lane. @param {import("./connection.js").Start} start @param {Message[]} log
   *  @returns {SavedLane} */
  static fresh(start, log) {
    return { session: Session.fresh(start, log), written: [], startedAt: 0 };
  }

  /** @returns {SavedLane} */
  get saved() {
    return { session: this.#session.saved, written: this.#written.map(packed), startedAt: this.#startedAt };
  }

  get delay() {
    return this.#delay;
  }

  /** @param {Message} message */
  send(message) {
    this.#startedAt ||= Date.now();
    this.#session.send(message);
    this.#read(message);
  }

  /** @param {{room?: string, room_key?: string}} audience */
  share(audience) {
    this.#session.move(audience);
  }

  close() {
    this.#session.close();
    this.#root.remove();
    this.#details.remove();
  }

  /** @param {Message} message */
  #read(message) {
    if (message.type === "source") this.#path.read(splitWords(message.text));
  }

  /** @param {Commit} commit */
  #commit(commit) {
    this.#startedAt ||= Date.now();
    const { text, source_words: words, sentence } = commit;
    const seconds = Math.max(this.#written.at(-1)?.seconds ?? 0, (Date.now() - this.#startedAt) / 1000);
    this.#show({ text, seconds, endsSentence: false, sentence, words });
    this.#meter.add(commit);
    this.#listener.changed?.();
  }

  /** @param {Written} commit */
  #show(commit) {
    this.#written.push(commit);
    this.#find("[data-action=copy]").disabled = this.#find("[data-action=save]").disabled = false;
    this.#transcript.append(commit.text, commit.sentence);
    this.#path.write(commit);
  }

  #endSentence() {
    const last = this.#written.at(-1);
    if (!last || last.endsSentence) return;
    last.endsSentence = true;
    const text = this.#written.filter(({ sentence }) => sentence === last.sentence).map(({ text }) => text);
    this.#listener.sentence?.(text.join("").trim());
    this.#listener.changed?.();
  }

  /** @param {number | null} sentence @param {string} source */
  #takeBack(sentence, source) {
    if (sentence !== null) {
      this.#struck.add(sentence);
      this.#transcript.strike(sentence);
    }
    this.#listener.undone?.(sentence, source);
  }

  /** @param {import("./models.js").Model} model @param {string} name */
  #label({ target }, name) {
    this.#find("h2 b").textContent = languageName(target);
    this.#find(".translation").lang = languageTag(target);
    this.#find(".translation").ariaLabel = name;
    this.#root.ariaLabel = `${name}, with its controls`;
    this.#find("[name=delay]").ariaLabel = `${name}: faster or better`;
    this.#find("[data-action=copy]").ariaLabel = `Copy: ${name}`;
    this.#find("[data-action=save]").ariaLabel = `Save: ${name}`;
    this.#details.querySelector("svg").ariaLabel = `${name}: each translated word below the last word read for it`;
  }

  /** @param {number[]} delays */
  #offerDelays(delays) {
    const slider = this.#find("[name=delay]");
    this.#find(".delay").hidden = delays.length === 0;
    slider.max = String(delays.length - 1);
    slider.value = String(delays.indexOf(this.#delay ?? delays[0]));
    const show = () => {
      const wait = `${secondsOfSpeech(delays[slider.valueAsNumber]).toFixed(1)} s`;
      this.#find(".delay .figure b").textContent = wait;
      slider.setAttribute("aria-valuetext", `waits for at least ${wait} of speech`);
      this.#find(".delay").title = `Waits for at least ${wait} of speech before it translates a word`;
    };
    slider.addEventListener("input", () => {
      this.#delay = delays[slider.valueAsNumber];
      show();
      this.#session.send({ type: "delay", k: this.#delay });
      this.#listener.changed?.();
    });
    show();
  }

  /** @param {string} name */
  #offerExports(name) {
    const copyButton = this.#find("[data-action=copy]");
    const menu = this.#find(".menu");
    copyButton.addEventListener("click", async () => {
      await copy(plainText(this.#kept()));
      copyButton.dataset.state = "done";
      setTimeout(() => delete copyButton.dataset.state, CONFIRMATION_MS);
    });
    this.#find("[data-action=save]").popoverTargetElement = menu;
    for (const button of menu.querySelectorAll("[data-download]")) {
      button.addEventListener("click", () => {
        menu.hidePopover();
        download(this.#kept(), button.dataset.download, `simulmt-${name}`);
      });
    }
  }

  /** Commits that were not undone. */
  #kept() {
    return this.#written.filter(({ sentence }) => !this.#struck.has(sentence));
  }

  /** @param {string} selector */
  #find(selector) {
    return this.#root.querySelector(selector);
  }
}

/** Return the current delay of a session. @param {import("./connection.js").Saved} saved */
function delayOf({ start, log }) {
  return log.findLast(({ type }) => type === "delay")?.k ?? start.delay;
}

/** Return a compact form of a commit for storage. @param {Written} commit */
function packed({ text, seconds, endsSentence, sentence, words }) {
  return [text, Number(seconds.toFixed(2)), endsSentence ? 1 : 0, sentence, words];
}

/** @param {any[]} row @returns {Written} */
function unpacked([text, seconds, endsSentence, sentence, words]) {
  return { text, seconds, endsSentence: endsSentence === 1, sentence, words };
}

/** Clone the element of a template. @param {string} template */
function instance(template) {
  return document.getElementById(`${template}-template`).content.firstElementChild.cloneNode(true);
}
