/** The speech recogniser of the browser, where it has one. */

const Recognition = globalThis.SpeechRecognition ?? globalThis.webkitSpeechRecognition;

const TRANSIENT = new Set(["no-speech", "aborted"]); // errors solved by restarting

export class BrowserRecogniser {
  #recognition = new Recognition();
  #listener;
  #isOver = false;

  /** @param {string} language */
  static knows(language) {
    return Recognition !== undefined && /^[a-z]{2,3}(-|$)/.test(language);
  }

  /** @param {string} language @param {import("./microphone.js").Listener} listener */
  constructor(language, listener) {
    this.#listener = listener;
    this.#recognition.lang = language;
    this.#recognition.continuous = true;
    this.#recognition.interimResults = true;
    this.#recognition.onresult = (event) => this.#hear(event);
    // Browsers stop recognition after silence; restart it until the user stops or an error occurs.
    this.#recognition.onend = () => this.#isOver || this.#recognition.start();
    this.#recognition.onerror = ({ error }) => TRANSIENT.has(error) || this.#listener.failed(error);
    this.#recognition.start();
  }

  stop() {
    this.#isOver = true;
    this.#recognition.stop();
  }

  #hear({ results, resultIndex }) {
    const fresh = [...results].slice(resultIndex);
    for (const result of fresh.filter(({ isFinal }) => isFinal)) {
      this.#listener.text(result[0].transcript);
      this.#listener.sentence(); // browsers write no punctuation, so a pause ends the sentence
    }
    const open = fresh.filter(({ isFinal }) => !isFinal);
    this.#listener.tentative(open.map((result) => result[0].transcript).join(""));
  }
}
