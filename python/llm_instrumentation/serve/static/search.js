// Search: tokens by their text or id, texts by their labels.

import { ask } from "./api.js";
import { h, notice, plural, spoken, word } from "./dom.js";
import { pager, rove } from "./lists.js";
import { entry } from "./tokens.js";

const EACH = 100;
const KINDS = [
  ["text", "tokens by their text", "A word, or a part of one"],
  ["id", "tokens by their ids", "Ids, as 7 or 7,11"],
  ["label", "texts by document, label or request", "A part of a name"],
];

export async function search(root, state, { go, href, signal }) {
  const q = state.get("q") ?? "";
  const kind = state.get("kind") ?? "text";
  const begin = Number(state.get("begin") ?? 0);
  const input = h("input", { type: "search", "data-search": true, value: q, "aria-label": "Search for", autocomplete: "off", spellcheck: "false" });
  const choice = h("select", { "aria-label": "What to search", onchange: () => suggest() }, KINDS.map(([value, name]) => h("option", { value, selected: value === kind }, name)));
  const suggest = () => (input.placeholder = KINDS.find(([value]) => value === choice.value)[2]);
  suggest();
  const form = h(
    "form",
    { class: "tools", role: "search", onsubmit: (event) => (event.preventDefault(), go({ q: input.value, kind: choice.value, begin: null })) },
    choice, input, h("button", {}, "Search"),
  );
  const results = h("div", { "aria-live": "polite" });
  root.replaceChildren(h("h1", {}, "Search"), form, results);
  let found;
  try {
    if (!q) return void results.replaceChildren(await hint(state.get("capture"), { href, signal }));
    found = await ask("search", { capture: state.get("capture"), q, kind, begin, count: EACH }, signal);
  } catch (error) {
    if (error.name !== "AbortError") results.replaceChildren(notice("bad", h("p", {}, error.message)));
    return;
  }
  if (signal.aborted) return;
  const what = kind === "label" ? "text" : "token";
  const items = h("ul", { class: "items wide" }, found.hits.map((hit) => h("li", {}, kind === "label" ? entry(hit, href) : place(hit, href))));
  rove(items, "a");
  results.replaceChildren(h("p", {}, `${plural(found.total, what)} found.`), found.total ? items : "", pager(found.total, begin, EACH, (to) => go({ begin: to || null })) ?? "");
}

/** What can be searched, each with an example from the capture. */
async function hint(capture, { href, signal }) {
  const { texts } = await ask("texts", { capture, count: 1 }, signal);
  if (!texts.length) return h("p", { class: "muted" }, "The model was given no texts.");
  const [{ begins, document, request }] = texts;
  const example = (kind, q) => (q === undefined || q === null ? null : h("a", { href: href({ view: "search", q, kind: kind === "text" ? null : kind }) }, q));
  const known = begins.filter(([, says]) => says !== null).map(([id, says]) => [id, says.trim()]);
  const [id, says] = (known.length ? known : begins).toSorted((a, b) => (b[1]?.length ?? 0) - (a[1]?.length ?? 0))[0] ?? [];
  const kinds = [
    ["The text of a token, or a part of it, in upper or lower case", known.length ? example("text", says) : "the texts of tokens are unknown: start strap serve with --tokenizer"],
    ["Ids of tokens, with commas between them", example("id", id) ?? "the ids of tokens are unknown"],
    ["A document, label or request, or a part of it", example("label", document ?? request) ?? "the first text has none"],
  ];
  return h("dl", { class: "hint" }, kinds.map(([what, shown]) => h("div", {}, h("dt", {}, what), h("dd", {}, typeof shown === "string" ? shown : ["for example ", shown]))));
}

function place(hit, href) {
  const to = { view: "tokens", sequence: hit.sequence, step: hit.step, position: hit.position, q: null, kind: null, begin: null };
  const words = [...hit.before, hit.text ?? `[${hit.token_id}]`, ...hit.behind];
  const shown = (text, k) => (k === hit.before.length ? h("mark", {}, word(text)) : word(text));
  return h(
    "a",
    { href: href(to) },
    h("span", { class: "said-there" }, hit.more_before ? "… " : "", spoken(words, shown), hit.more_behind ? "…" : ""),
    h("span", { class: "muted" }, `id ${hit.token_id}, text ${hit.sequence}, step ${hit.step}, position ${hit.position}${hit.decoder ? ", decoder" : ""}${hit.document ? `, ${hit.document}` : ""}`),
  );
}
