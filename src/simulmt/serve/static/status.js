/** What to tell the person about the connection. */

const STATES = {
  connecting: "Connecting…",
  live: "Ready",
  lost: "Connection lost, trying again. Your text is safe.",
  asleep: "Resting. Type or speak to go on.",
  failed: "Stopped",
};

const CAUSES = {
  too_many_streams: "The server is full, trying again. Your text is safe.",
  draining: "The server is restarting. Your text is safe.",
  internal: "The server had a fault, trying again. Your text is safe.",
  slow_reader: "The network is slow, catching up.",
  unauthorized: "This server asks for a key.",
  taken_over: "This text is open in another tab.",
  too_long: "The server ended this session after its longest time. Reload the page to go on.",
  room_taken: "Somebody else speaks in this room.",
  unknown_model: "The server no longer has these languages. Reload the page.",
};

const WORST_FIRST = ["failed", "lost", "asleep", "connecting", "live"];

export class Status {
  #root;
  /** @type {{state: string, code: string}[]} of each lane */
  #lanes = [];

  /** @param {HTMLElement} root */
  constructor(root) {
    this.#root = root;
  }

  /** @param {number} lane @param {string} state @param {string} [code] */
  set(lane, state, code = "") {
    this.#lanes[lane] = { state, code };
    this.#show();
  }

  /** Forget lanes that are gone. @param {number} count of those that are left */
  keep(count) {
    this.#lanes.length = Math.min(count, this.#lanes.length);
    this.#show();
  }

  #show() {
    const rank = ({ state }) => WORST_FIRST.indexOf(state);
    const worst = this.#lanes.filter(Boolean).toSorted((one, other) => rank(one) - rank(other))[0];
    if (!worst) return;
    this.#root.dataset.state = worst.state;
    this.#root.querySelector("span").textContent = CAUSES[worst.code] ?? STATES[worst.state];
  }
}
