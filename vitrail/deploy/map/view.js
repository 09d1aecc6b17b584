// Pan, zoom and selection: by wheel, drag, pinch and keyboard.
const tip = byId("map-tip");
const tipImage = byId("map-tip-image");
const pointers = new Map(); // of this moment, by id: position
let outline = null; // of the selection that is being drawn, on the screen
let dragged = 0; // pixels since the pointer went down
let pinch = 0; // distance of two fingers

const toolOf = () => document.querySelector("input[name=map-tool]:checked").value;
const place = (event) => {
  const box = stage.getBoundingClientRect();
  return [event.clientX - box.left - stage.clientLeft, event.clientY - box.top - stage.clientTop];
};

function zoomAt(x, y, factor) {
  const scale = Math.max(view.fitted / 2, Math.min(view.fitted * 4000, view.scale * factor));
  const change = scale / view.scale;
  view.x = x - (x - view.x) * change;
  view.y = y - (y - view.y) * change;
  view.scale = scale;
  requestDraw();
}

function panBy(dx, dy) {
  view.x += dx;
  view.y += dy;
  requestDraw();
}

function pointAt([x, y], reach = 14) {
  const radius = Math.max(reach, pointRadius() + 4) / view.scale;
  return findNearest((x - view.x) / view.scale, (view.y - y) / view.scale, radius, (i) => shown[i] === 1);
}

stage.addEventListener("wheel", (event) => {
  event.preventDefault();
  const lines = event.deltaMode === 1 ? 30 : 1;
  zoomAt(...place(event), Math.exp(-Math.max(-240, Math.min(240, event.deltaY * lines)) * 0.0022));
  hideTip();
}, { passive: false });

stage.addEventListener("pointerdown", (event) => {
  if (event.button) return;
  stage.setPointerCapture(event.pointerId);
  pointers.set(event.pointerId, place(event));
  dragged = 0;
  if (pointers.size === 2) {
    const [a, b] = [...pointers.values()];
    pinch = Math.hypot(a[0] - b[0], a[1] - b[1]);
    outline = null;
  } else if (toolOf() !== "pan" && pointers.size === 1) outline = [place(event)];
});

stage.addEventListener("pointermove", (event) => {
  const here = place(event);
  const before = pointers.get(event.pointerId);
  if (!before) return hoverAt(here);
  const [dx, dy] = [here[0] - before[0], here[1] - before[1]];
  pointers.set(event.pointerId, here);
  dragged += Math.hypot(dx, dy);
  if (pointers.size === 2) {
    const [a, b] = [...pointers.values()];
    const distance = Math.hypot(a[0] - b[0], a[1] - b[1]);
    panBy(dx / 2, dy / 2);
    if (pinch) zoomAt((a[0] + b[0]) / 2, (a[1] + b[1]) / 2, distance / pinch);
    pinch = distance;
  } else if (outline) {
    if (toolOf() === "lasso") outline.push(here);
    else outline = [outline[0], [here[0], outline[0][1]], here, [outline[0][0], here[1]]];
    requestDraw();
  } else panBy(dx, dy);
  if (dragged > 4) hideTip();
});

function endPointer(event) {
  if (!pointers.delete(event.pointerId)) return;
  if (event.type === "pointerup" && outline && dragged > 4) selectInside(outline, event.shiftKey);
  else if (event.type === "pointerup" && dragged <= 4 && !pointers.size) {
    const found = pointAt(place(event), event.pointerType === "touch" ? 24 : 14);
    if (found >= 0) showPoint(found);
  }
  outline = null;
  requestDraw();
}
stage.addEventListener("pointerup", endPointer);
stage.addEventListener("pointercancel", endPointer);
stage.addEventListener("pointerleave", () => pointers.size || hideTip());
stage.addEventListener("dblclick", (event) => zoomAt(...place(event), 2));
stage.addEventListener("focus", requestDraw);
stage.addEventListener("blur", requestDraw);

function selectInside(polygon, add) {
  const xs = polygon.map(([x]) => (x - view.x) / view.scale);
  const ys = polygon.map(([, y]) => (view.y - y) / view.scale);
  const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  select((i) => {
    const [x, y] = [points[2 * i], points[2 * i + 1]];
    if (!shown[i] || x < left || x > right || y < low || y > high) return false;
    let inside = false;
    for (let a = 0, b = xs.length - 1; a < xs.length; b = a++) {
      if ((ys[a] > y) !== (ys[b] > y) && x < (xs[b] - xs[a]) * (y - ys[a]) / (ys[b] - ys[a]) + xs[a]) inside = !inside;
    }
    return inside;
  }, add);
}

function select(accept, add = false) {
  state.nSelected = 0;
  for (let i = 0; i < count; i++) {
    state.selected[i] = (add && state.selected[i]) || accept(i) ? 1 : 0;
    state.nSelected += state.selected[i];
  }
  recolour();
  showSelection();
}

function hoverAt(here) {
  const found = pointAt(here);
  if (found !== state.hover) {
    state.hover = found;
    requestDraw();
    if (found >= 0) fillTip(found);
  }
  tip.hidden = found < 0;
  stage.style.cursor = found >= 0 ? "pointer" : toolOf() === "pan" ? "grab" : "crosshair";
  if (found < 0) return;
  const [x, y] = [toScreenX(found), toScreenY(found)];
  const [width, height] = [tip.offsetWidth, tip.offsetHeight];
  tip.style.left = `${x + 14 + width > view.width ? Math.max(4, x - 14 - width) : x + 14}px`;
  tip.style.top = `${Math.max(4, Math.min(view.height - height - 4, y - height / 2))}px`;
}

function hideTip() {
  tip.hidden = true;
  state.hover = -1;
  requestDraw();
}

function fillTip(i) {
  paintThumbnail(tipImage, i, 160);
  byId("map-tip-name").textContent = fileOf(i);
  const column = state.column;
  byId("map-tip-value").textContent = column ? `${column.name}: ${formatValue(column, i) || "–"}` : "";
}

// Show the thumbnail of a point in a canvas of its own, now or when its sheet is decoded.
function paintThumbnail(target, i, size) {
  target.hidden = cells[i] < 0;
  target.dataset.point = i;
  target.dataset.painted = "";
  if (cells[i] < 0) return;
  const [w, h] = fitShape(i, size);
  [target.width, target.height] = [Math.round(w * 2), Math.round(h * 2)];
  [target.style.width, target.style.height] = [`${Math.round(w)}px`, `${Math.round(h)}px`];
  const paint = () => {
    if (+target.dataset.point !== i || target.dataset.painted) return;
    if (drawThumbnail(target.getContext("2d"), i, 0, 0, target.width, target.height)) target.dataset.painted = "yes";
    else document.addEventListener("sheet", paint, { once: true });
  };
  paint();
}

function flyTo(i) {
  const inside = toScreenX(i) > 40 && toScreenX(i) < view.width - 40 && toScreenY(i) > 40 && toScreenY(i) < view.height - 40;
  if (!inside) panBy(view.width / 2 - toScreenX(i), view.height / 2 - toScreenY(i));
}

// The nearest point in one direction, for Shift and an arrow.
function findTowards(i, dx, dy) {
  let best = -1;
  let least = Infinity;
  for (let j = 0; j < count; j++) {
    if (j === i || !shown[j]) continue;
    const [x, y] = [points[2 * j] - points[2 * i], points[2 * j + 1] - points[2 * i + 1]];
    const along = x * dx + y * dy;
    const across = Math.abs(x * dy - y * dx);
    if (along > 0 && across <= along && along + 2 * across < least) [best, least] = [j, along + 2 * across];
  }
  return best;
}

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
stage.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const arrow = ARROWS[event.key];
  const middle = [view.width / 2, view.height / 2];
  if (arrow && event.shiftKey) {
    const found = state.current < 0 ? pointAt(middle, 4000) : findTowards(state.current, ...arrow);
    if (found >= 0) showPoint(found);
  } else if (arrow) panBy(-60 * arrow[0], 60 * arrow[1]);
  else if (event.key === "+" || event.key === "=") zoomAt(...middle, 1.4);
  else if (event.key === "-") zoomAt(...middle, 1 / 1.4);
  else if (event.key === "0") fitView();
  else if (event.key === "Enter") {
    const found = pointAt(middle, 4000);
    if (found >= 0) showPoint(found);
  } else if (event.key === "Escape") {
    if (state.nSelected) select(() => false);
    else showPoint(-1);
  } else return;
  event.preventDefault();
});
