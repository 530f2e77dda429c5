/** The live page: one source, one lane or two. */

import { announce, clearAnnouncements } from "./announcer.js";
import { merged } from "./connection.js";
import { Lane } from "./lane.js";
import { Microphone } from "./microphone.js";
import { farthestDelay, languageName, languageTag, loadModels, pairName } from "./models.js";
import { notify } from "./notice.js";
import { sampleFor } from "./samples.js";
import { Sharing } from "./share.js";
import { Source } from "./source.js";
import { Status } from "./status.js";
import { TextStorage, preference, tabSetting } from "./storage.js";
import { dropWords, splitWords } from "./words.js";

const ROOM_CLOSES_MS = 500; // after its text has ended
const NEW_TEXT = {
  title: "Start a new text?",
  reason: "This text and its translation will be removed. Save the translation first if you want to keep it.",
};
const OTHER_LANGUAGE = {
  title: "Change the language?",
  reason: "Changing the source language starts a new text. This text and its translation will be removed.",
};
const NAMES = ["Translation", "Second translation"];

const find = (selector) => document.querySelector(selector);
const picker = find("[name=model]");
const compareButton = find("[data-action=compare]");
const detailsButton = find("[data-action=details]");
const places = { text: find(".lanes"), details: find(".details") };
const keyDialog = find("dialog.key");
const keyButton = find("[data-action=key]");
const clearingDialog = find("dialog.clearing");
const status = new Status(find(".connection"));

/** @type {import("./models.js").Model[]} */
let models = [];
/** @type {import("./models.js").Model} */
let model;
/** @type {import("./connection.js").Message[]} messages sent and not undone, for lanes added later */
let history = [];
/** @type {import("./connection.js").Message[]} messages sent before there was a lane */
const early = [];
/** @type {Lane[]} */
let lanes = [];
/** @type {string | null} */
let apiKey = tabSetting("key");

const storage = new TextStorage(snapshot);
const source = new Source(find(".source"), send, () => storage.changed());
const microphone = new Microphone(find("[data-action=listen]"), source, notify, () => apiKey);
const sharing = new Sharing(find("dialog.sharing"), find("[data-action=share]"), (room) => lanes[0].share(room));

function snapshot() {
  if (lanes.length === 0) return undefined;
  if (isEmpty() && !sharing.room) return null;
  return {
    model: model.name,
    language: model.source,
    history: merged(history),
    rest: source.rest,
    room: sharing.room,
    lane: lanes[0].saved,
  };
}

function isEmpty() {
  return source.isEmpty && !source.rest.text.trim();
}

/** @param {import("./connection.js").Message} message */
function send(message) {
  if (message.type !== "undo") history.push(message); // what an undo removes is known from the answer
  if (lanes.length === 0) early.push(message);
  for (const lane of lanes) lane.send(message);
}

/** @param {import("./lane.js").SavedLane} saved */
function addLane(saved) {
  const index = lanes.length;
  const isFirst = index === 0;
  lanes.push(
    new Lane(places, model, NAMES[index], saved, apiKey, {
      state: (state, code) => showState(index, state, code),
      changed: isFirst ? () => storage.changed() : undefined,
      sentence: isFirst ? (text) => announce(text, languageTag(model.target)) : undefined,
      undone: isFirst ? takeBack : undefined,
    }),
  );
  document.body.dataset.lanes = String(lanes.length);
}

/** @param {number | null} _ the undone sentence @param {string} text its source */
function takeBack(_, text) {
  history = dropWords(history, splitWords(text).length);
  source.takenBack(text);
}

/** @param {number | null} delay @param {object} audience */
function addFreshLane(delay, audience = {}) {
  addLane(Lane.fresh({ model: model.name, delay, ...audience }, history));
  if (source.isTakingBack) lanes.at(-1).send({ type: "undo" });
}

function closeLanes(from = 0) {
  for (const lane of lanes.splice(from)) lane.close();
  status.keep(lanes.length);
}

/** @param {number} index @param {string} state @param {string} [code] */
function showState(index, state, code) {
  status.set(index, state, code);
  if (code === "unauthorized" && !keyDialog.open) askForKey();
  if (code === "room_taken") {
    if (!sharing.isRenewed) sharing.refuse();
    setTimeout(reopen, sharing.isRenewed ? ROOM_CLOSES_MS : 0);
  }
}

/** Reopen the lanes with their state: with another key, or without a room. */
function reopen() {
  const [first, second] = lanes.map((lane) => lane.saved);
  const { model: name, delay } = first.session.start;
  closeLanes();
  const start = { model: name, delay, ...sharing.audience };
  addLane({ ...first, session: { ...first.session, session: null, start } });
  if (second) addLane(second);
}

function askForKey() {
  keyDialog.querySelector(".trouble").textContent = apiKey ? "That key is not valid. Check it and try again." : "";
  keyDialog.returnValue = ""; // unchanged if the dialog is dismissed
  keyDialog.showModal();
  keyDialog.querySelector("input").select();
}

function useKey() {
  keyButton.hidden = keyDialog.returnValue !== "";
  if (!keyDialog.returnValue) return;
  apiKey = find("[name=key]").value;
  tabSetting("key", apiKey);
  reopen();
}

/** Translate the source so far again, with the current model. @param {(number | null)[]} delays */
function translateAgain(delays) {
  const isKnown = (delay) => model.delays.includes(delay);
  const [first, second] = delays.map((delay) => (isKnown(delay) ? delay : model.default_delay));
  closeLanes();
  sharing.renew();
  addFreshLane(first, sharing.audience);
  const isCompared = delays.length > 1 && model.delays.length > 1;
  if (isCompared) addFreshLane(second === first ? farthestDelay(model.delays, first) : second);
  showModel();
}

/** Clear the page; keep the delays. */
function begin() {
  const delays = lanes.map((lane) => lane.delay);
  history = [];
  clearAnnouncements();
  microphone.stop();
  source.clear();
  translateAgain(delays);
}

/** Ask before clearing a text, which cannot be undone.
 *  @param {{title: string, reason: string}} question @returns {Promise<boolean>} */
function mayClear({ title, reason }) {
  if (isEmpty()) return Promise.resolve(true);
  clearingDialog.querySelector("h2").textContent = title;
  clearingDialog.querySelector(".reason").textContent = reason;
  clearingDialog.returnValue = "";
  clearingDialog.showModal();
  return new Promise((resolve) => {
    clearingDialog.addEventListener("close", () => resolve(clearingDialog.returnValue === "clear"), { once: true });
  });
}

async function changeModel() {
  const chosen = models[picker.selectedIndex];
  if (chosen.source === model.source) {
    model = chosen;
    translateAgain(lanes.map((lane) => lane.delay));
  } else if (await mayClear(OTHER_LANGUAGE)) {
    model = chosen;
    begin();
  } else picker.selectedIndex = models.indexOf(model);
  source.focus();
}

async function startOver() {
  if (await mayClear(NEW_TEXT)) begin();
  source.focus();
}

function showModel() {
  const { source: language, delays } = model;
  find(".source h2 b").textContent = languageName(language);
  find("textarea").lang = find(".sent").lang = languageTag(language);
  for (const button of document.querySelectorAll("[data-action=sample]")) button.hidden = !sampleFor(language);
  compareButton.hidden = delays.length < 2;
  microphone.use(model);
  find("textarea").placeholder = microphone.isOffered ? "Type, paste or speak here." : "Type or paste here.";
  preference("model", model.name);
  storage.changed();
}

function toggleCompare() {
  const isOn = toggle(compareButton);
  if (isOn) addFreshLane(farthestDelay(model.delays, lanes[0].delay));
  else closeLanes(1);
  document.body.dataset.lanes = String(lanes.length);
}

function toggleDetails() {
  places.details.hidden = !toggle(detailsButton);
  places.details.scrollIntoView({ block: "nearest" });
}

/** @param {HTMLElement} button */
function toggle(button) {
  const isOn = button.ariaPressed !== "true";
  button.ariaPressed = String(isOn);
  return isOn;
}

/** Keep the page above the on-screen keyboard in browsers that do not do so. */
function fitScreen() {
  if (visualViewport.scale > 1.01) return; // the user has zoomed in
  document.documentElement.style.setProperty("--screen", `${visualViewport.height}px`);
}

function setUp() {
  picker.replaceChildren(...models.map((model) => new Option(pairName(model, models), model.name)));
  picker.selectedIndex = models.indexOf(model);
  picker.disabled = models.length < 2;
  picker.addEventListener("change", changeModel);
  compareButton.addEventListener("click", toggleCompare);
  detailsButton.addEventListener("click", toggleDetails);
  keyDialog.addEventListener("close", useKey);
  keyButton.addEventListener("click", askForKey);
  find("[data-action=new]").addEventListener("click", startOver);
  for (const button of document.querySelectorAll("[data-action=sample]")) {
    button.addEventListener("click", () => source.perform(sampleFor(model.source)));
  }
  for (const button of document.querySelectorAll("#menu button")) {
    button.addEventListener("click", () => find("#menu").hidePopover());
  }
  for (const button of document.querySelectorAll(".masthead nav button")) button.disabled = false;
  visualViewport.addEventListener("resize", fitScreen);
}

/** Show the saved text before the server is reachable. */
function restoreSource() {
  if (!saved) return;
  history = saved.history;
  source.restore(history, saved.rest);
}

/** Restore the saved translation if its model is still served, else only the source. */
function restoreTranslation() {
  const same = models.find(({ name }) => name === saved?.model);
  const similar = models.find(({ source }) => source === saved?.language);
  const usual = models.find(({ name }) => name === preference("model"));
  model = same ?? similar ?? usual ?? models[0];
  if (saved && !same && !similar) {
    source.clear();
    history = [];
  }
  setUp();
  if (!same) return translateAgain([model.default_delay]); // including text typed before the server was reachable
  sharing.restore(saved.room);
  addLane(saved.lane);
  early.forEach((message) => lanes[0].send(message));
  showModel();
}

const { saved } = storage;
restoreSource();
models = await loadModels(() => status.set(0, "lost"));
restoreTranslation();
source.focus();
