// The overview: what was captured, its problems, and its layers.

import { ask } from "./api.js";
import { sparkline } from "./charts.js";
import { count, facts, h, later, layerName, notice, number, plural, seconds, shape, size } from "./dom.js";
import { pager, rove } from "./lists.js";

const EACH = 100;
const STATES = {
  running: ["fair", "running"],
  closed: ["good", "closed"],
  "no index": ["fair", "no index"],
  damaged: ["bad", "damaged"],
};

export async function overview(root, state, { go, href, signal }) {
  const begin = Number(state.get("begin") ?? 0);
  const wanted = state.get("q") ?? "";
  const capture = state.get("capture");
  const [about, found] = await Promise.all([
    ask("overview", { capture }, signal),
    ask("layers", { capture, q: wanted, begin, count: EACH }, signal),
  ]);
  if (signal.aborted) return;
  const table = h("div", { id: "layers" }, layers(found, begin, { go, href }));
  const find = h("input", {
    type: "search", "data-search": true, value: wanted, "aria-label": "Search layers", placeholder: "Search layers",
    autocomplete: "off", spellcheck: "false",
    oninput: later(async () => {
      const q = find.value;
      go({ q, begin: null }, { replace: true, render: false });
      const answer = await ask("layers", { capture, q, count: EACH }, signal).catch(() => null);
      if (answer && q === find.value) table.replaceChildren(...layers(answer, 0, { go, href }));
    }, 120),
  });
  root.replaceChildren(
    h("h1", {}, about.path.split("/").pop()),
    ...problems(about, { href }),
    described(about),
    h("h2", {}, "Layers"),
    h("div", { class: "tools" }, find),
    table,
  );
}

function described(about) {
  const [tone, says] = STATES[about.state];
  const steps = about.first_step === null ? "" : `, ${about.first_step} to ${about.last_step}`;
  const listed = (counts) => Object.entries(counts).map(([name, n]) => `${name} (${count(n)})`).join(", ");
  return facts([
    ["State", h("span", { class: `badge ${tone}` }, says)],
    ["Models", about.models.join(", ")],
    ["Layers", count(about.layers)],
    ["Tensors", count(about.tensors)],
    ["Packets", count(about.packets)],
    ["Steps", `${count(about.steps)}${steps}`],
    ["Tokens recorded", about.tokens === null ? null : count(about.tokens)],
    ["Types", listed(about.source_dtypes)],
    ["Stored as", listed(about.stored_dtypes)],
    ["Codecs", listed(about.codecs)],
    ["Size of the tensors", about.ratio ? size(about.raw_bytes) : null],
    ["Stored", size(about.stored_bytes) + (about.ratio ? `, ${about.ratio.toFixed(2)} times smaller` : "")],
    ["File", size(about.file_bytes)],
    ["Time", about.seconds === null ? null : seconds(about.seconds)],
    ["Path", about.path],
  ]);
}

function problems(about, { href }) {
  const found = [];
  if (about.problem) {
    found.push(notice("bad", h("p", {}, about.problem), h("p", {}, "What is intact is shown. strap salvage copies it to a new stream.")));
  }
  if (about.state === "running") {
    found.push(notice("plain", h("p", {}, "A process is writing the capture. Reload shows what it has written since.")));
  }
  if (about.state === "no index") {
    found.push(notice("fair", h("p", {}, "The capture has no index: of its packets only names and sizes are known.")));
  }
  if (about.tokens_problem) found.push(notice("fair", h("p", {}, about.tokens_problem)));
  if (about.checkpoint) found.push(notice("plain", h("p", {}, `${about.checkpoint}: the capture can be resumed.`)));
  if (about.untyped) {
    const of = `The types of ${plural(about.untyped, "layer")} are unknown, because no index has them.`;
    found.push(notice("fair", h("p", {}, `${of} Their values are taken for float16, which is what float32 is stored as.`)));
  }
  if (about.missing) {
    const more = about.missing - about.missing_tensors.length;
    found.push(
      notice(
        "fair",
        h("p", {}, `${plural(about.missing, "tensor")} could not be captured, or ${about.missing === 1 ? "is" : "are"} incomplete.`),
        h(
          "details",
          {},
          h("summary", {}, "Which, and why"),
          h("ul", {}, about.missing_tensors.map((one) => h("li", {}, `${layerName(one.name)}${one.step === null ? "" : `, step ${one.step}`}: ${one.error}`))),
          more > 0 ? h("p", {}, `and ${count(more)} more`) : null,
        ),
      ),
    );
  }
  if (!about.tensors) found.push(notice("plain", h("p", {}, "The capture has no tensors.")));
  return found;
}

function layers(found, begin, { go, href }) {
  if (!found.total) return [h("p", { class: "muted" }, "No layer has such a name.")];
  const heads = ["Layer", "Norms", "Tensors", "Steps", "Shape", "Type", "Stored as", "Stored", "Ratio"];
  const rows = found.layers.map((one) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, h("a", { href: href({ view: "layer", layer: one.name }) }, layerName(one.name))),
      h("td", {}, one.norms ? sparkline(one.norms, `root mean square, ${number(one.norms[0])} to ${number(one.norms.at(-1))}`) : ""),
      h("td", { class: "n" }, count(one.tensors)),
      h("td", { class: "n" }, one.first_step === null ? "–" : one.first_step === one.last_step ? one.first_step : `${one.first_step}–${one.last_step}`),
      h("td", { class: "t" }, shape(one.shape)),
      h("td", {}, one.source_dtypes.join(", ") || "–"),
      h("td", {}, one.stored_dtypes.join(", ") || "–"),
      h("td", { class: "n" }, size(one.stored_bytes)),
      h("td", { class: "n" }, one.ratio === null ? "–" : one.ratio.toFixed(2)),
    ),
  );
  const body = h("tbody", {}, rows);
  rove(body, "a");
  const head = h("tr", {}, heads.map((name, k) => h("th", { scope: "col", class: [2, 3, 7, 8].includes(k) ? "n" : null }, name)));
  return [
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, head), body)),
    pager(found.total, begin, EACH, (to) => go({ begin: to || null })),
  ].filter(Boolean);
}
