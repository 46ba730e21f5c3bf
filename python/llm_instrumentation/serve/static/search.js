// Search: tokens by their text or id, texts by their labels.

import { ask } from "./api.js";
import { h, notice, plural, word } from "./dom.js";
import { pager, rove } from "./lists.js";
import { entry } from "./tokens.js";

const EACH = 100;
const KINDS = [
  ["text", "tokens by their text"],
  ["id", "tokens by their ids"],
  ["label", "texts by document, label or request"],
];

export async function search(root, state, { go, href, signal }) {
  const q = state.get("q") ?? "";
  const kind = state.get("kind") ?? "text";
  const begin = Number(state.get("begin") ?? 0);
  const input = h("input", { type: "search", "data-search": true, value: q, "aria-label": "Search for", placeholder: "Search for", autocomplete: "off", spellcheck: "false" });
  const choice = h("select", { "aria-label": "What to search" }, KINDS.map(([value, name]) => h("option", { value, selected: value === kind }, name)));
  const form = h(
    "form",
    { class: "tools", role: "search", onsubmit: (event) => (event.preventDefault(), go({ q: input.value, kind: choice.value, begin: null })) },
    choice, input, h("button", {}, "Search"),
  );
  const results = h("div", { "aria-live": "polite" });
  root.replaceChildren(h("h1", {}, "Search"), form, results);
  if (!q) return;
  let found;
  try {
    found = await ask("search", { capture: state.get("capture"), q, kind, begin, count: EACH }, signal);
  } catch (error) {
    if (error.name !== "AbortError") results.replaceChildren(notice("bad", h("p", {}, error.message)));
    return;
  }
  if (signal.aborted) return;
  const what = kind === "label" ? "text" : "token";
  const items = h("ul", { class: "items wide" }, found.hits.map((hit) => h("li", {}, kind === "label" ? entry(hit, href) : place(hit, href))));
  rove(items, "a");
  results.replaceChildren(h("p", {}, `${plural(found.total, what)} found.`), items, pager(found.total, begin, EACH, (to) => go({ begin: to || null })) ?? "");
}

function place(hit, href) {
  const to = { view: "tokens", sequence: hit.sequence, step: hit.step, position: hit.position, q: null, kind: null, begin: null };
  return h(
    "a",
    { href: href(to) },
    h("span", {}, hit.text === null ? `[${hit.token_id}]` : JSON.stringify(word(hit.text))),
    h("span", { class: "muted" }, `id ${hit.token_id}, text ${hit.sequence}, step ${hit.step}, position ${hit.position}${hit.decoder ? ", decoder" : ""}${hit.document ? `, ${hit.document}` : ""}`),
  );
}
