/** The source pane: the text already sent, and below it the draft.
 *
 * A typed word is sent when the next one begins, or after a pause. Pasted text and samples are played: words are sent
 * one by one at speaking pace, while the rest can still be edited. A sentence edited after it was sent is undone and
 * sent again.
 */

import { LONGEST_TEXT } from "./connection.js";
import { Draft } from "./draft.js";
import { Transcript } from "./transcript.js";
import { completeLength, firstWordLength, settledLength, splitSentences, splitWords } from "./words.js";

const PLAYED_WORDS = 3; // fewer pasted words are treated as typed
const TICK_MS = 40;
const REST_MS = 1000; // pause after which a word is complete
// The text of one message: split between words if possible.
const MESSAGE = new RegExp(`[^]{0,${LONGEST_TEXT - 1}}\\s|[^]{1,${LONGEST_TEXT}}`, "gu");

/** @typedef {import("./connection.js").Message} Message */

export class Source {
  #root;
  #sent;
  #draft;
  #playButton;
  #pace;
  #send;
  #changed;
  #paragraph = 0;
  #open = ""; // the part of the draft already sent: the open sentence
  #isSentenceOpen = false;
  #isTakingBack = false; // until the server has answered
  /** @type {(() => void)[]} actions to run after that */
  #postponed = [];
  #isScript = false; // whether the draft is played
  #player = 0;
  #lastWordAt = 0;
  #restTimer = 0;

  /**
   * @param {HTMLElement} root
   * @param {(message: Message) => void} send
   * @param {() => void} changed called when there is something to save
   */
  constructor(root, send, changed) {
    this.#root = root;
    this.#send = send;
    this.#changed = changed;
    const sheet = root.querySelector(".sheet");
    const ink = () => (this.#isScript ? root.querySelector(".ink span") : null);
    this.#sent = new Transcript(root.querySelector(".sent"), sheet, ink);
    sheet.addEventListener("click", ({ target }) => target === sheet && this.focus());
    this.#draft = new Draft(root.querySelector(".composer"), {
      edited: (edit) => this.#edit(edit),
      entered: () => this.#enter(),
      takenBack: () => this.takeBack(),
    });
    this.#playButton = this.#button("play", () => (this.isPlaying ? this.pause() : this.play()));
    this.#button("send", () => this.#finish());
    this.#button("take-back", () => {
      this.takeBack();
      this.focus();
    });
    this.#pace = root.querySelector("[name=pace]");
    this.#pace.addEventListener("input", () => this.#showPace());
    this.#showPace();
    this.#showState();
  }

  get isPlaying() {
    return this.#player !== 0;
  }

  /** Whether nothing was sent. */
  get isEmpty() {
    return this.#sent.isEmpty && !this.#open;
  }

  /** Text not sent yet. */
  get rest() {
    const { text, rest } = this.#draft;
    const isStillRead = this.#isTakingBack && text.startsWith(this.#open);
    return { text: isStillRead ? text.slice(this.#open.length) : rest, isScript: this.#isScript };
  }

  get isTakingBack() {
    return this.#isTakingBack;
  }

  /** Restore a saved text. @param {Message[]} messages @param {{text: string, isScript: boolean}} rest */
  restore(messages, { text, isScript }) {
    for (const message of messages) {
      if (message.type === "source") this.#showRead(message.text);
      else if (message.type === "end") this.#closeSentence();
    }
    this.#draft.setRest(text);
    this.#isScript = isScript;
    this.#showState();
  }

  focus() {
    this.#draft.focus();
  }

  /** Play a text after the draft. @param {string} text */
  perform(text) {
    const rest = this.#draft.rest.trim();
    this.#draft.setRest(rest ? `${rest}\n${text}` : text);
    this.play();
  }

  play() {
    if (this.isPlaying || !this.#draft.rest.trim()) return;
    this.#isScript = true;
    this.#lastWordAt = performance.now();
    this.#player = setInterval(() => this.#tick(), TICK_MS);
    this.#playWord();
  }

  pause() {
    clearInterval(this.#player);
    this.#player = 0;
    this.#showState();
  }

  /** Send the draft without waiting, and end the sentence. */
  sendAll() {
    if (this.#isTakingBack) return void this.#postponed.push(() => this.sendAll());
    this.#take(this.#draft.rest.length);
    this.endSentence();
    this.pause();
  }

  /** Send speech. @param {string} text */
  say(text) {
    if (this.#isTakingBack) return void this.#postponed.push(() => this.say(text));
    const words = `${text.trim()} `;
    this.#draft.insertRead(words);
    this.#open += words;
    this.#emit(words);
    this.#showState();
  }

  /** Show speech that may still be revised. @param {string} text */
  showTentative(text) {
    this.#draft.showTentative(text);
    this.#root.toggleAttribute("data-listening", text !== "");
    this.#sent.scrollSoon();
  }

  endSentence() {
    if (this.#isTakingBack) return void this.#postponed.push(() => this.endSentence());
    if (!this.#isSentenceOpen) return;
    this.#send({ type: "end" });
    this.#closeSentence();
    this.#showState();
  }

  /** Undo the last sentence. */
  takeBack() {
    if (this.#isTakingBack || this.isEmpty) return;
    this.pause();
    clearTimeout(this.#restTimer);
    this.#isTakingBack = true;
    this.#draft.setRead(0); // send nothing until the answer says how much was undone
    this.#send({ type: "undo" });
    this.#showState();
  }

  /** Handle the answer to undo: move the words back to the draft.
   *  @param {string} source as read by the server */
  takenBack(source) {
    const count = splitWords(source).length;
    const open = splitWords(this.#open).length;
    if (count === 0 && !this.#isTakingBack) return; // a repeated answer
    this.#isTakingBack = false;
    if (count >= open || count === 0) {
      const earlier = this.#popWords(count - open);
      const gap = open ? " " : "\n"; // the rest of the sentence follows, or another one
      this.#draft.prepend(earlier && this.#draft.text ? earlier + gap : earlier);
      this.#open = "";
    } else this.#keepRead(open - count);
    this.#isSentenceOpen = this.#open !== "";
    this.#showState();
    this.#postponed.splice(0).forEach((act) => act());
  }

  /** Keep the first words as sent, if the server had ended a sentence within the open one. @param {number} count */
  #keepRead(count) {
    this.#open = this.#open.slice(0, prefixLength(this.#open, count));
    if (this.#draft.text.startsWith(this.#open)) this.#draft.setRead(this.#open.length);
    else this.takeBack(); // they were edited as well
  }

  /** Remove and return the last words of the paragraphs above. @param {number} count */
  #popWords(count) {
    let text = "";
    while (splitWords(text).length < count && !this.#sent.isEmpty) text = `${this.#sent.pop().trim()} ${text}`;
    const surplus = prefixLength(text, splitWords(text).length - count);
    if (surplus > 0) this.#sent.append(text.slice(0, surplus), (this.#paragraph += 1));
    return text.slice(surplus).trim();
  }

  clear() {
    this.pause();
    clearTimeout(this.#restTimer);
    this.#sent.clear();
    this.#draft.setRead(0);
    this.#draft.setRest("");
    this.#open = "";
    this.#postponed = [];
    this.#isSentenceOpen = this.#isTakingBack = this.#isScript = false;
    this.#showState();
  }

  /** @param {{isInsertion: boolean, isPaste: boolean}} edit */
  #edit({ isInsertion, isPaste }) {
    clearTimeout(this.#restTimer);
    if (!this.#isTakingBack && !this.#draft.text.startsWith(this.#open)) this.takeBack();
    if (isPaste && splitWords(this.#draft.rest).length > PLAYED_WORDS) this.play();
    else if (isInsertion && this.#draft.isAtEnd && !this.#isScript) this.#sendTyped();
    this.#showState();
    this.#changed();
  }

  #sendTyped() {
    this.#take(settledLength(this.#draft.rest));
    this.#restTimer = setTimeout(() => this.#take(completeLength(this.#draft.rest)), REST_MS);
  }

  /** End the sentence on Enter; in a played text, Enter inserts a line break. */
  #enter() {
    if (this.#isScript) return false;
    this.sendAll();
    return true;
  }

  /** Handle the send button; keep the focus for typing. */
  #finish() {
    const wasTyped = !this.#isScript;
    this.sendAll();
    if (wasTyped) this.focus();
  }

  /** Send all words due since the last call, since timers of hidden tabs are throttled. */
  #tick() {
    const interval = 1000 / Number(this.#pace.value);
    while (this.isPlaying && performance.now() - this.#lastWordAt >= interval) {
      this.#lastWordAt += interval;
      this.#playWord();
    }
  }

  #playWord() {
    this.#take(firstWordLength(this.#draft.rest));
    if (this.#draft.rest.trim()) return;
    this.endSentence();
    this.pause();
  }

  /** Send the beginning of the unread text. @param {number} length */
  #take(length) {
    if (length === 0 || this.#isTakingBack) return;
    const text = this.#draft.rest.slice(0, length);
    this.#draft.read(length);
    this.#open += text;
    this.#emit(text);
    this.#showState();
  }

  /** Send text; the end of a line ends the sentence. @param {string} text */
  #emit(text) {
    text.split("\n").forEach((line, index) => {
      if (index > 0 && this.#isSentenceOpen) this.#send({ type: "end" });
      if (index > 0) this.#isSentenceOpen = false;
      if (!line.trim()) return;
      this.#isSentenceOpen = true;
      const words = /\s$/.test(line) ? line : `${line} `;
      for (const part of words.match(MESSAGE)) this.#send({ type: "source", text: part });
    });
    this.#moveUp();
  }

  /** Show text that was already sent. @param {string} text */
  #showRead(text) {
    this.#draft.insertRead(text);
    this.#open += text;
    this.#isSentenceOpen = true;
    this.#moveUp();
  }

  #closeSentence() {
    this.#isSentenceOpen = false;
    this.#moveUp(true);
  }

  /** Move complete sentences out of the field. @param {boolean} isAll */
  #moveUp(isAll = false) {
    const { sentences, length } = splitSentences(this.#open);
    const moved = isAll ? this.#open.length : length;
    if (isAll) sentences.push(this.#open.slice(length));
    for (const sentence of sentences.map((text) => text.trim()).filter(Boolean)) {
      this.#sent.append(`${sentence} `, (this.#paragraph += 1));
    }
    this.#draft.removeStart(moved);
    this.#open = this.#open.slice(moved);
    this.#sent.scrollSoon();
  }

  #showState() {
    const hasRest = this.#draft.rest.trim() !== "";
    if (!hasRest && !this.isPlaying && this.#isScript) this.#endScript();
    this.#root.toggleAttribute("data-empty", this.isEmpty && !this.#draft.text);
    this.#root.toggleAttribute("data-script", this.#isScript);
    this.#root.toggleAttribute("data-rest", hasRest);
    this.#root.querySelector("[data-action=take-back]").disabled = this.isEmpty || this.#isTakingBack;
    this.#root.querySelector("[data-action=new]").disabled = this.isEmpty && !this.#draft.text;
    this.#playButton.dataset.state = this.isPlaying ? "playing" : "paused";
    this.#playButton.ariaLabel = this.isPlaying ? "Pause" : "Play";
    this.#changed();
  }

  /** Hide the player controls; move the keyboard focus to the field. */
  #endScript() {
    const isThere = this.#root.querySelector(".player").contains(document.activeElement);
    this.#isScript = false;
    if (isThere && matchMedia("(pointer: fine)").matches) this.focus();
  }

  #showPace() {
    const pace = Number(this.#pace.value).toFixed(1);
    this.#root.querySelector(".pace .figure").textContent = pace;
    this.#pace.setAttribute("aria-valuetext", `${pace} words a second`);
  }

  /** @param {string} action @param {() => void} act @returns {HTMLButtonElement} */
  #button(action, act) {
    const button = this.#root.querySelector(`[data-action=${action}]`);
    button.addEventListener("click", act);
    return button;
  }
}

/** Return the length of the first words of a text. @param {string} text @param {number} count */
function prefixLength(text, count) {
  let length = 0;
  for (let word = 0; word < count; word += 1) length += firstWordLength(text.slice(length));
  return length;
}
