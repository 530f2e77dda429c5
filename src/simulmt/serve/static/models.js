/** Which models the server offers, and how to name them. */

const RETRY_MS = 2000;
const SECONDS_A_SUBWORD = 0.25; // at 150 words a minute, measured for German and English

/** @typedef {{name: string, kind: string, source: string, target: string, delays: number[],
 *             default_delay: number | null, audio?: boolean}} Model */

/** The server's models; waits for a server that is not there yet.
 *  @param {() => void} failed called after each attempt in vain @returns {Promise<Model[]>} */
export async function loadModels(failed) {
  for (;;) {
    try {
      const response = await fetch("v1/models");
      if (response.ok) return (await response.json()).models;
    } catch {
      // No connection: the server may be on its way.
    }
    failed();
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

const INVENTED = "synthetic"; // the language of the demonstration model

/** @param {string} code */
export function languageName(code) {
  if (code === INVENTED) return "Invented";
  try {
    return new Intl.DisplayNames("en", { type: "language" }).of(code) ?? code;
  } catch {
    return code; // of somebody's own model, and no code that browsers know
  }
}

/** The code as the `lang` attribute wants it. @param {string} code */
export function languageTag(code) {
  return code === INVENTED ? "art" : code;
}

/** Its languages, and its own name where they are not enough. @param {Model} model @param {Model[]} models */
export function pairName({ source, target, name }, models) {
  if (source === target) return `${languageName(source)} (${name})`;
  const isOnly = models.filter((other) => other.source === source && other.target === target).length === 1;
  const pair = `${languageName(source)} → ${languageName(target)}`;
  return isOnly ? pair : `${pair} (${name})`;
}

/** Seconds of speech that a delay waits for before it translates a word. @param {number} delay */
export function secondsOfSpeech(delay) {
  return (delay - 1) * SECONDS_A_SUBWORD;
}

/** The delay that differs most from a given one. @param {number[]} delays @param {number} delay */
export function farthestDelay(delays, delay) {
  const distance = (candidate) => Math.abs(candidate - delay);
  return delays.reduce((farthest, other) => (distance(other) >= distance(farthest) ? other : farthest));
}
