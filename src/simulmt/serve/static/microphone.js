/** Speech input: recognised by the server if possible, else by the browser; only final text is sent. */

import { BrowserRecogniser } from "./recogniser.js";
import { ServerRecogniser } from "./audio.js";

/** @typedef {{text(text: string): void, tentative(text: string): void, sentence(): void,
 *             failed(code: string): void}} Listener */

const EXPLANATIONS = {
  "not-allowed":
    "The microphone is blocked. Allow it for this page (the icon in the address bar), then press the button again.",
  "service-not-allowed": "This browser does not allow speech recognition here. Check its settings.",
  "audio-capture": "No microphone was found. Plug one in or switch it on, then press the microphone again.",
  "language-not-supported": "This browser's speech recogniser does not support this language.",
  network: "This browser's speech recogniser needs an internet connection.",
  insecure: "Browsers allow the microphone only on pages opened over https, or as localhost.",
  full: "The server has reached its limit of audio streams. Try again in a moment.",
  lost: "The server's speech recogniser has stopped. Press the microphone to try again.",
};

export class Microphone {
  #button;
  #source;
  #notify;
  #apiKey;
  /** @type {import("./models.js").Model | null} */
  #model = null;
  /** @type {BrowserRecogniser | ServerRecogniser | null} */
  #recogniser = null;
  /** @type {Listener | null} */
  #listener = null;

  /**
   * @param {HTMLButtonElement} button
   * @param {{say(text: string): void, showTentative(text: string): void, endSentence(): void}} source
   * @param {(text: string) => void} notify
   * @param {() => string | null} apiKey
   */
  constructor(button, source, notify, apiKey) {
    this.#button = button;
    this.#source = source;
    this.#notify = notify;
    this.#apiKey = apiKey;
    button.addEventListener("click", () => (this.#recogniser ? this.stop() : this.#listen()));
  }

  /** @param {import("./models.js").Model} model */
  use(model) {
    this.stop();
    this.#listener = null; // ignore pending results in another language
    this.#model = model;
    this.#button.hidden = !model.audio && !BrowserRecogniser.knows(model.source);
    this.#button.title = model.audio ? "Listen" : "Listen (your browser may send the audio to an online service)";
  }

  /** Whether speech recognition is available. */
  get isOffered() {
    return !this.#button.hidden;
  }

  stop() {
    this.#recogniser?.stop();
    this.#recogniser = null;
    this.#show("");
  }

  #listen() {
    this.#notify("");
    if (!globalThis.isSecureContext) return this.#explain("insecure");
    const { audio, name, source } = this.#model;
    const listener = {
      text: (text) => this.#listener === listener && this.#source.say(text),
      tentative: (text) => this.#listener === listener && this.#show(text),
      sentence: () => this.#listener === listener && this.#source.endSentence(),
      failed: (code) => this.#listener === listener && this.#explain(code),
    };
    this.#listener = listener;
    this.#recogniser = audio
      ? new ServerRecogniser({ model: name, api_key: this.#apiKey() }, listener)
      : new BrowserRecogniser(source, listener);
    this.#show("Listening…");
  }

  /** @param {string} code */
  #explain(code) {
    this.stop();
    this.#notify(EXPLANATIONS[code] ?? `The microphone does not work here (${code}).`);
  }

  /** @param {string} tentative */
  #show(tentative) {
    this.#button.setAttribute("aria-pressed", String(this.#recogniser !== null));
    this.#source.showTentative(tentative);
  }
}
