"use strict";
// The data of the page: typed arrays from base64, columns, palettes of both themes, and a grid to find near points.
const byId = (id) => document.getElementById(id);
const meta = JSON.parse(byId("data-meta").textContent);
const count = meta.count;
const NONE = 65535; // code of a missing value
const darkTheme = matchMedia("(prefers-color-scheme: dark)");

function readBytes(id) {
  const text = atob(byId(id).textContent);
  const bytes = new Uint8Array(text.length);
  for (let k = 0; k < text.length; k++) bytes[k] = text.charCodeAt(k);
  return bytes.buffer;
}

const points = new Float32Array(readBytes("data-points")); // x, y of each point
const cells = new Int32Array(readBytes("data-cells")); // thumbnail of each point, or -1
const shapes = new Uint8Array(readBytes("data-shapes")); // width and height of each thumbnail
const near = new Int32Array(readBytes("data-near")); // nearest points in the full space, or -1
const nearCosines = new Float32Array(readBytes("data-cosines"));
const columns = meta.columns.map((column, k) => ({
  ...column,
  values: column.labels ? new Uint16Array(readBytes(`data-column-${k}`)) : new Float32Array(readBytes(`data-column-${k}`)),
}));
const pathOf = (i) => meta.prefix + meta.names[i];
const fileOf = (i) => meta.names[i].slice(meta.names[i].lastIndexOf("/") + 1);

function formatValue(column, i) {
  const value = column.values[i];
  if (column.labels) return value === NONE ? "" : column.labels[value];
  return Number.isNaN(value) ? "" : String(+value.toPrecision(4));
}

// A fixed random order, so that no class is always drawn over the others.
const order = new Uint32Array(count);
let seed = 12345;
for (let i = 0; i < count; i++) order[i] = i;
for (let i = count - 1; i > 0; i--) {
  seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0;
  const j = seed % (i + 1);
  [order[i], order[j]] = [order[j], order[i]];
}

// Bounds, and a grid of cells with the points in each, by counting sort.
const bounds = { left: Infinity, right: -Infinity, bottom: Infinity, top: -Infinity };
for (let i = 0; i < count; i++) {
  bounds.left = Math.min(bounds.left, points[2 * i]);
  bounds.right = Math.max(bounds.right, points[2 * i]);
  bounds.bottom = Math.min(bounds.bottom, points[2 * i + 1]);
  bounds.top = Math.max(bounds.top, points[2 * i + 1]);
}
const extent = Math.max(bounds.right - bounds.left, bounds.top - bounds.bottom) || 1;
const side = Math.max(1, Math.min(256, Math.round(Math.sqrt(count / 2))));
const step = extent / side;
const columnOf = (x) => Math.max(0, Math.min(side - 1, Math.floor((x - bounds.left) / step)));
const rowOf = (y) => Math.max(0, Math.min(side - 1, Math.floor((y - bounds.bottom) / step)));
const starts = new Uint32Array(side * side + 1);
const members = new Uint32Array(count);
for (let i = 0; i < count; i++) starts[rowOf(points[2 * i + 1]) * side + columnOf(points[2 * i]) + 1]++;
for (let k = 0; k < side * side; k++) starts[k + 1] += starts[k];
const filled = starts.slice();
for (let i = 0; i < count; i++) members[filled[rowOf(points[2 * i + 1]) * side + columnOf(points[2 * i])]++] = i;

function findNearest(x, y, reach, accept) {
  let best = -1;
  let least = reach * reach;
  for (let row = rowOf(y - reach); row <= rowOf(y + reach); row++) {
    for (let column = columnOf(x - reach); column <= columnOf(x + reach); column++) {
      for (let k = starts[row * side + column]; k < starts[row * side + column + 1]; k++) {
        const i = members[k];
        const distance = (points[2 * i] - x) ** 2 + (points[2 * i + 1] - y) ** 2;
        if (distance <= least && accept(i)) [best, least] = [i, distance];
      }
    }
  }
  return best;
}

// What is shown and how it is coloured.
const state = {
  column: null, // that colours the map
  hidden: new Set(), // codes of hidden texts
  range: null, // of shown numbers, [low, high]
  pinned: [], // codes with a colour, oldest first
  colourOf: new Map(), // code -> number in the palette
  highlight: -1, // code under the pointer in the legend
  hover: -1,
  current: -1, // the point in the panel
  selected: new Uint8Array(count),
  nSelected: 0,
  thumbnails: true,
  labels: meta.label_map,
};
const shown = new Uint8Array(count).fill(1);

function updateShown() {
  const column = state.column;
  for (let i = 0; i < count; i++) {
    const value = column ? column.values[i] : 0;
    shown[i] = !column || (column.labels ? !state.hidden.has(value)
      : !state.range || Number.isNaN(value) || (value >= state.range[0] && value <= state.range[1])) ? 1 : 0;
  }
}

const parseColour = (text) => [1, 3, 5].map((k) => parseInt(text.slice(k, k + 2), 16));
const pack = ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0;
const mix = (a, b, share) => a.map((value, k) => Math.round(value + (b[k] - value) * share));
let theme = {};

function readTheme() {
  const palette = darkTheme.matches ? meta.palettes.dark : meta.palettes.light;
  const style = getComputedStyle(document.documentElement);
  const paper = parseColour(style.getPropertyValue("--sheet").trim());
  theme = { ...palette, paper, ink: style.getPropertyValue("--ink").trim() };
}

function colourText(code) {
  const number = state.colourOf.get(code);
  return number === undefined ? theme.rest : theme.classes[number];
}

// Texts of a column, largest first: those that get the colours.
function assignColours() {
  const column = state.column;
  state.pinned = [];
  state.colourOf = new Map();
  if (!column?.labels) return;
  const codes = column.labels.map((_, code) => code);
  if (column.labels.length > theme.classes.length) codes.sort((a, b) => column.counts[b] - column.counts[a] || a - b);
  codes.slice(0, theme.classes.length).forEach(pinColour);
}

function pinColour(code) {
  if (state.colourOf.has(code)) return;
  if (state.pinned.length < theme.classes.length) {
    const used = new Set(state.colourOf.values());
    state.colourOf.set(code, theme.classes.findIndex((_, k) => !used.has(k)));
  } else {
    const oldest = state.pinned.shift();
    state.colourOf.set(code, state.colourOf.get(oldest));
    state.colourOf.delete(oldest);
  }
  state.pinned.push(code);
}
