/** Announce whole sentences to screen readers; announcing every piece would stutter. */

const KEPT_SENTENCES = 5;

const log = document.querySelector(".announcer");

/** @param {string} sentence @param {string} language for the `lang` attribute */
export function announce(sentence, language) {
  const line = document.createElement("p");
  line.textContent = sentence;
  line.lang = language;
  log.append(line);
  while (log.childElementCount > KEPT_SENTENCES) log.firstElementChild.remove();
}

export function clearAnnouncements() {
  log.replaceChildren();
}
