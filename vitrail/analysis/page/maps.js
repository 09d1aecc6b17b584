// Maps over an image, as the explorer and the server's page draw them. `seen` is an image's data: its grid of patches, its heads,
// and attention as bytes (`codes`) with the largest value of each row beside them.
"use strict";
const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
// A cell of the grid in words; of a spectrogram, whose data has axes, its time and frequencies.
function place([row, column], { grid: [h, w], axes }) {
  if (!axes) return `row ${row + 1}, column ${column + 1}`;
  const { begin, end, heights } = axes, time = (k) => (begin + ((end - begin) * k) / w).toFixed(2), last = heights.length - 1;
  const hertz = (k) => { const at = (k / h) * last, low = Math.min(last - 1, Math.floor(at)); return heights[low] + (at - low) * (heights[low + 1] - heights[low]); };
  return `${time(column)}–${time(column + 1)} s, ${hertz(row + 1).toFixed(0)}–${hertz(row).toFixed(0)} Hz`;
}

// Frequencies beside a spectrogram and times below it, in elements over its box; none for an image.
function drawAxes(holder, axes) {
  for (const old of holder.querySelectorAll(".tick")) old.remove();
  holder.classList.toggle("heard", !!axes);
  const write = (kind, [at, text], side, unit) => {
    const tick = document.createElement("span");
    tick.className = `tick ${kind}`;
    tick.style[side] = `${100 * at}%`;
    tick.textContent = text + unit;
    holder.append(tick);
  };
  for (const [k, tick] of (axes?.hertz ?? []).entries()) write("hertz", tick, "top", k ? "" : " Hz");
  for (const tick of axes?.seconds ?? []) write("seconds", tick, "left", " s");
}

// Values between 0 and 1 for each patch of the grid, and the value that 1 stands for.
function row(store, index, count) {
  return { codes: store.codes.subarray(index * count, (index + 1) * count), largest: store.largest[index] };
}

function mean(rows) {
  const sum = new Float32Array(rows[0].codes.length);
  for (const { codes, largest } of rows) for (let i = 0; i < sum.length; i++) sum[i] += (codes[i] * largest) / 255 / rows.length;
  const largest = sum.reduce((a, b) => Math.max(a, b), 0);
  return { codes: Uint8Array.from(sum, (v) => Math.round((v / (largest || 1)) * 255)), largest };
}

// Where a layer looks from a patch, or from what is read where none is given. Heads count from 1; 0 is their mean.
function attention(seen, layer, head, patch) {
  const [h, w] = seen.grid, from = seen.between ? patch : null;
  const of = (k) => {
    const index = (layer - 1) * seen.heads + k;
    if (!from) return row(seen.attention, index, h * w);
    const [a, b] = seen.cells, cell = Math.floor((from[0] + (seen.lift ?? 0)) / seen.side) * b + Math.floor(from[1] / seen.side);
    return spread(seen, row(seen.between, index * a * b + cell, a * b));
  };
  return head ? of(head - 1) : mean(Array.from({ length: seen.heads }, (_, k) => of(k)));
}

// Cells of a coarser grid to the patches in them.
function spread(seen, { codes, largest }) {
  if (seen.side === 1) return { codes, largest };
  const [h, w] = seen.grid, b = seen.cells[1], made = new Uint8Array(h * w);
  for (let y = 0; y < h; y++) for (let x = 0; x < w; x++) made[y * w + x] = codes[Math.floor((y + (seen.lift ?? 0)) / seen.side) * b + Math.floor(x / seen.side)];
  return { codes: made, largest };
}

function strongest({ codes }, seen) {
  const best = codes.reduce((found, code, k) => (code > codes[found] ? k : found), 0), w = seen.grid[1];
  return place([Math.floor(best / w), best % w], seen);
}

// The strength of a map at first; figures/overlay.py draws with the same.
const MAP_STRENGTH = 0.6;

// The image at so many pixels a patch.
function grounded([h, w], image, side) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [w * side, h * side];
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingQuality = "high";
  context.imageSmoothingEnabled = image.naturalWidth > 64; // few pixels are shown as they are
  context.drawImage(image, 0, 0, w * side, h * side);
  return { full: context.getImageData(0, 0, w * side, h * side).data, side };
}

// The image under a map: nearly grey and a little darker, so that colours stand out and shapes stay. It brightens as the map is
// taken away; its own colours return below the strength at first, above which they would be taken for those of the map.
function faded(ground, strength) {
  if (ground.strength !== strength) {
    const { full } = ground, less = 0.78 * Math.min(1, strength / MAP_STRENGTH), dim = new Uint8ClampedArray(full);
    for (let k = 0; k < dim.length; k += 4) {
      const grey = 0.299 * full[k] + 0.587 * full[k + 1] + 0.114 * full[k + 2];
      for (let c = 0; c < 3; c++) dim[k + c] = 18 * strength + (1 - 0.28 * strength) * (less * grey + (1 - less) * full[k + c]);
    }
    Object.assign(ground, { strength, dim });
  }
  return ground.dim;
}

// Draws over a ground of `side` pixels a patch: codes through a map of colours, where a map that glows shows the more of its
// colour the stronger a patch is; or a colour for each patch; or nothing.
function paint(context, [h, w], ground, side, drawn, strength) {
  const width = w * side, image = new ImageData(width, h * side), out = image.data;
  for (let y = 0; y < h; y++) for (let x = 0; x < w; x++) {
    const at = y * w + x, code = drawn?.codes ? drawn.codes[at] : 0;
    const [from, index] = drawn?.colours ? [drawn.colours, 3 * at] : [drawn?.map, 3 * code];
    const part = drawn ? strength * (drawn.glow ? 0.12 + 0.76 * (code / 255) ** 0.8 : 0.94) : 0;
    const [r, g, b] = drawn ? [from[index] * part, from[index + 1] * part, from[index + 2] * part] : [0, 0, 0];
    for (let j = 0; j < side; j++) {
      let k = 4 * ((y * side + j) * width + x * side);
      for (let i = 0; i < side; i++, k += 4) {
        out[k] = ground[k] * (1 - part) + r;
        out[k + 1] = ground[k + 1] * (1 - part) + g;
        out[k + 2] = ground[k + 2] * (1 - part) + b;
        out[k + 3] = 255;
      }
    }
  }
  context.putImageData(image, 0, 0);
}

function outline(context, side, [y, x], line) {
  const { canvas } = context, edge = line / 2 + 1; // never beyond the image
  const [left, top] = [x, y].map((n) => Math.max(edge, n * side - line / 2));
  const right = Math.min(canvas.width - edge, (x + 1) * side + line / 2), bottom = Math.min(canvas.height - edge, (y + 1) * side + line / 2);
  for (const [width, colour] of [[line + 2, "rgb(20 18 24 / .85)"], [line, "#fff"]]) {
    context.lineWidth = width;
    context.strokeStyle = colour;
    context.strokeRect(left, top, right - left, bottom - top);
  }
}

// Every head of every layer: one pixel for each patch, a column for each layer; the browser makes it large.
function everyHead(canvas, seen, patch, map) {
  const [h, w] = seen.grid, gap = Math.max(1, Math.round(Math.max(h, w) / 9)), context = canvas.getContext("2d");
  const colours = Uint32Array.from({ length: 256 }, (_, k) => 0xff000000 | (map[3 * k + 2] << 16) | (map[3 * k + 1] << 8) | map[3 * k]);
  canvas.width = seen.layers * (w + gap) - gap;
  canvas.height = seen.heads * (h + gap) - gap;
  for (let layer = 1; layer <= seen.layers; layer++) for (let head = 1; head <= seen.heads; head++) {
    const image = new ImageData(w, h), pixels = new Uint32Array(image.data.buffer), { codes } = attention(seen, layer, head, patch);
    for (let k = 0; k < codes.length; k++) pixels[k] = colours[codes[k]];
    context.putImageData(image, (layer - 1) * (w + gap), (head - 1) * (h + gap));
  }
}

function colourBar(canvas, map) {
  const image = new ImageData(256, 1);
  for (let k = 0; k < 256; k++) image.data.set([...map.subarray(3 * k, 3 * k + 3), 255], 4 * k);
  [canvas.width, canvas.height] = [256, 1];
  canvas.getContext("2d").putImageData(image, 0, 0);
}
