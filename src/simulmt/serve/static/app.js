/** The live page: one source, one lane or two, one connection state. */

import { CaptionSender } from "./channel.js";
import { Lane } from "./lane.js";
import { Microphone } from "./microphone.js";
import { languageName, languageTag, loadModels, pairName } from "./models.js";
import { sampleFor } from "./samples.js";
import { Source } from "./source.js";

const ANNOUNCED_SENTENCES = 5;
const CONFIRMATION_MS = 3000;
const STATES = {
  connecting: "Connecting",
  live: "Live",
  lost: "Reconnecting",
  asleep: "Asleep until you go on",
  failed: "Stopped",
};

const find = (selector) => document.querySelector(selector);
const picker = find("[name=model]");
const compareButton = find("[data-action=compare]");
const places = { text: find(".lanes"), path: find(".paths") };
const keyDialog = find("dialog");
const newButton = find("[data-action=new]");
const captions = new CaptionSender();

/** @type {import("./models.js").Model[]} */
let models = [];
/** @type {import("./connection.js").Message[]} everything sent so far, for lanes that join later */
let history = [];
/** @type {Lane[]} */
let lanes = [];
/** @type {string[]} the connection state of each lane */
let states = [];
let apiKey = null;

const source = new Source(find(".source"), (message) => {
  history.push(message);
  for (const lane of lanes) lane.send(message);
});
const microphone = new Microphone(find("[data-action=listen]"), find(".interim"), (text) => source.say(text));

function model() {
  return models[picker.selectedIndex];
}

/** @param {number | null} delay */
function addLane(delay) {
  const index = lanes.length;
  const isFirst = index === 0;
  const settings = { delay, apiKey };
  lanes.push(
    new Lane(places, model(), settings, history, {
      state: (state, detail, code) => showState(index, state, detail, code),
      commit: isFirst ? (text) => captions.commit(text) : undefined,
      sentence: isFirst ? announce : undefined,
    }),
  );
  document.body.dataset.lanes = String(lanes.length);
}

/** @param {number} index @param {string} state */
function showState(index, state, detail = "", code = "") {
  states[index] = state;
  const worst = ["failed", "lost", "asleep", "connecting", "live"].find((candidate) => states.includes(candidate));
  const status = find(".connection");
  status.dataset.state = worst;
  const text = STATES[worst];
  status.querySelector("span").textContent = detail ? `${text}: ${detail}` : text;
  if (code === "unauthorized" && !keyDialog.open) askForKey();
}

function askForKey() {
  keyDialog.returnValue = ""; // stays so if the dialog is only closed
  keyDialog.showModal();
}

function useKey() {
  if (!keyDialog.returnValue) return;
  apiKey = find("[name=key]").value;
  translateAgain();
}

/** Screen readers hear whole sentences; text that grows by syllables would be a stutter. @param {string} sentence */
function announce(sentence) {
  captions.endSentence();
  const log = find(".announcer");
  const line = document.createElement("p");
  line.textContent = sentence;
  log.append(line);
  while (log.childElementCount > ANNOUNCED_SENTENCES) log.firstElementChild.remove();
}

/** Begin with an empty page. */
function begin() {
  history = [];
  source.clear();
  translateAgain();
}

/** Translate the source so far once more, with the model and the delays that are chosen now. */
function translateAgain() {
  for (const lane of lanes) lane.close();
  lanes = [];
  states = [];
  captions.clear();
  addLane(model().default_delay);
  if (compareButton.ariaPressed === "true" && model().delays.length > 1) addLane(otherDelay());
  showModel();
}

/** A second press within seconds, since nothing brings a cleared page back. */
function confirmNew() {
  if (source.isEmpty || newButton.dataset.state === "asking") {
    begin();
    settleNew();
  } else {
    newButton.dataset.state = "asking";
    newButton.textContent = "Clear all?";
    setTimeout(settleNew, CONFIRMATION_MS);
  }
}

function settleNew() {
  newButton.dataset.state = "";
  newButton.textContent = "New";
}

function changeModel() {
  const isSameSource = find("textarea").lang === languageTag(model().source);
  if (isSameSource) translateAgain();
  else begin();
}

function showModel() {
  const { source: language, delays } = model();
  find(".source h2 b").textContent = languageName(language);
  find("textarea").lang = find(".sent").lang = languageTag(language);
  find("[data-action=sample]").hidden = !sampleFor(language);
  compareButton.hidden = delays.length < 2;
  microphone.use(language);
}

/** A delay that differs from the model's own as much as possible. */
function otherDelay() {
  const { delays, default_delay } = model();
  const own = default_delay ?? delays[0];
  const distance = (delay) => Math.abs(delay - own);
  return delays.reduce((farthest, delay) => (distance(delay) >= distance(farthest) ? delay : farthest));
}

function toggleCompare() {
  const isOn = compareButton.ariaPressed !== "true";
  compareButton.ariaPressed = String(isOn);
  if (isOn) addLane(otherDelay());
  else {
    lanes.pop()?.close();
    states.length = 1;
    document.body.dataset.lanes = "1";
  }
}

function showPace() {
  const pace = find("[name=pace]");
  find(".pace .figure").textContent = Number(pace.value).toFixed(1);
  pace.setAttribute("aria-valuetext", `${pace.value} words a second`);
}

models = await loadModels();
picker.replaceChildren(...models.map((model) => new Option(pairName(model, models), model.name)));
picker.disabled = models.length < 2;
picker.addEventListener("change", changeModel);
compareButton.addEventListener("click", toggleCompare);
keyDialog.addEventListener("close", useKey);
newButton.addEventListener("click", confirmNew);
find("[data-action=sample]").addEventListener("click", () => source.perform(sampleFor(model().source)));
find("[name=pace]").addEventListener("input", showPace);
showPace();
translateAgain(); // with what was typed while the server was not there yet
