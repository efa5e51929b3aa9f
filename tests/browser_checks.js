/* What is wrong with a page: each check gives a list of [element, fault and remedy]. */

window.checks = {
  /* The rules of WCAG 2.1 AA that axe-core knows, contrast of HTML text among them. */
  async rules() {
    const levels = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"];
    const more = ["heading-order", "image-redundant-alt", "empty-heading"];
    const runOnly = [...axe.getRules(levels).map((rule) => rule.ruleId), ...more];
    const found = await axe.run(document, { runOnly, resultTypes: ["violations"] });
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
    const room = document.documentElement.clientWidth;
    if (document.documentElement.scrollWidth <= room) return [];
    const all = [...document.body.querySelectorAll("*")];
    const wide = all.filter((x) => x.getBoundingClientRect().right > room + 1);
    const fault = `wider than a screen of ${innerWidth} px: let it shrink or scroll`;
    return [[this.name(wide.at(-1) ?? document.body), fault]];
  },

  /* Words on the boxes of pictures: axe-core does not look below SVG text. */
  pictures() {
    for (const frame of document.querySelectorAll(".steps > div")) frame.hidden = false;
    const faults = [];
    for (const text of document.querySelectorAll("svg[role=img] text")) {
      const ink = getComputedStyle(text).fill;
      const ground = this.ground(text);
      const [a, b] = [this.light(ground), this.light([...ground, ink])];
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      const fault = `contrast ${ratio.toFixed(1)}:1 of ${ink} on ${ground.at(-1)}`;
      if (ratio < 4.5)
        faults.push([`svg text "${text.textContent}"`, `${fault}: make it 4.5:1`]);
    }
    return faults;
  },

  /* The colours below a text, from the page upwards. */
  ground(text) {
    const { left, right, top, bottom } = text.getBoundingClientRect();
    const [x, y] = [(left + right) / 2, (top + bottom) / 2];
    const below = [...text.closest("svg").querySelectorAll("rect")].filter((rect) => {
      const box = rect.getBoundingClientRect();
      const inside =
        box.left <= x && x <= box.right && box.top <= y && y <= box.bottom;
      const order = rect.compareDocumentPosition(text);
      return inside && order & Node.DOCUMENT_POSITION_FOLLOWING;
    });
    const page = getComputedStyle(document.body).backgroundColor;
    return [page, ...below.map((rect) => getComputedStyle(rect).fill)];
  },

  /* The relative luminance, as WCAG defines it, of colours laid over each other. */
  light(colours) {
    const options = { willReadFrequently: true };
    this.paint ??= document.createElement("canvas").getContext("2d", options);
    this.paint.fillStyle = "white";
    for (const colour of ["white", ...colours]) {
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
