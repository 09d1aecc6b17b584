"use strict";
// The explorer of a model whose layers have grids of their own. Maps are drawn on the grid of the embedding, the finest: a cell of a
// later stage covers several of its cells. Lines are windows; outside the window of the chosen cell there is nothing to draw.
const floats = (text) => new Float32Array(bytes(text).buffer);
const ints = (text) => new Int32Array(bytes(text).buffer);
const shared = JSON.parse($("shared").textContent);
const maps = Object.fromEntries(Object.entries(shared.maps).map(([name, text]) => [name, bytes(text)]));
const depth = shared.layers;

const known = new Map();
const rows = (packed) => packed && { ...packed, codes: bytes(packed.codes), largest: floats(packed.largest) };
function loadImage(number) {
  if (!known.has(number)) {
    const data = JSON.parse($(`image-${number}`).textContent);
    for (const layer of data.layers) {
      Object.assign(layer, { attention: rows(layer.attention), received: rows(layer.received) });
      for (const name of ["windows", "key_windows", "query_cells", "key_cells"]) layer[name] = ints(layer[name]);
      layer.token = new Map([...layer.query_cells].map((cell, token) => [cell, token]));
    }
    for (const token of data.tokens ?? []) {
      if (token.colours) token.colours = bytes(token.colours);
      for (const name of ["norms", "similar"]) token[name] = rows(token[name]);
    }
    known.set(number, data);
  }
  return known.get(number);
}

// `pinned` and `under` are cells of the finest grid: clicked or reached by keys, and under the pointer.
const state = { image: 0, tab: null, layer: depth, head: 0, kind: "colours", pinned: null, under: null, strength: MAP_STRENGTH };
let now = null, ground = null, small = null;
const stage = $("stage"), about = stage.getContext("2d", { willReadFrequently: true });
const patch = () => state.under ?? state.pinned;
const shown = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 1 ? value.toPrecision(3) : value.toPrecision(2));
const traced = () => now.layers[state.layer - 1];

// The cell of a grid that covers a cell of the finest one.
function cellOf([y, x], stride, grid) {
  const step = stride / now.stride;
  return [Math.min(grid[0] - 1, Math.floor(y / step)), Math.min(grid[1] - 1, Math.floor(x / step))];
}
// Codes of a layer's cells on the finest grid.
function spreadCells(codes, stride, grid) {
  const [h, w] = now.grid, found = new Uint8Array(h * w);
  for (let y = 0; y < h; y++) for (let x = 0; x < w; x++) {
    const [row, column] = cellOf([y, x], stride, grid);
    found[y * w + x] = codes[row * grid[1] + column];
  }
  return found;
}

// Attention of a cell inside its window, or what every cell receives; `inside` says which cells are in the window.
function windowMap(layer, head, at) {
  const heads = layer.received.largest.length, [a, b] = layer.key_grid, count = a * b;
  const list = head ? [head - 1] : Array.from({ length: heads }, (_, k) => k);
  if (!at || !layer.attention) return { ...mean(list.map((k) => row(layer.received, k, count))), inside: null };
  const cell = cellOf(at, layer.stride, layer.grid), index = cell[0] * layer.grid[1] + cell[1];
  const token = layer.token.get(index), window = Math.floor(token / layer.queries);
  const kept = layer.attention.largest.length / layer.query_cells.length, from = kept === heads ? list : [0];
  const found = from.map((k) => {
    const { codes, largest } = row(layer.attention, k * layer.query_cells.length + token, layer.keys), placed = new Uint8Array(count);
    codes.forEach((code, key) => { const to = layer.key_cells[window * layer.keys + key]; if (to >= 0) placed[to] = code; });
    return { codes: placed, largest };
  });
  return { ...mean(found), inside: Uint8Array.from(layer.key_windows, (number) => Number(number === layer.windows[index])), cell };
}

function current(head = state.head) {
  if (state.tab === "attention") {
    const layer = traced(), map = windowMap(layer, head, patch());
    const inside = map.inside && spreadCells(map.inside, layer.key_stride, layer.key_grid);
    return { ...map, codes: spreadCells(map.codes, layer.key_stride, layer.key_grid), inside, map: maps.heat, glow: true };
  }
  const token = now.tokens[state.layer], grid = token.grid, count = grid[0] * grid[1];
  if (state.kind === "colours") {
    const colours = new Uint8Array(3 * now.grid[0] * now.grid[1]);
    for (let c = 0; c < 3; c++) spreadCells(token.colours.filter((_, k) => k % 3 === c), token.stride, grid).forEach((v, k) => { colours[3 * k + c] = v; });
    return { colours };
  }
  const { codes, largest } = row(token[state.kind], 0, count);
  return { codes: spreadCells(codes, token.stride, grid), largest, low: token[state.kind].low[0], map: state.kind === "norms" ? maps.length : maps.like };
}

// Lines between windows, on the finest grid.
function windowLines(context, side, layer) {
  const [h, w] = now.grid, numbers = new Int32Array(h * w), step = layer.stride / now.stride;
  for (let y = 0; y < h; y++) for (let x = 0; x < w; x++) {
    numbers[y * w + x] = layer.windows[Math.min(layer.grid[0] - 1, Math.floor(y / step)) * layer.grid[1] + Math.min(layer.grid[1] - 1, Math.floor(x / step))];
  }
  context.strokeStyle = "rgb(255 255 255 / .6)";
  context.lineWidth = Math.max(1, side / 12);
  context.beginPath();
  for (let y = 0; y < h; y++) for (let x = 0; x < w; x++) {
    if (y && numbers[y * w + x] !== numbers[(y - 1) * w + x]) { context.moveTo(x * side, y * side); context.lineTo((x + 1) * side, y * side); }
    if (x && numbers[y * w + x] !== numbers[y * w + x - 1]) { context.moveTo(x * side, y * side); context.lineTo(x * side, (y + 1) * side); }
  }
  context.stroke();
}

function paintMap(context, base, drawn, strength, line) {
  const dim = faded(base, strength), [h, w] = now.grid;
  paint(context, now.grid, dim, base.side, drawn, strength);
  if (state.tab !== "attention") return;
  if (drawn.inside) {
    const image = context.getImageData(0, 0, w * base.side, h * base.side), pixels = image.data;
    for (let k = 0; k < pixels.length; k += 4) {
      const y = Math.floor(k / 4 / (w * base.side) / base.side), x = Math.floor(((k / 4) % (w * base.side)) / base.side);
      if (!drawn.inside[y * w + x]) for (let c = 0; c < 3; c++) pixels[k + c] = dim[k + c] * 0.75;
    }
    context.putImageData(image, 0, 0);
  }
  windowLines(context, base.side, traced());
  if (drawn.cell) outline(context, (base.side * traced().stride) / now.stride, drawn.cell, line);
}

const READING = {
  pooled: "Every cell attends to the whole image, to keys that were pooled to a grid of their own. Without a position: what each key receives, light is more.",
  attention: "Each window is a group of cells that attend only to each other; every second layer shifts them. Without a position: what each cell receives inside its window, light is more.",
  colours: "Three principal components of the tokens as red, green and blue: cells of one colour have similar tokens at this layer.",
  norms: "Norm of each token.",
  similar: "Cosine similarity of each token with that of the outlined position.",
};

function draw() {
  if (!ground) return;
  const drawn = current();
  paintMap(about, ground, drawn, state.strength, Math.max(2, Math.round(ground.side / 10)));
  if (state.tab === "tokens" && state.kind === "similar" && now.at) {
    const token = now.tokens[state.layer], [x, y] = now.at, step = token.stride / now.stride;
    outline(about, ground.side * step, [Math.floor(y / token.stride), Math.floor(x / token.stride)], 2);
  }
  document.querySelector(".scale").hidden = !!drawn.colours;
  if (!drawn.colours) {
    $("least").textContent = drawn.low === undefined ? "0" : shown(drawn.low);
    $("most").textContent = shown(drawn.largest + (drawn.low ?? 0));
    colourBar($("key"), drawn.map);
  }
  tell(drawn);
  if (state.tab === "attention") smallMaps();
  Object.assign($("explore").dataset, { tab: state.tab, layer: state.layer, head: state.head, kind: state.kind, patch: patch() ? patch().join() : "", image: state.image });
}

function tell(drawn) {
  let text = state.layer ? `After layer ${state.layer}.` : "Before the first layer: the embedding.";
  if (state.tab === "attention") {
    const layer = traced(), where = state.head ? `head ${state.head}` : "mean of the heads", grid = layer.grid.join("×"), keys = layer.key_grid.join("×");
    text = drawn.cell
      ? `From ${place(drawn.cell, now)} of ${grid} cells, layer ${state.layer}, ${where}: at most ${shown(100 * drawn.largest)} % goes to one ${layer.count > 1 ? "cell of its window" : `of ${keys} keys`}.`
      : `Layer ${state.layer}, ${where}: ${layer.count > 1 ? `${layer.count} windows on ${grid} cells` : `${grid} cells attend to ${keys} keys`}. 1 is what a cell receives on average.`;
  }
  $("caption").textContent = text;
}

function smallMaps() {
  const layer = traced(), heads = layer.received.largest.length, list = $("heads");
  while (list.children.length > heads + 1) list.lastChild.remove();
  for (let head = list.children.length; head <= heads; head++) {
    const button = document.createElement("button"), word = document.createElement("b"), reach = document.createElement("span");
    button.type = "button";
    word.textContent = head ? `head ${head}` : "mean";
    button.append(document.createElement("canvas"), word, reach);
    button.addEventListener("click", () => { state.head = head; update(); });
    list.append(button);
  }
  [...list.children].forEach((button, head) => {
    const canvas = button.firstChild;
    [canvas.width, canvas.height] = [now.grid[1] * small.side, now.grid[0] * small.side];
    paintMap(canvas.getContext("2d", { willReadFrequently: true }), small, current(head), MAP_STRENGTH, 1);
    button.setAttribute("aria-pressed", head === state.head);
    const far = layer.distance;
    button.lastChild.textContent = `${(head ? far[head - 1] : far.reduce((a, b) => a + b, 0) / far.length).toFixed(0)} px`;
  });
}

const has = (tab) => (tab === "attention" ? now.layers.length > 0 : tab === "tokens" && !!now.tokens);

function arrange() {
  const isAttention = state.tab === "attention";
  if (isAttention) state.layer = Math.max(1, state.layer);
  const heads = isAttention ? traced().received.largest.length : 1;
  state.head = Math.min(state.head, heads);
  $("from").hidden = !isAttention || !traced().attention;
  $("kinds").hidden = isAttention;
  $("heads").hidden = !isAttention;
  $("scores").hidden = isAttention || !now.predictions.length;
  $("every").hidden = $("coarse").hidden = true;
  document.querySelector("[data-for=head]").hidden = !isAttention;
  Object.assign($("layer"), { min: isAttention ? 1 : 0, max: depth, value: state.layer });
  Object.assign($("head"), { max: heads, value: state.head });
  $("layer-value").textContent = state.layer ? `${state.layer} of ${depth}` : "0, embedding";
  $("head-value").textContent = state.head ? `${state.head} of ${heads}` : "mean";
  $("strength-value").textContent = `${Math.round(100 * state.strength)} %`;
  for (const id of ["layer", "head", "strength"]) $(id).setAttribute("aria-valuetext", $(`${id}-value`).textContent);
  $("reading").textContent = READING[!isAttention ? state.kind : now.layers.some((layer) => layer.count > 1) ? "attention" : "pooled"];
  $("whole").textContent = "Received";
  $("patch").textContent = "From a position";
  $("whole").setAttribute("aria-pressed", !patch());
  $("patch").setAttribute("aria-pressed", !!patch());
  for (const button of $("kinds").children) {
    button.hidden = !now.tokens?.[0][button.dataset.kind];
    button.setAttribute("aria-pressed", button.dataset.kind === state.kind);
  }
  for (const tab of tabs) {
    const chosen = tab.dataset.tab === state.tab;
    tab.hidden = !has(tab.dataset.tab);
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    if (chosen) $("panel").setAttribute("aria-labelledby", tab.id);
  }
  stage.style.cursor = isAttention && traced().attention ? "crosshair" : "default";
}

function update() {
  arrange();
  draw();
}

const tabs = [...document.querySelectorAll("[role=tab]")];

function choose(number) {
  state.image = number;
  state.under = null;
  now = loadImage(number);
  state.tab = state.tab && has(state.tab) ? state.tab : ["attention", "tokens"].find(has);
  if (!now.tokens?.[0][state.kind]) state.kind = "norms";
  if (now.at && !state.pinned) state.pinned = [Math.floor(now.at[1] / now.stride), Math.floor(now.at[0] / now.stride)];
  showPredictions(now);
  showFiles(now);
  $("explore").classList.toggle("empty", !state.tab);
  if (!state.tab) { document.documentElement.dataset.ready = number; return; }
  ground = null;
  const image = new Image();
  image.onload = () => {
    if (state.image !== number) return;
    const largest = Math.max(...now.grid);
    ground = grounded(now.grid, image, Math.max(2, Math.floor(896 / largest)));
    small = grounded(now.grid, image, Math.max(1, Math.floor(154 / largest)));
    [stage.width, stage.height] = [now.grid[1] * ground.side, now.grid[0] * ground.side];
    update();
    document.documentElement.dataset.ready = number;
  };
  image.src = now.image;
}

for (const [id, set] of [["layer", (v) => { state.layer = v; }], ["head", (v) => { state.head = v; }], ["strength", (v) => { state.strength = v / 100; }]]) {
  $(id).addEventListener("input", (event) => { set(Number(event.target.value)); update(); });
}
for (const button of $("kinds").children) button.addEventListener("click", () => { state.kind = button.dataset.kind; update(); });
$("whole").addEventListener("click", () => { state.pinned = null; update(); });
$("patch").addEventListener("click", () => { state.pinned ??= now.grid.map((n) => n >> 1); update(); stage.focus(); });
for (const tab of tabs) tab.addEventListener("click", () => { state.tab = tab.dataset.tab; state.under = null; update(); });
moveBetweenTabs(tabs);
for (const input of document.querySelectorAll("[name=image]")) input.addEventListener("change", () => choose(Number(input.value)));
stage.addEventListener("pointermove", (event) => {
  const at = state.tab === "attention" && traced().attention ? pointed(event, stage, now.grid) : null;
  if (String(at) !== String(state.under)) { state.under = at; soon(update); }
});
stage.addEventListener("pointerleave", () => { state.under = null; soon(update); });
stage.addEventListener("click", (event) => { if (state.tab === "attention") { state.pinned = pointed(event, stage, now.grid); update(); } });
stage.addEventListener("keydown", (event) => {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (event.key === "Escape") { state.pinned = state.under = null; update(); return; }
  if (!step || state.tab !== "attention" || !traced().attention) return;
  event.preventDefault();
  state.under = null;
  const many = traced().stride / now.stride, from = state.pinned ?? now.grid.map((n) => n >> 1); // by one cell of this layer
  state.pinned = from.map((n, k) => Math.min(now.grid[k] - 1, Math.max(0, n + many * step[k])));
  update();
});
choose(0);
