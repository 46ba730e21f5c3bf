// The features of a sparse autoencoder: a list, and one with its contexts.

import { ask } from "./api.js";
import { bars } from "./charts.js";
import { contexts, effects } from "./contexts.js";
import { facts, h, number, plural } from "./dom.js";
import { pager, rove } from "./lists.js";

const EACH = 100;
const ORDERS = [["maximum", "largest activation"], ["density", "density"], ["feature", "number"]];

let shown = null;

export async function features(root, state, tools) {
  const { go, href, signal } = tools;
  const order = state.get("order") ?? "maximum";
  const begin = Number(state.get("begin") ?? 0);
  const key = JSON.stringify([order, begin]);
  if (shown?.key !== key || !root.contains(shown.panel)) {
    const found = await ask("features", { order, begin, count: EACH }, signal);
    if (signal.aborted) return;
    const links = found.features.map((one) =>
      h(
        "a",
        { href: href({ feature: one.feature }), "data-feature": one.feature, "data-replace": true },
        h("span", {}, `feature ${one.feature}`),
        h("span", { class: "muted" }, `max ${number(one.maximum)}, ${number(100 * one.density, 3)} % of rows`),
      ),
    );
    const items = h("ul", { class: "items" }, links.map((link) => h("li", {}, link)));
    rove(items, "a", { follow: true });
    const choice = h(
      "select",
      { onchange: () => go({ order: choice.value, begin: null, feature: null }) },
      ORDERS.map(([value, name]) => h("option", { value, selected: value === order }, name)),
    );
    const wanted = h("input", {
      type: "search", inputmode: "numeric", "data-search": true, "aria-label": "Go to a feature", placeholder: "Go to feature", autocomplete: "off",
      onchange: () => wanted.value.trim() && go({ feature: wanted.value.trim() }),
    });
    const panel = h("section", { class: "panel", "aria-label": "Feature" });
    root.replaceChildren(
      h("h1", {}, "Features"),
      h(
        "div",
        { class: "split" },
        h(
          "nav",
          { "aria-label": "Features" },
          h("div", { class: "tools" }, h("label", {}, "Order by", choice), wanted),
          items,
          pager(found.total, begin, EACH, (to) => go({ begin: to || null, feature: null })),
        ),
        panel,
      ),
    );
    shown = { key, panel, links, first: found.features[0]?.feature };
  }
  const chosen = state.get("feature") ?? shown.first;
  for (const link of shown.links) {
    if (link.dataset.feature === String(chosen)) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  if (chosen === undefined) return;
  const [found, site] = await Promise.all([ask("feature", { feature: chosen }, signal), ask("site", {}, signal)]);
  if (!signal.aborted) shown.panel.replaceChildren(...one(found, site.features));
}

function one(found, about) {
  const edges = about.histogram_edges;
  const labels = found.histogram.map((_, k) =>
    k === 0 ? `below ${number(edges[0])}` : k === edges.length ? `from ${number(edges.at(-1))}` : `${number(edges[k - 1])} to ${number(edges[k])}`,
  );
  // Only the bins around those with rows.
  const there = found.histogram.map((n, k) => (n ? k : -1)).filter((k) => k >= 0);
  const [low, high] = [Math.max(0, there[0] - 1), Math.min(found.histogram.length, there.at(-1) + 2)];
  return [
    h("h2", {}, `Feature ${found.feature}`),
    facts([
      ["Layer", found.layer],
      ["Active on", `${plural(found.fired, "row")} (${number(100 * found.density, 3)} %)`],
      ["Largest activation", number(found.maximum)],
    ]),
    there.length
      ? h(
          "figure",
          { class: "chart" },
          bars(found.histogram.slice(low, high), labels.slice(low, high), "Histogram of the activations; each bin is 1.41 times as wide as the one before"),
          h("div", { class: "ends" }, h("span", {}, labels[low]), h("span", {}, labels[high - 1])),
        )
      : h("p", { class: "muted" }, "It is active on no row."),
    h("h3", {}, "Top contexts"),
    contexts(found.contexts, found.maximum),
    effects("Promoted tokens", found.promoted),
    effects("Suppressed tokens", found.suppressed),
  ].filter(Boolean);
}
