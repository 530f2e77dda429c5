/** How a live page tells the caption pages of the same browser what it writes. */

const NAME = "simulmt-captions";
const KEPT_SENTENCES = 5;

/** @typedef {{from: string, type: "commit", text: string} | {from: string, type: "sentence"} |
 *            {from: string, type: "clear"} |
 *            {from: string, type: "recent", to: string, sentences: string[], open: string}} Caption */

export class CaptionSender {
  #channel = new BroadcastChannel(NAME);
  #name = crypto.getRandomValues(new Uint32Array(2)).join("-");
  /** @type {string[]} */
  #sentences = [];
  #open = "";

  constructor() {
    this.#channel.onmessage = ({ data }) => {
      if (data.type === "hello" && (this.#open || this.#sentences.length)) {
        this.#post({ type: "recent", to: data.from, sentences: this.#sentences, open: this.#open });
      }
    };
  }

  /** @param {string} text */
  commit(text) {
    this.#open += text;
    this.#post({ type: "commit", text });
  }

  endSentence() {
    this.#sentences = [...this.#sentences, this.#open].slice(-KEPT_SENTENCES);
    this.#open = "";
    this.#post({ type: "sentence" });
  }

  clear() {
    this.#sentences = [];
    this.#open = "";
    this.#post({ type: "clear" });
  }

  /** @param {object} message */
  #post(message) {
    this.#channel.postMessage({ from: this.#name, ...message });
  }
}

/** Hear what live pages write, from what they wrote last on. @param {(caption: Caption) => void} show */
export function receiveCaptions(show) {
  const channel = new BroadcastChannel(NAME);
  const name = crypto.getRandomValues(new Uint32Array(2)).join("-");
  channel.onmessage = ({ data }) => {
    if (data.type !== "hello" && (data.to ?? name) === name) show(data);
  };
  channel.postMessage({ from: name, type: "hello" });
}
