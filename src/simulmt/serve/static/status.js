/** The connection status shown to the user. */

const STATES = {
  connecting: "Connecting…",
  live: "Ready",
  lost: "Connection lost, trying again. Your text is safe.",
  asleep: "Paused. Type or speak to continue.",
  failed: "Stopped",
};

const CAUSES = {
  too_many_streams: "The server is full, trying again. Your text is safe.",
  draining: "The server is restarting. Your text is safe.",
  internal: "Server error, trying again. Your text is safe.",
  slow_reader: "The network is slow, catching up.",
  unauthorized: "This server requires a key.",
  taken_over: "This text is open in another tab.",
  too_long: "The session has reached the server's time limit. Reload the page to continue.",
  room_taken: "Another speaker is using this room.",
  unknown_model: "This language pair is no longer available. Reload the page.",
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

  /** Drop the status of closed lanes. @param {number} count of open lanes */
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
