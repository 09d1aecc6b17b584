"""The confusion matrix: what is what, and what was said."""

import numpy as np

from vitrail.report.markup import Markup, h, name


def confusion_matrix(matrix: np.ndarray, labels: list[str]) -> Markup:
    """A row for each class and a column for each answer; the deeper a cell, the larger its share of the row."""
    totals = np.maximum(1, matrix.sum(1))
    turned = "turned" if max(map(len, labels)) > 3 else None
    columns = [h("th", name(label, class_=turned, title=label), scope="col") for label in labels]
    rows = []
    for k, label in enumerate(labels):
        cells = [
            _cell(int(matrix[k, j]), matrix[k, j] / totals[k], k == j, label, labels[j]) for j in range(len(labels))
        ]
        rows.append(h("tr", h("th", name(label, title=label), scope="row"), cells))
    made = h(
        "table",
        h("caption", "Pictures of each class (rows) by what was said of them (columns)", class_="unseen"),
        h("thead", h("tr", h("td", h("span", "is ↓", " ", "said →"), class_="corner"), columns)),
        h("tbody", rows),
        class_="matrix roomy" if len(labels) <= 12 else "matrix",
    )
    return h("div", made, class_="wide fit", tabindex="0", role="region", aria_label="Confusion matrix")


def _cell(count: int, share: float, right: bool, truth: str, said: str) -> Markup:
    if not count:
        return h("td", class_="none")
    # From a trace to half the colour: text on it stays legible.
    depth = 8 + 44 * share**0.6
    title = f"{count:,} of “{truth}” ({100 * share:.0f} %) " + ("got right" if right else f"taken for “{said}”")
    return h("td", f"{count:,}", class_="hit" if right else "miss", style=f"--v:{depth:.0f}%", title=title)
