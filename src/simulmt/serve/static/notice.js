/** A notification, shown until it is closed or replaced. */

const root = document.querySelector(".notice");

/** @param {string} text */
export function notify(text) {
  root.querySelector("p").textContent = text;
  root.hidden = text === "";
}

root.querySelector("button").addEventListener("click", () => notify(""));
