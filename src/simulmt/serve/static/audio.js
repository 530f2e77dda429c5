/** The speech recogniser of the server: send audio, receive final and tentative text.
 *
 * Audio that the server has not acknowledged is kept, and sent again after a lost connection.
 */

import { Backoff, socketAddress } from "./backoff.js";

const SAMPLE_RATE = 16_000;
const LONGEST_FRAME = 32_000; // samples per binary message; servers limit them
const MOST_KEPT = 60 * SAMPLE_RATE; // samples; older audio is dropped while the connection is lost
const FULL = new Set(["too_many_streams"]);
const TRANSIENT = new Set(["slow_reader", "draining", "internal", "idle"]); // transient errors

/** @typedef {import("./microphone.js").Listener} Listener */

export class ServerRecogniser {
  #session;
  #listener;
  /** @type {MediaStream | null} */
  #stream = null;
  /** @type {AudioContext | null} */
  #context = null;
  #isOver = false;

  /** @param {{model: string, api_key: string | null}} start @param {Listener} listener */
  constructor(start, listener) {
    this.#listener = listener;
    this.#session = new AudioSession(start, listener);
    this.#record().catch((error) => this.#isOver || listener.failed(codeOf(error)));
  }

  stop() {
    this.#isOver = true;
    this.#stream?.getTracks().forEach((track) => track.stop());
    this.#context?.close();
    this.#session.finish();
  }

  async #record() {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
    this.#stream = stream;
    this.#context = new AudioContext({ sampleRate: SAMPLE_RATE });
    await this.#context.audioWorklet.addModule(new URL("recorder.js", import.meta.url));
    if (this.#isOver) return this.stop(); // stopped while the browser asked for permission
    const recorder = new AudioWorkletNode(this.#context, "recorder", { channelCount: 1, channelCountMode: "explicit" });
    recorder.port.onmessage = ({ data }) => this.#session.send(new Int16Array(data));
    stream.getTracks()[0].onended = () => this.#isOver || this.#listener.failed("audio-capture");
    this.#context.createMediaStreamSource(stream).connect(recorder);
  }
}

/** An audio session that survives lost connections. */
export class AudioSession {
  #start;
  #listener;
  /** @type {WebSocket | null} */
  #socket = null;
  /** @type {string | null} */
  #name = null;
  #isReady = false;
  #isFinishing = false;
  #backoff = new Backoff();
  #kept = new Int16Array(0); // unacknowledged samples, from number #firstKept of the session on
  #firstKept = 0;
  #sent = 0; // samples of the session that this connection has been sent
  #lastTranscript = 0;
  #trouble = "";

  /** @param {{model: string, api_key: string | null}} start @param {Listener} listener */
  constructor(start, listener) {
    this.#start = start;
    this.#listener = listener;
    this.#connect();
  }

  /** @param {Int16Array} samples */
  send(samples) {
    const kept = new Int16Array(Math.min(MOST_KEPT, this.#kept.length + samples.length));
    const surplus = this.#kept.length + samples.length - kept.length;
    kept.set(this.#kept.subarray(surplus));
    kept.set(samples, kept.length - samples.length);
    this.#kept = kept;
    this.#firstKept += surplus;
    this.#sent = Math.max(this.#sent, this.#firstKept);
    this.#flush();
  }

  /** Stop sending; audio already sent is still recognised. */
  finish() {
    this.#isFinishing = true;
    this.#backoff.cancel();
    if (this.#isReady) this.#sendMessage({ type: "finish" });
    else this.#socket?.close();
  }

  #connect = () => {
    const socket = new WebSocket(socketAddress("v1/stream"));
    this.#socket = socket;
    socket.onopen = () => this.#sendOpening();
    socket.onmessage = ({ data }) => this.#receive(JSON.parse(data));
    socket.onclose = () => this.#retry();
  };

  #sendOpening() {
    const { model, api_key } = this.#start;
    if (this.#name) this.#sendMessage({ type: "resume", session: this.#name, seq: this.#lastTranscript, api_key });
    else this.#sendMessage({ type: "start", model, input: "audio", output: "transcript", api_key });
  }

  #retry() {
    this.#isReady = false;
    if (this.#isFinishing) return;
    if (this.#trouble) this.#listener.failed(this.#trouble);
    else this.#backoff.retry(this.#connect);
  }

  #receive(message) {
    if (message.type === "ready") this.#ready(message);
    else if (message.type === "ack") this.#acknowledge(message.samples);
    else if (message.type === "transcript") this.#transcript(message);
    else if (message.type === "error") this.#error(message.code);
  }

  #ready({ session, samples }) {
    if (this.#name === null) this.#firstKept = 0; // a session counts its own samples
    this.#name = session;
    this.#acknowledge(samples);
    this.#sent = this.#firstKept;
    this.#isReady = true;
    this.#backoff.connected();
    this.#flush();
  }

  /** @param {number} samples */
  #acknowledge(samples) {
    const count = Math.max(0, Math.min(this.#kept.length, samples - this.#firstKept));
    this.#kept = this.#kept.slice(count);
    this.#firstKept += count;
  }

  #transcript({ seq, text, tentative, ends_sentence }) {
    if (seq <= this.#lastTranscript) return;
    this.#lastTranscript = seq;
    this.#backoff.succeeded();
    if (text.trim()) this.#listener.text(text);
    if (ends_sentence) this.#listener.sentence();
    if (!this.#isFinishing) this.#listener.tentative(tentative);
  }

  /** @param {string} code */
  #error(code) {
    if (code === "unknown_session") {
      this.#name = null;
      this.#lastTranscript = 0;
      this.#sendOpening();
    } else if (FULL.has(code)) this.#trouble = "full";
    else if (!TRANSIENT.has(code)) this.#trouble = "lost";
  }

  #flush() {
    while (this.#isReady && this.#sent < this.#firstKept + this.#kept.length) {
      const start = this.#sent - this.#firstKept;
      const frame = this.#kept.slice(start, start + LONGEST_FRAME);
      this.#socket.send(littleEndian(frame));
      this.#sent += frame.length;
    }
  }

  #sendMessage(message) {
    if (this.#socket?.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(message));
  }
}

/** @param {Int16Array} samples */
function littleEndian(samples) {
  const view = new DataView(new ArrayBuffer(2 * samples.length));
  samples.forEach((sample, index) => view.setInt16(2 * index, sample, true));
  return view.buffer;
}

/** Map a microphone error to the error code of SpeechRecognition. @param {DOMException} error */
function codeOf({ name }) {
  if (name === "NotAllowedError") return "not-allowed";
  if (name === "NotFoundError" || name === "NotReadableError") return "audio-capture";
  return name;
}
