/** A lane: one translation of the source at one delay, with its controls, its lag and its path. */

import { Session } from "./connection.js";
import { copy, download, plainText } from "./export.js";
import { Meter } from "./meter.js";
import { languageName, languageTag } from "./models.js";
import { Path } from "./path.js";
import { Transcript } from "./transcript.js";
import { splitWords } from "./words.js";

const CONFIRMATION_MS = 1500;

/** @typedef {import("./connection.js").Message} Message */
/** @typedef {{state: import("./connection.js").Listener["state"], commit?(text: string): void,
 *             sentence?(text: string): void}} Listener */

export class Lane {
  /** @type {import("./subtitles.js").TimedCommit[]} */
  #commits = [];
  #root;
  #pathRoot;
  #session;
  #transcript;
  #meter;
  #path;
  #listener;
  #startedAt = 0;
  #sentenceStart = 0; // index of the first commit of the open sentence

  /**
   * @param {{text: HTMLElement, path: HTMLElement}} places where the lane goes
   * @param {import("./models.js").Model} model
   * @param {{delay: number | null, apiKey: string | null}} settings
   * @param {Message[]} history what was sent before this lane began
   * @param {Listener} listener
   */
  constructor(places, model, { delay, apiKey }, history, listener) {
    this.#root = instance("lane");
    this.#pathRoot = instance("path");
    this.#listener = listener;
    places.text.append(this.#root);
    places.path.append(this.#pathRoot);
    this.#transcript = new Transcript(this.#find(".translation"));
    this.#meter = new Meter(this.#find(".meter"));
    this.#path = new Path(this.#pathRoot.querySelector("svg"));
    this.#find("h2 b").textContent = languageName(model.target);
    this.#find(".translation").lang = languageTag(model.target);
    this.#offerDelays(model.delays, delay);
    this.#offerExports(model.name);
    history.forEach((message) => this.#read(message));
    this.#session = new Session({ model: model.name, delay, api_key: apiKey }, history, {
      state: listener.state,
      commit: (commit) => this.#commit(commit),
      sentence: () => this.#endSentence(),
    });
  }

  /** @param {Message} message */
  send(message) {
    this.#startedAt ||= performance.now();
    this.#session.send(message);
    this.#read(message);
  }

  close() {
    this.#session.close();
    this.#root.remove();
    this.#pathRoot.remove();
  }

  /** @param {Message} message */
  #read(message) {
    if (message.type === "source") this.#path.read(splitWords(message.text));
  }

  /** @param {import("./connection.js").Commit} commit */
  #commit(commit) {
    this.#startedAt ||= performance.now();
    const seconds = (performance.now() - this.#startedAt) / 1000;
    this.#commits.push({ text: commit.text, seconds, endsSentence: false });
    this.#transcript.append(commit.text);
    this.#meter.add(commit);
    this.#path.write(commit);
    this.#listener.commit?.(commit.text);
  }

  #endSentence() {
    const sentence = this.#commits.slice(this.#sentenceStart);
    const last = sentence.at(-1);
    if (!last) return;
    last.endsSentence = true;
    this.#sentenceStart = this.#commits.length;
    this.#transcript.endParagraph();
    this.#listener.sentence?.(sentence.map(({ text }) => text).join("").trim());
  }

  /** @param {number[]} delays @param {number | null} delay */
  #offerDelays(delays, delay) {
    const slider = this.#find("[name=delay]");
    const figure = this.#find(".delay .figure");
    this.#find(".delay").hidden = delays.length === 0;
    slider.max = String(delays.length - 1);
    slider.value = String(delays.indexOf(delay ?? delays[0]));
    const show = () => {
      figure.textContent = String(delays[slider.valueAsNumber]);
      slider.setAttribute("aria-valuetext", `delay ${delays[slider.valueAsNumber]}`);
    };
    slider.addEventListener("input", () => {
      show();
      this.#session.send({ type: "delay", k: delays[slider.valueAsNumber] });
    });
    show();
  }

  /** @param {string} name */
  #offerExports(name) {
    const copyButton = this.#find("[data-action=copy]");
    copyButton.addEventListener("click", async () => {
      await copy(plainText(this.#commits));
      copyButton.textContent = "Copied";
      setTimeout(() => (copyButton.textContent = "Copy"), CONFIRMATION_MS);
    });
    for (const button of this.#root.querySelectorAll("[data-download]")) {
      button.addEventListener("click", () => download(this.#commits, button.dataset.download, `simulmt-${name}`));
    }
  }

  /** @param {string} selector */
  #find(selector) {
    return this.#root.querySelector(selector);
  }
}

/** A copy of a template's only element. @param {string} template */
function instance(template) {
  return document.getElementById(`${template}-template`).content.firstElementChild.cloneNode(true);
}
