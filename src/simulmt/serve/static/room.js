/** A viewer's connection to a room; reconnects when it is lost. */

import { Backoff, socketAddress } from "./backoff.js";

const LONGEST_NAME = 40;
const FINAL = new Set(["unauthorized", "bad_message"]);

/** @typedef {"connecting" | "live" | "waiting" | "closed" | "lost" | "refused"} State */
/** @typedef {{state(state: State, code?: string): void, opened(room: {target: string}): void, cleared(): void,
 *             commit(commit: {text: string, sentence: number}): void, sentence(sentence: number): void,
 *             retracted(sentence: number): void}} Listener */

export class RoomViewer {
  #name;
  #key;
  #listener;
  #backoff = new Backoff();
  /** @type {WebSocket | null} */
  #socket = null;
  #speech = ""; // id of the current speech
  #lastCommit = 0;
  #lastSentence = -1;
  #isClosed = false;
  #isRefused = false;

  /** @param {string} name @param {string | null} key for servers that require one @param {Listener} listener */
  constructor(name, key, listener) {
    this.#name = name;
    this.#key = key;
    this.#listener = listener;
    listener.state("connecting");
    addEventListener("online", this.#connect);
    addEventListener("offline", this.#disconnect);
    this.#connect();
  }

  #connect = () => {
    if (this.#socket || this.#isRefused) return;
    this.#backoff.cancel();
    const socket = new WebSocket(socketAddress(`../v1/rooms/${encodeURIComponent(this.#name)}`));
    this.#socket = socket;
    socket.onopen = () => {
      this.#backoff.connected();
      if (this.#key) socket.send(JSON.stringify({ type: "watch", api_key: this.#key }));
    };
    socket.onmessage = ({ data }) => this.#socket === socket && this.#receive(JSON.parse(data));
    socket.onclose = () => this.#socket === socket && this.#retry();
  };

  /** Drop a connection that may take minutes to time out. */
  #disconnect = () => {
    this.#socket?.close();
    if (this.#socket) this.#retry();
  };

  #retry() {
    this.#socket = null;
    if (this.#isRefused) return;
    this.#listener.state("lost");
    this.#backoff.retry(this.#connect);
  }

  #receive(message) {
    if (message.type === "room") this.#open(message);
    else if (message.type === "commit") this.#commit(message);
    else if (message.type === "sentence") this.#sentence(message);
    else if (message.type === "retract") this.#listener.retracted(message.sentence);
    else if (message.type === "waiting") this.#listener.state(this.#isClosed ? "closed" : "waiting");
    else if (message.type === "closed") this.#close();
    else if (message.type === "error") this.#refuse(message.code);
  }

  #open({ speech, target }) {
    if (speech !== this.#speech) {
      this.#listener.cleared();
      this.#lastCommit = 0;
      this.#lastSentence = -1;
    }
    this.#speech = speech;
    this.#isClosed = false;
    this.#listener.opened({ target });
    this.#listener.state("live");
  }

  #commit(commit) {
    if (commit.seq <= this.#lastCommit) return;
    this.#lastCommit = commit.seq;
    this.#backoff.succeeded();
    this.#listener.commit(commit);
  }

  #sentence({ sentence }) {
    if (sentence <= this.#lastSentence) return;
    this.#lastSentence = sentence;
    this.#listener.sentence(sentence);
  }

  #close() {
    this.#isClosed = true;
    this.#listener.state("closed");
  }

  /** @param {string} code */
  #refuse(code) {
    this.#isRefused = FINAL.has(code);
    if (this.#isRefused) this.#listener.state("refused", code);
  }
}

/** Convert typed text to a valid room name. @param {string} text */
export function roomName(text) {
  const plain = text.normalize("NFD").replace(/\p{M}/gu, "").toLowerCase();
  return plain.replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, LONGEST_NAME);
}
