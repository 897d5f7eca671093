// Keeps the form and the turns of completions and of the chat.

import {ApiError} from "./api.js";
import {announce, byId, element, showAlert} from "./dom.js";
import {NO_DRAFTER, Turn} from "./turn.js";

const COMPLETION_PROMPT = "import unittest\n\nclass TestCase(unittest.TestCase):";
const CHAT_PROMPT = "Explain in a few sentences how a rainbow forms.";

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
    document.addEventListener("keydown", (event) => this.onKey(event));
  }

  // Runs and stops from anywhere on the tab; on a link Ctrl+Enter has another meaning.
  onKey(event) {
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "Escape") this.stop();
    const runs = event.key === "Enter" && (event.ctrlKey || event.metaKey);
    if (!runs || byId("generate").hidden || event.target.closest("a")) return;
    event.preventDefault();
    this.run();
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
    const named = drafters.map(({name, state}) => [name, state === "attached" ? name : `${name} (${state})`]);
    const options = [["auto", "auto"], ...named];
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
