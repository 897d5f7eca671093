// Shows one run: its text, coloured by source, and its figures while it runs.

import {element} from "./dom.js";
import {drawTree} from "./tree.js";

// The times of fewer tokens say nothing about speed.
const LEAST_TIMED_TOKENS = 8;
// A view that is this close to its end follows the text.
const FOLLOW_PX = 40;
// What is said of a run by its finish reason; of others only that it is done.
const ENDINGS = {length: "done at the length limit", abort: "aborted by the operator"};

export class Panel {
  tokenIds = [];
  text = "";
  // The content of a chat's answer, without reasoning.
  content = "";
  // Tokens a second, once known.
  speed = null;

  constructor(title, sources, {isPlain = false, showsTrees = false}) {
    this.sources = sources;
    this.isPlain = isPlain;
    this.state = "";
    this.numAccepted = this.numSteps = 0;
    this.firstAt = this.lastAt = null;
    this.waiting = [];
    this.figures = new Map();
    this.note = element("p", {class: "soft"});
    this.list = element("dl", {class: "figures"});
    this.output = element("div", {class: "output", tabindex: "0", role: "region", "aria-label": `${title}: text`});
    this.element = element(
      "section", {class: "panel", "aria-label": title},
      element("div", {class: "row spread"}, element("h3", {text: title}), this.note), this.list, this.output,
    );
    this.showFigures();
    if (showsTrees) {
      this.tree = element("div", {class: "tree"}, element("p", {class: "soft", text: "No draft yet."}));
      this.element.append(this.tree);
    }
  }

  // Says that the run goes on from here.
  begin() {
    this.hasBegun = true;
    this.say("running");
  }

  // Says how the run ended. ``cut``: what ended it before the server did.
  finish(cut = "") {
    if (this.isOver) return;
    this.isOver = true;
    const ending = this.hasBegun ? cut : "not run";
    this.say(this.finishReason || !ending ? ENDINGS[this.finishReason] ?? "done" : ending);
  }

  // Says how far the run is.
  say(state) {
    this.state = state;
    this.showFigures();
  }

  // Takes one event of the stream.
  add(event, now = performance.now()) {
    for (const choice of event.choices ?? []) this.addChoice(choice, now);
    if (event.metrics) this.end(event.metrics);
    this.scheduleFrame();
  }

  addChoice(choice, now) {
    const content = choice.text ?? choice.delta?.content ?? "";
    const texts = choice.token_texts ?? [];
    const drafters = choice.token_drafters ?? [];
    if (texts.length) {
      this.firstAt ??= now;
      this.lastAt = now;
    }
    texts.forEach((text, index) => {
      this.addToken(choice.token_ids[index], text, drafters[index], choice.token_predicted?.[index]);
    });
    const joined = texts.join("");
    // Text that waited for its token's end, or for a stop string.
    if (content.length > joined.length && content.startsWith(joined)) this.append(content.slice(joined.length), "");
    this.content += content;
    this.finishReason = choice.finish_reason ?? this.finishReason;
    if (choice.draft_tree) this.lastTree = choice.draft_tree;
  }

  // ``drafter``: its name; null: the target sampled the token.
  addToken(id, text, drafter, isPredicted) {
    // The first token is the prompt's: no step drafted it.
    if (this.tokenIds.length) {
      if (drafter === null) this.numSteps += 1;
      else this.numAccepted += 1;
    }
    this.tokenIds.push(id);
    this.append(text, this.sources.classOf(drafter, isPredicted));
  }

  append(text, className) {
    if (!text) return;
    this.text += text;
    const last = this.waiting.at(-1);
    if (last?.className === className) last.text += text;
    else this.waiting.push({text, className});
  }

  // Draws at most once a frame, however fast tokens come.
  scheduleFrame() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  draw() {
    const {output} = this;
    const follows = output.scrollHeight - output.scrollTop - output.clientHeight < FOLLOW_PX;
    for (const {text, className} of this.waiting) {
      output.append(...this.spans(text, className));
    }
    this.waiting = [];
    if (follows) output.scrollTop = output.scrollHeight;
    this.showFigures();
    if (this.tree && this.lastTree) {
      drawTree(this.tree, this.lastTree, this.sources);
      this.lastTree = null;
    }
  }

  // Indents get no underline.
  spans(text, className) {
    if (!className) return [text];
    const parts = text.split(/(^\s+|\n\s*)/).filter(Boolean);
    return parts.map((part) => element("span", {class: `token ${part.trim() ? "" : "space"} ${className}`, text: part}));
  }

  // The server's own figure, once it is known.
  get bestSpeed() {
    return this.speed ?? this.liveSpeed;
  }

  get liveSpeed() {
    const count = this.tokenIds.length;
    if (count < LEAST_TIMED_TOKENS || this.lastAt <= this.firstAt) return null;
    return 1e3 * (count - 1) / (this.lastAt - this.firstAt);
  }

  showFigures() {
    const count = this.tokenIds.length;
    this.figure("tokens a second", number(this.bestSpeed));
    this.note.textContent = count ? `${count} tokens, ${this.state}` : this.state;
    if (this.isPlain) return;
    const decoded = this.numAccepted + this.numSteps;
    this.figure("tokens a step", this.numSteps ? (decoded / this.numSteps).toFixed(2) : "–");
    this.figure("written by drafters", count ? percent(this.numAccepted / count) : "–");
    this.figure("drafts accepted", this.acceptance ?? "–");
  }

  figure(name, value) {
    let shown = this.figures.get(name);
    if (!shown) {
      shown = element("dd");
      this.figures.set(name, shown);
      this.list.append(element("div", {}, element("dt", {text: name}), shown));
    }
    shown.textContent = value;
  }

  // Takes the server's own figures, which count drafted tokens that were refused.
  end(metrics) {
    const speculation = metrics.speculative_decoding;
    this.speed = metrics.tokens_per_second ?? null;
    if (speculation?.num_draft_tokens) {
      const {num_accepted_draft_tokens: accepted, num_draft_tokens: drafted} = speculation;
      this.acceptance = `${percent(accepted / drafted)} of ${drafted}`;
    } else if (speculation) {
      this.acceptance = "none drafted";
    }
  }
}

export const percent = (share) => `${Math.round(100 * share)} %`;

export function number(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 ? String(Math.round(value)) : value.toFixed(1);
}
