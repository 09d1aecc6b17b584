"use strict";
// The explorer of a model of clips: a frame of each time step, and the attention of one layer over them. A row of codes is a head of a
// layer over all time steps, so that these share a scale.
const floats = (text) => new Float32Array(bytes(text).buffer);
const shared = JSON.parse($("shared").textContent);
const heat = bytes(shared.maps.heat);

const known = new Map();
function loadClip(number) {
  if (!known.has(number)) {
    const data = JSON.parse($(`image-${number}`).textContent);
    for (const layers of Object.values(data.maps)) for (const layer of layers) {
      Object.assign(layer, { codes: bytes(layer.codes), largest: floats(layer.largest) });
    }
    known.set(number, data);
  }
  return known.get(number);
}

// `layer` is an index of the layers that were recorded; heads count from 1, and 0 is their mean.
const state = { image: 0, step: 0, layer: Infinity, head: 0, kind: null, strength: MAP_STRENGTH };
let now = null, pictures = [], grounds = new Map();
const stage = $("stage"), strip = $("strip");
const shown = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 1 ? value.toPrecision(3) : value.toPrecision(2));
const traced = (layer = state.layer) => now.maps[state.kind][layer];

// The frame of a time step at so many pixels a place of the grid.
function groundOf(step, [, h, w], most) {
  const key = [step, h, w, most].join(), side = Math.max(1, Math.floor(most / Math.max(h, w)));
  if (!grounds.has(key)) grounds.set(key, grounded([h, w], pictures[step], side));
  return grounds.get(key);
}

function wholeClip(layer, head) {
  const count = layer.grid[0] * layer.grid[1] * layer.grid[2], of = (k) => row(layer, k, count);
  return head ? of(head - 1) : mean(Array.from({ length: layer.largest.length }, (_, k) => of(k)));
}

// The time steps of a layer may be fewer than those of the frames.
const stepOf = (step, layer) => Math.floor((step * layer.grid[0]) / pictures.length);
function atStep({ codes }, step, layer) {
  const count = layer.grid[1] * layer.grid[2], from = stepOf(step, layer) * count;
  return codes.subarray(from, from + count);
}

function sharesOf({ codes }, layer) {
  const sums = Array.from({ length: pictures.length }, (_, step) => atStep({ codes }, step, layer).reduce((a, b) => a + b, 0));
  const all = sums.reduce((a, b) => a + b, 0);
  return sums.map((sum) => sum / (all || 1));
}

function paintStep(canvas, clip, layer, step, most, strength) {
  const [, h, w] = layer.grid, ground = groundOf(step, layer.grid, most);
  [canvas.width, canvas.height] = [w * ground.side, h * ground.side];
  const drawn = { codes: atStep(clip, step, layer), map: heat, glow: true };
  paint(canvas.getContext("2d"), [h, w], faded(ground, strength), ground.side, drawn, strength);
}

function draw() {
  const layer = traced(), clip = wholeClip(layer, state.head), shares = sharesOf(clip, layer);
  paintStep(stage, clip, layer, state.step, 896, state.strength);
  [...strip.children].forEach((button, step) => {
    const [canvas, bar, word] = button.children;
    paintStep(canvas, clip, layer, step, 224, state.strength);
    bar.style.setProperty("--score", `${(100 * shares[step]) / Math.max(...shares, 1e-9)}%`);
    word.textContent = `${(100 * shares[step]).toFixed(0)} %`;
    button.setAttribute("aria-pressed", step === state.step);
    button.setAttribute("aria-label", `time step ${step + 1}, frame ${now.numbers[step]}: ${word.textContent}`);
  });
  $("most").textContent = `${shown(100 * clip.largest)} %`;
  colourBar($("key"), heat);
  tell(layer, clip, shares);
  Object.assign($("explore").dataset, { step: state.step, layer: now.layers[state.layer], head: state.head, kind: state.kind, image: state.image });
}

function tell(layer, clip, shares) {
  const [, h, w] = layer.grid, where = state.head ? `head ${state.head}` : "mean of the heads";
  const best = clip.codes.reduce((found, code, k) => (code > clip.codes[found] ? k : found), 0), place = best % (h * w);
  const step = Math.floor(best / (h * w)), steps = layer.grid[0];
  $("caption").textContent = `Layer ${now.layers[state.layer]}, ${where}: time step ${state.step + 1} of ${pictures.length} gets ${shown(100 * shares[state.step])} % of the attention. `
    + `Most goes to row ${Math.floor(place / w) + 1}, column ${(place % w) + 1} of ${h}×${w} in step ${step + 1} of ${steps}: ${shown(100 * clip.largest)} %.`;
  $("reading").textContent = now.readings[state.kind];
}

// One pixel for each place, a row for each layer, a column for each time step; drawn again only for another head or kind.
let drawnTable = "";
function drawTable() {
  const wanted = [state.image, state.kind, state.head].join();
  if (wanted === drawnTable) return;
  drawnTable = wanted;
  const layers = now.maps[state.kind], h = Math.max(...layers.map(({ grid }) => grid[1])), w = Math.max(...layers.map(({ grid }) => grid[2]));
  const gap = Math.max(1, Math.round(Math.max(h, w) / 9)), canvas = $("all"), context = canvas.getContext("2d");
  [canvas.width, canvas.height] = [pictures.length * (w + gap) - gap, layers.length * (h + gap) - gap];
  layers.forEach((layer, index) => {
    const clip = wholeClip(layer, Math.min(state.head, layer.largest.length)), [, a, b] = layer.grid;
    for (let step = 0; step < pictures.length; step++) {
      const image = new ImageData(w, h), codes = atStep(clip, step, layer);
      for (let y = 0; y < h; y++) for (let x = 0; x < w; x++) {
        const code = codes[Math.floor((y * a) / h) * b + Math.floor((x * b) / w)];
        image.data.set([heat[3 * code], heat[3 * code + 1], heat[3 * code + 2], 255], 4 * (y * w + x));
      }
      context.putImageData(image, step * (w + gap), index * (h + gap));
    }
  });
}

function setSlider(id, value, least, most, text) {
  const slider = $(id);
  Object.assign(slider, { min: least, max: most, value });
  slider.disabled = most <= least;
  slider.setAttribute("aria-valuetext", text);
  $(`${id}-value`).textContent = text;
}

function update() {
  const layers = now.layers;
  state.layer = Math.min(state.layer, layers.length - 1);
  state.head = Math.min(state.head, traced().largest.length);
  state.step = Math.min(Math.max(0, state.step), pictures.length - 1);
  setSlider("step", state.step + 1, 1, pictures.length, `${state.step + 1} of ${pictures.length}, frame ${now.numbers[state.step]}`);
  setSlider("layer", state.layer + 1, 1, layers.length, `${layers[state.layer]} of ${layers[layers.length - 1]}`);
  setSlider("head", state.head, 0, traced().largest.length, state.head ? `${state.head} of ${traced().largest.length}` : "mean");
  setSlider("strength", Math.round(100 * state.strength), 0, 100, `${Math.round(100 * state.strength)} %`);
  for (const button of $("kinds").children) {
    button.hidden = !now.maps[button.dataset.kind];
    button.setAttribute("aria-pressed", button.dataset.kind === state.kind);
  }
  draw();
  drawTable();
}

function moveTo(step) {
  state.step = step;
  update();
}

function makeStrip() {
  strip.replaceChildren(...pictures.map((_, step) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(document.createElement("canvas"), document.createElement("i"), document.createElement("span"));
    button.addEventListener("click", () => moveTo(step));
    return button;
  }));
}

async function choose(number) {
  state.image = number;
  const data = loadClip(number);
  const loaded = await Promise.all(data.frames.map(async (source) => {
    const image = new Image();
    image.src = source;
    await image.decode();
    return image;
  }));
  if (state.image !== number) return; // another clip was chosen meanwhile
  [now, pictures, grounds] = [data, loaded, new Map()];
  if (!now.maps[state.kind]) state.kind = Object.keys(now.maps)[0];
  showPredictions(now);
  if (!now.predictions.length) $("prediction").textContent = now.words;
  showFiles(now);
  makeStrip();
  update();
  document.documentElement.dataset.ready = number;
}

for (const [id, set] of [["step", (v) => { state.step = v - 1; }], ["layer", (v) => { state.layer = v - 1; }], ["head", (v) => { state.head = v; }], ["strength", (v) => { state.strength = v / 100; }]]) {
  $(id).addEventListener("input", (event) => { set(Number(event.target.value)); update(); });
}
for (const button of $("kinds").children) button.addEventListener("click", () => { state.kind = button.dataset.kind; update(); });
for (const input of document.querySelectorAll("[name=image]")) input.addEventListener("change", () => choose(Number(input.value)));
stage.addEventListener("keydown", (event) => {
  const last = pictures.length - 1, to = { ArrowLeft: state.step - 1, ArrowRight: state.step + 1, Home: 0, End: last }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  moveTo(to);
});
$("all").addEventListener("click", (event) => {
  const [layer, step] = pointed(event, $("all"), [now.layers.length, pictures.length]) ?? [];
  if (layer === undefined) return;
  state.layer = layer;
  moveTo(step);
});
choose(0);
