/** The text field: the part already read is shown in a different colour, the rest can be edited.
 *
 * Browsers lose their undo history when a script changes the text of a field, so the field keeps its own.
 */

const REMEMBERED_EDITS = 200;

/** @typedef {{text: string, caret: number}} Snapshot */
/** @typedef {{edited(edit: {isInsertion: boolean, isPaste: boolean}): void, entered(): boolean,
 *             takenBack(): void}} Listener `entered` returns whether Enter was handled */

export class Draft {
  #field;
  #ink;
  #listener;
  #readLength = 0;
  #tentative = "";
  /** @type {Snapshot} */
  #last = { text: "", caret: 0 };
  /** @type {Snapshot[]} */
  #past = [];
  /** @type {Snapshot[]} */
  #future = [];

  /** @param {HTMLElement} root @param {Listener} listener */
  constructor(root, listener) {
    this.#field = root.querySelector("textarea");
    this.#ink = root.querySelector(".ink");
    this.#listener = listener;
    this.#field.addEventListener("input", (event) => this.#input(event));
    this.#field.addEventListener("compositionend", () => this.#listener.edited({ isInsertion: true, isPaste: false }));
    this.#field.addEventListener("keydown", (event) => this.#press(event));
    this.#field.addEventListener("beforeinput", (event) => this.#replaceHistory(event));
  }

  get text() {
    return this.#field.value;
  }

  /** Text not read yet. */
  get rest() {
    return this.text.slice(this.#readLength);
  }

  /** Whether the caret is at the end. */
  get isAtEnd() {
    return this.#field.selectionStart === this.text.length;
  }

  /** Set how much of the text has been read. @param {number} length */
  setRead(length) {
    this.#readLength = length;
    this.#show();
  }

  /** Read more of the text. @param {number} length */
  read(length) {
    this.setRead(this.#readLength + length);
  }

  /** Insert text that counts as read, such as speech, before unread text. @param {string} text */
  insertRead(text) {
    this.#field.setRangeText(text, this.#readLength, this.#readLength, "preserve");
    this.#forgetEdits();
    this.read(text.length);
  }

  /** Remove the beginning, which has been read. @param {number} length */
  removeStart(length) {
    if (length === 0) return;
    this.#field.setRangeText("", 0, length, "preserve");
    this.#forgetEdits();
    this.setRead(this.#readLength - length);
  }

  /** Insert undone text at the beginning. @param {string} text */
  prepend(text) {
    const isEmpty = this.text === "";
    this.#field.setRangeText(text, 0, 0, isEmpty ? "end" : "preserve");
    this.#forgetEdits();
    this.#show();
  }

  /** Show words that a recogniser may still revise after the text. @param {string} text */
  showTentative(text) {
    this.#tentative = text;
    this.#show();
  }

  /** Replace the unread text. @param {string} text */
  setRest(text) {
    this.#field.value = this.text.slice(0, this.#readLength) + text;
    this.#forgetEdits();
    this.#show();
  }

  focus() {
    this.#field.blur(); // after a dialog has returned the focus, the field ignores keys until it is focused anew
    this.#field.focus({ preventScroll: true });
  }

  #show() {
    const read = document.createElement("span");
    const tentative = document.createElement("i");
    read.textContent = this.text.slice(0, this.#readLength);
    tentative.textContent = this.#tentative;
    // The copy sets the height of the field; an empty last line needs a character to have a height.
    this.#ink.replaceChildren(read, `${this.rest}\u200b`, tentative);
  }

  #forgetEdits() {
    this.#past = [];
    this.#future = [];
    this.#last = this.#snapshot();
  }

  /** @returns {Snapshot} */
  #snapshot() {
    return { text: this.text, caret: this.#field.selectionStart };
  }

  /** @param {InputEvent} event */
  #input({ inputType = "", isComposing, data }) {
    const isPaste = /^insertFrom(Paste|Drop)/.test(inputType);
    const isLetter = inputType === "insertText" && /^\S$/u.test(data ?? "");
    const goesOn = isLetter && this.text === `${this.#last.text}${data}` && /\S$/u.test(this.#last.text);
    if (!goesOn || this.#past.length === 0) this.#past.push(this.#last); // else the edit continues a word
    if (this.#past.length > REMEMBERED_EDITS) this.#past.shift();
    this.#future = [];
    this.#last = this.#snapshot();
    this.#show();
    if (!isComposing) this.#listener.edited({ isInsertion: inputType.startsWith("insert"), isPaste });
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    const isCommand = (event.ctrlKey || event.metaKey) && !event.altKey;
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey && this.#listener.entered()) event.preventDefault();
    else if (isCommand && event.key.toLowerCase() === "z") this.#stepHistory(event, event.shiftKey);
    else if (isCommand && event.key.toLowerCase() === "y") this.#stepHistory(event, true);
    // Not while the key is held down, as when deleting a draft.
    else if (event.key === "Backspace" && !event.repeat && this.text === "") this.#listener.takenBack();
  }

  /** Handle undo and redo from a menu or a gesture. @param {InputEvent} event */
  #replaceHistory(event) {
    if (event.inputType === "historyUndo") this.#stepHistory(event, false);
    else if (event.inputType === "historyRedo") this.#stepHistory(event, true);
  }

  /** @param {Event} event @param {boolean} isForward */
  #stepHistory(event, isForward) {
    event.preventDefault();
    const [from, to] = isForward ? [this.#future, this.#past] : [this.#past, this.#future];
    const snapshot = from.pop();
    if (!snapshot && !isForward) return this.#listener.takenBack();
    if (!snapshot) return;
    to.push(this.#last);
    this.#field.value = snapshot.text;
    this.#field.setSelectionRange(snapshot.caret, snapshot.caret);
    this.#last = snapshot;
    this.#show();
    this.#listener.edited({ isInsertion: false, isPaste: false });
  }
}
