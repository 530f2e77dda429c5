/** The captions of a room, as a page or as a transparent overlay for video.
 *
 * /captions/ROOM                                      page for viewers
 * /captions/ROOM?overlay&size=48&lines=2&color=white  a browser source of OBS; size in px, or a CSS length such as 6vw
 */

import { announce } from "./announcer.js";
import { languageTag } from "./models.js";
import { RoomViewer, roomName } from "./room.js";
import { preference } from "./storage.js";
import { Transcript } from "./transcript.js";

const MOST_LINES = 20;
const SIZE_STEP = 1.15;
const SIZES = [-5, 8]; // steps
const STATES = {
  connecting: "Connecting…",
  live: "Live",
  waiting: "Waiting for the speaker…",
  closed: "The speaker has finished.",
  lost: "Connection lost, trying again…",
  refused: "This room cannot be opened.",
  unauthorized: "This server requires a key.",
};
// Shown instead of the text, or below it.
const NOTES = {
  live: "The captions will appear here.",
  waiting: "The captions will appear here as soon as somebody speaks in this room.",
  closed: STATES.closed,
};

const find = (selector) => document.querySelector(selector);
const parameters = new URLSearchParams(location.search);
const isOverlay = "obsstudio" in window || ["overlay", "size", "lines", "color"].some((name) => parameters.has(name));
const room = roomName(decodeURIComponent(location.pathname.match(/\/captions\/([^/]+)\/?$/)?.[1] ?? ""));
const key = new URLSearchParams(location.hash.slice(1)).get("key"); // the fragment is not sent to the server

function styleOverlay() {
  const size = parameters.get("size") ?? "";
  const length = /^[\d.]+$/.test(size) ? `${size}px` : size;
  const lines = Number.parseInt(parameters.get("lines") ?? "", 10);
  const color = parameters.get("color") ?? "";
  const style = document.documentElement.style;
  document.documentElement.classList.add("overlay");
  if (CSS.supports("font-size", length)) style.setProperty("--size", length);
  if (lines >= 1) style.setProperty("--lines", String(Math.min(lines, MOST_LINES)));
  if (CSS.supports("color", color)) style.setProperty("--color", color);
}

function offerSizes() {
  let step = Number(preference("captions-size") ?? 0);
  const show = () => document.documentElement.style.setProperty("--zoom", String(SIZE_STEP ** step));
  for (const button of document.querySelectorAll("[data-size]")) {
    button.addEventListener("click", () => {
      step = Math.max(SIZES[0], Math.min(SIZES[1], step + Number(button.dataset.size)));
      preference("captions-size", String(step));
      show();
    });
  }
  show();
}

/** Ask for a missing value. @param {string} label @param {(answer: string) => void} answered */
function ask(label, answered) {
  const form = find(".question");
  form.hidden = false;
  form.querySelector("label span").textContent = label;
  find(".captions").hidden = find(".size").hidden = true;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    answered(form.querySelector("input").value);
  });
  form.querySelector("input").focus();
}

function askForRoom() {
  ask("Room name", (answer) => location.assign(new URL(`captions/${roomName(answer)}`, location.href)));
}

function askForKey() {
  ask("Key", (answer) => {
    location.hash = new URLSearchParams({ key: answer }).toString();
    location.reload();
  });
}

function read() {
  const text = find(".captions");
  const transcript = new Transcript(text);
  document.title = `${room} · live captions`;
  find("h1").textContent = room;
  new RoomViewer(room, key, {
    state: (state, code) => {
      find(".connection").dataset.state = state;
      find(".connection span").textContent = STATES[code] ?? STATES[state];
      text.dataset.note = NOTES[state] ?? "";
      if (code === "unauthorized") askForKey();
    },
    opened: ({ target }) => {
      text.lang = languageTag(target);
    },
    cleared: () => transcript.clear(),
    commit: (commit) => transcript.append(commit.text, commit.sentence),
    sentence: (sentence) => announce(transcript.textOf(sentence), text.lang),
    retracted: (sentence) => transcript.strike(sentence),
  });
}

if (isOverlay) styleOverlay();
else offerSizes();
if (room) read();
else askForRoom();
