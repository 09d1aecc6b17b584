"""The pictures that the model was surest about and wrong: the quickest way to what is amiss with model or data."""

import base64
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.evaluate.mistakes import surest_mistakes, worst_label
from vitrail.evaluate.several import probabilities
from vitrail.report.markup import Markup, h, join, name
from vitrail.report.run import Evaluation, Run
from vitrail.report.words import count, percent

MOST = 24
KINDS = ("JPEG", "PNG", "WEBP")
FEW_PIXELS = 48  # wide or high: enlarged, such a picture shows its pixels


def chosen(run: Run) -> Evaluation | None:
    """The split to show mistakes of: the one the run is judged by, unless pictures were kept of another only."""
    if run.evaluation and run.evaluation.pictures:
        return run.evaluation
    return next((e for e in run.evaluations.values() if e.pictures), run.evaluation)


def mistakes(evaluation: Evaluation, labels: list[str]) -> list[Markup]:
    """Cards with what was said, how surely, and what it is."""
    wrong = surest_mistakes(evaluation.logits, evaluation.targets, len(evaluation.logits))
    total = len(evaluation.targets)
    if not len(wrong):
        return [h("p", f"There are none: all {count(total)} {evaluation.split} pictures are right.")]
    shown = wrong[:MOST]
    kept = [index for index in shown if int(index) in evaluation.pictures]
    which = f"The {len(shown)} surest of {count(len(wrong))}" if len(shown) < len(wrong) else f"All {len(wrong)}"
    lead = f"{which}, of {count(total)} {evaluation.split} pictures."
    cards = [_card(evaluation, int(index), labels, bool(kept)) for index in shown]
    return [h("p", lead), h("div", cards, class_="cards" if kept else "cards bare")]


def _card(evaluation: Evaluation, index: int, labels: list[str], with_picture: bool) -> Markup:
    words = _several(evaluation, index, labels) if evaluation.several else _single(evaluation, index, labels)
    file = evaluation.name(index)
    shown = None
    if with_picture:
        shown = shown_picture(evaluation.pictures.get(index), f"The picture {file}")
        shown = shown or h("span", "no picture kept", class_="lacking")
        shown = h("div", shown, class_="frame")
    return h("figure", shown, h("figcaption", words, h("p", name(file), class_="file")), class_="card")


def _single(evaluation: Evaluation, index: int, labels: list[str]) -> Markup:
    verdicts = evaluation.verdicts
    truth, said = int(verdicts.truth[index]), int(verdicts.said[index])
    given = float(np.exp(-verdicts.loss[index]))
    return join(
        [
            h(
                "p",
                h("span", "said"),
                h("b", name(labels[said])),
                h("i", percent(float(verdicts.sure[index]))),
                class_="said",
            ),
            h("p", h("span", "is"), h("b", name(labels[truth])), h("i", percent(given)), class_="is"),
        ]
    )


def _several(evaluation: Evaluation, index: int, labels: list[str]) -> Markup:
    logits, targets = evaluation.logits[index], evaluation.targets[index]
    worst, chance = worst_label(logits, targets)
    held = [labels[k] for k in np.flatnonzero(targets)]
    said = "said" if not targets[worst] else "missed"
    extra = [k for k in np.flatnonzero(probabilities(logits) >= 0.5) if not targets[k] and k != worst]
    more = f" and {len(extra)} more" if extra else ""
    return join(
        [
            h("p", h("span", said), h("b", name(labels[worst]), more), h("i", percent(chance)), class_="said"),
            h("p", h("span", "is"), h("b", join([name(label) for label in held], ", ") or "none"), class_="is"),
        ]
    )


def shown_picture(kept: Path | bytes | None, alt: str) -> Markup | None:
    """A small picture as part of the page, or None where it is not one that a browser shows."""
    if kept is None:
        return None
    try:
        data = kept if isinstance(kept, bytes) else kept.read_bytes()
        with Image.open(BytesIO(data)) as picture:
            kind, size = picture.format, picture.size
    except (OSError, ValueError):  # not a picture, or not to be read: the card says that there is none
        return None
    if kind not in KINDS:
        return None
    source = f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode('ascii')}"
    return h("img", src=source, alt=alt, class_="few-pixels" if max(size) <= FEW_PIXELS else None)
