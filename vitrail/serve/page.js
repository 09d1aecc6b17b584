// The page of vitrail serve: predictions, masks and attention maps of an image or a sound. It connects only to its own server.
"use strict";

// ---- Theme, set before the first paint. If storage is blocked, the choice lasts until the page is closed.
const kept = {
  get(store, key) { try { return window[store].getItem(key); } catch { return null; } },
  set(store, key, value) { try { if (value === null) window[store].removeItem(key); else window[store].setItem(key, value); } catch { /* storage is blocked */ } },
};
const darkness = matchMedia("(prefers-color-scheme: dark)");
const root = document.documentElement;
const chosenTheme = kept.get("localStorage", "vitrail-theme");
if (chosenTheme === "light" || chosenTheme === "dark") root.dataset.theme = chosenTheme;
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : darkness.matches);

const $ = (id) => document.getElementById(id);
const TRIES = 5; // attempts while the server is busy
const RECENT = 24; // images kept
const SHELF = 64 * 2 ** 20; // bytes of all recent images
const SMALLER = 1600; // pixels on the longer side of a downsized copy

// Every eighth colour of magma, readable for colour-blind users.
const MAGMA = "0000040303120a0822130d341d114729115a36106b440f7651127c5d177f6a1c81762181832681902a819c2e7faa337db73779c23b75cf4070db476ae55064ee5b5ef4695cf9785dfb8761fd9668fea571feb47bfec287fed194fde0a1fceeb0fcfdbf";
const heat = (() => {
  const part = (k, c) => parseInt(MAGMA.slice(6 * k + 2 * c, 6 * k + 2 * c + 2), 16), steps = MAGMA.length / 6 - 1;
  return Uint8Array.from({ length: 768 }, (_, i) => {
    const at = (Math.floor(i / 3) / 255) * steps, k = Math.min(steps - 1, Math.floor(at));
    return Math.round(part(k, i % 3) * (k + 1 - at) + part(k + 1, i % 3) * (at - k));
  });
})();

// ---- State. `pinned` is the patch selected by click or keyboard, `under` the one under the pointer.
const state = { models: [], model: null, view: "attention", layer: 1, head: 0, strength: MAP_STRENGTH, opacity: MASK_OPACITY, pinned: null, under: null, two: false, active: 0 };
let panes = [];
const shownPanes = () => (state.two ? panes : panes.slice(0, 1));
const patch = () => state.under ?? state.pinned;
const seeing = () => shownPanes().filter((pane) => pane.seen);
const masked = () => shownPanes().filter((pane) => pane.mask);
const has = (view) => seeing().some((pane) => pane.seen[view]);

const short = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 1 ? value.toPrecision(3) : value === 0 ? "0" : value >= 0.001 ? value.toPrecision(2) : value.toExponential(1));
const percent = (score) => (score > 0.9995 && score < 1 ? "> 99.9 %" : score > 0 && score < 0.0005 ? "< 0.1 %" : `${(100 * score).toFixed(1)} %`);
// The number of a regression model, or the probability of a class.
const amount = ({ value, score }) => (value === undefined ? percent(score) : Math.abs(value) >= 1e6 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(3) : String(Number(value.toPrecision(5))));
const counted = (count, [one, many]) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
const capital = (text) => text[0].toUpperCase() + text.slice(1);
function made(tag, className, ...inside) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...inside);
  return node;
}
function announce(text) { $("status").textContent = text; }

// ---- Requests.
class Trouble extends Error {
  constructor(kind, words, detail) { super(words); Object.assign(this, { kind, detail }); }
}
const WORDS = {
  400: "This file is not a valid image.", 401: "The server requires a token.", 403: "Access denied by the server.",
  404: "The server no longer has this model.", 408: "The upload took too long.", 413: "This image is too large for the server.",
  415: "This file is not a valid image.", 422: "This file is not a valid image.", 429: "The server is too busy.", 503: "The server is too busy.",
};
const wordsOf = (status) => WORDS[status]?.replace("image", medium()); // what the model takes
const GONE = () => new Trouble("gone", "The server does not respond.", "Check that vitrail serve is running, then try again.");

let token = kept.get("sessionStorage", "vitrail-token");
let asking = null; // one token dialog for all waiting requests
function askForToken(refused) {
  asking ??= new Promise((resolve) => {
    const gate = $("gate");
    $("gate-words").textContent = refused ? "The server rejected this token. Enter another one." : "Ask the server's administrator. It is stored until you close this tab.";
    $("gate-words").classList.toggle("wrong", refused);
    $("token").value = "";
    gate.returnValue = "";
    gate.addEventListener("close", () => {
      asking = null;
      const given = gate.returnValue === "go" ? $("token").value.trim() : "";
      $("token").value = "";
      if (given) { token = given; kept.set("sessionStorage", "vitrail-token", given); }
      resolve(!!given);
    }, { once: true });
    gate.showModal();
    $("token").focus();
  });
  return asking;
}

function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal?.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, { once: true });
  });
}

// A server that refuses a body may close the connection before the browser has read the response.
async function alive(body) {
  try { return !!body && (await fetch("healthz", { cache: "no-store" })).ok; } catch { return false; }
}

// Send a request, retrying while the server is busy; `tell` receives status text. Every failure is a Trouble.
async function ask(path, { body, signal, tell } = {}) {
  for (let tried = 1; ; tried++) {
    const used = token, headers = {};
    if (used) headers.Authorization = `Bearer ${used}`;
    if (body) headers["Content-Type"] = body.type || "application/octet-stream";
    let response, content = null;
    try {
      response = await fetch(path, { method: body ? "POST" : "GET", body, headers, signal, cache: "no-store" });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw (await alive(body)) ? new Trouble(413, "The server closed the connection during the upload.", "The file may be too large.") : GONE();
    }
    try {
      content = JSON.parse(await response.text());
    } catch (error) {
      if (signal?.aborted) throw error;
      if (response.ok) throw new Trouble("odd", "Invalid response from the server.", "A proxy may have changed it.");
    }
    if (response.ok) return content;
    const detail = typeof content?.error === "string" ? content.error : "";
    if (response.status === 401) {
      if (used !== token || (await askForToken(!!used))) { tried--; continue; } // another request may have obtained it meanwhile
      throw new Trouble(401, WORDS[401], "Enter a token to continue.");
    }
    if ((response.status === 503 || response.status === 429) && tried < TRIES) {
      const asked = Number(response.headers.get("Retry-After")), seconds = asked > 0 ? Math.min(asked, 30) : 2;
      tell?.(`The server is busy. Trying again in ${seconds} s, attempt ${tried + 1} of ${TRIES}.`);
      await pause(seconds, signal);
      tell?.("");
      continue;
    }
    throw new Trouble(response.status, wordsOf(response.status) ?? "The request failed.", detail);
  }
}

// ---- Decoding of attention: bytes with the maximum of each row.
function rows(codes, scale) { // the scale is base64 of float32, or numbers
  return { codes: bytes(codes), largest: typeof scale === "string" ? new Float32Array(bytes(scale).buffer) : Float32Array.from([scale].flat(2)) };
}

function unpacked(response) {
  const { grid, layers, heads, reader, image, answers, target, axes, lift } = response, seen = { grid, layers, heads, reader, image, predictions: answers, target, axes, lift };
  for (const name of ["attention", "between", "rollout", "relevance"]) {
    if (response[name]) seen[name] = rows(response[name], response[`${name}_scale`]);
  }
  return { ...seen, cells: response.between_grid, side: response.between_side }; // `side`: patches along the side of a cell
}

function current(seen) {
  if (!seen[state.view]) return null;
  const drawn = state.view === "attention" ? attention(seen, state.layer, state.head, patch()) : row(seen[state.view], 0, seen.grid[0] * seen.grid[1]);
  return { ...drawn, map: heat, glow: true };
}

// ---- Drawing.
function draw() {
  for (const { map, mask, alone, node } of masked()) {
    paintMask(map.getContext("2d"), mask, state.opacity, alone ?? null);
    const under = mask.classes[alone];
    node.querySelector(".caption").textContent = under ? `${under.label}: ${percent(under.share)} of the pixels.` : "";
  }
  for (const pane of seeing()) {
    const { seen, ground, map, node } = pane, drawn = current(seen), fits = patch() && patch()[0] < seen.grid[0] && patch()[1] < seen.grid[1];
    paint(map.getContext("2d"), seen.grid, faded(ground, drawn ? state.strength : 0), ground.side, drawn, state.strength);
    if (fits && (state.view === "attention" ? seen.between : state.under)) outline(map.getContext("2d"), ground.side, patch(), Math.max(2, Math.round(ground.side / 12)));
    node.querySelector(".most").textContent = drawn ? short(drawn.largest) : "";
    node.querySelector(".caption").textContent = describeMap(seen, drawn);
  }
  const only = state.two ? null : seeing()[0];
  if (only && state.view === "attention") smallMaps(only);
  Object.assign($("workspace").dataset, { view: state.view, layer: state.layer, head: state.head, patch: patch() ? patch().join() : "" });
}

function describeMap(seen, drawn) {
  if (!drawn) return "This map is not available for this image.";
  const w = seen.grid[1], at = seen.between ? patch() : null, { under } = state;
  if (state.view !== "attention") {
    return under ? `The patch ${seen.axes ? "at" : "in"} ${place(under, seen)}: ${short((drawn.codes[under[0] * w + under[1]] / 255) * drawn.largest)}.` : `Maximum ${seen.axes ? "at" : "in"} ${strongest(drawn, seen)}.`;
  }
  const who = at ? `The patch ${seen.axes ? "at" : "in"} ${place(at, seen)}` : `The ${seen.reader}`;
  const where = state.head ? `layer ${state.layer}, head ${state.head}` : `layer ${state.layer}, mean of the heads`;
  return `${who}, ${where}: maximum at ${strongest(drawn, seen)}, ${short(100 * drawn.largest)} %.`;
}

function smallMaps({ seen, small }) {
  const [h, w] = seen.grid, holder = $("heads"), at = seen.between ? patch() : null;
  if (holder.children.length !== seen.heads + 1) {
    holder.replaceChildren(...Array.from({ length: seen.heads + 1 }, (_, head) => {
      const button = made("button", "", made("canvas"), head ? `head ${head}` : "mean");
      button.type = "button";
      button.firstChild.setAttribute("aria-hidden", "true");
      button.addEventListener("click", () => { state.head = head; update(); });
      return button;
    }));
  }
  [...holder.children].forEach((button, head) => {
    const canvas = button.firstChild, context = canvas.getContext("2d");
    if (canvas.width !== w * small.side || canvas.height !== h * small.side) [canvas.width, canvas.height] = [w * small.side, h * small.side];
    paint(context, seen.grid, faded(small, MAP_STRENGTH), small.side, { ...attention(seen, state.layer, head, at), map: heat, glow: true }, MAP_STRENGTH);
    if (at) outline(context, small.side, at, 1);
    button.setAttribute("aria-pressed", head === state.head);
  });
  if ($("every").open) everyHead($("all"), seen, at, heat);
}

// ---- Page state.
const READING = {
  attention: "Attention weight of each patch, from dark to light. Point at a patch to see its attention; click to pin it.",
  rollout: "Attention of all layers multiplied, including residual connections: how much each patch contributes to the output token. Independent of the class.",
  relevance: "Attention weighted by the gradient of the class score: patches that support this class.",
};

function update() {
  const any = panes.some((pane) => pane.image), { model } = state;
  $("intake").classList.toggle("first", !any);
  $("workspace").hidden = !any;
  $("workspace").classList.toggle("two", state.two);
  $("compare").hidden = !any;
  $("compare").setAttribute("aria-pressed", state.two);
  panes.forEach((pane, k) => {
    pane.node.hidden = k > 0 && !state.two;
    pane.node.classList.toggle("active", state.two && state.active === k);
    pane.arrange();
  });
  $("shelf").querySelectorAll("button").forEach((button) => button.setAttribute("aria-current", shownPanes().some((pane) => pane.image?.id === button.dataset.id)));
  const first = seeing()[0]?.seen;
  $("controls").hidden = !first;
  if (first) {
    if (!has(state.view)) state.view = ["attention", "rollout", "relevance"].find(has);
    state.layer = Math.min(state.layer, first.layers);
    state.head = Math.min(state.head, first.heads);
    const isAttention = state.view === "attention", between = seeing().some((pane) => pane.seen.between);
    for (const tab of document.querySelectorAll("[role=tab]")) {
      const chosen = tab.dataset.view === state.view;
      tab.hidden = !has(tab.dataset.view);
      tab.setAttribute("aria-selected", chosen);
      tab.tabIndex = chosen ? 0 : -1;
      if (chosen) $("panel").setAttribute("aria-labelledby", tab.id);
    }
    $("from").hidden = !isAttention || !between;
    for (const id of ["for-layer", "for-head", "heads", "every"]) $(id).hidden = !isAttention;
    $("layer").max = first.layers;
    $("head").max = first.heads;
    const dials = { layer: [state.layer, `${state.layer} of ${first.layers}`], head: [state.head, state.head ? `${state.head} of ${first.heads}` : "mean"], strength: [Math.round(100 * state.strength), `${Math.round(100 * state.strength)} %`] };
    for (const [id, [value, words]] of Object.entries(dials)) {
      $(id).value = value;
      $(`${id}-value`).textContent = words;
      $(id).setAttribute("aria-valuetext", words);
    }
    const target = state.two ? null : first.target;
    $("reading").textContent = state.view === "relevance" ? READING.relevance.replace("this class", target ?? "the top class") : READING[state.view];
    $("whole").textContent = capital(first.reader);
    $("whole").setAttribute("aria-pressed", !patch());
    $("patch").setAttribute("aria-pressed", !!patch());
    $("coarse").hidden = !(isAttention && first.side > 1);
    if (first.side > 1) $("coarse").textContent = `Attention from a patch is shown on a coarser grid: ${first.cells.join("×")} cells of ${first.side}×${first.side} patches.`;
  }
  $("masking").hidden = !masked().length;
  $("opacity").value = Math.round(100 * state.opacity);
  $("opacity-value").textContent = `${Math.round(100 * state.opacity)} %`;
  $("theme").setAttribute("aria-pressed", isDark());
  document.title = model ? `${model.name} · vitrail` : "vitrail";
  draw();
}

// ---- One image with its predictions and maps.
class Pane {
  constructor(letter, number) {
    this.number = number;
    this.node = made("div", `pane ${letter}`, $("pane").content.cloneNode(true));
    this.map = this.node.querySelector(".map");
    this.node.querySelector(".letter").textContent = letter.toUpperCase();
    this.node.querySelector(".predictions").setAttribute("aria-label", `Predictions for image ${letter.toUpperCase()}`);
    this.map.setAttribute("aria-label", `Image ${letter.toUpperCase()} with its map: arrow keys move the patch, Escape clears it`);
    this.node.querySelector(".caption").id = `caption-${letter}`;
    this.map.setAttribute("aria-describedby", `caption-${letter}`);
    colourBar(this.node.querySelector(".key"), heat);
    this.forget();
    this.listen();
  }

  forget() {
    this.asked?.abort();
    if (this.url) URL.revokeObjectURL(this.url);
    Object.assign(this, { image: null, predictions: null, seconds: null, mask: null, alone: null, seen: null, axes: null, ratio: null, ground: null, small: null, trouble: null, waits: "", busy: false, url: null, asked: null });
  }

  // Show an image, request its predictions, then its attention maps.
  async show(image) {
    const { model } = state, preview = this.node.querySelector(".preview");
    this.forget();
    const asked = (this.asked = new AbortController()), signal = asked.signal;
    this.image = image;
    this.busy = true;
    this.url = URL.createObjectURL(image.blob);
    preview.hidden = true;
    preview.onload = () => { preview.hidden = false; };
    preview.onerror = () => { preview.hidden = true; }; // the server may support formats that the browser does not
    if (model.sound) this.node.querySelector(".player").src = this.url;
    else preview.src = this.url;
    update();
    const tell = (words) => { this.waits = words; this.arrange(); if (words) announce(words); };
    const about = `model=${encodeURIComponent(model.name)}`;
    try {
      if (model.masks) {
        const response = await ask(`segment?${about}`, { body: image.blob, signal, tell }), [first] = response.masks;
        if (first.error) throw new Trouble(422, wordsOf(422), first.error);
        const mask = await openMask(first.mask, image.blob);
        signal.throwIfAborted();
        [this.map.width, this.map.height] = [mask.w, mask.h];
        Object.assign(this, { mask, seconds: response.seconds, predictions: mask.classes.map(({ label, share, colour }) => ({ label, score: share, colour })) });
        announce(`${image.name}: ${this.predictions.slice(0, 3).map(({ label, score }) => `${label}, ${percent(score)}`).join("; ")}`);
        remember(image, this.predictions);
      } else if (model.labels || model.texts || !model.attention) {
        const response = await ask(`predict?${about}&top=${model.texts ? 8 : 5}${wording(model)}`, { body: image.blob, signal, tell }), [first] = response.predictions;
        signal.throwIfAborted();
        if (first.error) throw new Trouble(422, wordsOf(422), first.error);
        const predictions = first.values ? Object.entries(first.values).map(([label, value]) => ({ label, value })) : first.answers;
        Object.assign(this, { predictions, seconds: response.seconds });
        this.arrange();
        announce(`${image.name}: ${predictions.slice(0, 3).map((each) => `${each.label}, ${amount(each)}`).join("; ")}`);
        if (!model.sound) remember(image, predictions);
      }
      if (model.sound && !model.attention) {
        const { image: picture, axes } = await ask(`spectrogram?${about}`, { body: image.blob, signal, tell });
        signal.throwIfAborted();
        preview.src = picture;
        await preview.decode();
        this.hear(picture, axes, preview);
      }
      if (model.attention) {
        const seen = unpacked(await ask(`attention?${about}`, { body: image.blob, signal, tell })), input = new Image();
        input.src = seen.image;
        await input.decode();
        signal.throwIfAborted();
        const largest = Math.max(...seen.grid), [h, w] = seen.grid;
        this.ground = grounded(seen.grid, input, Math.max(2, Math.floor(896 / largest)));
        this.small = grounded(seen.grid, input, Math.max(1, Math.floor(154 / largest)));
        [this.map.width, this.map.height] = [w * this.ground.side, h * this.ground.side];
        if (seen.axes) this.hear(seen.image, seen.axes, input);
        if (!this.predictions) {
          this.predictions = seen.predictions.length ? seen.predictions : null; // none for a model without a classifier
          remember(image, seen.predictions);
        }
        this.seen = seen;
      }
    } catch (error) {
      if (signal.aborted) return; // replaced by another image
      this.trouble = error instanceof Trouble ? error : new Trouble("odd", "The response could not be displayed.", error.message);
    }
    this.busy = false;
    this.waits = "";
    update();
  }

  // Show the axes of a spectrogram, and keep the sound with it.
  hear(picture, axes, { naturalWidth, naturalHeight }) {
    this.axes = axes;
    this.ratio = Math.min(3, Math.max(1, naturalWidth / naturalHeight));
    this.image.picture = picture;
    if (this.predictions) remember(this.image, this.predictions);
  }

  arrange() {
    const { node, image, predictions, mask, seen, trouble, busy, waits } = this, { model } = state, part = (name) => node.querySelector(name);
    node.classList.toggle("empty", !image);
    node.classList.toggle("busy", busy);
    node.classList.toggle("predicted", !!predictions);
    node.classList.toggle("masked", !!mask);
    node.classList.toggle("unmapped", !seen && !mask);
    node.classList.toggle("whole", !busy && !seen && !mask); // show the original if there is no model input
    part(".predictions").hidden = !image;
    part(".predictions").setAttribute("aria-busy", busy);
    part(".replace").hidden = !image;
    part(".progress").hidden = !busy;
    part(".map").hidden = !seen && !mask;
    part(".map").classList.toggle("pick", !!seen?.between && state.view === "attention");
    const shape = mask ? [mask.h, mask.w] : seen ? seen.grid : (model?.size ?? [1, 1]);
    part(".frame").style.setProperty("--shape", this.ratio ?? `${shape[1]} / ${shape[0]}`);
    part(".frame").style.setProperty("--wide", this.ratio ?? shape[1] / shape[0]);
    if (this.axes !== this.written) drawAxes(part(".box"), this.axes);
    this.written = this.axes;
    part(".player").hidden = !image || !model?.sound;
    const [best] = predictions ?? [];
    const found = mask && predictions.length === 1 ? best.label : mask ? `${predictions.length} classes` : best?.label;
    const verdict = best?.value === undefined ? found : predictions.length > 1 ? `${predictions.length} numbers` : `${best.label} ${amount(best)}`;
    part(".verdict b").textContent = verdict ?? (busy ? "Running…" : "");
    part(".called").textContent = best ? `${best.label}, ${amount(best)}` : (image?.name ?? "");
    part(".verdict span").textContent = image ? [image.name, this.seconds === null ? "" : `${this.seconds.toFixed(2)} s`].filter(Boolean).join(" · ") : "";
    const bars = mask ? predictions.map((prediction, k) => this.entry(prediction, k)) : predictions ? (best?.value !== undefined && predictions.length === 1 ? [] : predictions.map(bar)) : busy ? [90, 55, 70, 40, 60].map(shadow) : [];
    if (this.drawn !== predictions || !predictions) part(".scores").replaceChildren(...bars); // animate bars once
    this.drawn = predictions;
    const aside = !image || busy ? "" : !predictions && !trouble ? "This model has no classifier: it returns features only." : predictions && model.several ? "Multi-label model: scores need not sum to 100 %." : "";
    const blind = image && !busy && !model.attention && !model.masks ? (model.clip ? "" : "No attention maps: they require a Vision Transformer checkpoint.") : "";
    part(".aside").textContent = [aside, blind].filter(Boolean).join(" ");
    part(".aside").hidden = !(aside || blind);
    const box = part(".trouble");
    box.hidden = !(trouble || waits);
    box.classList.toggle("waits", !!waits);
    if (waits) {
      part(".trouble b").textContent = "";
      part(".trouble p").textContent = waits;
      part(".trouble .ways").replaceChildren();
    } else if (trouble && trouble !== this.explained) {
      part(".trouble b").textContent = predictions ? `${trouble.message} Attention maps are missing.` : trouble.message;
      part(".trouble p").textContent = trouble.detail;
      part(".trouble .ways").replaceChildren(...this.remedies(trouble));
    }
    this.explained = waits ? null : trouble;
  }

  // A class of the mask: hidden by a click, alone under the pointer.
  entry(prediction, k) {
    const item = bar(prediction), button = made("button", "", made("span", "swatch"), item.firstChild);
    button.type = "button";
    button.setAttribute("aria-pressed", !this.mask.hidden.has(k));
    item.style.setProperty("--colour", prediction.colour);
    item.prepend(button);
    button.addEventListener("click", () => {
      const { hidden } = this.mask;
      if (!hidden.delete(k)) hidden.add(k);
      button.setAttribute("aria-pressed", !hidden.has(k));
      this.alone = null;
      draw();
    });
    item.addEventListener("pointerenter", () => { this.alone = this.mask.hidden.has(k) ? null : k; soon(); });
    item.addEventListener("pointerleave", () => { this.alone = null; soon(); });
    return item;
  }

  remedies({ kind }) {
    const remedy = (words, act) => { const button = made("button", "", words); button.type = "button"; button.addEventListener("click", act); return button; };
    if (kind === 413) return this.node.querySelector(".preview").naturalWidth ? [remedy("Send a smaller copy", () => this.shrink())] : [];
    return kind === 415 || kind === 422 || kind === 400 ? [] : [remedy(kind === 401 ? "Enter the token" : "Try again", () => this.show(this.image))];
  }

  // Send a downsized copy of the image.
  shrink() {
    const image = this.node.querySelector(".preview"), canvas = document.createElement("canvas"), part = Math.min(1, SMALLER / Math.max(image.naturalWidth, image.naturalHeight));
    [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight].map((n) => Math.max(1, Math.round(n * part)));
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => this.show(taken(blob, `${this.image.name}, smaller`)), "image/jpeg", 0.9);
  }

  // Save the image with its map and prediction as PNG.
  save() {
    const { map, image, predictions, node } = this, canvas = document.createElement("canvas"), context = canvas.getContext("2d"), style = getComputedStyle(root);
    [canvas.width, canvas.height] = [map.width, map.height + 116];
    context.fillStyle = "#fbfaf7";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(map, 0, 0);
    const [best] = predictions ?? [], does = state.view === "attention" ? "" : `${capital(state.view)}. `;
    const words = this.mask ? predictions.slice(1).map(({ label, score }) => `${label}, ${percent(score)}`).join("; ") : `${does}${node.querySelector(".caption").textContent}`;
    const lines = [[best ? `${best.label}, ${amount(best)}` : image.name, "#1c1b22", `500 38px ${style.getPropertyValue("--serif")}`, 52], [`${state.model.name}: ${words}`, "#5c5867", `20px ${style.getPropertyValue("--sans")}`, 92]];
    for (const [text, colour, font, down] of lines) {
      Object.assign(context, { fillStyle: colour, font });
      context.fillText(text, 24, map.height + down, map.width - 48);
    }
    canvas.toBlob((blob) => {
      const link = made("a"), url = (link.href = URL.createObjectURL(blob));
      link.download = `${image.name.replace(/\.\w+$/, "")}, ${this.mask ? "mask" : state.view}.png`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(url), 10_000);
    }, "image/png");
  }

  listen() {
    const { node, map } = this;
    node.querySelector(".save").addEventListener("click", () => this.save());
    for (const name of [".replace", ".second"]) node.querySelector(name).addEventListener("click", () => { meant = this; $("files").click(); });
    for (const kind of ["pointerdown", "focusin"]) node.addEventListener(kind, () => { if (state.active !== this.number) { state.active = this.number; update(); } });
    const pointed = (event) => {
      const box = map.getBoundingClientRect(), [h, w] = this.seen.grid;
      const y = Math.floor(((event.clientY - box.top) / box.height) * h), x = Math.floor(((event.clientX - box.left) / box.width) * w);
      return y >= 0 && x >= 0 && y < h && x < w ? [y, x] : null;
    };
    map.addEventListener("pointermove", (event) => {
      if (this.mask) {
        const box = map.getBoundingClientRect(), { w, h, values, hidden } = this.mask;
        const x = Math.floor(((event.clientX - box.left) / box.width) * w), y = Math.floor(((event.clientY - box.top) / box.height) * h), k = values[y * w + x];
        const at = x < 0 || y < 0 || x >= w || y >= h || k === NO_CLASS || hidden.has(k) ? null : k;
        if (at !== this.alone) { this.alone = at; soon(); }
        return;
      }
      const at = pointed(event);
      if (String(at) !== String(state.under)) { state.under = at; soon(); }
    });
    map.addEventListener("pointerleave", () => { state.under = this.alone = null; soon(); });
    map.addEventListener("click", (event) => { if (this.seen && state.view === "attention") { state.pinned = pointed(event); update(); } });
    map.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (event.key === "Escape") { state.pinned = state.under = null; update(); return; }
      if (!step || state.view !== "attention" || !this.seen?.between) return;
      event.preventDefault();
      const [h, w] = this.seen.grid, from = state.pinned;
      state.under = null;
      state.pinned = from ? [Math.min(h - 1, Math.max(0, from[0] + step[0])), Math.min(w - 1, Math.max(0, from[1] + step[1]))] : [h >> 1, w >> 1];
      update();
      announce(node.querySelector(".caption").textContent);
    });
  }
}

function bar({ label, score, value }) {
  const item = made("li", value === undefined ? "" : "number", made("span", "label", label), made("span", "bar"), made("span", "share", amount({ score, value })));
  item.firstChild.title = label;
  item.children[1].setAttribute("aria-hidden", "true");
  item.children[1].style.setProperty("--score", value === undefined ? `${100 * score}%` : "0%");
  return item;
}

function shadow(width) {
  const item = made("li", "shadow", made("span", "label"), made("span", "bar"), made("span", "share"));
  item.firstChild.style.setProperty("width", `${width}%`);
  item.setAttribute("aria-hidden", "true");
  return item;
}

let waiting = false; // at most one update per animation frame
function soon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; update(); });
}

// ---- Input of images, or of videos for a model of clips.
function medium() {
  return state.model?.sound ? "sound" : state.model?.clip ? "video" : "image";
}

const CHOOSE = { image: "Choose an image", video: "Choose a video", sound: "Choose a sound" };
const NOUNS = { image: "an image", video: "a video", sound: "a sound" };
// Files of sound may have the type of a video: WebM and Ogg are both.
const isTaken = ({ type }) => !type || (medium() === "sound" ? /^(audio|video)\/|^application\/ogg/.test(type) : type.startsWith(`${medium()}/`));

function taken(blob, name) {
  return { id: `${name} ${blob.size} ${blob.lastModified ?? Date.now()}`, name, blob };
}

function complain(words, again) {
  $("notice").hidden = !words;
  $("notice-words").textContent = words;
  $("notice-again").hidden = !again;
  $("notice-again").onclick = again ?? null;
}

let meant = null; // target pane of the file dialog
// Default pane of a new image: the empty one, else the active one.
function vacancy() {
  if (!state.two) return panes[0];
  return panes.find((pane) => !pane.image) ?? panes[state.active];
}

async function receive(files, pane) {
  const good = [], bad = [];
  for (const file of files) {
    if (!isTaken(file)) bad.push(`${file.name || "That"} is not ${NOUNS[medium()]}${medium() === "image" ? "" : `: this model takes ${medium()}s`}.`);
    else if (!file.size) bad.push(`${file.name || "That"} is empty.`);
    else good.push(file);
  }
  complain(bad.length > 2 ? `${bad.length} files are not ${medium()}s.` : bad.join(" "));
  if (!good.length) return;
  if (!state.model) { complain("No model yet: the server has not responded."); return; }
  if (good.length > 2) complain(`${good.length} ${medium()}s were given: the first two are shown. For many use vitrail predict.`);
  const { sound } = state.model, ready = await Promise.all(good.slice(0, 2).map((file) => (sound ? readableSound(file, sound.rate) : file)));
  const named = ready.map((file) => taken(file, file.name || medium()));
  if (named.length === 2) {
    state.two = true;
    named.forEach((each, k) => panes[k].show(each));
  } else {
    (pane ?? vacancy()).show(named[0]);
  }
}

function dropped(event) {
  const files = [...event.dataTransfer.files], at = panes.find((pane) => [...pane.node.children].some((part) => part.contains(event.target)));
  if (files.length) receive(files, at);
  else complain("Only files can be dropped here. Save the image first, or copy and paste it.");
}

function pasted(event) {
  const files = [...(event.clipboardData?.files ?? [])];
  if (files.length) { event.preventDefault(); receive(files.map((file) => new File([file], file.name === "image.png" ? "pasted image" : file.name, { type: file.type, lastModified: Date.now() }))); }
  else if (!event.target.closest?.("input, dialog")) complain("There is no image to paste: copy the image itself, not its URL.");
}

// Camera access; browsers allow it on localhost or over https.
async function photograph() {
  if (matchMedia("(pointer: coarse)").matches || !navigator.mediaDevices) { $("shot").click(); return; }
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment", width: { ideal: 1280 } } });
  } catch (error) {
    complain(error.name === "NotAllowedError" ? "Camera access denied: allow it in the browser, or choose an image." : "No camera found: choose an image instead.");
    return;
  }
  complain("");
  const video = $("video"), camera = $("camera");
  video.srcObject = stream;
  camera.addEventListener("close", () => { for (const track of stream.getTracks()) track.stop(); video.srcObject = null; }, { once: true });
  camera.showModal();
  await video.play();
}

// Recording of the microphone; browsers allow it on localhost or over https.
async function record() {
  const dialog = $("recording");
  let recording;
  const tell = (seconds, loudness) => {
    $("recording-time").textContent = `${seconds.toFixed(1)} s`;
    $("level").style.width = `${Math.min(100, 300 * loudness)}%`;
    if (seconds >= MOST_SECONDS - 0.1) dialog.close("done");
  };
  try {
    recording = await startRecording(tell);
  } catch (error) {
    complain(error.name === "NotAllowedError" ? "Microphone access denied: allow it in the browser, or choose a file." : "No microphone found: choose a file instead.");
    return;
  }
  complain("");
  $("recording-time").textContent = "0.0 s";
  $("level").style.width = "0";
  dialog.returnValue = "";
  dialog.addEventListener("close", () => {
    if (dialog.returnValue !== "done") { recording.stop(); return; }
    const file = recording.finish();
    if (file) receive([file]); else complain("Nothing was recorded: check the microphone.");
  }, { once: true });
  dialog.showModal();
}

function shutter() {
  const video = $("video"), canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
  canvas.getContext("2d").drawImage(video, 0, 0);
  $("camera").close();
  canvas.toBlob((blob) => receive([new File([blob], "photo.jpg", { type: "image/jpeg" })]), "image/jpeg", 0.92);
}

// ---- Recent images, stored in this browser's IndexedDB, or in memory if storage is blocked.
let recent = []; // newest first
let shelf = null; // the database, if there is one
const others = "BroadcastChannel" in window ? new BroadcastChannel("vitrail-recent") : null; // the same page in other tabs
const settled = (request) => new Promise((resolve, reject) => { request.onsuccess = () => resolve(request.result); request.onerror = () => reject(request.error); });

async function openShelf() {
  try {
    const opening = indexedDB.open("vitrail", 2);
    opening.onupgradeneeded = () => {
      const { result, transaction } = opening;
      if (result.objectStoreNames.contains("pictures")) transaction.objectStore("pictures").name = "images"; // of version 1
      else result.createObjectStore("images", { keyPath: "id" });
    };
    shelf = await settled(opening);
    shelf.onversionchange = () => shelf.close(); // a newer page in another tab
  } catch {
    shelf = null; // private window, or storage is blocked
  }
  await readShelf();
}

const storedImages = (mode) => shelf.transaction("images", mode).objectStore("images");

async function readShelf() {
  if (shelf) recent = (await settled(storedImages("readonly").getAll())).sort((a, b) => b.at - a.at);
  drawShelf();
}

async function remember(image, predictions) {
  const before = recent.find((each) => each.id === image.id);
  const item = { id: image.id, name: image.name, blob: image.blob, at: before?.at ?? Date.now(), predictions: predictions.slice(0, 1), picture: image.picture, thumb: before?.thumb ?? (await thumb(image.blob, image.picture)) };
  recent = [item, ...recent.filter((each) => each.id !== item.id)].sort((a, b) => b.at - a.at);
  const gone = recent.splice(room(recent));
  drawShelf();
  if (!shelf) return;
  try {
    const store = storedImages("readwrite");
    for (const each of gone) store.delete(each.id);
    await settled(store.put(item));
  } catch (error) {
    complain(`This image cannot be stored: the browser’s storage refused it (${error.name}).`);
  }
  others?.postMessage("changed");
}

// Number of items to keep, newest first; at least one.
function room(items) {
  let taken = 0;
  const full = items.findIndex(({ blob }, k) => k >= RECENT || ((taken += blob.size) > SHELF && k > 0));
  return full < 0 ? items.length : full;
}

// A small copy of an image, or of the spectrogram of a sound.
async function thumb(blob, picture) {
  const image = new Image(), url = (image.src = picture ?? URL.createObjectURL(blob));
  try { await image.decode(); } catch { return null; /* format not supported by this browser */ } finally { if (!picture) URL.revokeObjectURL(url); }
  const canvas = document.createElement("canvas"), side = Math.min(image.naturalWidth, image.naturalHeight);
  canvas.width = canvas.height = 128;
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(image, (image.naturalWidth - side) / 2, (image.naturalHeight - side) / 2, side, side, 0, 0, 128, 128);
  return canvas.toDataURL("image/jpeg", 0.85);
}

function drawShelf() {
  $("recent").hidden = !recent.length;
  $("shelf").replaceChildren(...recent.map((item) => {
    const button = made("button"), [best] = item.predictions ?? [], words = best ? `${item.name}: ${best.label}, ${amount(best)}` : item.name;
    button.type = "button";
    button.dataset.id = item.id;
    button.title = words;
    button.setAttribute("aria-label", words);
    if (item.thumb) { const image = made("img"); image.src = item.thumb; image.alt = ""; image.draggable = false; button.append(image); } else button.append("…");
    button.setAttribute("aria-current", shownPanes().some((pane) => pane.image?.id === item.id));
    button.addEventListener("click", () => { complain(""); if (state.model) vacancy().show(item); });
    return button;
  }));
}

async function clear() {
  recent = [];
  if (shelf) await settled(storedImages("readwrite").clear());
  drawShelf();
  others?.postMessage("changed");
  announce("Recent images deleted.");
  $("choose").focus();
}

// ---- Models.
async function meet() {
  complain("");
  try {
    const { models, index } = await ask("models", { tell: complain });
    state.models = models;
    $("find").hidden = !index;
  } catch (error) {
    if (!(error instanceof Trouble)) throw error;
    complain(`${error.message} ${error.detail}`, meet);
    return;
  }
  if (!state.models.length) { complain("The server has no model.", meet); return; }
  $("model").replaceChildren(...state.models.map(({ name }) => new Option(name, name)));
  $("models").hidden = state.models.length < 2;
  choose((state.models.find((model) => model.default) ?? state.models[0]).name);
  root.dataset.ready = "yes";
}

function choose(name) {
  const model = (state.model = state.models.find((each) => each.name === name));
  $("model").value = name;
  $("name").textContent = name;
  const facts = [model.layers && model.heads ? `${model.layers} layers of ${model.heads} heads` : "", model.clip ? `videos, ${model.clip.frames} frames` : "", model.sound ? `sounds of ${Number(model.sound.seconds.toPrecision(2))} s at ${model.sound.rate / 1000} kHz` : `${model.size[1]}×${model.size[0]} pixels`, model.labels ? counted(model.labels.length, model.numbers ? ["number", "numbers"] : ["class", "classes"]) : ""].filter(Boolean);
  $("facts").replaceChildren(...facts.map((fact) => made("span", "", fact)));
  $("files").accept = model.sound ? SOUND_TYPES : `${medium()}/*`;
  $("record").hidden = !model.sound || !navigator.mediaDevices || !("AudioWorkletNode" in window);
  $("photograph").hidden = medium() !== "image" || !(navigator.mediaDevices || matchMedia("(pointer: coarse)").matches);
  $("choose").textContent = CHOOSE[medium()];
  $("invitation").textContent = `Drop ${NOUNS[medium()]} here`;
  $("or-paste").textContent = model.sound && !$("record").hidden ? "or record one. It is sent to this server only." : "or paste one. It is sent to this server only.";
  Object.assign(state, { layer: model.layers || 1, head: 0, pinned: null, under: null });
  glass(name);
  offerWords(model);
  for (const pane of panes) if (pane.image) pane.show(pane.image);
  update();
}

// Stained-glass header, generated from the model's name.
function glass(seed) {
  let mixed = 2166136261;
  for (const c of seed) mixed = Math.imul(mixed ^ c.codePointAt(0), 16777619);
  const chance = () => {
    mixed = (mixed + 0x6d2b79f5) | 0;
    let t = Math.imul(mixed ^ (mixed >>> 15), 1 | mixed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  const columns = 22, rows = 3, wide = 1320 / columns, high = 132 / rows, weights = [5, 5, 4, 1.5, 2, 1.5, 3, 0.8]; // blues and ruby, as in Chartres
  const corners = Array.from({ length: columns + 1 }, (_, x) => Array.from({ length: rows + 1 }, (_, y) => [
    Math.round((x + (x % columns ? 0.68 * chance() - 0.34 : 0)) * wide), Math.round((y + (y % rows ? 0.6 * chance() - 0.3 : 0)) * high)]));
  const panesOfGlass = [], colours = {};
  for (let x = 0; x < columns; x++) for (let y = 0; y < rows; y++) {
    const [a, b, c, d] = [corners[x][y], corners[x + 1][y], corners[x + 1][y + 1], corners[x][y + 1]];
    const shapes = chance() > 0.3 ? [[a, b, c, d]] : chance() < 0.5 ? [[a, b, c], [a, c, d]] : [[a, b, d], [b, c, d]];
    for (const shape of shapes) {
      const near = [colours[[x - 1, y]], colours[[x, y - 1]], colours[[x, y]]], free = weights.map((weight, k) => (near.includes(k) ? 0 : weight));
      let left = chance() * free.reduce((p, q) => p + q), colour = 0;
      while ((left -= free[colour]) > 0) colour++;
      colours[[x, y]] = colour;
      const pane = document.createElementNS("http://www.w3.org/2000/svg", "polygon");
      pane.setAttribute("points", shape.map((point) => point.join()).join(" "));
      pane.setAttribute("class", `g${colour}`);
      panesOfGlass.push(pane);
    }
  }
  $("window").replaceChildren(...panesOfGlass);
}

// ---- Event handlers.
function start() {
  panes = ["a", "b"].map((letter, number) => new Pane(letter, number));
  $("controls").before(...panes.map((pane) => pane.node));
  glass("vitrail");

  $("choose").addEventListener("click", () => { meant = null; $("files").click(); });
  $("photograph").addEventListener("click", () => { meant = null; photograph(); });
  $("photograph").hidden = !(navigator.mediaDevices || matchMedia("(pointer: coarse)").matches);
  for (const id of ["files", "shot"]) $(id).addEventListener("change", (event) => { receive([...event.target.files], meant); event.target.value = ""; });
  $("shutter").addEventListener("click", shutter);
  $("record").addEventListener("click", () => { meant = null; record(); });
  $("recorded").addEventListener("click", () => $("recording").close("done"));
  $("recording-cancel").addEventListener("click", () => $("recording").close("cancel"));
  $("camera-cancel").addEventListener("click", () => $("camera").close());
  $("compare").addEventListener("click", () => {
    state.two = !state.two;
    state.active = state.two ? 1 : 0;
    if (!state.two) { state.under = null; panes[1].forget(); }
    update();
  });
  $("clear").addEventListener("click", clear);
  $("notice-close").addEventListener("click", () => complain(""));
  $("model").addEventListener("change", (event) => choose(event.target.value));
  $("theme").addEventListener("click", () => {
    const next = isDark() ? "light" : "dark", same = darkness.matches === (next === "dark"); // the system's theme is not stored
    if (same) delete root.dataset.theme; else root.dataset.theme = next;
    kept.set("localStorage", "vitrail-theme", same ? null : next);
    update();
  });
  darkness.addEventListener("change", update);

  for (const [id, set] of [["layer", (v) => { state.layer = v; }], ["head", (v) => { state.head = v; }], ["strength", (v) => { state.strength = v / 100; }], ["opacity", (v) => { state.opacity = v / 100; }]]) {
    $(id).addEventListener("input", (event) => { set(Number(event.target.value)); update(); });
  }
  $("whole").addEventListener("click", () => { state.pinned = null; update(); });
  $("patch").addEventListener("click", () => { const pane = seeing()[0]; state.pinned ??= pane.seen.grid.map((n) => n >> 1); update(); pane.map.focus(); });
  $("every").addEventListener("toggle", draw);
  $("all").addEventListener("click", (event) => {
    const box = event.target.getBoundingClientRect(), { layers, heads } = seeing()[0].seen;
    state.layer = Math.min(layers, 1 + Math.floor(((event.clientX - box.left) / box.width) * layers));
    state.head = Math.min(heads, 1 + Math.floor(((event.clientY - box.top) / box.height) * heads));
    update();
  });
  const tabs = [...document.querySelectorAll("[role=tab]")];
  for (const tab of tabs) {
    tab.addEventListener("click", () => { state.view = tab.dataset.view; state.under = null; update(); });
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      const open = tabs.filter((each) => !each.hidden), next = open[(open.indexOf(tab) + step + open.length) % open.length];
      next.focus();
      next.click();
      event.preventDefault();
    });
  }

  let leaving = null; // a drag ends when no dragover event follows
  const drag = (on, at) => {
    root.classList.toggle("dropping", on);
    for (const pane of panes) pane.node.classList.toggle("target", on && state.two && [...pane.node.children].some((part) => part.contains(at)));
  };
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    clearTimeout(leaving);
    leaving = setTimeout(drag, 200, false);
    drag(true, event.target);
  });
  document.addEventListener("drop", (event) => { event.preventDefault(); drag(false); dropped(event); });
  document.addEventListener("paste", pasted);
  others?.addEventListener("message", readShelf);

  update();
  openShelf();
  meet();
}
document.addEventListener("DOMContentLoaded", start);
