/** Export of translations: clipboard and files. */

import { srt, vtt } from "./subtitles.js";

const FORMATS = {
  txt: { media: "text/plain", write: plainText },
  srt: { media: "application/x-subrip", write: srt },
  vtt: { media: "text/vtt", write: vtt },
};

/** Return plain text, one sentence per line. @param {import("./subtitles.js").TimedCommit[]} commits */
export function plainText(commits) {
  const text = commits.map(({ text, endsSentence }) => text + (endsSentence ? "\n" : "")).join("");
  return text.replace(/^ +/gm, "");
}

/** @param {import("./subtitles.js").TimedCommit[]} commits @param {keyof typeof FORMATS} format @param {string} name */
export function download(commits, format, name) {
  const { media, write } = FORMATS[format];
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([write(commits)], { type: `${media};charset=utf-8` }));
  link.download = `${name}.${format}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** @param {string} text @param {HTMLElement} place the open dialog, if any, since only it can have the focus */
export async function copy(text, place = document.body) {
  try {
    return await navigator.clipboard.writeText(text);
  } catch {
    // The clipboard API needs HTTPS and permission; fall back to execCommand.
  }
  const carrier = document.createElement("textarea");
  carrier.value = text;
  place.append(carrier);
  carrier.select();
  document.execCommand("copy");
  carrier.remove();
}
