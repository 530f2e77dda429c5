/** Whole sentences for screen readers; text that grows by syllables would be a stutter. */

const KEPT_SENTENCES = 5;

const log = document.querySelector(".announcer");

/** @param {string} sentence @param {string} language as the `lang` attribute wants it */
export function announce(sentence, language) {
  const line = document.createElement("p");
  line.textContent = sentence;
  line.lang = language;
  log.append(line);
  while (log.childElementCount > KEPT_SENTENCES) log.firstElementChild.remove();
}

export function forgetAnnouncements() {
  log.replaceChildren();
}
