"""One model judged on some pictures: its numbers for people, machines and pages."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from vitrail.evaluate import several, single, surest_mistakes
from vitrail.evaluate.calibration import reliability
from vitrail.evaluate.intervals import wilson
from vitrail.evaluate.mistakes import worst_label
from vitrail.evaluation.answering import Answers
from vitrail.evaluation.choosing import Chosen
from vitrail.evaluation.matching import Matching
from vitrail.evaluation.opening import Opened
from vitrail.report.run import Evaluation
from vitrail.run.finish import MISTAKES, small, summed
from vitrail.run.record import fingerprint, named

MOST_MATRIX = 100  # classes of a confusion matrix in JSON; of more, the commonest mistakes
PAIRS = 20


@dataclass(frozen=True)
class Judged:
    """A model, the pictures, and what it said of them."""

    opened: Opened
    chosen: Chosen
    matching: Matching
    answers: Answers
    only_present: bool = False
    environment: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def columns(self) -> np.ndarray:
        """The outputs that are judged: all, or those that the data has pictures of."""
        return self.matching.present if self.only_present else np.arange(self.answers.logits.shape[1])

    @property
    def labels(self) -> list[str]:
        return [self.matching.labels[column] for column in self.columns]

    @cached_property
    def evaluation(self) -> Evaluation:
        """Logits and targets of the pictures that could be read, over the outputs that are judged."""
        read, columns = self.answers.read, self.columns
        pictures = self.chosen.pictures.only(read)
        targets = self.matching.targets(pictures)
        targets = targets[:, columns] if targets.ndim == 2 else np.searchsorted(columns, targets)
        names = [pictures.name(index) for index in range(len(pictures))]
        logits = self.answers.logits if read.all() else self.answers.logits[read]  # of 50,000 × 1,000, a copy counts
        logits = logits[:, columns] if self.only_present else logits
        return Evaluation(self.chosen.word, logits, targets, names, {})

    @cached_property
    def measures(self) -> dict[str, Any]:
        """Every measure, as training writes them."""
        return summed(self.evaluation.logits, self.evaluation.targets)

    @property
    def unreadable(self) -> dict[str, str]:
        """What was left out, before and while it was judged."""
        return self.chosen.left_out | self.answers.unreadable

    @cached_property
    def mistakes(self) -> np.ndarray:
        """The surest first."""
        return surest_mistakes(self.evaluation.logits, self.evaluation.targets, MISTAKES)

    def pictures(self) -> dict[int, bytes]:
        """Small copies of the surest mistakes; of those that are still there."""
        pictures, found = self.chosen.pictures.only(self.answers.read), {}
        for index in self.mistakes.tolist():
            try:
                found[index] = small(pictures, index)
            except (OSError, ValueError):  # it was there a moment ago: the card says that there is none
                continue
        return found

    def per_class(self) -> list[dict[str, Any]]:
        """A row for each class that some picture has, in the order of the outputs."""
        evaluation = self.evaluation
        found = (
            several.per_class(evaluation.logits, evaluation.targets)
            if evaluation.several
            else single.per_class(evaluation.verdicts)
        )
        rows = []
        for k in np.flatnonzero(found["support"] > 0).tolist():
            support, right = int(found["support"][k]), int(found["right"][k])
            row = {"class": self.labels[k], "index": int(self.columns[k]), "n": support, "right": right}
            row |= {"said": int(found["said"][k]), "interval": list(wilson(right, support))}
            row |= {name: number(found[name][k]) for name in ("recall", "precision", "f1")}
            if evaluation.several:
                row["average_precision"] = number(found["average_precision"][k])
            rows.append(row)
        return rows

    def surest(self) -> list[dict[str, Any]]:
        """The surest mistakes, in words."""
        evaluation, rows = self.evaluation, []
        for index in self.mistakes.tolist():
            row: dict[str, Any] = {"path": evaluation.name(index)}
            if evaluation.several:
                worst, chance = worst_label(evaluation.logits[index], evaluation.targets[index])
                held = [self.labels[k] for k in np.flatnonzero(evaluation.targets[index])]
                row |= {"labels": held, "about": self.labels[worst], "probability": chance}
            else:
                verdicts = evaluation.verdicts
                row |= {"label": self.labels[int(verdicts.truth[index])]}
                row |= {"predicted": self.labels[int(verdicts.said[index])]}
                row |= {"probability": float(verdicts.sure[index])}
            rows.append(row)
        return rows

    def confused(self) -> dict[str, Any]:
        """The matrix for few classes, and the commonest mistakes."""
        if self.evaluation.several:
            return {}
        verdicts, labels = self.evaluation.verdicts, self.labels
        pairs = single.confused_pairs(verdicts, PAIRS)
        told: dict[str, Any] = {
            "confused": [{"label": labels[is_], "predicted": labels[said], "n": n} for is_, said, n in pairs]
        }
        if verdicts.classes <= MOST_MATRIX:
            told["confusion"] = {"labels": labels, "matrix": single.confusion(verdicts).tolist()}
        return told

    def bins(self) -> list[dict[str, Any]]:
        """The reliability diagram in numbers."""
        evaluation = self.evaluation
        if evaluation.several:
            found = reliability(several.probabilities(evaluation.logits).ravel(), (evaluation.targets > 0).ravel())
        else:
            found = reliability(evaluation.verdicts.sure, evaluation.verdicts.right)
        return [
            {"low": bin.low, "high": bin.high, "n": bin.count, "sure": number(bin.sure), "right": number(bin.right)}
            for bin in found
        ]

    def model(self) -> dict[str, Any]:
        """What was judged."""
        model, pipeline = self.opened.model, self.opened.preprocessing
        return {
            "name": named(model),
            "file": self.opened.where,
            "sha256": self.opened.checksum,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "classes": len(self.matching.labels),
            "image_size": list(pipeline.size),
            "preprocessing": pipeline.in_words(),
            **({} if self.opened.runtime is None else {"runtime": self.opened.runtime.name}),
        }

    def speed(self) -> dict[str, Any]:
        """Pictures a second, with and without their preparation."""
        count, answers = int(self.answers.read.sum()), self.answers
        return {
            "images_per_second": count / max(1e-9, answers.seconds),
            "model_images_per_second": count / max(1e-9, answers.computing),
            "seconds": round(answers.seconds, 3),
        }

    def data(self) -> dict[str, Any]:
        """What it was judged on."""
        pictures = self.chosen.pictures
        return {
            "where": self.chosen.where,
            "kind": self.chosen.kind,
            "split": self.chosen.split,
            "images": len(pictures),
            "classes_present": len(self.matching.present),
            "classes_matched": self.matching.how,
            "only_present": self.only_present,
            "notes": list(self.chosen.notes),
            "fingerprint": fingerprint(pictures),
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything, in JSON's own kinds of value."""
        found, evaluation = self.measures, self.evaluation
        return {
            **found,
            **({} if "top5" in found else among_first(evaluation.logits, evaluation.targets, 5)),
            "n": found["images"],
            "ece": found["calibration_error"],
            "split": self.chosen.split,
            "task": "multi" if evaluation.several else "single",
            "throughput": self.speed(),
            "model": self.model(),
            "data": self.data(),
            "per_class": self.per_class(),
            **self.confused(),
            "reliability": self.bins(),
            "mistakes": self.surest(),
            "unreadable": self.unreadable,
            "environment": self.environment,
        }


def among_first(logits: np.ndarray, targets: np.ndarray, count: int) -> dict[str, Any]:
    """How often a right label is among so many surest answers, `top5`; always, with no more classes and a label each."""
    first = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    right = targets[:, None] == first if targets.ndim == 1 else np.take_along_axis(targets, first, 1) > 0
    found = int(right.any(1).sum())
    return {f"top{count}": found / len(logits), f"top{count}_interval": list(wilson(found, len(logits)))}


def number(value: Any) -> float | None:
    """A number, or nothing where there is none."""
    return None if math.isnan(value) else float(value)
