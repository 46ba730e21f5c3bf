// The page: its address is its state. Links and `go` change the address, and a view shows it.

import { ask } from "./api.js";
import { h, notice } from "./dom.js";
import { effects } from "./effects.js";
import { features } from "./features.js";
import { layer } from "./layer.js";
import { overview } from "./overview.js";
import { search } from "./search.js";
import { tokens } from "./tokens.js";
import { units } from "./units.js";

const VIEWS = { overview, layer, tokens, search, units, features, effects };
const NAMES = [["overview", "Overview"], ["tokens", "Tokens"], ["search", "Search"], ["units", "Units"], ["features", "Features"], ["effects", "Effects"]];
const GIVEN = ["features", "effects"]; // views of what strap serve may be given beside the captures

const main = document.getElementById("main");
const help = document.getElementById("help");
let site = null;
const known = ask("site").then((found) => {
  site = found;
  head();
});
let running = new AbortController();

const present = () => new URLSearchParams(location.search);

/** The address of the present state with some values changed; null removes one. */
function href(changes) {
  const state = present();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined) state.delete(name);
    else state.set(name, value);
  }
  const query = state.toString();
  return query ? `?${query}` : "/";
}

/** Goes to the address with some values changed. */
function go(changes, { replace = false, render: shows = true } = {}) {
  const to = href(changes);
  if (to !== (location.search || "/")) history[replace ? "replaceState" : "pushState"](null, "", to);
  if (shows) render();
}

/** The address of a view of the same capture, without what belongs to another view. */
function view(name) {
  const capture = present().get("capture");
  const state = new URLSearchParams();
  if (capture) state.set("capture", capture);
  if (name !== "overview") state.set("view", name);
  return state.size ? `?${state}` : "/";
}

/** The address of a link of the overview or of a list, which leaves out what is of the view. */
function linked(changes) {
  if (changes.view === undefined) return href(changes);
  const state = new URLSearchParams(view(changes.view ?? "overview").replace(/^\//, ""));
  for (const [name, value] of Object.entries(changes)) {
    if (name !== "view" && value !== null) state.set(name, value);
  }
  return state.size ? `?${state}` : "/";
}

async function render() {
  running.abort();
  running = new AbortController();
  const { signal } = running;
  const state = present();
  const name = state.get("view") ?? "overview";
  document.body.dataset.state = "loading";
  tabs();
  try {
    const show = VIEWS[name];
    if (!show) throw new Error(`There is no view ${JSON.stringify(name)}.`);
    await Promise.all([known, show(main, state, { go, href: linked, signal })]);
  } catch (error) {
    if (signal.aborted || error.name === "AbortError") return;
    main.replaceChildren(h("h1", {}, "This cannot be shown"), notice("bad", h("p", {}, error.message)), h("p", {}, h("a", { href: view("overview") }, "Go to the overview")));
  }
  await known.catch(() => null); // the error is shown
  if (signal.aborted) return;
  const title = main.querySelector("h1")?.textContent;
  document.title = title ? `${title} – strap serve` : "strap serve";
  document.body.dataset.state = "ready";
  performance.mark("shown");
}

// ---- the head of the page

function head() {
  const shown = NAMES.filter(([name]) => !GIVEN.includes(name) || (Array.isArray(site[name]) ? site[name].length : site[name]));
  document.getElementById("views").replaceChildren(...shown.map(([name, title]) => h("a", { "data-view": name }, title)));
  tabs();
  const capture = h(
    "select",
    { "aria-label": "Capture", onchange: () => { history.pushState(null, "", capture.value === "0" ? "/" : `?capture=${capture.value}`); render(); } },
    site.captures.map((path, k) => h("option", { value: k, selected: String(k) === (present().get("capture") ?? "0") }, path)),
  );
  document.getElementById("tools").replaceChildren(
    ...(site.captures.length > 1 ? [capture] : []),
    h("button", { type: "button", title: "Read what the capture has written since", onclick: reload }, "Reload"),
    h("button", { type: "button", title: "Keys", "aria-label": "Help", onclick: () => help.showModal() }, "?"),
  );
}

/** Lets the tabs lead to the views of the present capture, and marks the one that is shown. */
function tabs() {
  const name = present().get("view") ?? "overview";
  for (const link of document.querySelectorAll("#views a")) {
    link.setAttribute("href", view(link.dataset.view));
    if (link.dataset.view === (name === "layer" ? "overview" : name)) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

async function reload() {
  try {
    await ask("overview", { capture: present().get("capture"), refresh: 1 });
    main.replaceChildren();
    await render();
  } catch (error) {
    main.replaceChildren(h("h1", {}, "The capture cannot be read again"), notice("bad", h("p", {}, error.message)));
  }
}

// ---- links and keys

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]");
  if (!link || link.hash || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  const replace = link.dataset.replace !== undefined;
  if (link.href !== location.href) history[replace ? "replaceState" : "pushState"](null, "", link.href);
  const stays = main.contains(link) && replace;
  render().then(() => {
    if (!stays && !main.contains(document.activeElement)) main.focus({ preventScroll: true });
  });
  if (!stays) scrollTo(0, 0);
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.target.matches("input, select, textarea")) return;
  if (event.key === "?") help.showModal();
  else if (event.key === "/") main.querySelector("[data-search]")?.focus();
  else return;
  event.preventDefault();
});

addEventListener("popstate", render);

render();
