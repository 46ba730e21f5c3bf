// Measured effects: a map of nodes and tokens, the largest ones as a list, and one node.

import { ask, numbers } from "./api.js";
import { histogram } from "./charts.js";
import { breakable, count, facts, h, layerName, notice, number, plural, shortened, word } from "./dom.js";
import { HeatMap, several } from "./heatmap.js";
import { pager, rove } from "./lists.js";

const EACH = 100; // nodes of a page
const KINDS = {
  all: "all", layers: "residual stream after each layer", attention: "attention blocks", mlp: "feed-forward blocks",
  heads: "attention heads", experts: "experts", modules: "modules", nodes: "nodes",
};
const ONE = { tokens: "token", positions: "position", roles: "role", heads: "head" };

let shown = null; // the map and the list that are on the page

export async function effects(root, state, tools) {
  const { signal } = tools;
  const query = { file: state.get("file"), kind: state.get("kind") };
  const begin = Number(state.get("begin") ?? 0);
  const key = JSON.stringify([query, begin]);
  if (shown?.key !== key || !root.contains(shown.panel)) {
    const [site, found] = await Promise.all([ask("site", {}, signal), ask("effects", { ...query, begin, count: EACH }, signal)]);
    if (signal.aborted) return;
    shown = page(root, { site, found, query, begin, key }, tools);
    await shown.map.draw();
  }
  if (!signal.aborted) await node(state, tools);
}

// ---- the map and the list

function page(root, { site, found, query, begin, key }, { go, href, signal }) {
  const about = site.effects[Number(query.file ?? 0)];
  const none = { row: null, column: null, begin: null };
  const choice = (label, options, chosen, change) => {
    const select = h("select", { onchange: () => go({ ...none, ...change(select.value) }) },
      options.map(([value, name]) => h("option", { value, selected: value === chosen }, name)));
    return h("label", {}, label, select);
  };
  const names = site.effects.map(({ path }) => path.split("/").pop());
  const repeated = new Set(names).size < names.length; // files have the same name
  const files = site.effects.map(({ path }, k) => [String(k), repeated ? path : names[k]]);
  const kinds = about.kinds.map((kind) => [kind, KINDS[kind]]);
  const links = found.nodes.map((one) =>
    h(
      "a",
      { href: href({ row: one.row, column: one.column }), "data-replace": true, "data-cell": `${one.row},${one.column}` },
      h("span", {}, breakable(one.name)),
      h("span", { class: "muted" }, signed(one.effect)),
    ),
  );
  const items = h("ul", { class: "items" }, links.map((link) => h("li", {}, link)));
  rove(items, "a", { follow: true });
  const panel = h("section", { class: "panel", "aria-label": "Node" });
  const map = heatMap(found, about, query, { go, signal });
  root.replaceChildren(
    h("h1", {}, `Effects on ${about.metric}`),
    h(
      "div",
      { class: "tools" },
      files.length > 1 ? choice("File", files, String(query.file ?? 0), (file) => ({ file, kind: null })) : null,
      kinds.length > 1 ? choice("Sites", kinds, found.kind, (kind) => ({ kind })) : h("span", { class: "muted" }, `Sites: ${kinds[0][1]}`),
    ),
    facts([
      ["Method", `${about.method}, ${about.direction}`],
      ["Model", about.model],
      ["Examples", count(about.examples)],
      [`Mean ${about.metric}, clean`, number(about.clean)],
      ["Corrupted", number(about.corrupted)],
      ["File", files.length > 1 ? null : names[0]],
    ]),
    found.not_finite ? notice("fair", h("p", {}, `The effects of ${plural(found.not_finite, "node")} are NaN or infinite.`)) : "",
    found.remark ? notice("fair", h("p", {}, `${found.remark}.`)) : "",
    h(
      "div",
      { class: "split" },
      h(
        "nav",
        { "aria-label": "Largest effects" },
        h("p", { class: "muted" }, "The largest effects"),
        items,
        pager(found.total, begin, EACH, (to) => go({ begin: to || null, row: null, column: null })) ?? "",
      ),
      h("div", {}, map.element, panel),
    ),
  );
  return { key, panel, links, map, query };
}

function heatMap(found, about, query, { go, signal }) {
  const what = ONE[found.axis];
  const named = ({ top, left }) => {
    const label = map.tile.columns[left - map.rect.left][0];
    const said = found.axis === "tokens" ? `token ${JSON.stringify(word(label))}` : `${what} ${label}`;
    return `${map.full[top - map.rect.top]}, ${["all tokens", "MLP"].includes(label) ? label : said}`;
  };
  const place = (cell) => (cell.height * cell.width === 1 ? `${named(cell)}: ` : "");
  const map = new HeatMap({
    rows: found.rows,
    columns: found.columns,
    square: true,
    axes: ["nodes (rows)", `${found.axis} (columns)`],
    label: `Heat map of effects on ${about.metric}: a row for each node, a column for each ${what}`,
    nothing: "not measured",
    unit: `effect on ${about.metric}`,
    scale: found.scale,
    load: async (asked, rows, columns) => {
      const tile = await numbers("effects_tile", { ...query, ...asked, rows: Math.min(rows, 512), columns }, signal);
      map.full = tile.rows?.map(([name]) => name);
      return { ...tile, rows: map.full && shortened(map.full).map((name) => [name, false]) };
    },
    told: (cell, value) => place(cell) + (Number.isNaN(value) ? "not measured" : several(cell, value)),
    exact: async (cell) => {
      const one = await ask("effect", { ...query, row: cell.top, column: cell.left }, signal);
      return `${named(cell)}${found.axis === "tokens" && one.position !== null ? `, position ${one.position}` : ""}: ${one.exact}${spread(one)}`;
    },
    picked: (cell) => (cell.height * cell.width === 1 ? go({ row: cell.top, column: cell.left }, { replace: true }) : map.zoom(0.5)),
  });
  return map;
}

const signed = (value) => (value > 0 ? "+" : "") + number(value, 4);
const spread = (one) => (one.std_error === null ? "" : ` ± ${number(one.std_error, 3)} (standard error of ${plural(one.examples, "example")})`);
/** An interval; null is an end that the examples do not bound. */
const interval = (low, high) => `${low === null ? "−∞" : number(low)} to ${high === null ? "∞" : number(high)}`;

// ---- one node

async function node(state, { href, signal }) {
  const { panel, links, map, query } = shown;
  const [row, column] = [state.get("row"), state.get("column")];
  for (const link of links) {
    if (link.dataset.cell === `${row},${column}`) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  if (row === null || column === null) {
    panel.replaceChildren(h("p", { class: "muted" }, "Choose a node in the map or in the list."));
    return;
  }
  map.point(Number(row), Number(column));
  try {
    const found = await ask("effect", { ...query, row, column, capture: state.get("capture") }, signal);
    if (!signal.aborted) panel.replaceChildren(...one(found, href));
  } catch (error) {
    if (error.name !== "AbortError") panel.replaceChildren(notice("bad", h("p", {}, error.message)));
  }
}

function one(found, href) {
  const links = found.captured.map(({ layer, lead }) => h("li", {}, h("a", { href: href({ view: "layer", layer, lead }) }, breakable(layerName(layer)))));
  return [
    h("h2", {}, breakable(found.name)),
    facts([
      ["Effect", found.exact],
      ["Standard error", found.std_error === null ? null : number(found.std_error)],
      ["95 % interval", found.interval && interval(...found.interval)],
      ["Of clean − corrupted", found.share === null ? null : `${number(100 * found.share, 3)} %`],
      ["Examples above 0", `${count(found.positive)} of ${count(found.examples)}`],
      ["NaN or infinite", found.not_finite ? count(found.not_finite) : null],
      ["Layer", found.layer],
      ["Head", found.head],
      ["Position", found.position],
      ["Token", found.token === null ? null : JSON.stringify(word(found.token))],
      ["Role", found.role],
    ]),
    found.edges ? h("h3", {}, "Effects on the examples") : "",
    found.edges ? histogram(found.edges, found.counts) : "",
    links.length ? h("h3", {}, "In the capture") : "",
    links.length ? h("ul", {}, links) : h("p", { class: "muted" }, "The capture does not have this layer."),
  ].filter(Boolean);
}
