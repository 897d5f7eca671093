// Knows who writes tokens: the target model, the drafters by name, and a request's prediction.

import {element} from "./dom.js";

const NUM_COLOURS = 6;

export class Sources {
  // Of all verifiers, which may number them differently: one for each name.
  drafters = [];
  // The names that have a colour, in the order of their colours. A name keeps its colour.
  names = [];

  // Takes the verifiers of GET version; returns whether names or states are new.
  take(verifiers) {
    const found = new Map();
    for (const {name, state} of verifiers.flatMap(({drafters}) => drafters)) {
      // One that any verifier can use is there.
      if (!found.has(name) || state === "attached") found.set(name, {name, state});
    }
    const drafters = [...found.values()];
    const changed = JSON.stringify(drafters) !== JSON.stringify(this.drafters);
    this.drafters = drafters;
    drafters.forEach(({name}) => this.colourOf(name));
    return changed;
  }

  colourOf(name) {
    if (!this.names.includes(name)) this.names.push(name);
    return `d${this.names.indexOf(name) % NUM_COLOURS}`;
  }

  // Returns the class of a token's colour; the drafter is null for the target's own tokens.
  classOf(drafter, isPredicted = false) {
    if (drafter === null) return "";
    return isPredicted ? "predicted" : this.colourOf(drafter);
  }

  showLegend(list, hasPrediction) {
    const items = [legendItem("", "the model itself")];
    for (const {name, state} of this.drafters) items.push(legendItem(this.classOf(name), name, state));
    if (hasPrediction) items.push(legendItem("predicted", "your prediction"));
    list.replaceChildren(...items);
  }
}

function legendItem(className, name, state) {
  const item = element("li", {}, element("span", {class: `token ${className}`, text: "token"}), name);
  if (state && state !== "attached") {
    item.append(element("span", {class: state === "connecting" ? "state" : "state down", text: state}));
  }
  return item;
}
