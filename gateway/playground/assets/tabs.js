// Tabs as the ARIA Authoring Practices Guide has them: arrow keys move,
// one tab is in the tab order.

export class Tabs {
  // ``onSelect`` gets the selected tab.
  constructor(list, onSelect) {
    this.tabs = [...list.querySelectorAll("[role=tab]")];
    this.onSelect = onSelect;
    for (const tab of this.tabs) tab.addEventListener("click", () => this.select(tab));
    list.addEventListener("keydown", (event) => this.move(event));
  }

  select(tab) {
    for (const other of this.tabs) {
      other.setAttribute("aria-selected", String(other === tab));
      other.tabIndex = other === tab ? 0 : -1;
    }
    this.onSelect(tab);
  }

  move(event) {
    const at = this.tabs.indexOf(document.activeElement);
    const last = this.tabs.length - 1;
    const to = {
      ArrowRight: at === last ? 0 : at + 1, ArrowLeft: at === 0 ? last : at - 1, Home: 0, End: last,
    }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    this.tabs[to].focus();
    this.select(this.tabs[to]);
  }
}
