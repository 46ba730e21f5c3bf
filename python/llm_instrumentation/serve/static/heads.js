// The heads of a layer's attention weights as small pictures. A click or an arrow key chooses one.

import { paint, scheme } from "./colors.js";
import { h } from "./dom.js";
import { rove } from "./lists.js";

const MOST = 48; // rows and columns of a small picture

export class Heads {
  /**
   * @param {object} how
   *   count: of the heads. chosen: the head to begin with.
   *   load(head, most): a promise of the weights of a head, of blocks of weights the largest.
   *   choose(head): a head was chosen.
   */
  constructor({ count, chosen, load, choose }) {
    this.chosen = chosen;
    this.load = load;
    this.tiles = new Map(); // promises, by head
    this.pictures = Array.from({ length: count }, (_, head) => h("canvas", { "data-head": head }));
    this.buttons = this.pictures.map((picture, head) =>
      h("button", { type: "button", class: "head", "aria-label": `Head ${head}`, onclick: () => this.#choose(head, choose) }, picture, h("span", {}, head)),
    );
    this.title = h("h2", {});
    const strip = h("div", { class: "heads-of-layer", role: "group", "aria-label": "Heads of the layer" }, this.buttons);
    this.element = h("div", {}, this.title, strip);
    this.#mark();
    rove(strip, "button", { follow: true });
    scheme.addEventListener("change", () => this.draw());
  }

  /** Draws all small pictures. Each has its strongest colour at its own largest weight. */
  async draw() {
    for (const [head, picture] of this.pictures.entries()) {
      const { values, shape } = await this.#tile(head);
      const [rows, columns] = shape;
      Object.assign(picture, { width: columns, height: rows });
      const image = new ImageData(columns, rows);
      paint(values, largest(values), image.data);
      picture.getContext("2d").putImageData(image, 0, 0);
    }
  }

  /** A promise of the largest weight of the chosen head. */
  async scale() {
    return largest((await this.#tile(this.chosen)).values);
  }

  #tile(head) {
    if (!this.tiles.has(head)) this.tiles.set(head, this.load(head, MOST));
    return this.tiles.get(head);
  }

  #choose(head, choose) {
    this.chosen = head;
    this.#mark();
    choose(head);
  }

  #mark() {
    this.title.textContent = `Head ${this.chosen}`;
    for (const [head, button] of this.buttons.entries()) button.setAttribute("aria-pressed", String(head === this.chosen));
  }
}

function largest(values) {
  return values.reduce((most, value) => (value > most ? value : most), 0) || 1;
}
