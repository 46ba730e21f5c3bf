// The texts that the model was given, the tokens of one, and their vectors over the layers.

import { ask, numbers } from "./api.js";
import { count, h, layerName, notice, number, plural, shortened, spoken, word } from "./dom.js";
import { HeatMap } from "./heatmap.js";
import { pager, rove } from "./lists.js";

const EACH = 100; // texts
const TOKENS = 256; // of a page
const [FEW, MANY] = [8, 64]; // layers of the first request for norms, and of the next ones

let shown = null; // the text that is on the page

export async function tokens(root, state, tools) {
  if (state.get("sequence") === null) return texts(root, state, tools);
  const key = JSON.stringify(["capture", "sequence", "begin", "layers", "step", "position"].map((name) => state.get(name)));
  if (shown?.key !== key || !root.contains(shown.panel)) shown = await text(root, state, key, tools);
  if (shown && !tools.signal.aborted) await token(state, tools);
}

// ---- the list of texts

async function texts(root, state, { go, href, signal }) {
  const begin = Number(state.get("begin") ?? 0);
  const found = await ask("texts", { capture: state.get("capture"), begin, count: EACH }, signal);
  if (signal.aborted) return;
  const items = h("ul", { class: "items wide" }, found.texts.map((one) => h("li", {}, entry(one, href))));
  rove(items, "a");
  root.replaceChildren(
    h("h1", {}, "Texts that the model was given"),
    found.total ? items : notice("plain", h("p", {}, "The model was given no texts.")),
    pager(found.total, begin, EACH, (to) => go({ begin: to || null })) ?? "",
  );
}

/** A link to a text. */
export function entry(one, href) {
  const steps = one.first_step === one.last_step ? `step ${one.first_step}` : `steps ${one.first_step} to ${one.last_step}`;
  const labels = [one.document, one.labels, one.request].filter(Boolean).join(", ");
  const decoder = one.decoder_tokens ? `, ${plural(one.decoder_tokens, "token")} of the decoder` : "";
  return h(
    "a",
    { href: href({ view: "tokens", sequence: one.sequence, begin: null, at: null, q: null, kind: null }) },
    h("span", {}, `text ${one.sequence}`, labels ? `: ${labels}` : ""),
    h("span", { class: "muted" }, `${plural(one.tokens, "token")}${decoder}, ${steps}`),
    one.begins.length ? h("span", { class: "begins" }, one.begins.map(([id, says]) => `${says === null ? `[${id}]` : word(says)} `)) : null,
  );
}

// ---- one text

async function text(root, state, key, { go, href, signal }) {
  const capture = state.get("capture");
  const sequence = state.get("sequence");
  const layers = state.get("layers");
  const begin = Number(state.get("begin") ?? 0);
  const found = await ask("text", { capture, sequence, layers, begin, count: TOKENS, step: state.get("step"), position: state.get("position") }, signal);
  if (signal.aborted) return null;
  const says = found.tokens.map((one) => (one.text === null ? one.label : one.text));
  const chips = found.tokens.map((one, k) =>
    h(
      "button",
      {
        type: "button", class: "token", "aria-pressed": "false", "data-token": found.begin + k, "data-step": one.step, "data-about": about(one, found.begin + k),
        title: `${JSON.stringify(word(says[k]))}, ${about(one, found.begin + k)}`,
        onclick: () => go({ at: found.begin + k, step: null, position: null, begin: found.begin || null }, { replace: true }),
      },
      h("bdi", {}, word(says[k]) || "∅"),
    ),
  );
  const words = says.map((text) => h("span", {}, word(text)));
  const sentence = h("p", { class: "sentence" }, spoken(says, (_, k) => words[k]));
  const list = h("div", { class: "tokens", role: "group", "aria-label": "Tokens of the text" }, chips);
  const pattern = h("input", {
    type: "search", "data-search": true, value: layers ?? "", "aria-label": "Layers", placeholder: "Layers, as model.layers.*.mlp", autocomplete: "off", spellcheck: "false",
    onchange: () => go({ layers: pattern.value.trim() || null }),
  });
  const panel = h("section", { "aria-label": "Vectors of the token" });
  const [chosen, many] = [found.layers.slice(0, 256), found.layers.length];
  const values = new Float32Array(chosen.length * found.tokens.length).fill(NaN);
  const map = new HeatMap({
    columns: found.tokens.length,
    zooms: false,
    ...rows(chosen),
    heads: list,
    label: "Norms of the vectors, a row for each layer and a column for each token",
    nothing: "no vector",
    scale: null,
    positive: true,
    told: (cell, value) => `${layerName(chosen[cell.top])}, token ${found.begin + cell.left} ${JSON.stringify(chips[cell.left]?.textContent ?? "")}: norm ${number(value)}`,
    picked: (cell) => chips[cell.left].click(),
  });
  root.replaceChildren(
    h("p", {}, h("a", { href: href({ sequence: null, at: null, begin: null, layers: null, step: null, position: null }) }, "All texts")),
    h("h1", {}, `Text ${sequence}`, found.document ? `: ${found.document}` : ""),
    sentence,
    pager(found.total, found.begin, TOKENS, (to) => go({ begin: to || null, at: null, step: null, position: null })) ?? "",
    h("h2", {}, "Norms over the layers"),
    h("div", { class: "tools" }, pattern, h("span", { class: "muted" }, layers ? plural(many, "layer") : `${plural(many, "block")} of the model`)),
    map.element,
    panel,
  );
  rove(list, "button", { follow: true });
  shown = { key, panel, chips, words, map, layers: chosen, begin: found.begin, place: found.place, problems: {} };
  const here = shown;
  here.done = norms(here, values, found, { capture, sequence, layers }, signal);
  await here.done;
  return here;
}

const about = (one, k) => `token ${k}, step ${one.step}, position ${one.position}${one.token_id < 0 ? "" : `, id ${one.token_id}`}`;

async function norms(here, values, found, query, signal) {
  const columns = found.tokens.length;
  for (let first = 0; first < here.layers.length && columns; first += first ? MANY : FEW) {
    const many = Math.min(first ? MANY : FEW, here.layers.length - first);
    const part = await numbers("norms", { ...query, first, many, begin: found.begin, count: columns }, signal);
    const [rows, wide] = part.shape;
    for (let row = 0; row < rows; row += 1) {
      values.set(part.values.subarray(row * wide, (row + 1) * wide), (first + row) * columns);
    }
    Object.assign(here.problems, part.problems);
    here.map.update({ values, shape: [here.layers.length, columns], sampled: false });
  }
  const problems = Object.entries(here.problems);
  here.map.axis.textContent = `${plural(here.layers.length, "layer")}, tokens ${found.begin} to ${found.begin + columns - 1}`;
  if (problems.length) here.map.axis.textContent += `; ${plural(problems.length, "layer")} without vectors: ${problems[0][1]}`;
}

/** How a heat map shows a row for each layer. */
function rows(layers) {
  return { rows: layers.length, tall: Math.max(36, Math.min(864, layers.length * 18)), names: shortened(layers.map(layerName)) };
}

// ---- one token

async function token(state, { go, href, signal }) {
  const { chips, words, panel, map, layers, begin, place } = shown;
  const given = state.get("at") ?? place;
  for (const chip of chips) chip.setAttribute("aria-pressed", String(chip.dataset.token === String(given)));
  for (const [k, one] of words.entries()) one.classList.toggle("marked", given !== null && k === Number(given) - begin);
  map.mark(given === null ? null : Number(given) - begin);
  if (given === null) {
    panel.replaceChildren(h("p", { class: "muted" }, "Choose a token to see its vectors."));
    return;
  }
  const query = { capture: state.get("capture"), sequence: state.get("sequence"), layers: state.get("layers"), at: given };
  let found;
  try {
    found = await numbers("vectors", { ...query, many: 64, columns: 512 }, signal);
  } catch (error) {
    if (error.name !== "AbortError") panel.replaceChildren(notice("bad", h("p", {}, error.message)));
    return;
  }
  if (signal.aborted) return;
  const [high, columns] = found.shape;
  const chip = chips[Number(given) - begin];
  const vectors = new HeatMap({
    columns,
    zooms: false,
    ...rows(layers.slice(0, high)),
    label: "The vectors of the token, a row for each layer",
    nothing: "no vector",
    scale: null,
    told: (cell, value) => `${layerName(layers[cell.top])}, place ${cell.left} of ${columns}: ${number(value)}`,
    picked: (cell) => go({ view: "layer", layer: layers[cell.top], step: chip?.dataset.step ?? null, sequence: null, at: null, layers: null, begin: null, position: null }),
  });
  panel.replaceChildren(
    h("h2", {}, `Vectors of ${chip ? JSON.stringify(chip.textContent) : "the token"}`),
    chip ? h("p", { class: "muted" }, `${chip.dataset.about}. A row for each layer${layers.length > high ? `, the first ${high}` : ""}; a click opens the tensor.`) : "",
    vectors.element,
  );
  vectors.update({ ...found, sampled: false });
  vectors.axis.textContent = `${plural(high, "layer")}, ${count(columns)} columns`;
}
