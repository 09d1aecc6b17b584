// The panel beside the map: colours and legend, search, selection, and the point that was clicked.
const legend = byId("map-legend");
const MAX_ROWS = 400; // of the legend at once; the filter finds the others
const MAX_RESULTS = 30;

function make(name, settings = {}, ...children) {
  const element = Object.assign(document.createElement(name), settings);
  element.append(...children);
  return element;
}

const formatCount = (value) => value.toLocaleString("en");
const countItems = (value) => `${formatCount(value)} ${meta.media}${value === 1 ? "" : "s"}`;

function prepareColumn(column) {
  if (column.counts || column.clip) return;
  if (!column.labels) {
    const sorted = column.values.filter((value) => !Number.isNaN(value)).sort();
    const at = (share) => sorted[Math.round(share * (sorted.length - 1))] ?? 0;
    Object.assign(column, { clip: [at(0.01), at(0.99)], low: at(0), high: at(1) });
    return;
  }
  column.counts = new Array(column.labels.length + 1).fill(0);
  const xs = column.labels.map(() => []);
  for (let i = 0; i < count; i++) {
    const code = column.values[i];
    column.counts[code === NONE ? column.labels.length : code]++;
    if (code !== NONE) xs[code].push(i);
  }
  column.medians = new Float32Array(2 * column.labels.length);
  xs.forEach((rows, code) => {
    for (const axis of [0, 1]) {
      const values = Float32Array.from(rows, (i) => points[2 * i + axis]).sort();
      column.medians[2 * code + axis] = values[values.length >> 1];
    }
  });
}

function chooseColumn(number) {
  const column = columns[number] ?? null;
  if (column) prepareColumn(column);
  Object.assign(state, { column, range: null, highlight: -1 });
  state.hidden = new Set();
  byId("map-legend-filter").value = "";
  assignColours();
  updateShown();
  recolour();
  showLegend();
}

function showLegend() {
  const column = state.column;
  const many = Boolean(column?.labels) && column.labels.length > theme.classes.length;
  byId("map-legend-tools").hidden = !column?.labels;
  byId("map-legend-filter").hidden = !many;
  byId("map-legend-note").textContent = many
    ? `${theme.classes.length} of ${formatCount(column.labels.length)} are coloured. Press a grey square to colour another.` : "";
  legend.replaceChildren();
  if (!column) legend.append(make("p", { className: "note", textContent: `No classes are known: give --table, or PATHS with labels.` }));
  else if (column.labels) showTexts(column, many);
  else showRamp(column);
  showCounts();
}

function showTexts(column, many) {
  const query = byId("map-legend-filter").value.trim().toLowerCase();
  const codes = column.labels.map((_, code) => code).filter((code) => column.labels[code].toLowerCase().includes(query));
  if (many) codes.sort((a, b) => state.colourOf.has(b) - state.colourOf.has(a) || column.counts[b] - column.counts[a] || a - b);
  const list = make("ul", { className: "rows" });
  for (const code of codes.slice(0, MAX_ROWS)) list.append(legendRow(column, code, many));
  if (column.counts[column.labels.length] && !query) list.append(legendRow(column, NONE, false));
  legend.append(list);
  const more = codes.length - MAX_ROWS;
  if (more > 0) legend.append(make("p", { className: "note", textContent: `and ${formatCount(more)} more: filter them by name` }));
}

function legendRow(column, code, many) {
  const name = code === NONE ? "no value" : column.labels[code];
  const colour = code === NONE ? theme.rest : colourText(code);
  const swatch = make(many ? "button" : "span", { className: "swatch" });
  swatch.style.background = colour;
  if (many) {
    swatch.type = "button";
    swatch.setAttribute("aria-label", `Colour ${name}`);
    swatch.addEventListener("click", () => { pinColour(code); recolour(); showLegend(); });
  }
  const box = make("input", { type: "checkbox", checked: !state.hidden.has(code) });
  box.addEventListener("change", () => {
    if (box.checked) state.hidden.delete(code);
    else state.hidden.add(code);
    changeShown();
  });
  const text = make("bdi", { textContent: name, title: name });
  const number = make("span", { className: "n", textContent: formatCount(column.counts[code === NONE ? column.labels.length : code]) });
  const row = make("li", {}, swatch, make("label", {}, box, text), number);
  const light = (on) => { state.highlight = on && box.checked && code !== NONE ? code : -1; recolour(); };
  row.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && light(true));
  row.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && light(false));
  return row;
}

function changeShown() {
  updateShown();
  requestDraw();
  showCounts();
}

function showRamp(column) {
  const bar = make("div", { className: "ramp" });
  bar.style.background = `linear-gradient(to right, ${theme.ramp.filter((_, k) => k % 15 === 0).join(",")})`;
  const format = (value) => String(+value.toPrecision(3));
  const ends = make("p", { className: "ends" }, make("span", { textContent: format(column.clip[0]) }), make("span", { textContent: format(column.clip[1]) }));
  legend.append(bar, ends);
  const limits = [column.low, column.high];
  ["least", "most"].forEach((word, end) => {
    const slider = make("input", { type: "range", min: 0, max: 1000, value: 1000 * end });
    const shownValue = make("output", { textContent: format(limits[end]) });
    slider.addEventListener("input", () => {
      const share = slider.value / 1000;
      limits[end] = share === end ? (end ? column.high : column.low) : column.low + share * (column.high - column.low);
      shownValue.textContent = format(limits[end]);
      state.range = [...limits];
      changeShown();
    });
    legend.append(make("label", { className: "limit" }, make("span", { textContent: `at ${word}` }), slider, shownValue));
  });
}

function showCounts() {
  let total = 0;
  for (let i = 0; i < count; i++) total += shown[i];
  byId("map-counts").textContent = total === count ? `${countItems(count)}` : `${formatCount(total)} of ${countItems(count)} shown`;
}

function setAll(on) {
  const query = byId("map-legend-filter").value.trim().toLowerCase();
  state.column.labels.forEach((label, code) => {
    if (!label.toLowerCase().includes(query)) return;
    if (on) state.hidden.delete(code);
    else state.hidden.add(code);
  });
  if (!query && on) state.hidden.delete(NONE);
  else if (!query) state.hidden.add(NONE);
  changeShown();
  showLegend();
}

// --- selection ---

function showSelection() {
  const any = state.nSelected > 0;
  byId("map-selected").textContent = any ? `${countItems(state.nSelected)} selected` : `No ${meta.media} is selected.`;
  for (const id of ["map-export", "map-clear"]) byId(id).disabled = !any;
}

function quoteCell(text) {
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function exportSelection() {
  const lines = [["path", ...columns.map((column) => column.name)]];
  for (let i = 0; i < count; i++) {
    if (state.selected[i]) lines.push([pathOf(i), ...columns.map((column) => formatValue(column, i))]);
  }
  const blob = new Blob([lines.map((cells) => cells.map(quoteCell).join(",")).join("\n") + "\n"], { type: "text/csv" });
  const link = make("a", { href: URL.createObjectURL(blob), download: `${meta.file}-selection.csv` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// --- the point ---

function showPoint(i) {
  state.current = i;
  byId("map-point").hidden = i < 0;
  byId("map-point-empty").hidden = i >= 0;
  if (i < 0) return requestDraw();
  flyTo(i);
  paintThumbnail(byId("map-point-image"), i, 176);
  byId("map-point-name").textContent = fileOf(i);
  byId("map-point-path").textContent = pathOf(i);
  const values = byId("map-point-values");
  values.replaceChildren();
  for (const column of columns) {
    const value = formatValue(column, i);
    if (value) values.append(make("dt", { textContent: column.name }), make("dd", { textContent: value }));
  }
  const list = byId("map-near");
  list.replaceChildren();
  let k = 0;
  for (const j of neighboursOf(i)) {
    const thumbnail = make("canvas");
    paintThumbnail(thumbnail, j, 56);
    const cosine = nearCosines[meta.neighbours * i + k++].toFixed(3);
    const value = state.column?.labels ? formatValue(state.column, j) : "";
    const text = make("span", {}, make("bdi", { textContent: fileOf(j) }), make("small", { textContent: value ? `${cosine} · ${value}` : cosine }));
    const button = make("button", { type: "button", title: pathOf(j) }, thumbnail, text);
    button.addEventListener("click", () => showPoint(j));
    list.append(make("li", {}, button));
  }
  byId("map-near-title").hidden = !meta.neighbours;
  byId("map-near-none").hidden = k > 0 || !meta.neighbours;
  requestDraw();
}

// --- search ---

function findNames(query) {
  const wanted = query.trim().toLowerCase();
  const found = [];
  if (wanted) for (let i = 0; i < count; i++) if (pathOf(i).toLowerCase().includes(wanted)) found.push(i);
  return found;
}

function showResults() {
  const query = byId("map-search").value;
  const found = findNames(query);
  const list = byId("map-results");
  list.replaceChildren();
  list.hidden = !query.trim();
  if (!query.trim()) return;
  const all = make("button", { type: "button", textContent: found.length ? `Select ${countItems(found.length)}` : "No name contains this" });
  all.disabled = !found.length;
  all.addEventListener("click", () => {
    const rows = new Set(found);
    select((i) => rows.has(i));
    list.hidden = true;
  });
  list.append(make("li", {}, all));
  for (const i of found.slice(0, MAX_RESULTS)) {
    const button = make("button", { type: "button", title: pathOf(i) }, make("bdi", { textContent: meta.names[i] }));
    button.addEventListener("click", () => { showPoint(i); list.hidden = true; });
    list.append(make("li", {}, button));
  }
}

byId("map-search").addEventListener("input", showResults);
byId("map-search").addEventListener("keydown", (event) => {
  if (event.key === "Escape") byId("map-results").hidden = true;
  if (event.key !== "Enter") return;
  const [first] = findNames(event.target.value);
  if (first !== undefined) showPoint(first);
  byId("map-results").hidden = true;
});
document.addEventListener("pointerdown", (event) => {
  if (!event.target.closest(".map-find")) byId("map-results").hidden = true;
});
byId("map-colour").addEventListener("change", (event) => chooseColumn(+event.target.value));
byId("map-legend-filter").addEventListener("input", showLegend);
byId("map-all").addEventListener("click", () => setAll(true));
byId("map-none").addEventListener("click", () => setAll(false));
byId("map-select-shown").addEventListener("click", () => select((i) => shown[i] === 1));
byId("map-clear").addEventListener("click", () => select(() => false));
byId("map-export").addEventListener("click", exportSelection);
byId("map-in").addEventListener("click", () => zoomAt(view.width / 2, view.height / 2, 1.6));
byId("map-out").addEventListener("click", () => zoomAt(view.width / 2, view.height / 2, 1 / 1.6));
byId("map-fit").addEventListener("click", fitView);
byId("map-thumbnails").addEventListener("change", (event) => { state.thumbnails = event.target.checked; requestDraw(); });
byId("map-labels").addEventListener("change", (event) => { state.labels = event.target.checked; requestDraw(); });
darkTheme.addEventListener("change", () => { readTheme(); recolour(); showLegend(); });

readTheme();
chooseColumn(meta.colour);
showSelection();
new ResizeObserver(resize).observe(stage);
resize();
