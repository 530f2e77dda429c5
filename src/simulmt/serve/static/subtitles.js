/** Subtitles from timed commits, by the same rules as `simulmt translate --format srt`.
 *
 * A subtitle starts with its first word, or when the previous one ends, and is shown long enough to be read.
 */

const COLUMNS = 42; // per line; an ideograph takes two
const LINES = 2;
const READING_SPEED = 20; // columns per second
const SHORTEST = 0.8; // minimum duration in seconds
const LINGER = 1; // seconds that a subtitle stays after its last word
const LONGEST = 6; // seconds after which no more words are added
const CLOSING = new Set("\"'”’»›)]}」』）】》〉,.;:!?…、。，；：！？｡"); // never starts a line
const OPENING = new Set("“‘„«‹([{「『（【《〈"); // never ends a line
const PARTICLES = new Set("的了着过"); // end a Chinese word ...
const NOT_PARTICLES = new Set("的确 的话 的地 了解 着急 着手 着重 着陆 过程 过去 过来 过度".split(" ")); // ... except here
const UNIT_LENGTH = 4; // characters of a word that may be the unit of a number
const NUMBER = /\p{Nd}[\u3400-\u4dbf\u4e00-\u9fff]?$/u; // perhaps with the first ideograph of its unit
const WIDE_RANGES = [
  "\\u1100-\\u115f\\u2e80-\\u303e\\u3041-\\ua4cf\\uac00-\\ud7a3\\uf900-\\ufaff\\ufe30-\\ufe6f", // letters of East Asia
  "\\uff00-\\uff60\\uffe0-\\uffe6", // full-width forms
  "\\u{1f300}-\\u{1faff}", // emoji
  "\\u{20000}-\\u{3fffd}", // rare ideographs
];
const WIDE = new RegExp(`[${WIDE_RANGES.join("")}]`, "u");

/** @typedef {{text: string, seconds: number, endsSentence: boolean}} TimedCommit */
/** @typedef {{start: number, end: number, lines: string[]}} Cue */

/** @param {TimedCommit[]} commits */
export function srt(commits) {
  const blocks = cues(commits).map(({ start, end, lines }, index) => {
    const times = `${stamp(start, ",")} --> ${stamp(end, ",")}`;
    return `${index + 1}\n${times}\n${lines.join("\n")}\n\n`;
  });
  return blocks.join("");
}

/** @param {TimedCommit[]} commits */
export function vtt(commits) {
  const blocks = cues(commits).map(
    ({ start, end, lines }) => `${stamp(start, ".")} --> ${stamp(end, ".")}\n${escaped(lines.join("\n"))}\n\n`,
  );
  return `WEBVTT\n\n${blocks.join("")}`;
}

/** @param {TimedCommit[]} commits @returns {Cue[]} */
export function cues(commits) {
  const builder = new CueBuilder();
  for (const commit of commits) {
    builder.add(commit.text, commit.seconds);
    if (commit.endsSentence) builder.endLine();
  }
  builder.endLine();
  return builder.cues;
}

class CueBuilder {
  /** @type {Cue[]} */
  cues = [];
  #text = ""; // of the current subtitle
  #begun = 0; // time of its first commit
  #added = 0; // time of its last commit
  #shownUntil = 0;

  /** @param {string} text @param {number} now */
  add(text, now) {
    if (this.#text && now - this.#begun > LONGEST && beginsWord(text, this.#text)) {
      this.#show(wrap(this.#text), now);
      this.#text = "";
    }
    if (!this.#text) this.#begun = this.#added = now;
    let lines = wrap(this.#text + text);
    while (lines.length > LINES) {
      this.#show(lines.slice(0, LINES), now);
      lines = lines.slice(LINES);
      this.#begun = this.#added = now;
    }
    this.#text = lines.join("");
    this.#added = now;
  }

  endLine() {
    if (this.#text) this.#show(wrap(this.#text), Infinity);
    this.#text = "";
  }

  /** @param {string[]} lines @param {number} nextBegins */
  #show(lines, nextBegins) {
    const start = Math.max(this.#begun, this.#shownUntil);
    const columns = lines.reduce((sum, line) => sum + width(line), 0);
    const readingTime = Math.max(SHORTEST, columns / READING_SPEED);
    const end = Math.max(Math.min(this.#added + LINGER, nextBegins), start + readingTime);
    this.cues.push({ start, end, lines: lines.map((line) => line.trim()) });
    this.#shownUntil = end;
  }
}

/** Wrap text into lines, which join to the same text; only a long word may exceed the width.
 *
 *  Lines are filled, and broken after punctuation or else between words, where that leaves them half full. Two lines are
 *  balanced.
 *  @param {string} text */
function wrap(text) {
  const all = units(text);
  const ends = [0];
  while (ends[ends.length - 1] < all.length) {
    const start = ends[ends.length - 1];
    ends.push(start + fill(all.slice(start)));
  }
  if (ends.length === 3) ends[1] = balance(all) ?? ends[1];
  return ends.slice(1).map((end, line) => all.slice(ends[line], end).join(""));
}

/** Return how many units to put on a line. @param {string[]} units */
function fill(units) {
  let most = 1;
  while (most < units.length && width(units.slice(0, most + 1).join("")) <= COLUMNS) most += 1;
  if (most === units.length) return most;
  let best = most;
  for (let count = most - 1; count > 0 && width(units.slice(0, count).join("")) >= COLUMNS / 2; count -= 1) {
    if (badness(units, count) < badness(units, best)) best = count;
  }
  return best;
}

/** Return how many units to put on the first of two lines, or null if they do not fit on two. @param {string[]} units */
function balance(units) {
  let best = null;
  let least = Infinity;
  for (let count = 1; count < units.length; count += 1) {
    const [first, second] = [units.slice(0, count), units.slice(count)].map((line) => width(line.join("")));
    const cost = Math.abs(first - second) + (badness(units, count) * COLUMNS) / 2;
    if (Math.max(first, second) <= COLUMNS && cost < least) [best, least] = [count, cost];
  }
  return best;
}

/** Return how bad a break after some units is: 0 after punctuation, 1 between words, 2 perhaps inside a word.
 *  @param {string[]} units @param {number} count */
function badness(units, count) {
  const last = lastCharacter(units[count - 1]);
  const [first] = units[count];
  if (CLOSING.has(last)) return 0;
  if (!WIDE.test(last) || !WIDE.test(first)) return 1;
  return PARTICLES.has(last) && !NOT_PARTICLES.has(last + first) ? 1 : 2;
}

/** Return the display width of a text without surrounding spaces. @param {string} text */
function width(text) {
  return [...text.trim()].reduce((sum, character) => sum + (WIDE.test(character) ? 2 : 1), 0);
}

/** Split text into unbreakable units: words with the preceding space, ideographs, numbers with their unit.
 *
 *  Closing punctuation belongs to the unit before it, opening punctuation to the unit after it.
 *  @param {string} text */
function units(text) {
  /** @type {string[]} */
  const result = [];
  for (const part of parts(text)) {
    if (result.length && isInseparable(result[result.length - 1], part)) result[result.length - 1] += part;
    else result.push(part);
  }
  return result;
}

/** Split text into words with the preceding space, and ideographs. @param {string} text */
function parts(text) {
  /** @type {string[]} */
  const result = [];
  let previous = " ";
  for (const character of text) {
    const isApart = (WIDE.test(character) || WIDE.test(previous)) && !CLOSING.has(character);
    const beginsPart = (character === " " || isApart) && previous !== " ";
    if (!result.length || beginsPart) result.push("");
    result[result.length - 1] += character;
    previous = character;
  }
  return result;
}

/** Whether no line may be broken between two parts. @param {string} before @param {string} part */
function isInseparable(before, part) {
  const characters = [...part.trim()];
  const last = lastCharacter(before);
  if (characters.every((mark) => CLOSING.has(mark)) || OPENING.has(last)) return true;
  if (WIDE.test([...part][0])) return NUMBER.test(before);
  return /\p{Nd}/u.test(last) && characters.length <= UNIT_LENGTH;
}

/** @param {string} text */
function lastCharacter(text) {
  return [...text].at(-1) ?? "";
}

/** Whether a line may be broken between two texts. @param {string} text @param {string} before */
function beginsWord(text, before) {
  const last = units(before).length - 1;
  return units(before + text)[last] === units(before)[last];
}

/** @param {number} seconds @param {string} decimalMark */
function stamp(seconds, decimalMark) {
  const milliseconds = Math.round(seconds * 1000);
  const minutes = Math.floor(milliseconds / 60000);
  const parts = [Math.floor(minutes / 60), minutes % 60, Math.floor(milliseconds / 1000) % 60];
  const clock = parts.map((part) => String(part).padStart(2, "0")).join(":");
  return `${clock}${decimalMark}${String(milliseconds % 1000).padStart(3, "0")}`;
}

/** @param {string} text */
function escaped(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}
