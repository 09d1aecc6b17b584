// What the explorers of all families share: predictions, files, tabs, the pointer. `now` is the data of the chosen image.
"use strict";
const $ = (id) => document.getElementById(id);

function showPredictions(now) {
  const top = now.predictions[0];
  $("prediction").textContent = top ? `${top.name}, ${(100 * top.score).toFixed(0)} %` : "";
  $("file").textContent = now.name;
  $("scores").replaceChildren(...now.predictions.flatMap(({ name, score }) => {
    const term = document.createElement("dt"), value = document.createElement("dd"), bar = document.createElement("i");
    term.textContent = name;
    bar.style.setProperty("--score", `${100 * score}%`);
    value.append(bar, `${(100 * score).toFixed(1)} %`);
    return [term, value];
  }));
}

function showFiles(now) {
  for (const part of document.querySelectorAll(".of-image")) {
    const source = now.figures[part.dataset.view];
    part.hidden = !source;
    if (source) part.querySelector("img").src = source;
  }
  $("files").replaceChildren(...(now.files.length ? ["Large figures, in the folder of this page: ", ...now.files.flatMap((path, k) => {
    const link = document.createElement("a");
    link.href = path.split("/").map(encodeURIComponent).join("/");
    link.textContent = path.split("/").pop().replace(".png", "");
    return k ? [", ", link] : [link];
  })] : []));
}

function moveBetweenTabs(tabs) {
  for (const tab of tabs) tab.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    const open = tabs.filter((each) => !each.hidden), next = open[(open.indexOf(tab) + step + open.length) % open.length];
    next.focus();
    next.click();
    event.preventDefault();
  });
}

// The cell of a grid under the pointer.
function pointed(event, stage, [h, w]) {
  const box = stage.getBoundingClientRect();
  const y = Math.floor(((event.clientY - box.top) / box.height) * h), x = Math.floor(((event.clientX - box.left) / box.width) * w);
  return y >= 0 && x >= 0 && y < h && x < w ? [y, x] : null;
}

let waiting = false; // the pointer moves more often than a screen draws
function soon(update) {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; update(); });
}
