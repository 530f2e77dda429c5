/** The lag of the translation, by cause. */

const COMMITS_AVERAGED = 8;
const SCALES_MS = [1000, 2000, 5000, 10000, 20000, 60000];
const CAUSES = ["policy", "queue", "compute"];

export class Meter {
  #total;
  #parts;
  /** @type {import("./connection.js").Commit["lag_ms"][]} */
  #recent = [];

  /** @param {HTMLElement} total @param {HTMLElement} parts */
  constructor(total, parts) {
    this.#total = total;
    this.#parts = CAUSES.map((cause) => ({
      bar: parts.querySelector(`.bar .${cause}`),
      figure: parts.querySelector(`.${cause} .figure`),
    }));
  }

  /** @param {import("./connection.js").Commit} commit */
  add(commit) {
    this.#recent.push(commit.lag_ms);
    if (this.#recent.length > COMMITS_AVERAGED) this.#recent.shift();
    this.#show();
  }

  #show() {
    const means = CAUSES.map((cause) => mean(this.#recent.map((lag) => lag[cause])));
    const total = means.reduce((sum, part) => sum + part, 0);
    const scale = SCALES_MS.find((candidate) => candidate >= total) ?? total;
    this.#total.textContent = `${(total / 1000).toFixed(1)} s behind`;
    this.#parts.forEach(({ bar, figure }, index) => {
      bar.style.width = `max(2px, ${(100 * means[index]) / scale}%)`;
      figure.textContent = duration(means[index]);
    });
  }
}

/** @param {number[]} values */
function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

/** @param {number} milliseconds */
function duration(milliseconds) {
  if (milliseconds >= 995) return `${(milliseconds / 1000).toFixed(1)} s`;
  return `${Math.round(milliseconds)} ms`;
}
