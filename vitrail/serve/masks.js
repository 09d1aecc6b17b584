// Masks of the page of vitrail serve: run lengths to pixels, and pixels to colours over the image.
"use strict";

const MASK_OPACITY = 0.55;
const MASK_SIDE = 1280; // pixels on the longer side of the canvas, at most
const NO_CLASS = 255;

// Lengths of runs of COCO's compressed string: groups of 5 bits, lowest first; from the fourth on, differences to the count two before.
function runLengths(text) {
  const counts = [];
  for (let at = 0; at < text.length; ) {
    let value = 0, shift = 0, code;
    do {
      code = text.charCodeAt(at++) - 48;
      value += (code & 31) * 2 ** shift;
      shift += 5;
    } while (code & 32);
    if (code & 16) value -= 2 ** shift;
    counts.push(counts.length > 2 ? value + counts[counts.length - 2] : value);
  }
  return counts;
}

// The index of the class of every pixel of a canvas of w×h, from runs that go down the columns of the mask.
function maskPixels({ height, width, classes }, w, h) {
  const values = new Uint8Array(w * h).fill(NO_CLASS), whole = new Uint8Array(width * height).fill(NO_CLASS);
  classes.forEach(({ rle }, index) => {
    let at = 0;
    runLengths(rle.counts).forEach((length, k) => {
      if (k % 2) whole.fill(index, at, at + length);
      at += length;
    });
  });
  const rows = Int32Array.from({ length: h }, (_, y) => Math.floor(((y + 0.5) * height) / h));
  for (let x = 0; x < w; x++) {
    const column = Math.floor(((x + 0.5) * width) / w) * height;
    for (let y = 0; y < h; y++) values[y * w + x] = whole[column + rows[y]];
  }
  return values;
}

// The mask of a response, at the size of a canvas, with the image under it; null if the browser cannot decode the image.
async function openMask(response, blob) {
  const { height, width } = response, part = Math.min(1, MASK_SIDE / Math.max(height, width));
  const [w, h] = [width, height].map((n) => Math.max(1, Math.round(n * part)));
  let image = null;
  try { image = await createImageBitmap(blob); } catch { /* format not supported by this browser */ }
  const classes = response.classes.map(({ label, share, colour }) => ({ label, share, colour, rgb: [1, 3, 5].map((k) => parseInt(colour.slice(k, k + 2), 16)) }));
  return { w, h, image, classes, values: maskPixels(response, w, h), hidden: new Set() };
}

// Colours of the classes: their pixels, and in full colour the lines between them. Hidden classes have none, and only `alone` if it is given.
function maskLayers({ w, h, values, classes, hidden }, alone) {
  const fill = new ImageData(w, h), edge = new ImageData(w, h), line = Math.max(1, Math.round(0.002 * Math.hypot(w, h)));
  const seen = classes.map((_, k) => !hidden.has(k) && (alone === null || alone === k));
  for (let y = 0, i = 0; y < h; y++) for (let x = 0; x < w; x++, i++) {
    const k = values[i];
    if (k === NO_CLASS || !seen[k]) continue;
    const [red, green, blue] = classes[k].rgb, at = 4 * i;
    fill.data[at] = red; fill.data[at + 1] = green; fill.data[at + 2] = blue; fill.data[at + 3] = 255;
    const isEdge = (x >= line && values[i - line] !== k) || (x + line < w && values[i + line] !== k) || (y >= line && values[i - line * w] !== k) || (y + line < h && values[i + line * w] !== k);
    if (isEdge) edge.data.set([red, green, blue, 255], at);
  }
  return [fill, edge].map((data) => {
    const canvas = new OffscreenCanvas(w, h);
    canvas.getContext("2d").putImageData(data, 0, 0);
    return canvas;
  });
}

// Draw the image, the classes over it, and the lines between them, which are as strong as the classes or stronger.
function paintMask(context, mask, opacity, alone) {
  const { w, h, image } = mask, key = `${alone} ${[...mask.hidden]}`;
  if (mask.key !== key) Object.assign(mask, { key, layers: maskLayers(mask, alone) });
  context.globalAlpha = 1;
  context.fillStyle = "#8d8794";
  context.fillRect(0, 0, w, h);
  if (image) context.drawImage(image, 0, 0, w, h);
  [opacity, Math.min(1, 1.8 * opacity)].forEach((alpha, k) => {
    context.globalAlpha = alpha;
    context.drawImage(mask.layers[k], 0, 0);
  });
  context.globalAlpha = 1;
}
