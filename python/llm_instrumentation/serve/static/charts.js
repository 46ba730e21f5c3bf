// Small charts as SVG, and the legend of a heat map.

import { paint } from "./colors.js";
import { count, h, number, svg } from "./dom.js";

/** A line without axes. */
export function sparkline(values, label) {
  const [width, height] = [96, 22];
  const high = Math.max(...values);
  const low = Math.min(...values);
  const y = (value) => (high > low ? 2 + ((high - value) / (high - low)) * (height - 4) : height / 2);
  const x = (k) => (values.length > 1 ? 1 + (k / (values.length - 1)) * (width - 2) : width / 2);
  const line = values.map((value, k) => `${x(k).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  return svg(
    "svg",
    { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label },
    svg("title", {}, label),
    values.length > 1
      ? svg("polyline", { points: line })
      : svg("circle", { cx: x(0), cy: y(values[0]), r: 2.5 }),
  );
}

/** Bars, with a label of each for the mouse. */
export function bars(counts, labels, description) {
  const [width, height] = [640, 130];
  const most = Math.max(...counts, 1);
  const each = width / counts.length;
  return svg(
    "svg",
    { class: "bars", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": description, preserveAspectRatio: "none" },
    counts.map((n, k) => {
      const tall = n ? Math.max(1.5, (n / most) * (height - 2)) : 0;
      const bar = { x: k * each, y: height - tall, width: Math.max(1, each - 1), height: tall };
      return svg("rect", bar, svg("title", {}, `${labels[k]}: ${count(n)}`));
    }),
  );
}

export function histogram(edges, counts) {
  const [low, high] = edges;
  const edge = (k) => number(low + ((high - low) * k) / counts.length);
  const labels = counts.map((_, k) => `${edge(k)} to ${edge(k + 1)}`);
  const described = `Histogram of the values from ${number(low)} to ${number(high)}`;
  const share = -low / (high - low);
  const zero = share > 0.1 && share < 0.9 ? h("span", { class: "zero" }, "0") : null;
  if (zero) zero.style.left = `${share * 100}%`;
  return h(
    "figure",
    { class: "chart" },
    bars(counts, labels, described),
    h("div", { class: "ends" }, h("span", {}, number(low)), zero, h("span", {}, number(high))),
  );
}

/** What the colours mean; without the half for values below zero if there are none. `unit` is of the values. */
export function legend(scale, { nothing = "", signed = true, unit = "" } = {}) {
  const width = 160;
  const low = signed ? -scale : 0;
  const strip = h("canvas", { width, height: 1, "aria-hidden": "true" });
  const image = new ImageData(width, 1);
  paint(Float32Array.from({ length: width }, (_, k) => low + (k / (width - 1)) * (scale - low)), scale, image.data);
  strip.getContext("2d").putImageData(image, 0, 0);
  return h(
    "div",
    { class: "legend" },
    h("span", {}, number(low)), strip, h("span", {}, number(scale)), unit ? h("span", {}, unit) : null,
    nothing ? [h("i", { class: "nothing" }), h("span", {}, nothing)] : null,
  );
}
