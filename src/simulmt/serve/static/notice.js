/** A message to the person, until they close it or it no longer holds. */

const root = document.querySelector(".notice");

/** @param {string} text */
export function notify(text) {
  root.querySelector("p").textContent = text;
  root.hidden = text === "";
}

root.querySelector("button").addEventListener("click", () => notify(""));
