// Draws the draft tree that a step verified: depth from left to right, the kept path in bold.

import {element, svg} from "./dom.js";

const COLUMN = 92;
const ROW = 30;
const BOX = {width: 74, height: 22};
const MAX_CHARS = 8;

export function drawTree(place, tree, sources) {
  const kept = new Set([0, ...tree.accepted]);
  const {x, y, width, height} = layout(tree.parents);
  const edges = tree.parents.slice(1).map((parent, index) => {
    const node = index + 1;
    const [fromX, fromY, toX, toY] = [x[parent] + BOX.width, y[parent], x[node], y[node]];
    const middle = (fromX + toX) / 2;
    const path = svg("path", {d: `M${fromX} ${fromY}C${middle} ${fromY} ${middle} ${toY} ${toX} ${toY}`});
    if (kept.has(node)) path.classList.add("kept");
    return [path, kept.has(node)];
  });
  // Kept edges are drawn over the others.
  edges.sort(([, a], [, b]) => a - b);
  const boxes = tree.token_texts.map((text, node) => {
    const label = svg("text", {x: x[node] + 8, y: y[node]});
    label.textContent = visible(text);
    const group = svg("g", {}, svg("rect", {x: x[node], y: y[node] - BOX.height / 2, ...BOX, rx: 5}), label);
    const className = sources.classOf(tree.drafters[node]);
    if (className) group.classList.add(className);
    if (kept.has(node)) group.classList.add("kept");
    return group;
  });
  const path = tree.accepted.map((node) => tree.token_texts[node]).join("");
  const drafted = tree.parents.length - 1;
  const words = `${drafted} drafted ${drafted === 1 ? "token" : "tokens"}, ${tree.accepted.length} kept`;
  const name = `Draft tree: ${words}${path ? `: ${path}` : ""}`;
  const picture = svg("svg", {width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name});
  picture.append(...edges.map(([path]) => path), ...boxes);
  place.replaceChildren(
    element("p", {class: "soft", text: `Draft tree of the last step: ${drafted} drafted, ${tree.accepted.length} kept.`}),
    element("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": "Draft tree"}, picture),
  );
}

// Returns the boxes' places: a leaf takes a row, a parent stands at the middle of its children.
function layout(parents) {
  const children = parents.map(() => []);
  parents.forEach((parent, node) => parent >= 0 && children[parent].push(node));
  const depth = [];
  parents.forEach((parent, node) => { depth[node] = parent < 0 ? 0 : depth[parent] + 1; });
  const y = [];
  let rows = 0;
  const stack = [[0, false]];
  while (stack.length) {
    const [node, isDone] = stack.pop();
    if (!children[node].length) y[node] = ROW * (rows++ + 0.5);
    else if (isDone) y[node] = (y[children[node][0]] + y[children[node].at(-1)]) / 2;
    else {
      stack.push([node, true]);
      for (const child of [...children[node]].reverse()) stack.push([child, false]);
    }
  }
  const x = depth.map((level) => 4 + level * COLUMN);
  return {x, y, width: Math.max(...x) + BOX.width + 8, height: rows * ROW};
}

function visible(text) {
  const shown = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·");
  return shown.length > MAX_CHARS ? `${shown.slice(0, MAX_CHARS - 1)}…` : shown;
}
