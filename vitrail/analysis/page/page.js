"use strict";
const floats = (text) => new Float32Array(bytes(text).buffer);
const shared = JSON.parse($("shared").textContent);
const maps = Object.fromEntries(Object.entries(shared.maps).map(([name, text]) => [name, bytes(text)]));

const [layers, heads] = [shared.layers, shared.heads];

// An image's data, its arrays unpacked when it is first chosen. `codes` are bytes; a row's largest value is beside it.
const known = new Map();
function loadImage(number) {
  if (!known.has(number)) {
    const data = { ...JSON.parse($(`image-${number}`).textContent), layers, heads };
    for (const name of ["attention", "between", "rollout", "relevance", "norms", "similar"]) {
      if (data[name]) data[name] = { ...data[name], codes: bytes(data[name].codes), largest: floats(data[name].largest) };
    }
    if (data.colours) data.colours = bytes(data.colours);
    known.set(number, data);
  }
  return known.get(number);
}

// What is shown. `pinned` is a patch that was clicked or reached by keys, `under` the one under the pointer.
const state = { image: 0, tab: null, layer: shared.layers, head: 0, kind: "colours", pinned: null, under: null, strength: MAP_STRENGTH };
let now = null; // the chosen image's data
let ground = null; // its pixels as what maps are drawn on, at the stage's size
let small = null; // the same for the small maps

const stage = $("stage"), about = stage.getContext("2d", { willReadFrequently: true });
const patch = () => state.under ?? state.pinned;
const shown = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 1 ? value.toPrecision(3) : value.toPrecision(2));

// What the current tab draws: bytes for each patch with a map of colours, or colours themselves.
function current() {
  const count = now.grid[0] * now.grid[1];
  if (state.tab === "attention") return { ...attention(now, state.layer, state.head, patch()), map: maps.heat, glow: true };
  if (state.tab !== "tokens") return { ...row(now[state.tab], 0, count), map: maps.heat, glow: true };
  if (state.kind === "norms") return { ...row(now.norms, state.layer, count), low: now.norms.low[state.layer], map: maps.length };
  if (state.kind === "similar") return { ...row(now.similar, state.layer, count), low: now.similar.low[state.layer], map: maps.like };
  return { colours: now.colours.subarray(3 * state.layer * count, 3 * (state.layer + 1) * count) };
}

const READING = {
  attention: "Attention weight of each patch, from 0 (dark) to the maximum (light). The number under a head is its mean attention distance.",
  rollout: "Attention of all layers multiplied, with the residual path: how much of each patch reaches the output. It does not depend on a class.",
  relevance: "Attention weighted by the gradient of the class’s logit: which patches support this class.",
  colours: "Three principal components of the patch tokens as red, green and blue: patches of one colour have similar tokens at this layer.",
  norms: "Norm of each patch token. A few outliers with a large norm hold global information instead of their patch (Darcet et al. 2024).",
  similar: "Cosine similarity of each patch token with that of the outlined patch.",
};

function draw() {
  if (!ground) return;
  const drawn = current(), at = state.tab === "attention" ? patch() : state.tab === "tokens" && state.kind === "similar" ? now.at : null;
  paint(about, now.grid, faded(ground, state.strength), ground.side, drawn, state.strength);
  if (at) outline(about, ground.side, at, Math.max(2, Math.round(ground.side / 12)));
  else if (state.under) outline(about, ground.side, state.under, 2);
  legend(drawn);
  if (state.tab === "attention") small_maps();
  tell(drawn, at);
  const explorer = $("explore");
  Object.assign(explorer.dataset, {
    tab: state.tab, layer: state.layer, head: state.head, kind: state.kind, patch: patch() ? patch().join() : "", image: state.image,
  });
}

function legend(drawn) {
  const bar = document.querySelector(".scale");
  bar.hidden = !!drawn.colours;
  if (drawn.colours) return;
  $("least").textContent = drawn.low === undefined ? "0" : shown(drawn.low);
  $("most").textContent = shown(drawn.largest + (drawn.low ?? 0));
  colourBar($("key"), drawn.map);
}

function tell(drawn, at) {
  const who = at ? `The patch ${now.axes ? "at" : "in"} ${place(at, now)}` : `The ${now.reader}`;
  const where = state.head ? `layer ${state.layer}, head ${state.head}` : `layer ${state.layer}, mean of the heads`;
  let text = "";
  if (state.tab === "attention") {
    text = `${who}, ${where}: most goes to ${strongest(drawn, now)}, ${shown(100 * drawn.largest)} %.`;
  } else if (state.tab === "tokens") {
    text = state.layer ? `After layer ${state.layer}.` : "Before the first layer: the embedding with positions.";
    if (state.under && drawn.codes) text += ` Under the pointer: ${shown(value(drawn, state.under))}.`;
  } else if (state.under) {
    text = `The patch ${now.axes ? "at" : "in"} ${place(state.under, now)}: ${shown(value(drawn, state.under))}.`;
  }
  $("caption").textContent = text || " ";
}

function value(drawn, [y, x]) {
  return (drawn.low ?? 0) + (drawn.codes[y * now.grid[1] + x] / 255) * drawn.largest;
}

function small_maps() {
  const at = patch(), buttons = $("heads").children;
  const far = now.distance?.[state.layer - 1];
  for (let head = 0; head <= heads; head++) {
    const button = buttons[head], canvas = button.firstChild, context = canvas.getContext("2d");
    paint(context, now.grid, faded(small, MAP_STRENGTH), small.side, { ...attention(now, state.layer, head, at), map: maps.heat, glow: true }, MAP_STRENGTH);
    if (at) outline(context, small.side, at, 1);
    button.setAttribute("aria-pressed", head === state.head);
    const reach = far ? (head ? far[head - 1] : far.reduce((a, b) => a + b, 0) / heads) : null;
    button.lastChild.textContent = reach === null ? "" : `${reach.toFixed(0)} px`;
  }
  if ($("every").open) everyHead($("all"), now, at, maps.heat);
}

// The parts of the panel that the current tab has a use for.
function arrange() {
  const isAttention = state.tab === "attention", isTokens = state.tab === "tokens";
  $("from").hidden = !isAttention || !now.between;
  $("kinds").hidden = !isTokens;
  $("scores").hidden = isAttention || isTokens || !now.predictions.length;
  $("heads").hidden = $("every").hidden = !isAttention;
  document.querySelector("[data-for=layer]").hidden = !(isAttention || isTokens);
  document.querySelector("[data-for=head]").hidden = !isAttention;
  $("layer").min = isTokens ? 0 : 1;
  $("layer").max = layers;
  $("head").max = heads;
  if (isAttention) state.layer = Math.max(1, state.layer);
  $("layer").value = state.layer;
  $("head").value = state.head;
  $("layer-value").textContent = isTokens && !state.layer ? "0, embedding" : `${state.layer} of ${layers}`;
  $("head-value").textContent = state.head ? `${state.head} of ${heads}` : "mean";
  $("strength-value").textContent = `${Math.round(100 * state.strength)} %`;
  for (const [id, on] of [["layer", $("layer-value")], ["head", $("head-value")], ["strength", $("strength-value")]]) $(id).setAttribute("aria-valuetext", on.textContent);
  const reading = isTokens ? READING[state.kind] : READING[state.tab];
  $("reading").textContent = state.tab === "relevance" && now.target ? reading.replace("this class", now.target) : reading;
  $("whole").textContent = now.reader[0].toUpperCase() + now.reader.slice(1);
  $("whole").setAttribute("aria-pressed", !patch());
  $("patch").setAttribute("aria-pressed", !!patch());
  for (const button of $("kinds").children) {
    button.hidden = !now[button.dataset.kind];
    button.setAttribute("aria-pressed", button.dataset.kind === state.kind);
  }
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const chosen = tab.dataset.tab === state.tab;
    tab.hidden = !has(tab.dataset.tab);
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    if (chosen) $("panel").setAttribute("aria-labelledby", tab.id);
  }
  $("coarse").hidden = !isAttention || !now.side || now.side === 1;
  if (now.side > 1) $("coarse").textContent = `From a patch, attention is shown on a coarser grid of ${now.cells.join("×")} cells of ${now.side}×${now.side} patches, so that it fits on a page. The arrays hold the same; --at draws one patch on the full grid.`;
  stage.style.cursor = isAttention && now.between ? "crosshair" : "default";
}

const has = (tab) => (tab === "tokens" ? !!(now.colours || now.norms) : !!now[tab]);

function update() {
  arrange();
  draw();
}

function choose(number) {
  state.image = number;
  state.under = null;
  now = loadImage(number);
  if (state.pinned && (state.pinned[0] >= now.grid[0] || state.pinned[1] >= now.grid[1])) state.pinned = null;
  state.tab = state.tab && has(state.tab) ? state.tab : ["attention", "rollout", "relevance", "tokens"].find(has);
  if (!now[state.kind]) state.kind = now.colours ? "colours" : "norms";
  showPredictions(now);
  showFiles(now);
  $("explore").classList.toggle("empty", !state.tab);
  if (!state.tab) { document.documentElement.dataset.ready = number; return; } // nothing to draw over the image
  stage.width = stage.height = 1;
  drawAxes(stage.parentElement, now.axes);
  ground = null;
  const image = new Image();
  image.onload = () => {
    if (state.image !== number) return;
    const [h, w] = now.grid, largest = Math.max(h, w);
    ground = grounded(now.grid, image, Math.max(2, Math.floor(896 / largest)));
    small = grounded(now.grid, image, Math.max(1, Math.floor(154 / largest)));
    stage.width = w * ground.side;
    stage.height = h * ground.side;
    document.documentElement.style.setProperty("--aspect", now.axes ? Math.min(3, Math.max(1, image.naturalWidth / image.naturalHeight)) : "auto");
    for (const button of $("heads").children) {
      button.firstChild.width = w * small.side;
      button.firstChild.height = h * small.side;
    }
    update();
    document.documentElement.dataset.ready = number;
  };
  image.src = now.image;
}

for (let head = 0; head <= heads; head++) {
  const button = document.createElement("button"), word = document.createElement("b"), reach = document.createElement("span");
  button.type = "button";
  word.textContent = head ? `head ${head}` : "mean";
  button.append(document.createElement("canvas"), word, reach);
  button.addEventListener("click", () => { state.head = head; update(); });
  $("heads").append(button);
}

for (const [id, set] of [["layer", (v) => { state.layer = v; }], ["head", (v) => { state.head = v; }], ["strength", (v) => { state.strength = v / 100; }]]) {
  $(id).addEventListener("input", (event) => { set(Number(event.target.value)); update(); });
}
for (const button of $("kinds").children) button.addEventListener("click", () => { state.kind = button.dataset.kind; update(); });
$("whole").addEventListener("click", () => { state.pinned = null; update(); });
$("patch").addEventListener("click", () => { state.pinned ??= now.at ?? now.grid.map((n) => n >> 1); update(); stage.focus(); });
$("every").addEventListener("toggle", draw);
$("all").addEventListener("click", (event) => {
  const box = event.target.getBoundingClientRect();
  state.layer = Math.min(layers, 1 + Math.floor(((event.clientX - box.left) / box.width) * layers));
  state.head = Math.min(heads, 1 + Math.floor(((event.clientY - box.top) / box.height) * heads));
  update();
});

const tabs = [...document.querySelectorAll("[role=tab]")];
for (const tab of tabs) {
  tab.addEventListener("click", () => { state.tab = tab.dataset.tab; state.under = null; update(); });
}
moveBetweenTabs(tabs);
for (const input of document.querySelectorAll("[name=image]")) input.addEventListener("change", () => choose(Number(input.value)));

stage.addEventListener("pointermove", (event) => {
  const at = pointed(event, stage, now.grid);
  if (String(at) !== String(state.under)) { state.under = at; soon(update); }
});
stage.addEventListener("pointerleave", () => { state.under = null; soon(update); });
stage.addEventListener("click", (event) => { if (state.tab === "attention") { state.pinned = pointed(event, stage, now.grid); update(); } });
stage.addEventListener("keydown", (event) => {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (event.key === "Escape") { state.pinned = state.under = null; update(); return; }
  if (!step || state.tab !== "attention" || !now.between) return;
  event.preventDefault();
  state.under = null;
  const from = state.pinned ?? now.at ?? now.grid.map((n) => n >> 1), [h, w] = now.grid;
  state.pinned = state.pinned ? [Math.min(h - 1, Math.max(0, from[0] + step[0])), Math.min(w - 1, Math.max(0, from[1] + step[1]))] : from;
  update();
});
choose(0);
