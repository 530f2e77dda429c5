/** A translation session that survives lost connections and page reloads.
 *
 * Every message is kept in a log. After a lost connection the session is resumed, and the log is sent from the first
 * message that the server has not received. If the server no longer knows the session, the whole log is sent again;
 * since the output depends on the messages only, commits received before are dropped.
 */

import { Backoff, socketAddress } from "./backoff.js";

export const LONGEST_TEXT = 2000; // characters per message; servers limit them
const LONGEST_LOG = 5000; // messages saved without merging
const CLOCK_MS = 5000;
const SLEEP_MS = 90_000; // longer than browsers throttle timers of hidden pages
const TRANSIENT = new Set(["too_many_streams", "slow_reader", "draining", "internal"]); // transient errors

/** @typedef {{type: "source", text: string} | {type: "delay", k: number} | {type: "end"} | {type: "undo"}} Message */
/** @typedef {{seq: number, text: string, sentence: number, source_words: number,
 *             lag_ms: {policy: number, queue: number, compute: number}}} Commit */
/** @typedef {{model: string, delay: number | null, room?: string, room_key?: string}} Start */
/** @typedef {"connecting" | "live" | "lost" | "asleep" | "failed"} State */
/** @typedef {{commit(commit: Commit): void, sentence(): void, undone(sentence: number | null, source: string): void,
 *             state(state: State, code?: string): void}} Listener */
/** @typedef {{start: Start, log: Message[], session: string | null, commits: number, sentences: number,
 *             undone: number[]}} Saved state to continue with after a reload of the page */

export class Session {
  #start;
  #apiKey;
  #log;
  #listener;
  /** @type {WebSocket | null} */
  #socket = null;
  /** @type {string | null} */
  #name;
  #next = 0;
  #isReady = false;
  #isOver = false;
  #lastCommit;
  #lastSentence;
  /** @type {Set<number>} the undone sentences */
  #undone;
  #backoff = new Backoff();
  #clock;
  #clockSeen = Date.now();
  #isAsleep = false;
  #trouble = "";

  /**
   * @param {Saved} saved
   * @param {string | null} apiKey
   * @param {Listener} listener
   */
  constructor(saved, apiKey, listener) {
    this.#start = saved.start;
    this.#apiKey = apiKey;
    this.#log = merged(saved.log);
    this.#name = saved.session;
    this.#lastCommit = saved.commits;
    this.#lastSentence = saved.sentences;
    this.#undone = new Set(saved.undone);
    this.#listener = listener;
    if (this.#name !== null) this.#log = saved.log; // the server counts these messages, so they must not be merged
    addEventListener("online", this.#connect);
    addEventListener("offline", this.#disconnect);
    this.#clock = setInterval(() => this.#noticeSleep(), CLOCK_MS);
    this.#connect();
  }

  /** Return the state of a new session. @param {Start} start @param {Message[]} log @returns {Saved} */
  static fresh(start, log) {
    return { start, log, session: null, commits: 0, sentences: 0, undone: [] };
  }

  /** The state to save. A long log is merged into fewer messages, which start a new session.
   *  @returns {Saved} */
  get saved() {
    const isLong = this.#log.length > LONGEST_LOG;
    return {
      start: this.#start,
      log: isLong ? merged(this.#log) : this.#log,
      session: isLong ? null : this.#name,
      commits: this.#lastCommit,
      sentences: this.#lastSentence,
      undone: [...this.#undone],
    };
  }

  /** @param {Message} message */
  send(message) {
    this.#log.push(message);
    if (this.#isAsleep) this.#connect();
    this.#flush();
  }

  /** Continue in a new session, with or without a room; keep the translation.
   *  @param {{room?: string, room_key?: string}} audience */
  move(audience) {
    const { model, delay } = this.#start;
    this.#start = { model, delay, ...audience };
    if (this.#isReady) this.#sendMessage({ type: "finish" });
    this.#name = null;
    this.#log = merged(this.#log);
    this.#drop();
    this.#connect();
  }

  close() {
    if (this.#isReady) this.#sendMessage({ type: "finish" });
    this.#end();
  }

  #connect = () => {
    if (this.#socket || this.#isOver) return;
    this.#backoff.cancel();
    this.#isAsleep = false;
    if (!this.#backoff.isTrying) this.#listener.state("connecting");
    const socket = new WebSocket(socketAddress("v1/stream"));
    this.#socket = socket;
    socket.onopen = () => this.#sendOpening();
    socket.onmessage = ({ data }) => this.#socket === socket && this.#receive(JSON.parse(data));
    socket.onclose = () => this.#socket === socket && this.#retry();
  };

  /** Reconnect after the computer has slept, since its connections are dead without an error. */
  #noticeSleep() {
    const hasSlept = Date.now() - this.#clockSeen > SLEEP_MS;
    this.#clockSeen = Date.now();
    if (hasSlept) this.#disconnect();
  }

  /** Drop a connection that may take minutes to time out. */
  #disconnect = () => {
    this.#socket?.close();
    if (this.#socket) this.#retry();
  };

  #sendOpening() {
    this.#sendMessage(
      this.#name === null
        ? { type: "start", ...this.#start, api_key: this.#apiKey }
        : { type: "resume", session: this.#name, seq: this.#lastCommit, api_key: this.#apiKey },
    );
  }

  #retry() {
    this.#socket = null;
    this.#isReady = false;
    if (this.#isAsleep) return this.#listener.state("asleep");
    this.#listener.state("lost", this.#trouble);
    this.#backoff.retry(this.#connect);
  }

  #end() {
    this.#isOver = true;
    clearInterval(this.#clock);
    removeEventListener("online", this.#connect);
    removeEventListener("offline", this.#disconnect);
    this.#drop();
  }

  #drop() {
    const socket = this.#socket;
    this.#backoff.cancel();
    this.#socket = null; // ignore messages that still arrive
    if (socket?.readyState === WebSocket.CONNECTING) socket.onopen = () => socket.close(); // now: an error
    else socket?.close();
    this.#isReady = false;
  }

  #receive(message) {
    if (message.type === "ready") this.#ready(message);
    else if (message.type === "commit") this.#commit(message);
    else if (message.type === "sentence") this.#sentence(message);
    else if (message.type === "undone") this.#undo(message);
    else if (message.type === "error") this.#error(message);
  }

  #ready({ session, received }) {
    this.#name = session;
    this.#next = received;
    this.#backoff.connected(); // not yet a success: the server may fail on the text that follows
    this.#trouble = "";
    this.#isReady = true;
    this.#listener.state("live");
    this.#flush();
  }

  #commit(commit) {
    if (commit.seq <= this.#lastCommit) return;
    this.#lastCommit = commit.seq;
    this.#backoff.succeeded();
    this.#listener.commit(commit);
  }

  #sentence({ seq }) {
    if (seq <= this.#lastSentence) return;
    this.#lastSentence = seq;
    this.#listener.sentence();
  }

  #undo({ sentence, source }) {
    if (this.#undone.has(sentence)) return;
    if (sentence !== null) this.#undone.add(sentence);
    this.#listener.undone(sentence, source);
  }

  #error({ code, message }) {
    if (code === "unknown_session") this.#restart();
    else if (code === "idle") this.#isAsleep = true;
    else if (TRANSIENT.has(code)) this.#trouble = code;
    else this.#fail(code, message);
  }

  #restart() {
    this.#name = null;
    this.#log = merged(this.#log);
    this.#sendOpening();
  }

  #fail(code, message) {
    console.info(`simulmt: ${message}`);
    this.#end();
    this.#listener.state("failed", code);
  }

  #flush() {
    while (this.#isReady && this.#next < this.#log.length) {
      this.#sendMessage(this.#log[this.#next]);
      this.#next += 1;
    }
  }

  #sendMessage(message) {
    this.#socket?.send(JSON.stringify(message));
  }
}

/** Join neighbouring texts, so that long sessions are sent quickly. @param {Message[]} messages */
export function merged(messages) {
  /** @type {Message[]} */
  const result = [];
  for (const message of messages) {
    const last = result.at(-1);
    const isText = message.type === "source" && last?.type === "source";
    if (isText && last.text.length + message.text.length <= LONGEST_TEXT) last.text += message.text;
    else result.push({ ...message });
  }
  return result;
}
