// A heat map on a canvas: it shows a part of a matrix, and can zoom, be dragged and be read by keys.

import { legend } from "./charts.js";
import { paint, scheme } from "./colors.js";
import { count, h, later, number, word } from "./dom.js";

const FEWEST = 8; // rows and columns of the smallest part
const [SQUARE, TALLEST] = [28, 720]; // pixels: of a square cell at most, of a map of square cells
const WIDE = 24; // pixels of a column with a head that can be clicked, at least
const LINE = 14; // pixels that a name needs

export class HeatMap {
  /**
   * @param {object} how
   *   rows, columns: of the matrix.
   *   load(rect, rows, columns): a promise of {values, shape, sampled}, at most of this size; with
   *     tokens of the rows and columns of the part, [label, padding] each, if they are known.
   *   scale: the magnitude with the strongest colour, or null: that of the values. A tile may have
   *     its own.
   *   label: what is shown.
   *   told(cell, value): a text for a cell {top, left, height, width}.
   *   exact(cell): a promise of a longer text for a cell of one value; or nothing.
   *   rect: the part to begin with. moved(rect): the part is another one now.
   *   picked(cell): a cell was clicked, or Enter was pressed on it.
   *   zooms: whether it can show parts. tall: its height in pixels. square: its cells are squares.
   *   nothing: what cells without a value are. positive: no value is below zero. unit: of the values.
   *   names: of the rows, to stand beside them; or nothing: tokens stand there, if they are known.
   *   heads: an element with a child for each column, to stand above them; or nothing: likewise.
   *   axes: what rows and columns are.
   *   controls: elements to stand beside the buttons.
   */
  constructor(how) {
    this.how = { zooms: true, tall: 360, controls: [], axes: ["rows", "columns"], ...how };
    this.whole = { top: 0, left: 0, height: how.rows, width: how.columns };
    this.rect = how.rect ?? this.whole;
    this.cell = null; // of the cursor, in rows and columns of the tile
    this.canvas = h("canvas", {
      tabindex: 0, role: "application", "aria-roledescription": "heat map", "aria-label": how.label,
    });
    this.cursor = h("div", { class: "cursor", hidden: true });
    this.said = h("p", { class: "said", "aria-live": "polite" });
    this.axis = h("p", { class: "axis" });
    this.legend = h("div");
    this.ruler = h("div"); // as wide as there is room, and never higher than nothing
    this.names = h("div", { class: "names", "aria-hidden": "true" });
    this.heads = how.heads ?? h("div", { "aria-hidden": "true" });
    this.heads.classList.add("heads");
    this.field = h("div", { class: "labelled" }, this.heads, this.names, h("div", { class: "plot" }, this.canvas, this.cursor));
    const button = (name, action) => h("button", { type: "button", onclick: action }, name);
    this.element = h(
      "div",
      { class: "heat" },
      this.how.zooms
        ? h(
            "div",
            { class: "tools" },
            button("Zoom in", () => this.zoom(0.5)),
            button("Zoom out", () => this.zoom(2)),
            button("Show all", () => this.show(this.whole)),
            this.how.controls,
          )
        : null,
      this.ruler,
      this.field,
      h("div", { class: "under" }, this.axis, this.legend),
      this.said,
    );
    this.canvas.style.height = `${this.how.tall}px`;
    this.field.classList.toggle("square", this.how.square === true);
    if (how.heads) {
      this.field.classList.add("wide-columns");
      this.canvas.parentElement.style.minWidth = `${how.columns * WIDE}px`;
    }
    this.tellExactly = later(() => this.#exactly(), 120);
    this.#listen();
  }

  /** Loads and draws the present part. While it loads, a second call waits for the first. */
  async draw() {
    this.again = true;
    if (this.loading) return;
    this.loading = true;
    this.#fit();
    this.element.dataset.state = "loading";
    while (this.again) {
      this.again = false;
      await this.#load();
    }
    this.loading = false;
    this.element.dataset.state = "ready";
  }

  async #load() {
    const { clientWidth: wide, clientHeight: high } = this.canvas;
    const { rect } = this;
    try {
      const tile = await this.how.load(rect, Math.max(1, high), Math.max(1, Math.min(wide, 1024)));
      if (rect === this.rect) this.update(tile);
    } catch (error) {
      if (error.name !== "AbortError") this.said.textContent = error.message;
    }
  }

  /** Shows a tile of the present part. */
  update(tile) {
    this.tile = tile;
    this.canvas.setAttribute("aria-label", this.how.label);
    this.scale = tile.scale ?? this.how.scale ?? strongest(tile.values);
    this.#label();
    this.#fit();
    this.#label();
    this.#paint();
    this.axis.textContent = this.#described();
    const nothing = tile.values.some(Number.isNaN) ? (this.how.nothing ?? "NaN") : "";
    this.legend.replaceChildren(legend(this.scale, { nothing, signed: !this.how.positive, unit: this.how.unit }));
    this.#place();
  }

  #described() {
    const { top, left, height, width } = this.rect;
    const [rows, columns] = this.how.axes;
    const { sampled, problem } = this.tile;
    const padding = [...(this.tile.rows ?? []), ...(this.tile.columns ?? [])].map((one) => one[1]);
    return [
      `${rows} ${span(top, height)}, ${columns} ${span(left, width)}`,
      sampled && "of each block of values some were read",
      padding.includes(true) && "padding is struck out",
      padding.includes(null) && "which tokens are padding is unknown",
      problem,
    ].filter(Boolean).join("; ");
  }

  /** Makes the cells of the present part squares, as large as there is room for. */
  #fit() {
    if (!this.how.square) return;
    const { height, width } = this.rect;
    const room = this.ruler.clientWidth - this.names.getBoundingClientRect().width - 2;
    const cell = Math.max(0.1, Math.min(SQUARE, room / width, TALLEST / height));
    const [wide, high] = [width, height].map((length) => `${Math.max(LINE, length * cell)}px`);
    Object.assign(this.canvas.style, { width: wide, height: high });
    this.heads.style.width = wide;
  }

  /** Writes the names of the rows and columns beside the map. */
  #label() {
    const { top, left, height, width } = this.rect;
    const numbered = (begin, length) => this.how.square && Array.from({ length }, (_, k) => [count(begin + k)]);
    const names = this.how.names?.map((name) => [name]) ?? this.tile.rows ?? numbered(top, height);
    write(this.names, names, height, this.canvas.clientHeight / height);
    const cell = this.canvas.clientWidth / width;
    if (!this.how.heads) return write(this.heads, this.tile.columns ?? numbered(left, width), width, cell);
    const longest = Math.max(...Array.from(this.heads.children, (one) => one.textContent.length));
    this.heads.classList.toggle("upright", cell >= 8 * longest + 6);
  }

  #paint() {
    const [rows, columns] = this.tile.shape;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.max(1, Math.round(this.canvas.clientWidth * ratio));
    this.canvas.height = Math.max(1, Math.round(this.canvas.clientHeight * ratio));
    if (!rows || !columns) return;
    const image = new ImageData(columns, rows);
    paint(this.tile.values, this.scale, image.data);
    const small = new OffscreenCanvas(columns, rows);
    small.getContext("2d").putImageData(image, 0, 0);
    const context = this.canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(small, 0, 0, this.canvas.width, this.canvas.height);
  }

  // ---- the part that is shown

  show(rect) {
    const height = Math.max(1, Math.min(this.how.rows, Math.round(rect.height)));
    const width = Math.max(1, Math.min(this.how.columns, Math.round(rect.width)));
    const top = Math.max(0, Math.min(this.how.rows - height, Math.round(rect.top)));
    const left = Math.max(0, Math.min(this.how.columns - width, Math.round(rect.left)));
    this.rect = { top, left, height, width };
    this.cell = null;
    this.how.moved?.(this.rect);
    return this.draw();
  }

  zoom(factor, at = this.cell ? this.source(this.cell) : null) {
    const { top, left, height, width } = this.rect;
    const tall = Math.max(Math.min(FEWEST, this.how.rows), height * factor);
    const wide = Math.max(Math.min(FEWEST, this.how.columns), width * factor);
    const [y, x] = at ? [at.top + at.height / 2, at.left + at.width / 2] : [top + height / 2, left + width / 2];
    this.show({
      top: y - ((y - top) / height) * tall, left: x - ((x - left) / width) * wide, height: tall, width: wide,
    });
  }

  /** The rows and columns of the matrix that a cell of the tile stands for. */
  source({ row, column }) {
    const { top, left, height, width } = this.rect;
    const [rows, columns] = this.tile.shape;
    const [y, x] = [Math.floor((row * height) / rows), Math.floor((column * width) / columns)];
    const [below, right] = [Math.floor(((row + 1) * height) / rows), Math.floor(((column + 1) * width) / columns)];
    return { top: top + y, left: left + x, height: Math.max(1, below - y), width: Math.max(1, right - x) };
  }

  // ---- the cell of the cursor

  /** Puts the cursor on a column of the matrix, or hides it. */
  mark(column) {
    this.marked = column === null ? null : { column };
    if (this.tile) this.#place();
  }

  /** Puts the cursor on a cell of the matrix; arrow keys go on from there. */
  point(row, column) {
    const { top, left, height, width } = this.rect;
    const inside = row >= top && row < top + height && column >= left && column < left + width;
    if (!this.tile || !inside) return;
    const [rows, columns] = this.tile.shape;
    this.#move(Math.floor(((row - top) * rows) / height), Math.floor(((column - left) * columns) / width));
  }

  #place() {
    const cell = this.cell ?? this.#markedCell();
    this.cursor.hidden = !cell;
    if (!cell) return;
    const [rows, columns] = this.tile.shape;
    const { clientWidth: wide, clientHeight: high } = this.canvas;
    const all = cell.row === null;
    Object.assign(this.cursor.style, {
      left: `${(cell.column * wide) / columns}px`, top: all ? "0" : `${(cell.row * high) / rows}px`,
      width: `${Math.max(4, wide / columns)}px`, height: all ? `${high}px` : `${Math.max(4, high / rows)}px`,
    });
  }

  #markedCell() {
    if (!this.marked) return null;
    const column = this.marked.column - this.rect.left;
    const inside = column >= 0 && column < this.rect.width;
    return inside ? { row: null, column: Math.floor((column * this.tile.shape[1]) / this.rect.width) } : null;
  }

  #move(row, column) {
    const [rows, columns] = this.tile.shape;
    if (!rows || !columns) return;
    this.cell = { row: Math.max(0, Math.min(rows - 1, row)), column: Math.max(0, Math.min(columns - 1, column)) };
    this.#place();
    const source = this.source(this.cell);
    this.said.textContent = this.how.told(source, this.tile.values[this.cell.row * columns + this.cell.column]);
    if (this.how.exact && source.height * source.width === 1) this.tellExactly();
  }

  async #exactly() {
    const cell = this.cell;
    if (!cell) return;
    const text = await this.how.exact(this.source(cell)).catch((error) => error.message);
    if (cell === this.cell) this.said.textContent = text;
  }

  #at(event) {
    const [rows, columns] = this.tile.shape;
    const box = this.canvas.getBoundingClientRect();
    return [
      Math.floor(((event.clientY - box.top) / box.height) * rows),
      Math.floor(((event.clientX - box.left) / box.width) * columns),
    ];
  }

  // ---- mouse and keys

  #listen() {
    const { canvas } = this;
    let held = null;
    canvas.addEventListener("pointerdown", (event) => {
      if (!this.tile || event.button) return;
      held = { x: event.clientX, y: event.clientY, rect: this.rect, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.tile) return;
      if (!held || !this.how.zooms) return void this.#move(...this.#at(event));
      const box = canvas.getBoundingClientRect();
      const [dx, dy] = [event.clientX - held.x, event.clientY - held.y];
      if (!held.moved && Math.hypot(dx, dy) < 4) return;
      held.moved = true;
      const { rect } = held;
      this.show({ ...rect, top: rect.top - (dy / box.height) * rect.height, left: rect.left - (dx / box.width) * rect.width });
    });
    canvas.addEventListener("pointerup", (event) => {
      if (held && !held.moved && this.tile) {
        this.#move(...this.#at(event));
        if (this.cell) this.how.picked?.(this.source(this.cell));
      }
      held = null;
    });
    canvas.addEventListener("pointercancel", () => (held = null));
    canvas.addEventListener("dblclick", () => this.how.zooms && this.zoom(0.5));
    canvas.addEventListener(
      "wheel",
      (event) => {
        if (!this.how.zooms || !this.tile || !(event.ctrlKey || event.metaKey)) return;
        event.preventDefault();
        this.#move(...this.#at(event));
        this.zoom(event.deltaY < 0 ? 0.7 : 1 / 0.7);
      },
      { passive: false },
    );
    canvas.addEventListener("keydown", (event) => this.tile && this.#key(event));
    new ResizeObserver(() => this.tile && (this.#label(), this.#paint(), this.#place())).observe(canvas);
    new ResizeObserver(() => this.tile && this.#fit()).observe(this.ruler);
    scheme.addEventListener("change", () => this.tile && this.update(this.tile));
  }

  #key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] ?? [0, 0];
    if (down || right) {
      const { top, left, height, width } = this.rect;
      if (event.shiftKey && this.how.zooms) {
        this.show({ ...this.rect, top: top + (down * height) / 2, left: left + (right * width) / 2 });
      } else {
        const { row, column } = this.cell ?? { row: -down, column: -right };
        this.#move(row + down, column + right);
      }
    } else if (this.how.zooms && (event.key === "+" || event.key === "=")) this.zoom(0.5);
    else if (this.how.zooms && event.key === "-") this.zoom(2);
    else if (this.how.zooms && event.key === "0") this.show(this.whole);
    else if (event.key === "Enter" && this.cell && this.how.picked) this.how.picked(this.source(this.cell));
    else return;
    event.preventDefault();
  }
}

/** Writes names along an axis, each at its cell. Of cells that are too small some have their names. */
function write(element, names, length, cell) {
  const each = Math.max(1, Math.ceil(LINE / cell));
  const shown = names?.length === length ? names.filter((_, k) => k % each === 0) : [];
  element.hidden = !shown.length;
  element.style.setProperty("--middle", `${(cell - LINE) / 2}px`);
  element.replaceChildren(
    ...shown.map(([name, padding], k) => {
      const one = h("span", { class: padding ? "padding" : null }, h("bdi", {}, word(name) || "∅"));
      one.style.flexGrow = Math.min(each, names.length - k * each);
      return one;
    }),
  );
}

/** The magnitude that nearly all values are below. */
export function strongest(values) {
  const finite = values.filter(Number.isFinite).map(Math.abs).sort();
  return finite[Math.floor(0.995 * (finite.length - 1))] || finite[finite.length - 1] || 1;
}

export function span(begin, length) {
  return length === 1 ? count(begin) : `${count(begin)} to ${count(begin + length - 1)}`;
}

export function several(cell, value) {
  const one = cell.height * cell.width === 1;
  return one ? number(value) : `${number(value)} for ${count(cell.height)} × ${count(cell.width)} values`;
}
