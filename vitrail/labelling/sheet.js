// Decisions about labels: buttons and keys, kept in the browser, saved as CSV.
"use strict";
const main = document.getElementById("main"), cards = [...document.querySelectorAll(".deck .card")];
const classes = new Set([...document.getElementById("classes").options].map((option) => option.value));
const place = `vitrail-labels-${main.dataset.id}`, words = { accept: "", correct: "", dismiss: "kept", remove: "removed" };
let shown = "all", unsaved = false;

function recall() { // a browser may refuse to store anything for files
  try { return JSON.parse(localStorage.getItem(place)) ?? {}; } catch { return {}; }
}

function store() {
  const kept = Object.fromEntries(decided().map((card) => [card.dataset.path, [card.dataset.decision, card.dataset.label ?? ""]]));
  try { localStorage.setItem(place, JSON.stringify(kept)); } catch { /* they are saved as CSV */ }
}

const decided = () => cards.filter((card) => card.dataset.decision);
const visible = () => cards.filter((card) => !card.hidden);

function mark(card, decision, label = "") {
  if (decision) card.dataset.decision = decision;
  else delete card.dataset.decision;
  card.dataset.label = decision === "accept" ? card.dataset.suggested : label;
  card.querySelector(".stamp").textContent = decision ? words[decision] || card.dataset.label : "";
  for (const button of card.querySelectorAll("[data-action]")) button.setAttribute("aria-pressed", String(button.dataset.action === decision));
}

function decide(card, decision, label) {
  mark(card, decision, label);
  close(card);
  unsaved = true;
  store();
  count();
  const next = cards.slice(cards.indexOf(card) + 1).find((each) => !each.hidden && !each.dataset.decision);
  show(shown, next ?? card);
}

function count() {
  const number = decided().length;
  document.getElementById("decided").textContent = number;
  document.getElementById("progress").style.width = `${(100 * number) / Math.max(1, cards.length)}%`;
  document.getElementById("save").disabled = !number;
  document.getElementById("status").textContent = unsaved ? "not saved yet" : "";
}

function show(which, focus) {
  shown = which;
  for (const card of cards) card.hidden = which !== "all" && Boolean(card.dataset.decision) !== (which === "decided");
  for (const button of document.querySelectorAll("[data-filter]")) button.setAttribute("aria-pressed", String(button.dataset.filter === which));
  document.querySelector(".none-left")?.remove();
  const left = visible();
  if (!left.length) {
    const note = document.createElement("p");
    note.className = "none-left";
    note.textContent = which === "undecided" ? "Every image is decided: save the decisions." : "No image here.";
    document.querySelector(".deck").append(note);
  }
  const target = focus && !focus.hidden ? focus : left[0];
  if (focus && target) reach(target);
}

function reach(card) {
  for (const each of cards) each.tabIndex = each === card ? 0 : -1;
  card.focus();
  card.scrollIntoView({ block: "nearest" });
}

function open(card) {
  const field = card.querySelector(".other");
  field.hidden = false;
  field.value = card.dataset.decision === "correct" ? card.dataset.label : "";
  field.setCustomValidity("");
  field.focus();
}

function close(card) {
  card.querySelector(".other").hidden = true;
}

function commit(card) {
  const field = card.querySelector(".other"), label = field.value.trim();
  if (!label) return close(card);
  field.setCustomValidity(classes.has(label) ? "" : "This is no class of the data.");
  if (!field.reportValidity()) return undefined;
  if (label === card.dataset.given) return decide(card, "dismiss");
  return decide(card, label === card.dataset.suggested ? "accept" : "correct", label);
}

function act(card, action) {
  if (action === "correct") open(card);
  else decide(card, card.dataset.decision === action ? "" : action);
}

function move(card, key) {
  const list = visible(), index = list.indexOf(card), columns = getComputedStyle(document.querySelector(".deck")).gridTemplateColumns.split(" ").length;
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[key];
  const next = list[index + step];
  if (next) reach(next);
}

function cell(text) {
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function save() {
  const rows = decided().map(({ dataset: { path, given, suggested, decision, label } }) => [path, given, suggested, decision, decision === "dismiss" ? given : label]);
  const text = [["path", "given_label", "suggested_label", "decision", "label"], ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.download = main.dataset.file;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  unsaved = false;
  document.getElementById("status").textContent = `saved as ${main.dataset.file}`;
}

document.querySelector(".deck").addEventListener("click", (event) => {
  const card = event.target.closest(".card"), action = event.target.closest("[data-action]")?.dataset.action;
  if (card && action) act(card, action);
  else if (card && !event.target.closest("input")) reach(card);
});
document.querySelector(".deck").addEventListener("change", (event) => {
  const field = event.target.closest(".other");
  if (field && !field.hidden) commit(field.closest(".card"));
});
document.querySelector(".deck").addEventListener("input", (event) => event.target.closest(".other")?.setCustomValidity(""));
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const card = event.target.closest?.(".card");
  if (event.target.matches?.("input")) {
    if (event.key === "Enter") commit(card);
    else if (event.key === "Escape") { close(card); reach(card); }
    return;
  }
  const current = card ?? cards.find((each) => each.tabIndex === 0 && !each.hidden) ?? visible()[0];
  const action = { a: "accept", c: "correct", d: "dismiss", x: "remove", u: "" }[event.key.toLowerCase()];
  if (!current || (action === undefined && !event.key.startsWith("Arrow"))) return;
  if (action === "dismiss" && !("labelled" in main.dataset)) return;
  event.preventDefault();
  if (event.key.startsWith("Arrow")) move(current, event.key);
  else if (action) act(current, action);
  else { mark(current, ""); unsaved = true; store(); count(); show(shown, current); }
});
for (const button of document.querySelectorAll("[data-filter]")) button.addEventListener("click", () => show(button.dataset.filter, cards.find((card) => card.tabIndex === 0)));
document.getElementById("save").addEventListener("click", save);
window.addEventListener("beforeunload", (event) => { if (unsaved) event.preventDefault(); });

const kept = recall();
for (const card of cards) if (kept[card.dataset.path]) mark(card, ...kept[card.dataset.path]);
count();
