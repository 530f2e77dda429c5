/** Word splitting as on the server: at white space and around ideographs. */

const IDEOGRAPH =
  "\\u3001-\\u30ff\\u3400-\\u4dbf\\u4e00-\\u9fff\\uf900-\\ufaff\\uff01-\\uff0f\\uff1a-\\uff20\\u{20000}-\\u{3ffff}";
const LONGEST_WORD = 128;
const LONGEST_PIECE = 1000; // characters searched for the end of a word
const LONGEST_SENTENCE = 80; // words; some speech recognisers write no punctuation
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

/** Return whether a word is written without spaces. @param {string} word */
export function isIdeograph(word) {
  return IS_IDEOGRAPH.test(word);
}

/** Return the length of the complete words: all but a last word that may still grow. @param {string} text */
export function completeLength(text) {
  const open = text.search(OPEN_WORD);
  return open < 0 ? text.length : open;
}

/** Return the length of the first word with surrounding white space and line end.
 *  @param {string} text */
export function firstWordLength(text) {
  return text.match(FIRST_WORD)?.[0].length ?? text.length;
}

/** Return whether a sentence seems to end with this word; for display only, the server decides independently.
 *  @param {string} word */
export function looksFinal(word) {
  return ENDING.test(word) && !ABBREVIATION.test(word);
}

/** Return the length of the text before the last word, which may still change until another one or a new line starts.
 *  @param {string} text */
export function settledLength(text) {
  const line = text.lastIndexOf("\n") + 1;
  const words = [...text.matchAll(WORD)];
  return Math.max(line, words.at(-1)?.index ?? 0);
}

/** Split a text after each word that seems to end a sentence. @param {string} text
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

/** Remove the last words from messages. @param {import("./connection.js").Message[]} messages @param {number} count */
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
