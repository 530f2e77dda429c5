/** Sharing the translation in a room: its URL and QR code. */

import { copy } from "./export.js";
import { qrImage } from "./qr.js";
import { roomName } from "./room.js";

const SYLLABLES = "ba be bo da do fa fe ka ko la le li ma mi mo na no pa pe ra ro sa so ta te to va vi zo".split(" ");
const CONFIRMATION_MS = 1500;
const LOOPBACK_WARNING =
  "This address works only on this computer. To let other devices connect, start the server with --host 0.0.0.0, " +
  "and open this page by the computer's name or IP address.";
const RENEWAL_MS = 5000;

/** @typedef {{name: string, key: string}} Room */

export class Sharing {
  #dialog;
  #button;
  #share;
  /** @type {Room | null} */
  #room = null;
  #lastName = "";
  #renewedAt = -Infinity;

  /**
   * @param {HTMLDialogElement} dialog
   * @param {HTMLButtonElement} button opens it
   * @param {(audience: {room?: string, room_key?: string}) => void} share called when the room changes
   */
  constructor(dialog, button, share) {
    this.#dialog = dialog;
    this.#button = button;
    this.#share = share;
    button.addEventListener("click", () => this.#open());
    this.#find("[name=room]").addEventListener("change", () => this.#rename());
    this.#find(".stop").addEventListener("click", () => this.#use(null));
    dialog.addEventListener("close", () => this.#showError(""));
    for (const copyButton of dialog.querySelectorAll("[data-copy]")) {
      copyButton.addEventListener("click", () => this.#copy(copyButton));
    }
  }

  /** The room, if any; saved across reloads. */
  get room() {
    return this.#room;
  }

  /** The fields of `start` for the room. */
  get audience() {
    return this.#room ? { room: this.#room.name, room_key: this.#room.key } : {};
  }

  /** Restore a room after a reload. @param {Room | null} room */
  restore(room) {
    this.#room = room ?? null;
    this.#show();
  }

  /** Use a new key, so that the server opens the room again for a new text. */
  renew() {
    if (!this.#room) return;
    this.#room = { name: this.#room.name, key: secret() };
    this.#renewedAt = performance.now();
  }

  /** Whether the server may still be closing our own room. */
  get isRenewed() {
    return performance.now() - this.#renewedAt < RENEWAL_MS;
  }

  /** Handle a room that another speaker has opened. */
  refuse() {
    const name = this.#room?.name;
    this.#room = null;
    this.#lastName = "";
    this.#show();
    this.#showError(`Another speaker is using the room “${name}”. Choose another name.`);
    if (!this.#dialog.open) this.#showDialog();
  }

  #open() {
    if (!this.#room) this.#use({ name: this.#lastName || freshName(), key: secret() });
    this.#showDialog();
  }

  /** Open the dialog scrolled to the top, although the last button has the focus. */
  #showDialog() {
    this.#dialog.showModal();
    this.#dialog.scrollTop = 0;
  }

  #rename() {
    const name = roomName(this.#find("[name=room]").value);
    this.#showError("");
    if (!name) this.#showError("Use only the letters a to z, digits and hyphens.");
    else if (name !== this.#room?.name) this.#use({ name, key: secret() });
  }

  /** @param {Room | null} room */
  #use(room) {
    this.#room = room;
    this.#lastName = room?.name ?? this.#lastName;
    this.#show();
    this.#share(this.audience);
  }

  #show() {
    this.#button.setAttribute("aria-pressed", String(this.#room !== null));
    for (const part of [".invitation", ".warning", ".stop"]) this.#find(part).hidden = this.#room === null;
    if (!this.#room) return;
    const address = this.#address();
    this.#find("[name=room]").value = this.#room.name;
    this.#find(".link").href = address;
    this.#find(".link").textContent = address.replace(/^https?:\/\//, "");
    this.#find(".code").replaceChildren(qrImage(address));
    this.#find(".warning").textContent = isLoopback() ? LOOPBACK_WARNING : "";
  }

  /** @param {string} text */
  #showError(text) {
    this.#find(".trouble").textContent = text;
  }

  #address() {
    return new URL(`captions/${this.#room.name}`, document.baseURI).href;
  }

  /** @param {HTMLButtonElement} button */
  async #copy(button) {
    const { textContent } = button;
    if (textContent === "Copied") return;
    await copy(button.dataset.copy === "overlay" ? `${this.#address()}?overlay` : this.#address(), this.#dialog);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = textContent), CONFIRMATION_MS);
  }

  /** @param {string} selector */
  #find(selector) {
    return this.#dialog.querySelector(selector);
  }
}

/** Whether this page was opened by a loopback address. */
function isLoopback() {
  return /^(localhost|127\.|\[::1\])/.test(location.hostname);
}

/** Return a random name that is easy to say. */
function freshName() {
  const [...numbers] = crypto.getRandomValues(new Uint32Array(6));
  const syllables = numbers.map((number) => SYLLABLES[number % SYLLABLES.length]);
  return `${syllables.slice(0, 3).join("")}-${syllables.slice(3).join("")}`;
}

function secret() {
  return [...crypto.getRandomValues(new Uint32Array(4))].map((number) => number.toString(36)).join("");
}
