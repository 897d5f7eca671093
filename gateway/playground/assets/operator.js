// The operator's tab: load, drafters, and the requests of the last minutes.

import {ApiError, getJson, operatorKey} from "./api.js";
import {announce, byId, element, showAlert} from "./dom.js";
import {number, percent} from "./panel.js";
import {ScrollHint} from "./scroll_hint.js";

const REFRESH_MS = 2000;
// What ended as somebody wanted: ``cancelled`` is a client's own stop.
const NO_FAILURES = ["ok", "cancelled"];
const NO_ENDPOINTS = "This server has no operator's endpoints: it was started without --admin-api-key-file.";

export class OperatorView {
  timer = null;
  // Whether the alert is about what the operator did: it stays until the next action.
  isKept = false;

  constructor() {
    for (const region of document.querySelectorAll("#operator-view .scroll")) new ScrollHint(region);
    byId("operator-form").addEventListener("submit", (event) => {
      event.preventDefault();
      operatorKey.value = byId("operator-key").value.trim();
      byId("operator-key").value = "";
      this.isKept = false;
      this.refresh();
    });
    byId("forget").addEventListener("click", () => {
      operatorKey.value = "";
      this.close();
      byId("operator-key").focus();
    });
    byId("attach").addEventListener("submit", (event) => {
      event.preventDefault();
      this.attach();
    });
  }

  show() {
    this.timer ??= setInterval(() => document.hidden || (operatorKey.value && this.refresh()), REFRESH_MS);
    if (operatorKey.value) this.refresh();
    else this.close();
  }

  hide() {
    clearInterval(this.timer);
    this.timer = null;
  }

  close() {
    byId("operator-form").hidden = false;
    byId("operator-view").hidden = true;
  }

  async refresh() {
    await this.guarded(async () => {
      this.draw(await getJson("v1/activity", {key: operatorKey}));
      byId("operator-form").hidden = true;
      byId("operator-view").hidden = false;
      if (!this.isKept) showAlert(byId("operator-alert"));
    });
  }

  // Runs what the operator asked for.
  async act(action) {
    this.isKept = false;
    showAlert(byId("operator-alert"));
    this.isKept = !(await this.guarded(action));
    if (this.isKept) byId("operator-alert").scrollIntoView({block: "nearest"});
  }

  // Shows what goes wrong; a refused key is forgotten. Returns whether all went well.
  async guarded(action) {
    try {
      await action();
      return true;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      const isMissing = error.status === 404 && error.message.includes("Not Found");
      showAlert(byId("operator-alert"), isMissing ? NO_ENDPOINTS : error.message);
      if ([401, 403].includes(error.status)) {
        operatorKey.value = "";
        this.close();
      }
      return false;
    }
  }

  async attach() {
    const [name, address] = [byId("attach-name").value.trim(), byId("attach-address").value.trim()];
    await this.act(async () => {
      const body = {name, address, transport: byId("attach-transport").value};
      await getJson("v1/drafters", {method: "POST", key: operatorKey, body});
      byId("attach").reset();
      announce(`${name} is being attached.`);
      await this.refresh();
    });
  }

  async detach(name, verifier) {
    await this.act(async () => {
      const path = `v1/drafters/${encodeURIComponent(name)}?${new URLSearchParams({verifier})}`;
      await getJson(path, {method: "DELETE", key: operatorKey});
      announce(`${name} is detached.`);
      await this.refresh();
    });
  }

  draw({num_requests: numRequests, num_waiting: numWaiting, verifiers, requests}) {
    byId("load").replaceChildren(
      tile(numRequests, "requests in the gateway"),
      tile(numWaiting, "sequences wait for a verifier"),
      ...verifiers.flatMap((verifier) => loadTiles(verifier, verifiers.length > 1)),
    );
    // A redrawn button would lose the focus.
    const rows = verifiers.flatMap(({address, drafters}) => drafters.map((drafter) => ({verifier: address, ...drafter})));
    const focused = document.activeElement?.dataset?.detach;
    byId("drafters").replaceChildren(...rows.map((row) => this.drafterRow(row)));
    if (focused) byId("drafters").querySelector(`[data-detach="${CSS.escape(focused)}"]`)?.focus();
    byId("requests").replaceChildren(...requests.map(requestRow));
    if (!requests.length) {
      byId("requests").append(element("tr", {}, element("td", {colspan: "10", class: "soft", text: "None."})));
    }
  }

  drafterRow(drafter) {
    const {verifier, name, state, reason, algorithm, transport, address, num_attaches: attaches} = drafter;
    const {num_draft_tokens: drafted, num_accepted_tokens: accepted} = drafter;
    const detach = element("button", {type: "button", text: "Detach", "aria-label": `Detach ${name}`});
    detach.dataset.detach = `${verifier} ${name}`;
    detach.addEventListener("click", () => this.detach(name, verifier));
    const shown = element("td", {}, element("span", {class: `state-${state}`, text: state}));
    if (reason) shown.append(element("span", {class: "soft", text: ` ${reason}`}));
    if (attaches > 1) shown.append(element("span", {class: "soft", text: ` attached ${attaches} times`}));
    return element(
      "tr", {}, element("td", {class: "name", text: name}), element("td", {}, ...(state === "detached" ? [] : [detach])), shown,
      element("td", {text: algorithm}), element("td", {class: "number", text: String(drafted)}),
      element("td", {class: "number", text: drafted ? percent(accepted / drafted) : "–"}),
      element("td", {text: transport}), addressCell(address || "in the verifier"), addressCell(verifier),
    );
  }
}

// An address may break after each part of a path, so that a long one needs no scrolling.
function addressCell(address) {
  const parts = address.split(/(?<=[/:.])/u).flatMap((part) => [part, element("wbr")]);
  return element("td", {class: "address"}, ...parts);
}

function tile(value, words, ...more) {
  return element("div", {class: "tile"}, element("b", {text: String(value)}), element("span", {text: words}), ...more);
}

// ``isNamed``: whether to say which verifier it is.
function loadTiles(verifier, isNamed) {
  const {address, up, num_running: running, num_waiting: waiting, max_queue: room} = verifier;
  const {num_blocks: blocks, num_free_blocks: free} = verifier;
  if (!up) return [tile("down", `verifier at ${address}`)];
  const fill = blocks ? (blocks - free) / blocks : 0;
  const meter = element("meter", {min: "0", max: "1", value: String(fill), "aria-label": "KV cache in use"});
  return [
    tile(running, isNamed ? `sequences run at ${address}` : "sequences run"),
    tile(waiting, `sequences in the queue, which holds ${room}`),
    tile(percent(fill), `of ${blocks} KV blocks are in use`, meter),
  ];
}

function requestRow(request) {
  const ended = new Date(1e3 * request.ended_at).toLocaleTimeString();
  const first = request.time_to_first_token_ms;
  // From the first token to the end.
  const seconds = first === null ? 0 : (request.duration_ms - first) / 1e3;
  const speed = seconds > 0 && request.completion_tokens > 1 ? (request.completion_tokens - 1) / seconds : null;
  const numbers = [
    request.prompt_tokens, request.completion_tokens, first === null ? "–" : `${number(first)} ms`, number(speed),
    request.draft_tokens ? percent(request.accepted_tokens / request.draft_tokens) : "–",
  ];
  return element(
    "tr", {}, element("td", {text: ended}), element("td", {text: request.api}),
    element("td", {}, element("span", {class: NO_FAILURES.includes(request.outcome) ? "" : "failed", text: request.outcome})),
    ...numbers.map((text) => element("td", {class: "number", text: String(text)})),
    element("td", {text: request.drafter || "–"}), element("td", {text: request.key || "–"}),
  );
}
