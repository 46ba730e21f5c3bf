// The units of a layer: a list of all, and one with its values, related units and contexts.

import { ask, scan } from "./api.js";
import { bars } from "./charts.js";
import { contexts, effects } from "./contexts.js";
import { breakable, count, facts, h, later, layerName, notice, number, plural, shape } from "./dom.js";
import { pager, rove } from "./lists.js";

const EACH = 100;
const ORDERS = [
  ["maximum", "largest value"], ["minimum", "smallest value"], ["mean", "mean"],
  ["std", "standard deviation"], ["unit", "number"],
];

let shown = null; // the list that is on the page

export async function units(root, state, tools) {
  if (state.get("layer") === null) return layers(root, state, tools);
  const key = JSON.stringify(["capture", "layer", "order", "begin", "without"].map((name) => state.get(name)));
  if (shown?.key !== key || !root.contains(shown.panel)) shown = await list(root, state, key, tools);
  if (shown && !tools.signal.aborted) await unit(state, tools);
}

// ---- the layers to choose from

async function layers(root, state, { go, href, signal }) {
  const capture = state.get("capture");
  const begin = Number(state.get("begin") ?? 0);
  const listed = async (q, first) => {
    const found = await ask("layers", { capture, q, begin: first, count: EACH }, signal);
    const links = found.layers.map((one) =>
      h(
        "a",
        { href: href({ view: "units", layer: one.name }) },
        h("span", {}, breakable(layerName(one.name))),
        h("span", { class: "muted" }, shape(one.shape)),
      ),
    );
    const items = h("ul", { class: "items wide" }, links.map((link) => h("li", {}, link)));
    rove(items, "a");
    const turn = pager(found.total, first, EACH, (to) => go({ begin: to || null }));
    return [links.length ? items : h("p", { class: "muted" }, "No layer has such a name."), turn].filter(Boolean);
  };
  const q = state.get("q") ?? "";
  const results = h("div", {}, await listed(q, begin));
  if (signal.aborted) return;
  const find = h("input", {
    type: "search", "data-search": true, value: q, "aria-label": "Search layers", placeholder: "Search layers",
    autocomplete: "off", spellcheck: "false",
    oninput: later(async () => {
      const wanted = find.value;
      go({ q: wanted || null, begin: null }, { replace: true, render: false });
      const found = await listed(wanted, 0).catch(() => null);
      if (found && wanted === find.value) results.replaceChildren(...found);
    }, 120),
  });
  root.replaceChildren(
    h("h1", {}, "Units"),
    h("p", {}, "A unit is one value of a layer's vectors, as a neuron of an MLP. Choose a layer."),
    h("div", { class: "tools" }, find),
    results,
  );
}

// ---- the list of units

async function list(root, state, key, { go, href, signal }) {
  const [capture, layer, without] = ["capture", "layer", "without"].map((name) => state.get(name));
  const order = state.get("order") ?? "maximum";
  const begin = Number(state.get("begin") ?? 0);
  const panel = h("section", { class: "panel", "aria-label": "Unit" });
  const nav = h("nav", { "aria-label": "Units of the layer" });
  const choice = h(
    "select",
    { onchange: () => go({ order: choice.value, begin: null, unit: null }) },
    ORDERS.map(([value, name]) => h("option", { value, selected: value === order }, name)),
  );
  const wanted = h("input", {
    type: "search", inputmode: "numeric", "data-search": true, "aria-label": "Go to a unit", placeholder: "Go to unit", autocomplete: "off",
    onchange: () => wanted.value.trim() && go({ unit: wanted.value.trim() }),
  });
  const left = h("input", {
    type: "search", inputmode: "numeric", value: without ?? "", "aria-label": "Ids of tokens to leave out", placeholder: "Leave out token ids, as 0,2", autocomplete: "off",
    onchange: () => go({ without: left.value.trim() || null, begin: null }),
  });
  const results = h("div");
  nav.append(h("div", { class: "tools" }, h("label", {}, "Order by", choice), wanted, left), results);
  root.replaceChildren(
    h("p", {}, h("a", { href: href({ view: "units" }) }, "All layers"), " · ", h("a", { href: href({ view: "layer", layer }) }, "Tensors of the layer")),
    h("h1", {}, "Units of ", breakable(layerName(layer))),
    h("div", { class: "split" }, nav, panel),
  );
  let found;
  try {
    found = await long("units", { capture, layer, without, order, begin, count: EACH }, signal, results);
  } catch (error) {
    if (error.name !== "AbortError") results.replaceChildren(notice("bad", h("p", {}, error.message)));
    return null;
  }
  if (signal.aborted) return null;
  const by = order === "unit" ? "maximum" : order;
  const links = found.units.map((one) =>
    h(
      "a",
      { href: href({ unit: one.unit }), "data-unit": one.unit, "data-replace": true },
      h("span", {}, `unit ${one.unit}`),
      h("span", { class: "muted" }, `${{ maximum: "max", minimum: "min" }[by] ?? by} ${number(one[by], 4)}`),
    ),
  );
  const items = h("ul", { class: "items" }, links.map((link) => h("li", {}, link)));
  rove(items, "a", { follow: true });
  results.replaceChildren(items, pager(found.total, begin, EACH, (to) => go({ begin: to || null, unit: null })) ?? "");
  return { key, panel, links, first: found.units[0]?.unit };
}

/** An answer that takes long, with a bar at its place meanwhile. */
async function long(path, query, signal, place) {
  const bar = h("progress", { max: 1 });
  const says = h("p", { class: "muted", role: "status" }, "Reading the layer …");
  const waiting = h("div", { class: "waiting" }, bar, says);
  const timer = setTimeout(() => place.replaceChildren(waiting), 200); // not for an answer that is there
  try {
    return await scan(path, query, signal, (done, of) => {
      bar.value = of ? done / of : 0;
      says.textContent = `${count(done)} of ${plural(of, "row")}`;
    });
  } finally {
    clearTimeout(timer);
  }
}

// ---- one unit

async function unit(state, { href, signal }) {
  const { panel, links, first } = shown;
  const chosen = state.get("unit") ?? first;
  for (const link of links) {
    if (link.dataset.unit === String(chosen)) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  if (chosen === undefined) return;
  const [capture, layer, without] = ["capture", "layer", "without"].map((name) => state.get(name));
  try {
    const found = await long("unit", { capture, layer, without, unit: chosen }, signal, panel);
    if (!signal.aborted) panel.replaceChildren(...one(found, href));
  } catch (error) {
    if (error.name !== "AbortError") panel.replaceChildren(notice("bad", h("p", {}, error.message)));
  }
}

function one(found, href) {
  const { edges, quantiles } = found;
  const labels = found.histogram.map((_, k) => `${number(edges[k])} to ${number(edges[k + 1])}`);
  const textOf = ({ sequence }) => href({ view: "tokens", sequence });
  const ends = (name, of, extreme) => (of.length ? [h("h3", {}, name), contexts(of, extreme, textOf)] : []);
  return [
    h("h2", {}, `Unit ${found.unit}`),
    facts([
      ["Rows", count(found.rows)],
      ["Above 0", `${count(found.positive)} (${number((100 * found.positive) / found.rows, 3)} %)`],
      ["Min", number(quantiles[0])],
      ["Median", number(quantiles[4])],
      ["Mean", number(found.mean)],
      ["Std", number(found.std)],
      ["Max", number(quantiles.at(-1))],
      ["NaN", found.nan ? count(found.nan) : null],
    ]),
    found.histogram.some(Boolean)
      ? h(
          "figure",
          { class: "chart" },
          bars(found.histogram, labels, `Histogram of the values from ${number(edges[0])} to ${number(edges.at(-1))}`),
          h("div", { class: "ends" }, h("span", {}, number(edges[0])), h("span", {}, number(edges.at(-1)))),
        )
      : null,
    effects("Promoted tokens", found.promoted),
    effects("Suppressed tokens", found.suppressed),
    found.logits_problem ? h("p", { class: "muted" }, `The tokens that it promotes are unknown: ${found.logits_problem}`) : null,
    found.related.length ? h("h3", {}, "Units with the largest correlations") : null,
    found.related.length
      ? h("p", { class: "effects" }, found.related.map((other) => h("a", { class: "effect", href: href({ unit: other.unit }) }, `unit ${other.unit} ${number(other.correlation, 3)}`)))
      : null,
    ...ends("Highest", found.contexts, quantiles.at(-1)),
    ...ends("Lowest", found.lowest, quantiles[0]),
  ].filter(Boolean);
}
