// Runs one prompt: with the drafters that are chosen and, to compare, without any.

import {streamEvents} from "./api.js";
import {announce, byId, element} from "./dom.js";
import {Panel, number, percent} from "./panel.js";

export const NO_DRAFTER = "none";
const SEEDS = 2 ** 32;

export class Turn {
  constructor(generator, prompt) {
    this.generator = generator;
    this.isChat = generator.isChat;
    this.prompt = prompt;
    const drafter = byId("drafter").value;
    this.isPlain = drafter === NO_DRAFTER;
    this.compares = byId("compare").checked && !this.isPlain;
    this.body = this.commonBody(drafter);
    const {sources} = generator;
    this.panels = this.isPlain ? [] : [new Panel("With drafters", sources, {showsTrees: byId("trees").checked})];
    if (this.isPlain || this.compares) this.panels.push(new Panel("Plain decoding", sources, {isPlain: true}));
    this.verdict = element("p", {class: "verdict", hidden: ""});
    this.place();
  }

  commonBody(drafter) {
    const speculative = this.isPlain ? {enabled: false} : {drafter};
    if (!this.isPlain) speculative.max_draft_tokens = numberOf("draft-tokens");
    const body = {
      stream: true,
      stream_options: {include_usage: true},
      return_token_sources: true,
      max_tokens: numberOf("max-tokens"),
      temperature: numberOf("temperature"),
      // Both runs of a comparison need the same one.
      seed: numberOf("seed") ?? (this.compares ? Math.floor(Math.random() * SEEDS) : undefined),
      speculative,
    };
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
    const panels = element("div", {class: this.compares ? "panels two" : "panels"});
    panels.append(...this.panels.map((panel) => panel.element));
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
    for (const panel of this.panels) panel.finish(word);
  }

  // Runs the drafters first: they would learn the text from the plain run. Later, so
  // that neither slows the other.
  async run(signal) {
    const [drafted, plain] = this.panels;
    plain?.say("waits for the other run");
    await this.stream(drafted, this.body, signal);
    if (this.isChat) {
      const said = [{role: "user", content: this.prompt}, {role: "assistant", content: drafted.content}];
      this.generator.messages.push(...said);
    }
    if (plain) {
      const {return_draft_tree: _, prediction: __, ...body} = this.body;
      await this.stream(plain, {...body, speculative: {enabled: false}}, signal);
      this.compare(drafted, plain);
    } else {
      announce(`Done: ${drafted.tokenIds.length} tokens, ${number(drafted.bestSpeed)} tokens a second.`);
    }
  }

  async stream(panel, body, signal) {
    panel.begin();
    // Neither run may find cached text of the other.
    const salted = this.compares ? {...body, cache_salt: randomSalt()} : body;
    const path = this.isChat ? "v1/chat/completions" : "v1/completions";
    try {
      for await (const event of streamEvents(path, salted, signal)) panel.add(event);
      panel.finish();
    } finally {
      panel.scheduleFrame();
    }
  }

  compare(drafted, plain) {
    const [ours, theirs] = [drafted.tokenIds, plain.tokenIds];
    const first = ours.findIndex((id, index) => id !== theirs[index]);
    const isSame = first < 0 && ours.length === theirs.length;
    const ratio = drafted.bestSpeed && plain.bestSpeed ? drafted.bestSpeed / plain.bestSpeed : null;
    const speed = ratio === null ? "too short to time" : `${ratio.toFixed(2)} × as fast`;
    const differsAt = (first < 0 ? Math.min(ours.length, theirs.length) : first) + 1;
    const same = isSame
      ? `The same text: all ${ours.length} tokens are equal.`
      : `The texts differ from token ${differsAt} on. On a GPU near-ties may be rounded differently; `
        + "--numerics strict prevents that.";
    const note = drafted.numAccepted ? "" : " No token came from a drafter, so the times say nothing.";
    this.verdict.replaceChildren(element("strong", {text: speed}), element("span", {text: same + note}));
    this.verdict.classList.toggle("same", isSame);
    this.verdict.classList.toggle("slower", ratio !== null && ratio < 1);
    this.verdict.classList.toggle("faster", ratio > 1);
    this.verdict.hidden = false;
    const share = ours.length ? drafted.numAccepted / ours.length : 0;
    announce(`Done. ${speed}. ${same} ${percent(share)} was written by drafters.`);
  }
}

function numberOf(id) {
  // An empty field is left out of the JSON, and gets the server's default.
  const text = byId(id).value;
  return text === "" ? undefined : Number(text);
}

function randomSalt() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return `page-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

