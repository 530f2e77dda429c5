/** A translation session that outlives its connections.
 *
 * Every message is kept in a log. After a lost connection the session is resumed and the log sent on from where the
 * server had received it. A server that no longer knows the session gets the whole log again; since what it writes
 * depends on the messages only, commits that were seen before are dropped, and nothing is lost, repeated or changed.
 */

const FIRST_RETRY_MS = 250;
const LONGEST_RETRY_MS = 8000;
export const LONGEST_TEXT = 2000; // characters of a message; servers limit them
const CLOCK_MS = 5000;
const SLEEP_MS = 90_000; // longer than the clock of a hidden page is ever held back
const PASSING = new Set(["too_many_streams", "slow_reader", "draining", "internal"]); // errors that time may heal

/** @typedef {{type: "source", text: string} | {type: "delay", k: number} | {type: "end"}} Message */
/** @typedef {{seq: number, text: string, source_words: number,
 *             lag_ms: {policy: number, queue: number, compute: number}}} Commit */
/** @typedef {"connecting" | "live" | "lost" | "asleep" | "failed"} State */
/** @typedef {{commit(commit: Commit): void, sentence(): void,
 *             state(state: State, detail?: string, code?: string): void}} Listener */

export class Session {
  #start;
  #log;
  #listener;
  /** @type {WebSocket | null} */
  #socket = null;
  /** @type {string | null} */
  #name = null;
  #next = 0;
  #isReady = false;
  #isOver = false;
  #lastCommit = 0;
  #lastSentence = 0;
  #attempts = 0;
  #timer = 0;
  #clock;
  #clockSeen = Date.now();
  #isAsleep = false;
  #trouble = "";

  /**
   * @param {{model: string, delay: number | null, api_key: string | null}} start
   * @param {Message[]} messages what the session begins with
   * @param {Listener} listener
   */
  constructor(start, messages, listener) {
    this.#start = start;
    this.#log = merged(messages);
    this.#listener = listener;
    addEventListener("online", this.#connect);
    addEventListener("offline", this.#disconnect);
    this.#clock = setInterval(() => this.#noticeSleep(), CLOCK_MS);
    this.#connect();
  }

  /** @param {Message} message */
  send(message) {
    this.#log.push(message);
    if (this.#isAsleep) this.#connect();
    this.#flush();
  }

  close() {
    if (this.#isReady) this.#say({ type: "finish" });
    this.#end();
  }

  #connect = () => {
    if (this.#socket || this.#isOver) return;
    clearTimeout(this.#timer);
    this.#isAsleep = false;
    if (!this.#attempts) this.#listener.state("connecting");
    const address = new URL("v1/stream", document.baseURI);
    address.protocol = address.protocol.replace("http", "ws");
    const socket = new WebSocket(address);
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
        ? { type: "start", ...this.#start }
        : { type: "resume", session: this.#name, seq: this.#lastCommit, api_key: this.#start.api_key },
    );
  }

  #retry() {
    this.#socket = null;
    this.#isReady = false;
    if (this.#isAsleep) return this.#listener.state("asleep");
    this.#listener.state("lost", this.#trouble);
    const wait = Math.min(LONGEST_RETRY_MS, FIRST_RETRY_MS * 2 ** this.#attempts);
    this.#attempts += 1;
    // Many pages lose one server at the same time; they should not all come back at the same time.
    this.#timer = setTimeout(this.#connect, wait * (0.5 + Math.random() / 2));
  }

  #end() {
    this.#isOver = true;
    clearTimeout(this.#timer);
    clearInterval(this.#clock);
    removeEventListener("online", this.#connect);
    removeEventListener("offline", this.#disconnect);
    this.#socket?.close();
    this.#socket = null; // what still arrives is no longer heard
  }

  #receive(message) {
    if (message.type === "ready") this.#ready(message);
    else if (message.type === "commit") this.#commit(message);
    else if (message.type === "sentence") this.#sentence(message);
    else if (message.type === "error") this.#error(message);
  }

  #ready({ session, received }) {
    this.#name = session;
    this.#next = received;
    this.#attempts = 0;
    this.#trouble = "";
    this.#isReady = true;
    this.#listener.state("live");
    this.#flush();
  }

  #commit(commit) {
    if (commit.seq <= this.#lastCommit) return;
    this.#lastCommit = commit.seq;
    this.#listener.commit(commit);
  }

  #sentence({ seq }) {
    if (seq <= this.#lastSentence) return;
    this.#lastSentence = seq;
    this.#listener.sentence();
  }

  #error({ code, message }) {
    if (code === "unknown_session") this.#beginAgain();
    else if (code === "idle") this.#isAsleep = true;
    else if (PASSING.has(code)) this.#trouble = message;
    else this.#fail(message, code);
  }

  #beginAgain() {
    this.#name = null;
    this.#log = merged(this.#log);
    this.#greet();
  }

  #fail(message, code) {
    this.#end();
    this.#listener.state("failed", message, code);
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
