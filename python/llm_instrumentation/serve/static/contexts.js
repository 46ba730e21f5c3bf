// Contexts with their tokens coloured by value, and tokens whose logits are raised or lowered.

import { h, number, word } from "./dom.js";

/**
 * Contexts, one below the other. The nearer a value is to the extreme one, the stronger its colour.
 * With `href` each has a link to its text.
 */
export function contexts(found, extreme, href = null) {
  return h("ol", { class: "contexts" }, found.map((context) => h("li", {}, ...said(context, extreme, href))));
}

function said(context, extreme, href) {
  const words = context.token_ids.map((id, k) => {
    const says = context.texts?.[k];
    const value = context.values[k];
    const share = extreme && value !== null ? value / extreme : 0;
    const strength = share > 0 ? Math.min(9, Math.max(1, Math.round(9 * share))) : 0;
    const shade = h("span", { class: `shade s${strength}`, title: number(value) }, says === null || says === undefined ? `[${id}] ` : word(says));
    return k === context.peak ? h("strong", {}, shade) : shade;
  });
  const where = context.sequence < 0 ? "" : `text ${context.sequence}, position ${context.position}`;
  const about = [number(context.value), context.document, where].filter(Boolean).join(" · ");
  return [h("p", {}, words), h("p", { class: "muted" }, href && where ? h("a", { href: href(context) }, about) : about)];
}

/** Tokens with their effects; null: they are unknown. */
export function effects(name, found) {
  if (!found) return null;
  return h("div", {}, h("h3", {}, name), h("p", { class: "effects" }, found.map((one) => h("span", { class: "effect" }, `${one.text === null ? `[${one.token_id}]` : JSON.stringify(word(one.text))} ${number(one.value)}`))));
}
