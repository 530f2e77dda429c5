/** Speech, where the browser can recognise it; only what it calls final is passed on. */

const Recognition = globalThis.SpeechRecognition ?? globalThis.webkitSpeechRecognition;

const LASTING = /not-allowed|audio-capture|language|network/; // errors that a new start does not mend

export class Microphone {
  #button;
  #interim;
  #say;
  #language = "";
  #recognition = null;

  /**
   * @param {HTMLButtonElement} button
   * @param {HTMLElement} interim shows what is not final yet
   * @param {(text: string) => void} say
   */
  constructor(button, interim, say) {
    this.#button = button;
    this.#interim = interim;
    this.#say = say;
    button.addEventListener("click", () => (this.#recognition ? this.stop() : this.#listen()));
  }

  /** @param {string} language */
  use(language) {
    this.stop();
    this.#language = language;
    this.#button.hidden = !Recognition || !/^[a-z]{2,3}(-|$)/.test(language);
  }

  stop() {
    const recognition = this.#recognition;
    this.#recognition = null;
    recognition?.stop();
    this.#show("");
  }

  #listen() {
    const recognition = new Recognition();
    recognition.lang = this.#language;
    recognition.continuous = true;
    recognition.interimResults = true;
    recognition.onresult = (event) => this.#hear(event);
    // Recognisers stop after a silence; only the user, or a refusal, ends ours.
    recognition.onend = () => this.#recognition === recognition && recognition.start();
    recognition.onerror = ({ error }) => LASTING.test(error) && this.stop();
    this.#recognition = recognition;
    recognition.start();
    this.#show("");
  }

  #hear({ results, resultIndex }) {
    const fresh = [...results].slice(resultIndex);
    for (const result of fresh.filter((result) => result.isFinal)) this.#say(result[0].transcript);
    this.#show(fresh.filter((result) => !result.isFinal).map((result) => result[0].transcript).join(""));
  }

  /** @param {string} interim */
  #show(interim) {
    this.#button.setAttribute("aria-pressed", String(this.#recognition !== null));
    this.#interim.textContent = interim;
  }
}
