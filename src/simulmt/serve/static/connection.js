/** A translation session that outlives its connections, and the page.
 *
 * Every message is kept in a log. After a lost connection the session is resumed and the log sent on from where the
 * server had received it. A server that no longer knows the session gets the whole log again; since what it writes
 * depends on the messages only, commits that were seen before are dropped, and nothing is lost, repeated or changed.
 */

import { Backoff, socketAddress } from "./backoff.js";

export const LONGEST_TEXT = 2000; // characters of a message; servers limit them
const LONGEST_LOG = 5000; // messages that are saved one by one
const CLOCK_MS = 5000;
const SLEEP_MS = 90_000; // longer than the clock of a hidden page is ever held back
const PASSING = new Set(["too_many_streams", "slow_reader", "draining", "internal"]); // errors that time may heal

/** @typedef {{type: "source", text: string} | {type: "delay", k: number} | {type: "end"} | {type: "undo"}} Message */
/** @typedef {{seq: number, text: string, sentence: number, source_words: number,
 *             lag_ms: {policy: number, queue: number, compute: number}}} Commit */
/** @typedef {{model: string, delay: number | null, room?: string, room_key?: string}} Start */
/** @typedef {"connecting" | "live" | "lost" | "asleep" | "failed"} State */
/** @typedef {{commit(commit: Commit): void, sentence(): void, undone(sentence: number | null, source: string): void,
 *             state(state: State, code?: string): void}} Listener */
/** @typedef {{start: Start, log: Message[], session: string | null, commits: number, sentences: number,
 *             undone: number[]}} Saved what it takes to go on after a reload of the page */

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
  /** @type {Set<number>} the sentences that were taken back */
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
    if (this.#name !== null) this.#log = saved.log; // the server has counted these messages as they are
    addEventListener("online", this.#connect);
    addEventListener("offline", this.#disconnect);
    this.#clock = setInterval(() => this.#noticeSleep(), CLOCK_MS);
    this.#connect();
  }

  /** A session that is yet to be started. @param {Start} start @param {Message[]} log @returns {Saved} */
  static fresh(start, log) {
    return { start, log, session: null, commits: 0, sentences: 0, undone: [] };
  }

  /** After hours, not the messages that the server has counted, but the same text in few: it is sent again.
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

  /** Go on as another session, with an audience or without; what was written stays.
   *  @param {{room?: string, room_key?: string}} audience */
  move(audience) {
    const { model, delay } = this.#start;
    this.#start = { model, delay, ...audience };
    if (this.#isReady) this.#say({ type: "finish" });
    this.#name = null;
    this.#log = merged(this.#log);
    this.#drop();
    this.#connect();
  }

  close() {
    if (this.#isReady) this.#say({ type: "finish" });
    this.#end();
  }

  #connect = () => {
    if (this.#socket || this.#isOver) return;
    this.#backoff.cancel();
    this.#isAsleep = false;
    if (!this.#backoff.isTrying) this.#listener.state("connecting");
    const socket = new WebSocket(socketAddress("v1/stream"));
    this.#socket = socket;
    socket.onopen = () => this.#greet();
    socket.onmessage = ({ data }) => this.#socket === socket && this.#receive(JSON.parse(data));
    socket.onclose = () => this.#socket === socket && this.#retry();
  };

  /** A computer that slept wakes up with connections that are dead and do not know it. */
  #noticeSleep() {
    const hasSlept = Date.now() - this.#clockSeen > SLEEP_MS;
    this.#clockSeen = Date.now();
    if (hasSlept) this.#disconnect();
  }

  /** Let go of a connection that may hang for minutes before it notices its own death. */
  #disconnect = () => {
    this.#socket?.close();
    if (this.#socket) this.#retry();
  };

  #greet() {
    this.#say(
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
    this.#socket = null; // what still arrives is no longer heard
    if (socket?.readyState === WebSocket.CONNECTING) socket.onopen = () => socket.close(); // sooner is an error
    else socket?.close();
    this.#isReady = false;
  }

  #receive(message) {
    if (message.type === "ready") this.#ready(message);
    else if (message.type === "commit") this.#commit(message);
    else if (message.type === "sentence") this.#sentence(message);
    else if (message.type === "undone") this.#takeBack(message);
    else if (message.type === "error") this.#error(message);
  }

  #ready({ session, received }) {
    this.#name = session;
    this.#next = received;
    this.#backoff.connected(); // no success yet: the server may fail on the text that follows
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

  #takeBack({ sentence, source }) {
    if (this.#undone.has(sentence)) return;
    if (sentence !== null) this.#undone.add(sentence);
    this.#listener.undone(sentence, source);
  }

  #error({ code, message }) {
    if (code === "unknown_session") this.#beginAgain();
    else if (code === "idle") this.#isAsleep = true;
    else if (PASSING.has(code)) this.#trouble = code;
    else this.#fail(code, message);
  }

  #beginAgain() {
    this.#name = null;
    this.#log = merged(this.#log);
    this.#greet();
  }

  #fail(code, message) {
    console.info(`simulmt: ${message}`);
    this.#end();
    this.#listener.state("failed", code);
  }

  #flush() {
    while (this.#isReady && this.#next < this.#log.length) {
      this.#say(this.#log[this.#next]);
      this.#next += 1;
    }
  }

  #say(message) {
    this.#socket?.send(JSON.stringify(message));
  }
}

/** The same messages with neighbouring texts joined, so that hours are quickly sent. @param {Message[]} messages */
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
