/** The source pane: a draft that is still yours, and above it what was sent for good.
 *
 * Typed words are sent as soon as they are complete. A text that was pasted or taken from the samples is played: its
 * words leave the draft one by one at a speaking pace, while the rest can still be edited.
 */

import { LONGEST_TEXT } from "./connection.js";
import { Transcript } from "./transcript.js";
import { completeLength, firstWordLength, looksFinal, splitWords } from "./words.js";

const LONGEST_PARAGRAPH = 80; // words; speech recognition may know no full stops
const PLAYED_WORDS = 3; // pasting fewer is like typing
const TICK_MS = 40;
// What goes into one message: cut between words, unless there is no gap.
const MESSAGE = new RegExp(`[^]{0,${LONGEST_TEXT - 1}}\\s|[^]{1,${LONGEST_TEXT}}`, "gu");

/** @typedef {import("./connection.js").Message} Message */

export class Source {
  #sent;
  #draft;
  #playButton;
  #pace;
  #send;
  #timer = 0;
  #lastWordAt = 0;
  #wordsInParagraph = 0;
  #isSentenceOpen = false;
  #isTyped = false; // whether the end of the draft is being typed, and its last word may grow

  /**
   * @param {HTMLElement} root
   * @param {(message: Message) => void} send
   */
  constructor(root, send) {
    this.#send = send;
    this.#sent = new Transcript(root.querySelector(".sent"));
    this.#draft = root.querySelector("textarea");
    this.#playButton = root.querySelector("[data-action=play]");
    this.#pace = root.querySelector("[name=pace]");
    this.#draft.addEventListener("input", (event) => this.#input(event));
    this.#draft.addEventListener("compositionend", () => this.#sendComplete());
    this.#playButton.addEventListener("click", () => (this.isPlaying ? this.pause() : this.play()));
    root.querySelector("[data-action=send]").addEventListener("click", () => this.sendAll());
    this.#showState();
  }

  get isPlaying() {
    return this.#timer !== 0;
  }

  get isEmpty() {
    return this.#sent.isEmpty;
  }

  /** Play a text, after the draft if there is one. @param {string} text */
  perform(text) {
    const draft = this.#draft.value.trim();
    this.#draft.value = draft ? `${draft}\n${text}` : text;
    this.play();
  }

  play() {
    if (this.isPlaying || !this.#draft.value.trim()) return;
    this.#isTyped = false;
    this.#lastWordAt = performance.now();
    this.#timer = setInterval(() => this.#tick(), TICK_MS);
    this.#playWord();
  }

  pause() {
    clearInterval(this.#timer);
    this.#timer = 0;
    this.#showState();
  }

  /** Send the draft without waiting, and end the sentence. */
  sendAll() {
    this.#take(this.#draft.value.length);
    this.endSentence();
    this.pause();
  }

  /** Send an utterance; recognised speech has pauses in place of full stops. @param {string} text */
  say(text) {
    this.#emit(text);
    this.endSentence();
  }

  endSentence() {
    if (!this.#isSentenceOpen) return;
    this.#isSentenceOpen = false;
    this.#send({ type: "end" });
    this.#endParagraph();
  }

  clear() {
    this.#draft.value = "";
    this.#sent.clear();
    this.#isSentenceOpen = false;
    this.#wordsInParagraph = 0;
    this.pause();
  }

  /** @param {InputEvent} event */
  #input(event) {
    const isPasted = /^insertFrom(Paste|Drop)/.test(event.inputType ?? "");
    this.#isTyped = !isPasted;
    if (isPasted && splitWords(this.#draft.value).length > PLAYED_WORDS) this.play();
    else if (!event.isComposing) this.#sendComplete();
    this.#showState();
  }

  #sendComplete() {
    if (!this.isPlaying) this.#take(completeLength(this.#draft.value));
  }

  /** Hidden tabs are woken rarely, so the words of the time since the last call are all due. */
  #tick() {
    const interval = 1000 / Number(this.#pace.value);
    while (this.isPlaying && performance.now() - this.#lastWordAt >= interval) {
      this.#lastWordAt += interval;
      this.#playWord();
    }
  }

  #playWord() {
    const text = this.#draft.value;
    const length = firstWordLength(text);
    const isStillTyped = this.#isTyped && length > completeLength(text);
    if (!isStillTyped) this.#take(length);
    if (!this.#draft.value.trim() && !this.#isTyped) this.endSentence();
    if (isStillTyped || !this.#draft.value.trim()) this.pause();
  }

  /** Move the beginning of the draft over to what is sent. @param {number} length */
  #take(length) {
    if (length === 0) return;
    const text = this.#draft.value.slice(0, length);
    this.#draft.setRangeText("", 0, length, "preserve");
    this.#emit(text);
    this.#showState();
  }

  /** @param {string} text */
  #emit(text) {
    text.split("\n").forEach((line, index) => {
      if (index > 0) this.endSentence();
      if (line.trim()) this.#emitLine(/\s$/.test(line) ? line : `${line} `);
    });
  }

  /** @param {string} line */
  #emitLine(line) {
    this.#isSentenceOpen = true;
    for (const text of line.match(MESSAGE)) this.#send({ type: "source", text });
    this.#sent.append(line);
    const words = splitWords(line);
    this.#wordsInParagraph += words.length;
    if (looksFinal(words[words.length - 1]) || this.#wordsInParagraph >= LONGEST_PARAGRAPH) this.#endParagraph();
  }

  #endParagraph() {
    this.#wordsInParagraph = 0;
    this.#sent.endParagraph();
  }

  #showState() {
    const hasDraft = this.#draft.value.trim() !== "";
    this.#playButton.disabled = !hasDraft && !this.isPlaying;
    this.#playButton.dataset.state = this.isPlaying ? "playing" : "paused";
    this.#playButton.querySelector("span").textContent = this.isPlaying ? "Pause" : "Play";
  }
}
