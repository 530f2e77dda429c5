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

/** Wrap text into lines, which join to the same text; only a long word may exceed the width. @param {string} text */
function wrap(text) {
  const lines = [""];
  for (const unit of units(text)) {
    const last = lines.length - 1;
    if (lines[last] && width(lines[last] + unit) > COLUMNS) lines.push(unit);
    else lines[last] += unit;
  }
  return lines;
}

/** Return the display width of a text without surrounding spaces. @param {string} text */
function width(text) {
  return [...text.trim()].reduce((sum, character) => sum + (WIDE.test(character) ? 2 : 1), 0);
}

/** Split text into unbreakable units: words with the preceding space, or ideographs, plus closing punctuation.
 *  @param {string} text */
function units(text) {
  /** @type {string[]} */
  const result = [];
  let previous = " ";
  for (const character of text) {
    const isApart = (WIDE.test(character) || WIDE.test(previous)) && !CLOSING.has(character);
    const beginsUnit = (character === " " || isApart) && previous !== " ";
    if (!result.length || beginsUnit) result.push("");
    result[result.length - 1] += character;
    previous = character;
  }
  return result.reduce((joined, unit) => {
    if (joined.length && [...unit.trim()].every((mark) => CLOSING.has(mark))) joined[joined.length - 1] += unit;
    else joined.push(unit);
    return joined;
  }, []);
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
