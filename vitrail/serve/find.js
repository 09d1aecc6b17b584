// The page that searches an index by text. It connects only to its own server.
"use strict";

const $ = (id) => document.getElementById(id);
const stored = (store, key) => { try { return window[store].getItem(key); } catch { return null; } };
const theme = stored("localStorage", "vitrail-theme");
if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
let asked = null;

async function get(path, signal) {
  const token = stored("sessionStorage", "vitrail-token");
  let response;
  try {
    response = await fetch(path, { signal, cache: "no-store", headers: token ? { Authorization: `Bearer ${token}` } : {} });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Error("The server does not respond. Check that vitrail serve is running, then try again.");
  }
  const content = await response.json().catch(() => null);
  if (response.ok && content) return content;
  if (response.status === 401) throw new Error("The server requires a token: enter it on the page of predictions, in this tab.");
  throw new Error(content?.error ?? "Invalid response from the server.");
}

function card({ image, cosine, thumbnail }) {
  const item = document.createElement("li"), at = image.lastIndexOf("/") + 1, text = document.createElement("p");
  const name = Object.assign(document.createElement("b"), { textContent: image.slice(at) });
  const about = Object.assign(document.createElement("span"), { textContent: [image.slice(0, Math.max(0, at - 1)), cosine.toFixed(3)].filter(Boolean).join(" · ") });
  if (thumbnail) {
    const picture = Object.assign(new Image(), { src: thumbnail, alt: "" });
    picture.addEventListener("load", () => picture.classList.toggle("few", picture.naturalWidth <= 48));
    item.append(picture);
  } else {
    item.append(Object.assign(document.createElement("div"), { className: "lacking", textContent: "file missing" }));
  }
  text.append(name, document.createElement("br"), about);
  item.append(text);
  return item;
}

async function search(text) {
  asked?.abort();
  const { signal } = (asked = new AbortController());
  $("status").textContent = "Searching…";
  try {
    const { images, notes, neighbours } = await get(`search?thumbnails=true&top=12&text=${encodeURIComponent(text)}`, signal);
    $("found").replaceChildren(...neighbours.map(card));
    $("status").textContent = [`The nearest ${neighbours.length} of ${images.toLocaleString("en")} images to “${text}”.`, ...notes].join(" ");
  } catch (error) {
    if (signal.aborted) return;
    $("found").replaceChildren();
    $("status").textContent = error.message;
  }
}

document.addEventListener("DOMContentLoaded", async () => {
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    history.replaceState(null, "", `?text=${encodeURIComponent($("text").value)}`);
    search($("text").value);
  });
  try {
    const { index } = await get("models");
    $("name").textContent = index ?? "the index";
    if (!index) $("status").textContent = "There is no index to search: start the service with --index INDEX.";
  } catch (error) {
    $("status").textContent = error.message;
  }
  const text = new URLSearchParams(location.search).get("text");
  if (text) { $("text").value = text; search(text); } else $("text").focus();
});
