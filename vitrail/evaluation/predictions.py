"""Every prediction as a row of a CSV."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vitrail.checkpoints.files.atomic import atomic
from vitrail.evaluate.several import probabilities
from vitrail.evaluation.judged import Judged

FIRST = 5
AT_ONCE = 1024  # pictures


def write_predictions(judged: Judged, path: Path) -> None:
    """One row for each picture that could be read, in order: what it is, what was said, how surely, and what came next."""
    with atomic(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
        csv.writer(text).writerows(rows(judged))
        text.detach()  # what is written is handed on, and the file stays open


def rows(judged: Judged) -> Iterator[list[object]]:
    """The header, then the pictures."""
    evaluation, labels = judged.evaluation, judged.labels
    first = min(FIRST, len(labels))
    told = "rank" if not evaluation.several else "wrong_labels"
    following = [name for place in range(1, first + 1) for name in (f"top{place}", f"probability{place}")]
    yield ["path", "label", "predicted", "probability", "right", told, *following]
    for start in range(0, len(evaluation.logits), AT_ONCE):
        logits = evaluation.logits[start : start + AT_ONCE].astype(np.float64)
        chances = probabilities(logits) if evaluation.several else softmax(logits)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :first]
        for row, (chance, places) in enumerate(zip(chances, order.tolist(), strict=True)):
            index = start + row
            best = [cell for place in places for cell in (labels[place], shown(chance[place]))]
            if evaluation.several:
                held, said = evaluation.targets[index] > 0, logits[row] >= 0
                wrong = int((held != said).sum())
                what = [*("|".join(labels[k] for k in np.flatnonzero(mask)) for mask in (held, said))]
                yield [evaluation.name(index), *what, shown(chance[places[0]]), int(not wrong), wrong, *best]
            else:
                truth, said = int(evaluation.verdicts.truth[index]), int(evaluation.verdicts.said[index])
                rank = int(evaluation.verdicts.place[index]) + 1
                what = [labels[truth], labels[said], shown(chance[said]), int(truth == said), rank]
                yield [evaluation.name(index), *what, *best]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Of each row, in double precision."""
    raised = np.exp(logits - logits.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


def shown(chance: float) -> str:
    """Six digits that count."""
    return f"{chance:.6g}"
