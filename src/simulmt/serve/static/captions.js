/** The caption page: the last lines of the live page of another tab, large, on nothing.
 *
 * /captions?size=48&lines=2&color=white     size in px, or any CSS length such as 6vw
 */

import { receiveCaptions } from "./channel.js";

const KEPT_SENTENCES = 6;
const MOST_LINES = 20;

const text = document.querySelector(".captions");
const hint = document.querySelector(".hint");
let speaker = ""; // the live page that is shown: the last one that wrote something
let sentence = null; // the paragraph that grows

/** @param {URLSearchParams} parameters */
function applyStyle(parameters) {
  const size = parameters.get("size") ?? "";
  const length = /^[\d.]+$/.test(size) ? `${size}px` : size;
  const lines = Number.parseInt(parameters.get("lines") ?? "", 10);
  const color = parameters.get("color") ?? "";
  const style = document.documentElement.style;
  if (CSS.supports("font-size", length)) style.setProperty("--size", length);
  if (lines >= 1) style.setProperty("--lines", String(Math.min(lines, MOST_LINES)));
  if (CSS.supports("color", color)) style.setProperty("--color", color);
}

/** @param {string} piece */
function append(piece) {
  if (!sentence) {
    sentence = document.createElement("p");
    text.append(sentence);
    // Whole paragraphs go, and only far above: the lines in view never move but upwards.
    while (text.childElementCount > KEPT_SENTENCES) text.firstElementChild?.remove();
  }
  sentence.append(piece);
}

function clear() {
  text.replaceChildren();
  sentence = null;
}

/** @param {import("./channel.js").Caption} caption */
function show(caption) {
  hint.hidden = true;
  if (caption.from !== speaker || caption.type === "clear") clear();
  speaker = caption.from;
  if (caption.type === "commit") append(caption.text);
  else if (caption.type === "sentence") sentence = null;
  else if (caption.type === "recent") {
    clear();
    for (const earlier of caption.sentences) {
      append(earlier);
      sentence = null;
    }
    if (caption.open) append(caption.open);
  }
}

applyStyle(new URLSearchParams(location.search));
receiveCaptions(show);
