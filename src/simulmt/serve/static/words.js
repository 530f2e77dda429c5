/** Words as the server counts them: cut at white space and around ideographs. */

const IDEOGRAPH =
  "\\u3001-\\u30ff\\u3400-\\u4dbf\\u4e00-\\u9fff\\uf900-\\ufaff\\uff01-\\uff0f\\uff1a-\\uff20\\u{20000}-\\u{3ffff}";
const LONGEST_WORD = 128;
const LONGEST_PIECE = 1000; // characters that are searched for the end of a word
const LONGEST_SENTENCE = 80; // words; speech recognition may know no full stops
const WORD = new RegExp(`[${IDEOGRAPH}]|[^\\s${IDEOGRAPH}]{1,${LONGEST_WORD}}`, "gu");
const IS_IDEOGRAPH = new RegExp(`^[${IDEOGRAPH}]`, "u");
const OPEN_WORD = new RegExp(`(?<![^\\s${IDEOGRAPH}])[^\\s${IDEOGRAPH}]+$`, "u"); // tried at word starts only
const FIRST_WORD = new RegExp(`^\\s*(?:[${IDEOGRAPH}]|[^\\s${IDEOGRAPH}]+)[^\\S\\n]*\\n?`, "u");
const ENDING = /[.!?…。！？]["'”’»›)\]}」』）】》〉]*$/u;
const ABBREVIATION = /^["'“„«‹(]*(?:(?:\p{L}\.)+|\d+\.|\p{Lu}\p{L}{1,2}\.)$/u;

/** @param {string} text */
export function splitWords(text) {
  return text.match(WORD) ?? [];
}

/** Whether a word is one that is written without spaces. @param {string} word */
export function isIdeograph(word) {
  return IS_IDEOGRAPH.test(word);
}

/** How much of a text is complete words: all but a last word that may still grow. @param {string} text */
export function completeLength(text) {
  const open = text.search(OPEN_WORD);
  return open < 0 ? text.length : open;
}

/** The length of the first word of a text and the white space around it, with the end of its line.
 *  @param {string} text */
export function firstWordLength(text) {
  return text.match(FIRST_WORD)?.[0].length ?? text.length;
}

/** Whether a sentence seems to end with this word; for the look of the page only, the server decides for itself.
 *  @param {string} word */
export function looksFinal(word) {
  return ENDING.test(word) && !ABBREVIATION.test(word);
}

/** How much of a text can no longer be meant to change: the last word may, until another one begins or the line ends.
 *  @param {string} text */
export function settledLength(text) {
  const line = text.lastIndexOf("\n") + 1;
  const words = [...text.matchAll(WORD)];
  return Math.max(line, words.at(-1)?.index ?? 0);
}

/** Cut a text after each word that seems to end a sentence. @param {string} text
 *  @returns {{sentences: string[], length: number}} the complete sentences, and their length in all */
export function splitSentences(text) {
  const sentences = [];
  let [start, end, count] = [0, 0, 0];
  while (end < text.length) {
    const piece = text.slice(end, end + firstWordLength(text.slice(end, end + LONGEST_PIECE)));
    end += piece.length;
    count += 1;
    if (looksFinal(piece.trim()) || piece.endsWith("\n") || count >= LONGEST_SENTENCE) {
      sentences.push(text.slice(start, end));
      [start, count] = [end, 0];
    }
  }
  return { sentences, length: start };
}

/** Messages without their last words. @param {import("./connection.js").Message[]} messages @param {number} count */
export function dropWords(messages, count) {
  const kept = [...messages];
  for (let left = count; left > 0 && kept.length; ) {
    const message = kept.pop();
    const words = message.type === "source" ? [...message.text.matchAll(WORD)] : [];
    if (words.length > left) kept.push({ ...message, text: message.text.slice(0, words.at(-left).index) });
    left -= words.length;
  }
  return kept;
}
