// One layer: its tensors as a list, and one of them as a heat map with its statistics.

import { ask, numbers } from "./api.js";
import { histogram } from "./charts.js";
import { breakable, count, facts, h, layerName, notice, number, plural, shape, size, word } from "./dom.js";
import { Heads } from "./heads.js";
import { HeatMap, several, span } from "./heatmap.js";
import { pager, rove } from "./lists.js";

const EACH = 100;
const PART = ["top", "left", "height", "width"];
const NONE = Object.fromEntries(PART.map((name) => [name, null]));

let shown = null; // the list that is on the page

export async function layer(root, state, tools) {
  const { href, signal } = tools;
  const capture = state.get("capture");
  const name = state.get("layer");
  if (name === null) {
    root.replaceChildren(h("h1", {}, "No layer is chosen"), h("p", {}, h("a", { href: href({ view: null }) }, "Choose one in the overview")));
    return;
  }
  const row = state.get("row");
  const key = JSON.stringify([capture, name, state.get("begin"), state.get("step")]);
  if (shown?.key !== key || !root.contains(shown.panel)) shown = await list(root, state, key, tools);
  if (!shown || signal.aborted) return;
  const chosen = row ?? shown.rows[0];
  for (const link of shown.links) {
    if (link.dataset.row === String(chosen)) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  await tensor(shown.panel, chosen, state, tools);
}

// ---- the list

async function list(root, state, key, { go, href, signal }) {
  const name = state.get("layer");
  const begin = Number(state.get("begin") ?? 0);
  const found = await ask(
    "activations",
    { capture: state.get("capture"), layer: name, begin, count: EACH, step: state.get("step") },
    signal,
  );
  if (signal.aborted) return null;
  const wanted = state.get("step");
  const at = found.activations.find((one) => wanted !== null && one.step >= Number(wanted));
  const links = found.activations.map((one) =>
    h(
      "a",
      { href: href({ row: one.row, top: null, left: null, height: null, width: null, lead: null, step: null, begin: found.begin || null }), "data-row": one.row, "data-replace": true },
      h("span", {}, one.step === null ? `tensor ${one.row}` : `step ${one.step}`, one.call ? `, call ${one.call}` : "", one.token === null ? "" : `, token ${one.token}`),
      h("span", { class: "muted" }, shape(one.shape)),
    ),
  );
  const items = h("ul", { class: "items" }, links.map((link) => h("li", {}, link)));
  rove(items, "a", { follow: true });
  const step = h("input", {
    type: "search", inputmode: "numeric", "data-search": true, "aria-label": "Go to a step", placeholder: "Go to step", autocomplete: "off",
    onchange: () => step.value.trim() && go({ step: step.value.trim(), begin: null, row: null }),
  });
  const panel = h("section", { class: "panel", "aria-label": "Tensor" });
  const alike = h(
    "select",
    { onchange: () => other(alike.value) },
    found.alike.map((one) => h("option", { value: one, selected: one === name }, layerName(one))),
  );
  // The same step, and the same matrix of it, of another layer.
  const other = (wanted) => {
    const row = items.querySelector("[aria-current]")?.dataset.row;
    const one = found.activations.find((one) => String(one.row) === row);
    go({ layer: wanted, step: one?.step, row: null, begin: null, ...NONE });
  };
  root.replaceChildren(
    h("p", {}, h("a", { href: href({ view: null }) }, "All layers"), " · ", h("a", { href: href({ view: "units", layer: name }) }, "Units of the layer")),
    h("h1", {}, breakable(layerName(name))),
    found.alike.length > 1 ? h("div", { class: "tools" }, h("label", {}, "Go to layer", alike)) : "",
    h(
      "div",
      { class: "split" },
      h(
        "nav",
        { "aria-label": "Tensors of the layer" },
        h("div", { class: "tools" }, step),
        items,
        pager(found.total, found.begin, EACH, (to) => go({ begin: to || null, row: null, step: null })),
      ),
      panel,
    ),
  );
  return { key, panel, links, rows: at ? [at.row] : found.activations.map((one) => one.row) };
}

// ---- the tensor

async function tensor(panel, row, state, tools) {
  const { signal } = tools;
  const capture = state.get("capture");
  const fold = state.get("fold");
  let about;
  try {
    about = await ask("activation", { capture, row, fold }, signal);
  } catch (error) {
    if (error.name !== "AbortError") panel.replaceChildren(notice("bad", h("p", {}, error.message)));
    return;
  }
  if (signal.aborted) return;
  if (about.name !== state.get("layer")) return void tools.go({ layer: about.name, begin: null }, { replace: true });
  const { map, strip } = heatMap(about, row, state, tools);
  panel.replaceChildren(
    strip?.element ?? "",
    map ? map.element : notice("plain", h("p", {}, "The tensor is empty.")),
    h("h2", {}, "Values"),
    statistics(about),
    about.values.edges ? histogram(about.values.edges, about.values.counts) : "",
    h("h2", {}, "Tensor"),
    described(about),
  );
  if (map) await map.draw();
  await strip?.draw().catch((error) => (map.said.textContent = error.message));
}

function heatMap(about, row, state, { go, signal }) {
  const { rows, columns, size: all, lead } = about.shown;
  if (!all) return {};
  const capture = state.get("capture");
  const part = PART.map((name) => state.get(name));
  const rect = part.every((one) => one !== null) ? Object.fromEntries(PART.map((name, k) => [name, Number(part[k])])) : null;
  const inside = rect && rect.top + rect.height <= rows && rect.left + rect.width <= columns && rect.height > 0 && rect.width > 0;
  const place = lead.length || about.shown.shape.length > 1 ? "row" : "line";
  const known = about.token_rows || about.attention;
  const query = { capture, row, fold: state.get("fold"), pool: state.get("pool") };
  const tile = (number, asked) => numbers("tile", { ...query, lead: number, ...asked }, signal);
  const begin = Number(state.get("lead") ?? 0);
  const strip = about.attention ? headsOf(about, begin, tile, (number) => {
    go({ lead: number || null }, { replace: true, render: false });
    map.how.label = `Heat map of head ${strip.chosen} of ${layerName(about.name)}`;
    map.draw();
  }) : null;
  const matrix = () => (strip ? begin - (begin % lead[1]) + strip.chosen : begin);
  const told = (cell) => `${place} ${span(cell.top, cell.height)}, column ${span(cell.left, cell.width)}: `;
  const map = new HeatMap({
    rows,
    columns,
    rect: inside ? rect : null,
    scale: about.values.scale,
    tall: about.token_rows ? Math.max(96, Math.min(960, rows * 15)) : Math.max(96, Math.min(460, rows * 12)),
    square: about.attention,
    axes: about.attention ? ["queries (rows)", "keys (columns)"] : ["rows", "columns"],
    controls: controls(about, state, { go }, strip),
    positive: about.values.min !== null && about.values.min >= 0,
    label: `Heat map of ${layerName(about.name)}`,
    nothing: "NaN",
    load: async (asked, high, wide) => {
      const number = matrix();
      const [found, axes, scale] = await Promise.all([
        tile(number, { ...asked, rows: Math.min(high, 512), columns: wide }),
        known ? ask("axes", { capture, row, lead: number, ...asked }, signal) : {},
        strip?.scale(),
      ]);
      return { ...found, ...axes, scale };
    },
    told: (cell, value) => told(cell) + several(cell, value),
    exact: async (cell) => {
      const at = (matrix() * rows + cell.top) * columns + cell.left;
      if (at >= all) return `${told(cell)}behind the end`;
      const { value, index } = await ask("value", { capture, row, at }, signal);
      return `[${index.join(", ")}]${tokensOf(map, cell, about)}: ${value}`;
    },
    moved: (asked) => {
      const whole = asked.height === rows && asked.width === columns;
      go(whole ? NONE : asked, { replace: true, render: false });
    },
  });
  return { map, strip };
}

/** The heads of attention weights. `choose` gets the number of the matrix of a head. */
function headsOf({ shown: { lead, rows, columns } }, begin, tile, choose) {
  const first = begin - (begin % lead[1]);
  return new Heads({
    count: lead[1],
    chosen: begin % lead[1],
    load: (head, most) => tile(first + head, { top: 0, left: 0, height: rows, width: columns, rows: most, columns: most, pool: "extreme" }),
    choose: (head) => choose(first + head),
  });
}

/** The tokens of a cell in words; "" if they are unknown. */
function tokensOf({ tile, rect }, cell, { attention }) {
  const said = (what, tokens, at) => {
    const [label, padding] = tokens?.[at] ?? [null];
    return label === null ? "" : `, ${what} ${JSON.stringify(word(label))}${padding ? " (padding)" : ""}`;
  };
  const row = said(attention ? "query" : "token", tile.rows, cell.top - rect.top);
  return row + said("key", tile.columns, cell.left - rect.left);
}

function controls(about, state, { go }, strip) {
  const { lead, shape: dimensions } = about.shown;
  const chosen = indices(Number(state.get("lead") ?? 0), lead);
  const inputs = lead.map((length, axis) => {
    const input = h("input", {
      type: "number", min: 0, max: length - 1, value: chosen[axis], id: `axis-${axis}`,
      onchange: () => {
        const all = inputs.map((one, at) => (strip && at === 1 ? strip.chosen : Number(one.value)));
        go({ lead: lead.reduce((sum, n, k) => sum * n + Math.max(0, Math.min(n - 1, all[k] || 0)), 0) || null }, { replace: true });
      },
    });
    return input;
  });
  const labelled = inputs.map((input, axis) => h("label", {}, `Index ${axis} of ${count(lead[axis])}`, input));
  if (strip) labelled.splice(0, 2, h("label", {}, `Row of the batch, of ${count(lead[0])}`, inputs[0]));
  const pool = h(
    "select",
    { onchange: () => go({ pool: pool.value === "extreme" ? null : pool.value }, { replace: true }) },
    [["extreme", "the largest magnitude"], ["mean", "the mean"]].map(([value, name]) =>
      h("option", { value, selected: (state.get("pool") ?? "extreme") === value }, name),
    ),
  );
  const found = [...labelled, h("label", {}, "Of several values show", pool)];
  if (dimensions.length === 1) {
    const fold = h("input", {
      type: "number", min: 1, value: about.shown.columns,
      onchange: () => go({ fold: fold.value || null, ...NONE }, { replace: true }),
    });
    found.push(h("label", {}, "Values of a line", fold));
  }
  return found;
}

function indices(lead, lengths) {
  const found = [];
  for (const length of [...lengths].reverse()) {
    found.unshift(lead % length);
    lead = Math.floor(lead / length);
  }
  return found;
}

function statistics(about) {
  const { values, shown: of } = about;
  const share = values.values ? (100 * values.zeros) / values.values : 0;
  return facts([
    ["Values", values.read < of.size ? `${count(of.size)}; the statistics are of ${count(values.read)}` : count(of.size)],
    ["Min", number(values.min)],
    ["Mean", number(values.mean)],
    ["Std", number(values.std)],
    ["Max", number(values.max)],
    ["Zeros", `${count(values.zeros)} (${number(share, 3)} %)`],
    ["NaN", values.nan ? count(values.nan) : null],
    ["Infinite", values.inf ? count(values.inf) : null],
  ]);
}

function described(about) {
  const twin = about.overflowed ? `${about.shown.dtype}, because float16 could not hold the values` : about.shown.dtype;
  return facts([
    ["Place in the layer", `${count(about.place + 1)} of ${count(about.of)}`],
    ["Step", about.step],
    ["Token", about.token],
    ["Call in the step", about.call || null],
    ["Request", about.request],
    ["Model", about.model],
    ["Shape", shape(about.shown.shape)],
    ["Shape of the source", about.transform ? shape(about.source_shape) : null],
    ["Transform", about.transform],
    ["Type", about.source_dtype],
    ["Stored as", `${twin}${about.dtype === null ? ", assumed" : ""}`],
    ["Codec", about.codec],
    ["Stored", size(about.stored_bytes)],
    ["Mean squared error", about.mse === null ? null : number(about.mse)],
    ["Normalised error", about.normalized_mse === null ? null : number(about.normalized_mse)],
    ["Row of the index", count(about.row)],
  ]);
}
