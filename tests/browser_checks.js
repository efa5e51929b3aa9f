/* What is wrong with a page: each check gives a list of [element, fault and remedy]. */

window.checks = {
  /* The rules of WCAG 2.1 AA that axe-core knows. Comes last: it empties the code. */
  async rules() {
    const levels = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"];
    const names = axe.getRules(levels).map((rule) => rule.ruleId);
    const more = ["heading-order", "image-redundant-alt", "empty-heading"];
    const mine = names.filter((name) => name !== "color-contrast"); // contrast() below
    for (const code of document.querySelectorAll(".highlight pre"))
      code.replaceChildren("its thousands of spans would take seconds");
    const found = await axe.run({ runOnly: [...mine, ...more] });
    return found.violations.flatMap(({ help, nodes }) =>
      nodes.slice(0, 3).map(({ target, failureSummary }) => [
        target.join(" "),
        `${help}: ${failureSummary.replace(/\s+/g, " ")}`,
      ])
    );
  },

  headings() {
    const count = document.querySelectorAll("h1").length;
    return count === 1 ? [] : [["h1", `${count} of them: a page has one title`]];
  },

  tooWide() {
    for (const frame of document.querySelectorAll(".steps > div")) frame.hidden = false;
    for (const fold of document.querySelectorAll("details")) fold.open = true;
    const room = document.documentElement.clientWidth;
    if (document.documentElement.scrollWidth <= room) return [];
    const all = [...document.body.querySelectorAll("*")];
    const wide = all.filter((x) => x.getBoundingClientRect().right > room + 1);
    const fault = `wider than a screen of ${innerWidth} px: let it shrink or scroll`;
    return [[this.name(wide.at(-1) ?? document.body), fault]];
  },

  /* A table that a cell printed loses its columns where a line breaks. */
  wraps() {
    const printed = [...document.querySelectorAll(".output pre > code")];
    const height = (code) => code.getBoundingClientRect().height;
    const wraps = printed.filter((code) => {
      const [tall, own] = [height(code), code.style.whiteSpace];
      code.style.whiteSpace = "pre";
      const broken = height(code) < tall;
      code.style.whiteSpace = own;
      return broken;
    });
    const fault = `breaks its lines on a screen of ${innerWidth} px: let it scroll`;
    return wraps.slice(0, 1).map((code) => [this.name(code.closest(".output")), fault]);
  },

  cut() {
    const words = [...document.querySelectorAll(".md-nav .md-ellipsis")];
    return words
      .filter((word) => word.scrollWidth > word.clientWidth)
      .map((word) => [word.textContent.trim(), "is cut in the menu: say it shorter"]);
  },

  /* Of each pair of colours the first place; narrow screens show no others. Boxes of
     pictures count as ground, which axe-core does not know; it also takes seconds. */
  async contrast() {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    if (!(await this.follows(dark ? "slate" : "default")))
      return [["body", "keeps its colours when the system's change: see mkdocs.yml"]];
    const faults = new Map();
    this.known = new Map();
    for (const element of this.written()) {
      const { fill, color } = getComputedStyle(element);
      const ink = element.closest("svg") ? fill : color;
      const ground = this.ground(element);
      const pair = [...ground, ink].join();
      if (faults.has(pair)) continue;
      const [a, b] = [this.light(ground), this.light([...ground, ink])];
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      const fault = `contrast ${ratio.toFixed(1)}:1 of ${ink} on ${ground.at(-1)}`;
      const remedy = `make it 4.5:1 in ${dark ? "dark" : "light"} colours`;
      const found = [this.name(element), `${fault}: ${remedy}`];
      faults.set(pair, ratio < 4.5 ? found : null);
    }
    return [...faults.values()].filter(Boolean);
  },

  /* Whether the page takes on a colour scheme, if it has any. */
  async follows(scheme) {
    const has = () => document.body.dataset.mdColorScheme ?? scheme;
    for (let tries = 0; has() !== scheme && tries < 100; tries++)
      await new Promise((resolve) => setTimeout(resolve, 10));
    return has() === scheme;
  },

  /* The elements that show words of their own; of a listing each kind of word once. */
  written() {
    const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const found = new Set();
    while (words.nextNode())
      if (words.currentNode.data.trim()) found.add(words.currentNode.parentElement);
    const kinds = new Map();
    for (const word of found) {
      const listing = word.closest(".highlight pre");
      if (!listing) continue;
      const known = kinds.get(listing) ?? new Set();
      if (known.has(word.className)) found.delete(word);
      kinds.set(listing, known.add(word.className));
    }
    const seen = { opacityProperty: true, visibilityProperty: true };
    return [...found].filter((x) => x.checkVisibility(seen) && !x.matches(":disabled"));
  },

  /* The colours below a text, from the page upwards. */
  ground(element) {
    const boxes = this.boxes(element).map((rect) => getComputedStyle(rect).fill);
    return [...this.backgrounds(element), ...boxes];
  },

  backgrounds(element) {
    if (!element) return ["white"];
    if (!this.known.has(element)) {
      const colour = getComputedStyle(element).backgroundColor;
      const below = this.backgrounds(element.parentElement);
      const clear = colour === "rgba(0, 0, 0, 0)";
      this.known.set(element, clear ? below : [...below, colour]);
    }
    return this.known.get(element);
  },

  /* The boxes of a picture below one of its words. */
  boxes(word) {
    const rects = word.closest("svg")?.querySelectorAll("rect");
    if (!rects) return [];
    const { left, right, top, bottom } = word.getBoundingClientRect();
    const [x, y] = [(left + right) / 2, (top + bottom) / 2];
    return [...rects].filter((rect) => {
      const box = rect.getBoundingClientRect();
      const order = rect.compareDocumentPosition(word);
      const above = order & Node.DOCUMENT_POSITION_FOLLOWING;
      return above && box.left <= x && x <= box.right && box.top <= y && y <= box.bottom;
    });
  },

  /* The relative luminance, as WCAG defines it, of colours laid over each other. */
  light(colours) {
    const options = { willReadFrequently: true };
    this.paint ??= document.createElement("canvas").getContext("2d", options);
    for (const colour of colours) {
      this.paint.fillStyle = colour;
      this.paint.fillRect(0, 0, 1, 1);
    }
    const [r, g, b] = [...this.paint.getImageData(0, 0, 1, 1).data].map((x) =>
      x <= 10 ? x / 3294.6 : ((x / 255 + 0.055) / 1.055) ** 2.4
    );
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  },

  name(element) {
    const classes = element.getAttribute("class") ?? "";
    return [element.localName, ...classes.split(" ").filter(Boolean)].join(".");
  },

  links() {
    const links = [...document.querySelectorAll("a[href]")];
    const places = [...document.querySelectorAll("[id], a[name]")];
    return [links.map((a) => a.href), places.map((x) => x.id || x.name)];
  },
};
