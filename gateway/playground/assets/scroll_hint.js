// Shows that a region has more content than fits its width: a shadow on
// that side, and words above it.

import {element} from "./dom.js";

// Rounded widths may differ by so much.
const SLACK_PX = 1;

export class ScrollHint {
  constructor(region) {
    this.region = region;
    this.words = element("p", {class: "soft sideways", text: "Scroll sideways for more columns →", hidden: ""});
    this.words.id = `${region.id}-hint`;
    region.before(this.words);
    region.addEventListener("scroll", () => this.show(), {passive: true});
    const observer = new ResizeObserver(() => this.show());
    for (const resized of [region, ...region.children]) observer.observe(resized);
  }

  show() {
    const {region} = this;
    const rest = region.scrollWidth - region.clientWidth;
    region.classList.toggle("more-before", region.scrollLeft > SLACK_PX);
    region.classList.toggle("more-after", region.scrollLeft < rest - SLACK_PX);
    this.words.hidden = rest <= SLACK_PX;
    // Hidden words would be read all the same.
    if (this.words.hidden) region.removeAttribute("aria-describedby");
    else region.setAttribute("aria-describedby", this.words.id);
  }
}
