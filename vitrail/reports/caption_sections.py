"""Report sections on retrieval with captions: the images whose own caption is found last."""

import numpy as np

from vitrail.metrics.retrieval import list_first
from vitrail.reports.document import PageSection
from vitrail.reports.html import Markup, h, isolate
from vitrail.reports.predictions import MAX_CARDS, embed_image
from vitrail.reports.run import EvaluatedCaptions


def build_caption_sections(evaluation: EvaluatedCaptions) -> list[PageSection]:
    """Return the section of the worst images."""
    return [("mistakes", "Worst images", "Images whose caption is found last", render_worst_images(evaluation))]


def render_worst_images(evaluation: EvaluatedCaptions) -> list[Markup]:
    """Return cards of the images whose best caption has the highest rank."""
    first, ranks = list_first(evaluation.items)[0], evaluation.ranks
    order = np.argsort(-ranks, kind="stable")
    shown = [(int(first[k]), int(ranks[k])) for k in order[ranks[order] > 0][:MAX_CARDS]]
    if not shown:
        return [h("p", "Every image is most similar to its own caption.")]
    has_images = any(index in evaluation.images for index, _ in shown)
    note = f"The {len(shown)} worst of {len(ranks):,}: other captions are more similar to the image than its own."
    cards = [_render_card(evaluation, index, rank, has_images) for index, rank in shown]
    return [h("p", note), h("div", cards, class_="cards" if has_images else "cards bare")]


def _render_card(evaluation: EvaluatedCaptions, index: int, rank: int, with_image: bool) -> Markup:
    file, frame = evaluation.image_name(index), None
    if with_image:
        image = embed_image(evaluation.images.get(index), f"The image {file}")
        frame = h("div", image or h("span", "image not stored", class_="lacking"), class_="frame")
    lines = [
        h("p", h("span", "most similar"), h("b", isolate(evaluation.find_best_text(index))), class_="said"),
        h(
            "p",
            h("span", f"own caption, rank {rank + 1:,}"),
            h("b", isolate(str(evaluation.texts[index]))),
            class_="is",
        ),
    ]
    return h("figure", frame, h("figcaption", lines, h("p", isolate(file), class_="file")), class_="card")
