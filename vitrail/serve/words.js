// Words on the page: the classes among which a model with a text tower chooses. They are stored in this browser only.
"use strict";

const WORDS_WAIT = 350; // milliseconds after the last key
const TEMPLATE = "a photo of a {}.";
let wordsTimer = null;

// The query of the words for this model; empty for a model without a text tower.
function wording(model) {
  return model?.texts ? `&classes=${encodeURIComponent($("words").value)}&template=${encodeURIComponent($("template").value || TEMPLATE)}` : "";
}

// Show the field for a model with a text tower.
function offerWords(model) {
  $("wording").hidden = !model.texts;
  $("words-note").textContent = "";
}

// Predict again for other words; image and attention maps stay.
async function judgeWords(pane) {
  pane.judging?.abort();
  const { image, asked } = pane, judging = (pane.judging = new AbortController());
  try {
    const response = await ask(`predict?model=${encodeURIComponent(state.model.name)}&top=8${wording(state.model)}`, { body: image.blob, signal: judging.signal });
    if (judging.signal.aborted || asked !== pane.asked || response.predictions[0].error) return;
    Object.assign(pane, { predictions: response.predictions[0].answers, seconds: response.seconds, trouble: null });
    $("words-note").textContent = "";
    $("words").removeAttribute("aria-invalid");
    pane.arrange();
    announce(pane.predictions.slice(0, 3).map(({ label, score }) => `${label}, ${percent(score)}`).join("; "));
    remember(image, pane.predictions);
  } catch (error) {
    if (judging.signal.aborted) return;
    if (!(error instanceof Trouble)) throw error;
    $("words-note").textContent = (error.detail || error.message).replace("classes= ", "the list ");
    $("words").setAttribute("aria-invalid", "true");
  }
}

document.addEventListener("DOMContentLoaded", () => {
  $("words").value = kept.get("localStorage", "vitrail-words") ?? "a cat, a dog, a person, a building, food";
  for (const id of ["words", "template"]) {
    $(id).addEventListener("input", () => {
      clearTimeout(wordsTimer);
      wordsTimer = setTimeout(() => {
        kept.set("localStorage", "vitrail-words", $("words").value);
        for (const pane of shownPanes()) if (pane.image && !pane.busy) judgeWords(pane);
      }, WORDS_WAIT);
    });
  }
});
