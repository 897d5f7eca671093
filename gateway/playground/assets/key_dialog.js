// Asks for the client's key.

import {clientKey} from "./api.js";
import {byId} from "./dom.js";

export class KeyDialog {
  // ``onKey`` is called after the key has changed.
  constructor(onKey) {
    this.dialog = byId("key-dialog");
    this.usualReason = byId("key-reason").textContent;
    byId("open-key").addEventListener("click", () => this.open());
    byId("cancel-key").addEventListener("click", () => this.dialog.close());
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      clientKey.value = byId("key").value.trim();
      this.dialog.close();
      onKey();
    });
  }

  open(reason = this.usualReason) {
    byId("key-reason").textContent = reason;
    byId("key").value = clientKey.value;
    if (!this.dialog.open) this.dialog.showModal();
    byId("key").select();
  }
}
