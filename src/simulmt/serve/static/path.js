/** The read/write path of a translation: source words run across, target words down.
 *
 * The source runs along the top as text; each target word stands below the last source word that was read for it.
 * Only the most recent words are drawn, so the cost does not grow with the text.
 */

import { isIdeograph, splitWords } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const KEPT_WORDS = 60;
const KEPT_ROWS = 30;
const ROW_HEIGHT = 26;
const HEADER_HEIGHT = 42; // the line of the source, above the first row
const SOURCE_BASELINE = 28;
const NARROWEST_GAP = 18;
const WIDEST_GAP = 56;
const MARGIN = 24;
const ROOM = 180; // for the target word below the last source word

export class Path {
  #svg;
  #across = document.createElementNS(SVG, "g");
  #window = document.createElementNS(SVG, "svg"); // clips rows that scroll up to the source
  #both = document.createElementNS(SVG, "g");
  #ruler = document.createElement("canvas").getContext("2d");
  #isDrawDue = false;
  /** @type {{text: string, start: number, end: number}[]} the last source words, placed */
  #words = [];
  #wordsDropped = 0;
  /** @type {{text: string, x: number}[]} the last target words, each a row */
  #rows = [];
  #rowsDropped = 0;

  /** @param {SVGSVGElement} svg */
  constructor(svg) {
    this.#svg = svg;
    this.#window.setAttribute("y", String(HEADER_HEIGHT));
    this.#window.append(this.#both);
    svg.replaceChildren(this.#window, this.#across);
    new ResizeObserver(() => this.#drawSoon()).observe(svg);
  }

  /** @param {string[]} words */
  read(words) {
    this.#ruler.font = getComputedStyle(this.#svg).font;
    const gap = Math.min(WIDEST_GAP, Math.max(NARROWEST_GAP, innerWidth / 24));
    for (const text of words) {
      const start = this.#words.length ? this.#words[this.#words.length - 1].end + gap : 0;
      this.#words.push({ text, start, end: start + this.#ruler.measureText(text).width });
    }
    this.#drawSoon();
  }

  /** @param {{text: string, words: number}} commit a text, and how many source words were read before it */
  write({ text, words: wordsRead }) {
    const word = this.#words[Math.max(0, wordsRead - this.#wordsDropped - 1)];
    const x = word?.end ?? 0;
    const [first, ...others] = splitWords(text);
    const last = this.#rows.at(-1);
    const continuesWord = last && !text.startsWith(" ") && !isIdeograph(first) && !isIdeograph(last.text);
    if (continuesWord) last.text += first;
    else this.#rows.push({ text: first, x });
    this.#rows.push(...others.map((text) => ({ text, x })));
    this.#drawSoon();
  }

  #drawSoon() {
    if (this.#isDrawDue) return;
    this.#isDrawDue = true;
    requestAnimationFrame(() => {
      this.#isDrawDue = false;
      this.#forget();
      if (this.#svg.clientWidth) this.#draw();
    });
  }

  #forget() {
    const words = this.#words.length - KEPT_WORDS;
    const rows = this.#rows.length - KEPT_ROWS;
    if (words > 0) this.#wordsDropped += this.#words.splice(0, words).length;
    if (rows > 0) this.#rowsDropped += this.#rows.splice(0, rows).length;
  }

  #draw() {
    this.#across.replaceChildren(...this.#words.map((word) => label(word.text, word.start, SOURCE_BASELINE, "read")));
    this.#both.replaceChildren(...this.#stairs());
    const { clientWidth, clientHeight } = this.#svg;
    const read = this.#words.at(-1)?.end ?? 0;
    const left = Math.min(MARGIN, clientWidth - Math.min(ROOM, clientWidth / 3) - read);
    const rows = this.#rowsDropped + this.#rows.length;
    const up = Math.min(0, clientHeight - HEADER_HEIGHT - (rows + 1.5) * ROW_HEIGHT);
    this.#across.style.transform = `translate(${left}px, 0)`;
    this.#both.style.transform = `translate(${left}px, ${up}px)`;
  }

  #stairs() {
    let x = this.#rows[0]?.x ?? 0;
    const steps = this.#rows.flatMap((row, index) => {
      const y = this.#rowTop(index);
      const marks = [step(x, y, row.x, y + ROW_HEIGHT), label(row.text, row.x + 9, y + 19, "written")];
      if (row.x > x) marks.unshift(guide(row.x, y));
      x = row.x;
      return marks;
    });
    const head = this.#words.at(-1)?.end ?? 0;
    const y = this.#rowTop(this.#rows.length);
    return [...steps, step(x, y, head, y)];
  }

  /** @param {number} index */
  #rowTop(index) {
    return (this.#rowsDropped + index) * ROW_HEIGHT + 1;
  }
}

/** A step of the path: across for reading, then down for writing. */
function step(x, y, nextX, nextY) {
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", `M${x} ${y}H${nextX}V${nextY}`);
  return path;
}

/** A thin line from a source word down to what was written after it. */
function guide(x, y) {
  const path = step(x, 0, x, y);
  path.setAttribute("class", "guide");
  return path;
}

function label(content, x, y, kind) {
  const text = document.createElementNS(SVG, "text");
  text.setAttribute("x", String(x));
  text.setAttribute("y", String(y));
  text.setAttribute("class", kind);
  text.textContent = content;
  return text;
}
