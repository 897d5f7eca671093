// Starts the page, and keeps its view of the server fresh.

import {ApiError, getJson} from "./api.js";
import {byId, showAlert} from "./dom.js";
import {Generator} from "./generate.js";
import {KeyDialog} from "./key_dialog.js";
import {OperatorView} from "./operator.js";
import {Sources} from "./sources.js";
import {Tabs} from "./tabs.js";

const REFRESH_MS = 3000;

const sources = new Sources();
const keyDialog = new KeyDialog(() => {
  showAlert(byId("alert"));
  // A key that is not right is asked for again.
  hasAsked = false;
  refresh();
});
const generator = new Generator(sources, (reason) => keyDialog.open(reason));
const operator = new OperatorView();
// Asks once for each key; after that only a run asks again.
let hasAsked = false;

new Tabs(document.querySelector("[role=tablist]"), (tab) => {
  const isOperator = tab.id === "tab-operator";
  byId("operator").hidden = !isOperator;
  byId("generate").hidden = isOperator;
  if (isOperator) {
    operator.show();
    return;
  }
  operator.hide();
  byId("generate").setAttribute("aria-labelledby", tab.id);
  generator.switchTo(tab.id.replace("tab-", ""));
});

async function refresh() {
  try {
    show(await getJson("version"));
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    byId("server").textContent = error.status ? error.message : "the server does not answer";
    if (error.status === 401 && !hasAsked) {
      hasAsked = true;
      keyDialog.open(error.message);
    }
  }
}

function show({model, version, verifiers}) {
  const up = verifiers.filter((verifier) => verifier.device);
  const [first] = up;
  const where = first ? ` on ${first.device}, ${first.dtype}, ${first.mode}` : ": no verifier is up";
  byId("server").textContent = model + where;
  byId("version").textContent = `foretoken ${version}`;
  if (!first) return;
  const isNew = sources.take(up);
  if (isNew || !byId("drafter").options.length) generator.offerDrafters();
}

await refresh();
// Drafters come and go while the server runs.
setInterval(() => document.hidden || refresh(), REFRESH_MS);
