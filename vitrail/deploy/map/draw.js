// Drawing: points into an array of pixels, thumbnails and marks on a second canvas above.
const stage = byId("map-stage");
const canvas = byId("map-points-canvas");
const over = byId("map-over-canvas");
const context = canvas.getContext("2d", { alpha: false });
const overContext = over.getContext("2d");
const PAD = 64; // pixels around the array of pixels, so that no point is clipped while it is written
const MAX_PIXELS = 5e6; // of the array
const FEW = 100; // points whose thumbnails are shown without zooming in
const view = { width: 0, height: 0, ratio: 1, scale: 1, x: 0, y: 0 }; // screen = x + scale * point
let pixels = null;
let image = null;
let colours = null; // packed colour of each point
const front = new Uint8Array(count); // points that are drawn over the others: selected, highlighted, or with a colour
const sequence = order.slice(); // all points in the order of drawing
let waiting = false;

const toScreenX = (i) => view.x + view.scale * points[2 * i];
const toScreenY = (i) => view.y - view.scale * points[2 * i + 1];

function resize() {
  const [width, height] = [Math.max(80, stage.clientWidth), Math.max(80, stage.clientHeight)];
  const ratio = Math.min(devicePixelRatio || 1, Math.max(1, Math.sqrt(MAX_PIXELS / (width * height))), 3);
  if (width === view.width && height === view.height && ratio === view.ratio && image) return;
  const [oldWidth, oldHeight] = [view.width, view.height];
  Object.assign(view, { width, height, ratio });
  for (const each of [canvas, over]) [each.width, each.height] = [Math.round(width * ratio), Math.round(height * ratio)];
  image = new ImageData(canvas.width + 2 * PAD, canvas.height + 2 * PAD);
  pixels = new Uint32Array(image.data.buffer);
  if (oldWidth) [view.x, view.y] = [view.x + (width - oldWidth) / 2, view.y + (height - oldHeight) / 2];
  else fitView();
  requestDraw();
}

function fitView() {
  const [width, height] = [bounds.right - bounds.left, bounds.top - bounds.bottom];
  const margin = 36;
  view.scale = Math.min((view.width - 2 * margin) / (width || extent), (view.height - 2 * margin) / (height || extent));
  view.x = view.width / 2 - view.scale * (bounds.left + bounds.right) / 2;
  view.y = view.height / 2 + view.scale * (bounds.bottom + bounds.top) / 2;
  view.fitted = view.scale;
  requestDraw();
}

function computeColours() {
  const column = state.column;
  const dim = (rgb) => mix(rgb, theme.paper, 0.82);
  const rest = parseColour(theme.rest);
  colours = new Uint32Array(count);
  const any = state.nSelected > 0;
  if (!column || column.labels) {
    const codes = column ? column.labels.length : 0;
    const full = new Uint32Array(codes + 1).fill(pack(rest));
    const pale = new Uint32Array(codes + 1).fill(pack(dim(rest)));
    const palette = theme.classes.map(parseColour);
    if (!column) full[0] = pack(palette[0]), pale[0] = pack(dim(palette[0]));
    else for (const [code, number] of state.colourOf) full[code] = pack(palette[number]), pale[code] = pack(dim(palette[number]));
    if (state.highlight >= 0 && !state.colourOf.has(state.highlight)) full[state.highlight] = pack(parseColour(theme.mark));
    for (let i = 0; i < count; i++) {
      const code = column ? Math.min(column.values[i], codes) : 0;
      const off = state.highlight >= 0 ? code !== state.highlight : any && !state.selected[i];
      colours[i] = off ? pale[code] : full[code];
      front[i] = state.highlight >= 0 || any ? !off : state.colourOf.has(code);
    }
    return;
  }
  const ramp = theme.ramp.map(parseColour);
  const [low, high] = column.clip;
  const full = ramp.map(pack);
  const pale = ramp.map((rgb) => pack(dim(rgb)));
  for (let i = 0; i < count; i++) {
    const value = column.values[i];
    const k = Math.max(0, Math.min(255, Math.round(255 * (value - low) / (high - low || 1))));
    const off = any && !state.selected[i];
    front[i] = any ? !off : !Number.isNaN(value);
    if (Number.isNaN(value)) colours[i] = pack(off ? dim(rest) : rest);
    else colours[i] = off ? pale[k] : full[k];
  }
}

function sortFront() {
  let [at, last] = [0, count];
  for (let k = count - 1; k >= 0; k--) if (front[order[k]]) sequence[--last] = order[k];
  for (let k = 0; k < count; k++) if (!front[order[k]]) sequence[at++] = order[k];
}

// Discs as lists of offsets and coverages, at four by four positions inside a pixel.
let stamps = { radius: 0, width: 0, list: [] };
function makeStamps(radius, width) {
  if (stamps.radius === radius && stamps.width === width) return stamps.list;
  const list = [];
  const reach = Math.ceil(radius + 1);
  for (let part = 0; part < 16; part++) {
    const [cx, cy] = [(part % 4 + 0.5) / 4, (Math.floor(part / 4) + 0.5) / 4];
    const [offsets, covers] = [[], []];
    for (let dy = -reach; dy <= reach; dy++) {
      for (let dx = -reach; dx <= reach; dx++) {
        const cover = Math.max(0, Math.min(1, radius + 0.5 - Math.hypot(dx + 0.5 - cx, dy + 0.5 - cy)));
        if (cover > 0.04) offsets.push(dy * width + dx), covers.push(Math.round(256 * cover));
      }
    }
    list.push({ offsets: Int32Array.from(offsets), covers: Int32Array.from(covers) });
  }
  stamps = { radius, width, list };
  return list;
}

function pointRadius() {
  const base = count > 20000 ? 1.6 : count > 5000 ? 2.2 : count > 1000 ? 3 : 4;
  return Math.min(7, base * Math.max(1, (view.scale / view.fitted) ** 0.35));
}

function drawPoints() {
  const width = image.width;
  pixels.fill(pack(theme.paper));
  const list = makeStamps(Math.round(4 * pointRadius() * view.ratio) / 4, width);
  const [maxX, maxY] = [canvas.width + PAD / 2, canvas.height + PAD / 2];
  const { ratio } = view;
  const [scale, left, top] = [view.scale * ratio, view.x * ratio, view.y * ratio];
  let visible = 0;
  for (let k = 0; k < count; k++) {
    const i = sequence[k];
    if (!shown[i]) continue;
    const x = left + scale * points[2 * i];
    const y = top - scale * points[2 * i + 1];
    if (x < -PAD / 2 || y < -PAD / 2 || x >= maxX || y >= maxY) continue;
    visible++;
    const fx = Math.floor(x);
    const fy = Math.floor(y);
    const { offsets, covers } = list[Math.floor((y - fy) * 4) * 4 + Math.floor((x - fx) * 4)];
    const at = (fy + PAD) * width + fx + PAD;
    const colour = colours[i];
    const r = colour & 255;
    const g = colour >> 8 & 255;
    const b = colour >> 16 & 255;
    for (let n = 0; n < offsets.length; n++) {
      const cover = covers[n];
      const here = at + offsets[n];
      if (cover >= 250) { pixels[here] = colour; continue; }
      const old = pixels[here];
      const red = (old & 255) + ((r - (old & 255)) * cover >> 8);
      const green = (old >> 8 & 255) + ((g - (old >> 8 & 255)) * cover >> 8);
      const blue = (old >> 16 & 255) + ((b - (old >> 16 & 255)) * cover >> 8);
      pixels[here] = 0xff000000 | blue << 16 | green << 8 | red;
    }
  }
  context.putImageData(image, -PAD, -PAD);
  return visible;
}

// Sheets of thumbnails are decoded when they are first needed.
const sheets = [];
function sheetOf(i) {
  const number = Math.floor(cells[i] / meta.per_row ** 2);
  if (!sheets[number]) {
    const sheet = new Image();
    sheets[number] = sheet;
    sheet.onload = () => { sheet.ready = true; requestDraw(); document.dispatchEvent(new CustomEvent("sheet")); };
    sheet.src = `data:image/${meta.sheet_kind};base64,${byId(`data-sheet-${number}`).textContent}`;
  }
  return sheets[number].ready ? sheets[number] : null;
}

function drawThumbnail(target, i, x, y, width, height) {
  const sheet = cells[i] < 0 ? null : sheetOf(i);
  if (!sheet) return false;
  const cell = cells[i] % meta.per_row ** 2;
  const [left, top] = [cell % meta.per_row * meta.cell, Math.floor(cell / meta.per_row) * meta.cell];
  target.imageSmoothingEnabled = meta.smooth || width < shapes[2 * i];
  target.imageSmoothingQuality = "high";
  target.drawImage(sheet, left, top, shapes[2 * i], shapes[2 * i + 1], x, y, width, height);
  return true;
}

function fitShape(i, size) {
  const [w, h] = [shapes[2 * i], shapes[2 * i + 1]];
  return [size * w / Math.max(w, h), size * h / Math.max(w, h)];
}

// Thumbnails that do not overlap, as soon as few enough points are in view.
let drawnThumbnails = 0;
function drawThumbnails(visible) {
  drawnThumbnails = 0;
  if (!state.thumbnails || !meta.sheets || !visible) return;
  const room = Math.sqrt(view.width * view.height / visible);
  if (room < 18 || (view.scale < 1.8 * view.fitted && visible > FEW)) return;
  const size = Math.max(44, Math.min(meta.cell, 160, 0.95 * room));
  const taken = new Map();
  const key = (a, b) => a * 4096 + b;
  for (let k = 0; k < count; k++) {
    const i = order[k];
    if (!shown[i] || cells[i] < 0) continue;
    const [x, y] = [toScreenX(i), toScreenY(i)];
    if (x < -size || y < -size || x > view.width + size || y > view.height + size) continue;
    const [a, b] = [Math.floor(x / size), Math.floor(y / size)];
    let free = true;
    for (let p = a - 1; p <= a + 1 && free; p++) {
      for (let q = b - 1; q <= b + 1 && free; q++) {
        const other = taken.get(key(p, q));
        if (other && Math.abs(other[0] - x) < size + 3 && Math.abs(other[1] - y) < size + 3) free = false;
      }
    }
    if (!free) continue;
    taken.set(key(a, b), [x, y]);
    const [w, h] = fitShape(i, size);
    overContext.globalAlpha = state.nSelected && !state.selected[i] ? 0.35 : 1;
    if (drawThumbnail(overContext, i, x - w / 2, y - h / 2, w, h)) drawnThumbnails++;
    overContext.strokeStyle = `#${(colours[i] & 255 | 256).toString(16).slice(1)}${(colours[i] >> 8 & 255 | 256).toString(16).slice(1)}${(colours[i] >> 16 & 255 | 256).toString(16).slice(1)}`;
    overContext.lineWidth = 2;
    overContext.strokeRect(x - w / 2 - 1, y - h / 2 - 1, w + 2, h + 2);
  }
  overContext.globalAlpha = 1;
}

// Names of the coloured classes at the median of their points, the largest first, without overlaps.
function drawLabels() {
  const column = state.column;
  if (!state.labels || !column?.labels || column.labels.length < 2) return;
  overContext.font = "600 13px system-ui, sans-serif";
  overContext.textAlign = "center";
  overContext.textBaseline = "middle";
  overContext.lineJoin = "round";
  const boxes = [];
  const codes = column.labels.map((_, code) => code).filter((code) => !state.hidden.has(code) && column.counts[code]);
  codes.sort((a, b) => state.colourOf.has(b) - state.colourOf.has(a) || column.counts[b] - column.counts[a] || a - b);
  for (const code of codes) {
    const [x, y] = [view.x + view.scale * column.medians[2 * code], view.y - view.scale * column.medians[2 * code + 1]];
    if (x < 0 || y < 0 || x > view.width || y > view.height) continue;
    const text = column.labels[code].length > 28 ? `${column.labels[code].slice(0, 27)}…` : column.labels[code];
    const half = overContext.measureText(text).width / 2 + 4;
    if (boxes.some((box) => Math.abs(box[0] - x) < box[1] + half && Math.abs(box[2] - y) < 19)) continue;
    boxes.push([x, half, y]);
    overContext.strokeStyle = `rgb(${theme.paper.join(" ")} / .88)`;
    overContext.lineWidth = 5;
    overContext.strokeText(text, x, y);
    overContext.fillStyle = theme.ink;
    overContext.fillText(text, x, y);
    if (boxes.length >= 60) break;
  }
}

function ring(i, radius, width) {
  overContext.beginPath();
  overContext.arc(toScreenX(i), toScreenY(i), radius, 0, 2 * Math.PI);
  overContext.lineWidth = width + 2.5;
  overContext.strokeStyle = `rgb(${theme.paper.join(" ")})`;
  overContext.stroke();
  overContext.lineWidth = width;
  overContext.strokeStyle = theme.ink;
  overContext.stroke();
}

function drawMarks() {
  const radius = pointRadius() + 3;
  if (state.current >= 0) {
    overContext.strokeStyle = theme.ink;
    overContext.lineWidth = 1;
    for (const j of neighboursOf(state.current)) {
      overContext.beginPath();
      overContext.moveTo(toScreenX(state.current), toScreenY(state.current));
      overContext.lineTo(toScreenX(j), toScreenY(j));
      overContext.stroke();
      ring(j, radius - 1, 1.25);
    }
    ring(state.current, radius + 2, 2.5);
  }
  if (state.hover >= 0 && state.hover !== state.current) ring(state.hover, radius, 2);
  if (outline) {
    overContext.beginPath();
    outline.forEach(([x, y], k) => (k ? overContext.lineTo(x, y) : overContext.moveTo(x, y)));
    overContext.closePath();
    overContext.fillStyle = `${theme.mark}22`;
    overContext.fill();
    overContext.setLineDash([5, 4]);
    overContext.lineWidth = 1.5;
    overContext.strokeStyle = theme.ink;
    overContext.stroke();
    overContext.setLineDash([]);
  }
  if (document.activeElement === stage && stage.matches(":focus-visible")) { // where Enter looks for a point
    const [x, y] = [view.width / 2, view.height / 2];
    overContext.strokeStyle = theme.ink;
    overContext.lineWidth = 1.5;
    overContext.beginPath();
    overContext.moveTo(x - 9, y); overContext.lineTo(x + 9, y);
    overContext.moveTo(x, y - 9); overContext.lineTo(x, y + 9);
    overContext.stroke();
  }
}

function* neighboursOf(i) {
  for (let k = 0; k < meta.neighbours; k++) if (near[meta.neighbours * i + k] >= 0) yield near[meta.neighbours * i + k];
}

function drawMap() {
  const visible = drawPoints();
  overContext.setTransform(view.ratio, 0, 0, view.ratio, 0, 0);
  overContext.clearRect(0, 0, view.width, view.height);
  drawThumbnails(visible);
  if (!drawnThumbnails) drawLabels();
  drawMarks();
}

function requestDraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; if (image && colours) drawMap(); });
}

function recolour() {
  computeColours();
  sortFront();
  requestDraw();
}
