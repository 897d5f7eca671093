// Runs what the form asks for: a completion or a chat's turn, once or, to compare, with and without drafters.

import {ApiError, streamEvents} from "./api.js";
import {announce, byId, element, showAlert} from "./dom.js";
import {Panel, number, percent} from "./panel.js";

const COMPLETION_PROMPT = "import unittest\n\nclass TestCase(unittest.TestCase):";
const CHAT_PROMPT = "Explain in a few sentences how a rainbow forms.";
const NO_DRAFTER = "none";
const SEEDS = 2 ** 32;

export class Generator {
  // ``askForKey`` is called with the reason when the server refuses a key.
  constructor(sources, askForKey) {
    this.sources = sources;
    this.askForKey = askForKey;
    this.isChat = false;
    // The prompts of both kinds, and the chat so far.
    this.prompts = {completion: COMPLETION_PROMPT, chat: CHAT_PROMPT};
    this.turns = {completion: [...byId("turns").childNodes], chat: []};
    this.messages = [];
    this.stopper = null;
    byId("prompt").value = COMPLETION_PROMPT;
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    byId("drafter").addEventListener("change", () => this.allowComparing());
    byId("prediction").addEventListener("input", () => this.showLegend());
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.run();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.stop();
    });
  }

  get isRunning() {
    return this.stopper !== null;
  }

  // Shows completions or the chat; what was written in the other stays.
  switchTo(kind) {
    const shown = this.isChat ? "chat" : "completion";
    if (kind === shown) return;
    this.stop();
    this.prompts[shown] = byId("prompt").value;
    this.turns[shown] = [...byId("turns").childNodes];
    this.isChat = kind === "chat";
    byId("prompt").value = this.prompts[kind];
    byId("prompt-label").textContent = this.isChat ? "Message" : "Prompt";
    byId("turns").replaceChildren(...this.turns[kind]);
    document.querySelector(".bench").classList.toggle("chat", this.isChat);
    byId("system-field").hidden = byId("clear").hidden = !this.isChat;
    showAlert(byId("alert"));
  }

  clear() {
    this.stop();
    this.messages = [];
    byId("turns").replaceChildren();
    byId("prompt").focus();
  }

  // Offers the server's drafters; keeps the choice.
  offerDrafters() {
    const chosen = byId("drafter").value || "auto";
    const {drafters} = this.sources;
    const options = [["auto", "auto"], ...drafters.map(({name, state}) => [name, state === "attached" ? name : `${name} (${state})`])];
    if (drafters.length > 1) options.push(["merge", "merge all"]);
    options.push([NO_DRAFTER, "none: plain"]);
    byId("drafter").replaceChildren(...options.map(([value, text]) => element("option", {value, text})));
    byId("drafter").value = options.some(([value]) => value === chosen) ? chosen : "auto";
    this.allowComparing();
    this.showLegend();
  }

  allowComparing() {
    byId("compare").disabled = byId("drafter").value === NO_DRAFTER;
  }

  showLegend() {
    this.sources.showLegend(byId("legend"), byId("prediction").value !== "");
  }

  stop() {
    this.stopper?.abort();
  }

  async run() {
    const prompt = byId("prompt").value;
    showAlert(byId("alert"));
    if (this.isRunning) return;
    if (!prompt) {
      showAlert(byId("alert"), "Write a prompt first.");
      byId("prompt").focus();
      return;
    }
    this.stopper = new AbortController();
    byId("run").disabled = true;
    byId("stop").disabled = false;
    announce("Running.");
    const turn = new Turn(this, prompt);
    try {
      await turn.run(this.stopper.signal);
    } catch (error) {
      if (!(error instanceof ApiError) && error.name !== "AbortError") throw error;
      this.fail(error, turn);
    } finally {
      this.stopper = null;
      byId("run").disabled = false;
      byId("stop").disabled = true;
    }
  }

  fail(error, turn) {
    if (error.name === "AbortError") {
      turn.endAs("stopped");
      announce("Stopped.");
      return;
    }
    turn.endAs("failed");
    if (!turn.hasText) turn.remove();
    showAlert(byId("alert"), error.message);
    if (error.status === 401) this.askForKey(error.message);
  }
}

// One prompt with its panels: with the drafters that are chosen and, to compare, without any.
class Turn {
  constructor(generator, prompt) {
    this.generator = generator;
    this.isChat = generator.isChat;
    this.prompt = prompt;
    const drafter = byId("drafter").value;
    this.isPlain = drafter === NO_DRAFTER;
    this.compares = byId("compare").checked && !this.isPlain;
    this.body = this.commonBody(drafter);
    const showsTrees = byId("trees").checked;
    const {sources} = generator;
    this.panels = [new Panel(this.isPlain ? "Plain decoding" : "With drafters", sources, {isPlain: this.isPlain, showsTrees: showsTrees && !this.isPlain})];
    if (this.compares) this.panels.push(new Panel("Plain decoding", sources, {isPlain: true}));
    this.verdict = element("p", {class: "verdict", hidden: ""});
    this.place();
  }

  commonBody(drafter) {
    const speculative = this.isPlain ? {enabled: false} : {drafter};
    if (byId("draft-tokens").value !== "" && !this.isPlain) speculative.max_draft_tokens = Number(byId("draft-tokens").value);
    const seed = byId("seed").value;
    const body = {
      stream: true,
      stream_options: {include_usage: true},
      return_token_sources: true,
      max_tokens: numberOf("max-tokens"),
      temperature: numberOf("temperature"),
      speculative,
    };
    // Both runs of a comparison need the same seed.
    if (seed !== "") body.seed = Number(seed);
    else if (this.compares) body.seed = Math.floor(Math.random() * SEEDS);
    if (byId("trees").checked && !this.isPlain) body.return_draft_tree = true;
    const prediction = byId("prediction").value;
    if (prediction) body.prediction = {type: "content", content: prediction};
    if (!this.isChat) return {...body, prompt: this.prompt};
    const system = byId("system").value;
    const messages = [...this.generator.messages, {role: "user", content: this.prompt}];
    return {...body, messages: system ? [{role: "system", content: system}, ...messages] : messages};
  }

  place() {
    const turns = byId("turns");
    const parts = this.isChat ? [element("p", {class: "said", text: this.prompt})] : [];
    const panels = element("div", {class: this.compares ? "panels two" : "panels"}, ...this.panels.map((panel) => panel.element));
    this.parts = [...parts, this.verdict, panels];
    if (this.isChat) {
      turns.append(...this.parts);
      byId("prompt").value = "";
    } else {
      turns.replaceChildren(...this.parts);
    }
    panels.scrollIntoView({block: "nearest"});
  }

  get hasText() {
    return this.panels[0].tokenIds.length > 0;
  }

  // Gives the prompt back for another try.
  remove() {
    for (const part of this.parts) part.remove();
    byId("prompt").value ||= this.prompt;
  }

  endAs(word) {
    for (const panel of this.panels) if (!panel.isOver) panel.say(word);
  }

  // Runs the drafters first: they would learn the text from the plain run. Later, so that neither slows the other.
  async run(signal) {
    const [drafted, plain] = this.panels;
    plain?.say("waits for the other run");
    await this.stream(drafted, this.body, signal);
    if (this.isChat) this.generator.messages.push({role: "user", content: this.prompt}, {role: "assistant", content: drafted.content});
    if (plain) {
      const {return_draft_tree: _, prediction: __, ...body} = this.body;
      await this.stream(plain, {...body, speculative: {enabled: false}}, signal);
      this.compare(drafted, plain);
    } else {
      announce(`Done: ${drafted.tokenIds.length} tokens, ${number(drafted.speed ?? drafted.liveSpeed)} tokens a second.`);
    }
  }

  async stream(panel, body, signal) {
    panel.say("running");
    // Neither run may find cached text of the other.
    const salted = this.compares ? {...body, cache_salt: randomSalt()} : body;
    const path = this.isChat ? "v1/chat/completions" : "v1/completions";
    try {
      for await (const event of streamEvents(path, salted, signal)) panel.add(event);
      panel.isOver = true;
      panel.say("done");
    } finally {
      panel.scheduleFrame();
    }
  }

  compare(drafted, plain) {
    const [ours, theirs] = [drafted.tokenIds, plain.tokenIds];
    const first = ours.findIndex((id, index) => id !== theirs[index]);
    const isSame = first < 0 && ours.length === theirs.length;
    const speeds = [drafted.speed ?? drafted.liveSpeed, plain.speed ?? plain.liveSpeed];
    const ratio = speeds[0] && speeds[1] ? speeds[0] / speeds[1] : null;
    const speed = ratio === null ? "too short to time" : `${ratio.toFixed(2)} × as fast`;
    const same = isSame
      ? `The same text: all ${ours.length} tokens are equal.`
      : `The texts differ from token ${(first < 0 ? Math.min(ours.length, theirs.length) : first) + 1} on. On a GPU near-ties may be rounded differently; --numerics strict prevents that.`;
    this.verdict.replaceChildren(element("strong", {text: speed}), element("span", {text: same}));
    this.verdict.classList.toggle("same", isSame);
    this.verdict.classList.toggle("faster", ratio > 1);
    this.verdict.hidden = false;
    announce(`Done. ${speed}. ${same} ${percent(drafted.tokenIds.length ? drafted.numAccepted / drafted.tokenIds.length : 0)} was written by drafters.`);
  }
}

function numberOf(id) {
  // An empty field is left out of the JSON, and gets the server's default.
  const text = byId(id).value;
  return text === "" ? undefined : Number(text);
}

function randomSalt() {
  return `page-${[...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

