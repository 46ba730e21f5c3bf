// The diverging colour map: orange below zero, blue above as in the figures of effects and circuits.
// People with any colour vision can tell them apart. The map is symmetric, and its middle is the
// colour of the page.

const LIGHT = ["#6e2a00", "#c4570c", "#f09a4e", "#fbd9b8", "#f7f7f5", "#cfe3f0", "#6aaed6", "#2166ac", "#053061"];
const DARK = ["#ffdcb5", "#f39a4c", "#bb5b17", "#673412", "#1a2027", "#1b4469", "#2f7cc0", "#6cb6f5", "#c6e4ff"];
const NOTHING = [138, 138, 138]; // of NaN
const STEPS = 512;

export const scheme = matchMedia("(prefers-color-scheme: dark)");

function channels(color) {
  return [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
}

function table(stops) {
  const colors = stops.map(channels);
  return Array.from({ length: STEPS }, (_, k) => {
    const place = (k / (STEPS - 1)) * (colors.length - 1);
    const at = Math.min(Math.floor(place), colors.length - 2);
    return colors[at].map((low, c) => Math.round(low + (colors[at + 1][c] - low) * (place - at)));
  });
}

const TABLES = { false: table(LIGHT), true: table(DARK) };

/** Writes the colours of values to the bytes of an image. */
export function paint(values, scale, image) {
  const colors = TABLES[scheme.matches];
  for (let k = 0; k < values.length; k += 1) {
    const value = values[k];
    const place = Math.round(((value / scale + 1) / 2) * (STEPS - 1));
    const [red, green, blue] = Number.isNaN(value) ? NOTHING : colors[Math.max(0, Math.min(STEPS - 1, place))];
    image[4 * k] = red;
    image[4 * k + 1] = green;
    image[4 * k + 2] = blue;
    image[4 * k + 3] = 255;
  }
}
