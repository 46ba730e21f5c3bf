// Makes elements, and writes numbers for people.

const LONG = 16; // characters of a name that has room beside a map on a phone
const SVG = "http://www.w3.org/2000/svg";

/** An element. Attributes that begin with "on" are listeners; false and null leave one out. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An element of SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Calls a function once, when it was not asked for again for some milliseconds. */
export function later(action, milliseconds) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...given), milliseconds);
  };
}

export const count = (n) => n.toLocaleString("en-US");
export const plural = (n, what) => `${count(n)} ${what}${n === 1 ? "" : "s"}`;
export const layerName = (name) => name || "(the model)";
/** A name with dots as what an element has. A line may end behind a dot. */
export const breakable = (name) => name.split(/(?<=\.)/).flatMap((part) => [part, h("wbr")]);
export const shape = (dimensions) =>
  dimensions ? `[${dimensions.map((n) => n ?? "*").join(", ")}]` : "unknown";

/** A number with few significant digits; "–" where JSON has null. */
export function number(value, digits = 5) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const text = value.toPrecision(digits);
  return String(Math.abs(value) >= 1e-4 && Math.abs(value) < 1e6 ? Number(text) : Number(text).toExponential());
}

/** A size in units of 1,024. */
export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (bytes >= 1023.5 && power < units.length - 1) {
    bytes /= 1024;
    power += 1;
  }
  return `${Number(bytes.toPrecision(3))} ${units[power]}`;
}

export function seconds(value) {
  if (value >= 600) return `${number(value / 60, 3)} min`;
  return value >= 1 ? `${number(value, 3)} s` : `${number(value * 1000, 3)} ms`;
}

/** A text of a token as people read it: "↵" for a new line. */
export function word(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "→").replace(/[\u0000-\u001f\u007f-\u009f\u2028-\u202e\u2066-\u2069]/g, "·");
}

/** Texts of tokens one after the other. Those of some tokenizers have the spaces between words. */
export function spoken(texts, shown = word) {
  const gap = texts.some((text) => text.startsWith(" ")) ? "" : " ";
  return texts.flatMap((text, k) => [shown(text, k), gap]);
}

/** Names without what all of them begin and end with, if they are long. */
export function shortened(names) {
  if (names.length < 2 || Math.max(...names.map((name) => name.length)) <= LONG) return names;
  const parts = names.map((name) => name.split("."));
  const least = Math.min(...parts.map((one) => one.length)) - 1;
  const alike = (at, most) => {
    let n = 0;
    while (n < most && parts.every((one) => one.at(at(n)) === parts[0].at(at(n)))) n += 1;
    return n;
  };
  const first = alike((n) => n, least);
  const last = alike((n) => -1 - n, least - first);
  return parts.map((one) => `${first ? "…" : ""}${one.slice(first, one.length - last).join(".")}${last ? "…" : ""}`);
}

/** A list of names and values. Names without a value are left out. */
export function facts(pairs) {
  const told = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "facts" }, told.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

export function notice(tone, ...children) {
  return h("div", { class: `notice ${tone}`, role: tone === "bad" ? "alert" : null }, ...children);
}
