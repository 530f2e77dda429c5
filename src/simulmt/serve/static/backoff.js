/** Exponential back-off with jitter for reconnecting. */

const FIRST_RETRY_MS = 250;
const LONGEST_RETRY_MS = 8000;
const STEADY_MS = 10_000; // a connection that lasted this long resets the back-off

export class Backoff {
  #attempts = 0;
  #connectedAt = Infinity;
  #timer = 0;

  get isTrying() {
    return this.#attempts > 0;
  }

  connected() {
    this.#connectedAt = performance.now();
  }

  succeeded() {
    this.#attempts = 0;
  }

  /** @param {() => void} connect */
  retry(connect) {
    if (performance.now() - this.#connectedAt > STEADY_MS) this.#attempts = 0;
    this.#connectedAt = Infinity;
    const wait = Math.min(LONGEST_RETRY_MS, FIRST_RETRY_MS * 2 ** this.#attempts);
    this.#attempts += 1;
    // Jitter: pages that lose a server at the same time should not all reconnect at once.
    this.#timer = setTimeout(connect, wait * (0.5 + Math.random() / 2));
  }

  cancel() {
    clearTimeout(this.#timer);
  }
}

/** Return the URL of a WebSocket of this server. @param {string} path */
export function socketAddress(path) {
  const address = new URL(path, document.baseURI);
  address.protocol = address.protocol.replace("http", "ws");
  return address;
}
