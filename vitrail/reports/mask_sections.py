"""Report sections on predicted masks: IoU of each class, confusion of pixels, and the worst images."""

from typing import Any

import numpy as np

from vitrail.metrics.segmentation import compute_image_iou, compute_iou, divide, find_worst_images
from vitrail.reports.document import PageSection
from vitrail.reports.html import Markup, h, isolate, render_table
from vitrail.reports.masks import Colour, choose_colours, parse_colour, render_legend
from vitrail.reports.predictions import (
    MAX_CARDS,
    MAX_MATRIX_CLASSES,
    embed_image,
    label_cell,
    render_confusion_matrix,
    share_cell,
)
from vitrail.reports.run import EvaluatedMasks
from vitrail.utils.text import format_percent

Palette = tuple[Colour, ...]


def read_palette(stored: Any, labels: list[str]) -> Palette:
    """Return the colours that a run stored, or the default ones."""
    if isinstance(stored, list) and len(stored) == len(labels):
        return tuple(parse_colour(str(colour)) for colour in stored)
    return choose_colours(labels)


def build_mask_sections(evaluation: EvaluatedMasks, labels: list[str], palette: Palette) -> list[PageSection]:
    """Return the sections of per-class results, confusion and worst images."""
    sections: list[PageSection] = [
        ("classes", "Classes", f"Per-class results, {evaluation.split}", [render_mask_classes(evaluation, labels)]),
        ("mistakes", "Worst images", "Images with the lowest IoU", render_worst_images(evaluation, labels, palette)),
    ]
    if 1 < len(labels) <= MAX_MATRIX_CLASSES:
        sections.insert(1, ("confusion", "Confusion", "Confusion of pixels", [render_pixels(evaluation, labels)]))
    return sections


def render_mask_classes(evaluation: EvaluatedMasks, labels: list[str]) -> Markup:
    """Return a table of the classes that occur or were predicted, lowest IoU first."""
    pixels = evaluation.pixels.sum(0)
    hits, true, predicted = pixels
    iou, recall, precision = compute_iou(pixels), divide(hits, true), divide(hits, predicted)
    edges = None if evaluation.boundary is None else divide(*evaluation.boundary.sum(0).T)
    shares = true / max(1, true.sum())
    rows = []
    for k in np.argsort(iou, kind="stable"):
        if np.isnan(iou[k]):
            continue
        edge = [share_cell(edges[k])] if edges is not None else []
        cells = [share_cell(iou[k], bar=True), *edge, share_cell(recall[k]), share_cell(precision[k])]
        rows.append([label_cell(labels[k]), share_cell(shares[k]), *cells])
    head = ["class", "share of pixels", "IoU", *(["boundary IoU"] if edges is not None else []), "recall", "precision"]
    return render_table(head, rows, caption="Results of each class", numeric_from=1, sortable=True)


def render_pixels(evaluation: EvaluatedMasks, labels: list[str]) -> Markup:
    """Return the confusion matrix of all pixels as percentages of the true class."""
    return render_confusion_matrix(evaluation.confusion, labels, "Pixels", lambda count, share: format_percent(share))


def render_worst_images(evaluation: EvaluatedMasks, labels: list[str], palette: Palette) -> list[Markup]:
    """Return cards of the images with the lowest mean IoU: the true mask on the left, the predicted one on the right."""
    shown: list[int] = find_worst_images(evaluation.pixels, MAX_CARDS).tolist()
    if not any(index in evaluation.images for index in shown):
        return []
    scores = compute_image_iou(evaluation.pixels)
    note = f"The {len(shown)} lowest of {len(evaluation):,}. Left: true mask; right: predicted mask."
    cards = [_render_card(evaluation, index, float(scores[index])) for index in shown]
    return [h("p", note), render_legend(labels, palette), h("div", cards, class_="cards pairs")]


def _render_card(evaluation: EvaluatedMasks, index: int, score: float) -> Markup:
    file = evaluation.image_name(index)
    image = embed_image(evaluation.images.get(index), f"True and predicted mask of {file}")
    frame = h("div", image or h("span", "image not stored", class_="lacking"), class_="frame")
    caption = h("p", h("span", "mean IoU"), h("b", format_percent(score)), class_="said")
    return h("figure", frame, h("figcaption", caption, h("p", isolate(file), class_="file")), class_="card")
