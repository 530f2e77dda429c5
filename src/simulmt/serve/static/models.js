/** The models of the server, and their display names. */

const RETRY_MS = 2000;
const SECONDS_PER_SUBWORD = 0.25; // at 150 words a minute, measured for German and English

/** @typedef {{name: string, kind: string, source: string, target: string, delays: number[],
 *             default_delay: number | null, audio?: boolean}} Model */

/** Load the list of models; retry until the server is reachable.
 *  @param {() => void} failed called after each failed attempt @returns {Promise<Model[]>} */
export async function loadModels(failed) {
  for (;;) {
    try {
      const response = await fetch("v1/models");
      if (response.ok) return (await response.json()).models;
    } catch {
      // No connection: the server may be starting.
    }
    failed();
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

const SYNTHETIC = "synthetic"; // the language of the demonstration model

/** @param {string} code */
export function languageName(code) {
  if (code === SYNTHETIC) return "Synthetic";
  try {
    return new Intl.DisplayNames("en", { type: "language" }).of(code) ?? code;
  } catch {
    return code; // a code that browsers do not know
  }
}

/** Return the code for the `lang` attribute. @param {string} code */
export function languageTag(code) {
  return code === SYNTHETIC ? "art" : code;
}

/** Return the languages of a model, with its name if ambiguous. @param {Model} model @param {Model[]} models */
export function pairName({ source, target, name }, models) {
  if (source === target) return `${languageName(source)} (${name})`;
  const isOnly = models.filter((other) => other.source === source && other.target === target).length === 1;
  const pair = `${languageName(source)} → ${languageName(target)}`;
  return isOnly ? pair : `${pair} (${name})`;
}

/** Return the seconds of speech that a delay waits for before translating a word. @param {number} delay */
export function secondsOfSpeech(delay) {
  return (delay - 1) * SECONDS_PER_SUBWORD;
}

/** Return the delay that differs most from a given one. @param {number[]} delays @param {number} delay */
export function farthestDelay(delays, delay) {
  const distance = (candidate) => Math.abs(candidate - delay);
  return delays.reduce((farthest, other) => (distance(other) >= distance(farthest) ? other : farthest));
}
