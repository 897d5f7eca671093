// Knows who writes tokens: the target model, the drafters by number, and a request's prediction.

import {element} from "./dom.js";

const NUM_COLOURS = 6;
export const TARGET = 0;

export class Sources {
  // In the order of their numbers, from 1.
  drafters = [];

  // Takes the drafters of GET version; returns whether names or states are new.
  take(drafters) {
    const changed = JSON.stringify(drafters) !== JSON.stringify(this.drafters);
    this.drafters = drafters;
    return changed;
  }

  // Returns the class of a token's colour.
  classOf(source, isPredicted = false) {
    if (source === TARGET) return "";
    return isPredicted ? "predicted" : `d${(source - 1) % NUM_COLOURS}`;
  }

  showLegend(list, hasPrediction) {
    const items = [legendItem("", "the model itself")];
    this.drafters.forEach(({name, state}, index) => {
      items.push(legendItem(this.classOf(index + 1), name, state));
    });
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
