"""Find labels that are probably wrong, by classifiers that have not seen the image and by its neighbours.

The probability of each class is the mean of two that do not know the image's own label: a linear classifier of frozen features,
fitted to the other folds, and the votes of the nearest images. Confident learning (`metrics/label_noise.py`) estimates from these
how many labels of each class are wrong, and which. Suspects are ranked by the self-confidence and the margin of the mean.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitrail.labelling import DEFAULT_MODEL
from vitrail.labelling.folds import FOLDS, assign_folds, predict_out_of_fold
from vitrail.labelling.images import (
    Compute,
    compute_features,
    group_duplicates,
    load_labelled,
    note_own_data,
    open_features,
    require_classes,
)
from vitrail.labelling.neighbours import choose_neighbours, predict_from_neighbours
from vitrail.metrics.calibration import probabilities
from vitrail.metrics.label_noise import ConfidentJoint, compute_margins, estimate_joint, find_suspects
from vitrail.metrics.temperature import choose_temperature
from vitrail.utils.progress import ProgressCallback


@dataclass(frozen=True)
class LabelScores:
    """Scores of each label by classifiers and neighbours. All arrays are [n], probabilities [n, K]."""

    labels: np.ndarray
    classifier: np.ndarray  # probabilities of a linear classifier of the other folds
    neighbours: np.ndarray  # share of votes of the nearest images
    joint: ConfidentJoint  # of the mean of both
    suspected: np.ndarray  # bool

    @property
    def mean(self) -> np.ndarray:
        return (self.classifier + self.neighbours) / 2

    @property
    def score(self) -> np.ndarray:
        """Return how suspicious each label is, 0 to 1: the mean of 1 - self-confidence and (1 - margin) / 2.

        The first ranks labels high that nothing speaks for, the second those that another class fits better.
        """
        own = self.mean[np.arange(len(self.labels)), self.labels]
        return ((1 - own) + (1 - compute_margins(self.labels, self.mean)) / 2) / 2


def score_labels(
    features: np.ndarray,  # [n, D]
    labels: np.ndarray,  # [n]
    classes: int,
    *,
    groups: np.ndarray | None = None,
    folds: int = FOLDS,
    neighbours: int | None = None,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> LabelScores:
    """Score labels with features. Images of one group, near-duplicates, are never judged by each other."""
    if folds < 2:
        raise ValueError(f"folds must be >= 2, got {folds}")
    groups = np.arange(len(labels)) if groups is None else groups
    k = min(neighbours or choose_neighbours(labels), len(labels) - 1)
    fold = assign_folds(labels, folds, groups, seed)
    logits = predict_out_of_fold(features, labels, classes, fold, seed=seed, progress=progress)
    # One temperature for all makes the confidence of these predictions agree with the labels.
    classifier = probabilities(logits / choose_temperature(logits, labels, seed).temperature, multilabel=False)
    votes = predict_from_neighbours(features, labels, classes, groups, k, progress)
    mean = (classifier + votes) / 2
    joint = estimate_joint(labels, mean)
    return LabelScores(labels, classifier, votes, joint, find_suspects(labels, mean, joint))


@dataclass(frozen=True)
class Suspect:
    """A label that is probably wrong."""

    rank: int
    path: str
    given_label: str
    suggested_label: str
    score: float  # how suspicious, 0 to 1: the mean of 1 - self_confidence and (1 - margin) / 2
    confidence: float  # probability of the suggestion, mean of classifier and neighbours
    self_confidence: float  # of the given label
    margin: float  # self_confidence minus that of the most probable other class
    neighbour_agreement: float  # share of votes of the neighbours for the given label
    classifier_confidence: float  # probability that the classifier alone gives to the given label
    split: str


@dataclass(frozen=True)
class LabelErrors:
    """The suspects of a dataset, most suspicious first, and the estimated noise."""

    data: str
    model: str
    classes: tuple[str, ...]
    suspects: tuple[Suspect, ...]
    n_labels: int  # that were judged
    noise_rate: float  # estimated share of wrong labels
    class_noise: dict[str, float]  # by given label
    confusions: tuple[
        tuple[str, str, float], ...
    ]  # given and true class with the estimated number of labels, most first
    notes: tuple[str, ...] = ()
    unreadable: dict[str, str] = field(default_factory=dict)
    scores: LabelScores | None = field(default=None, repr=False, compare=False)
    paths: tuple[str, ...] = field(default=(), repr=False, compare=False)  # of the judged labels

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return {
            "data": self.data,
            "model": self.model,
            "labels": self.n_labels,
            "suspected": len(self.suspects),
            "noise_rate": self.noise_rate,
            "class_noise": self.class_noise,
            "confusions": [
                {"given": given, "true": true, "estimated": count} for given, true, count in self.confusions
            ],
            "suspects": [vars(suspect) for suspect in self.suspects],
            "notes": list(self.notes),
            "unreadable": self.unreadable,
        }


def find_label_errors(
    data: Any,
    model: str = DEFAULT_MODEL,
    *,
    split: str | None = None,
    label_from: str | None = None,
    folds: int = FOLDS,
    neighbours: int | None = None,
    seed: int = 0,
    compute: Compute = Compute(),  # noqa: B008
    progress: ProgressCallback | None = None,
) -> LabelErrors:
    """Return the labels of a dataset that are probably wrong, and the estimated share of wrong labels.

    `data` is a folder or a CSV of image files with one class each; all its splits are searched, or `split` alone. `model` is a
    checkpoint whose frozen features separate the classes; it need not know them. `neighbours` is the number of nearest images
    that vote (default: half of a class, 3 to 20).
    """
    labelled = load_labelled(data, label_from=label_from, progress=progress)
    require_classes(labelled)
    if split is not None and split not in labelled.dataset.splits:
        raise ValueError(f"{labelled.dataset.source} has no {split} split: it has {', '.join(labelled.dataset.splits)}")
    opened = open_features(model, compute)
    groups = group_duplicates(labelled.dataset, compute.cache, progress)
    wanted = np.arange(len(labelled.images)) if split is None else np.flatnonzero(labelled.splits == split)
    read = compute_features(opened, labelled.images.select(wanted), compute, progress)
    indices = wanted[read.indices]
    judged = find_judged(labelled.images.targets[indices], groups[indices])
    notes = [*read.notes, *note_own_data(opened, labelled)]
    if left := int((~judged).sum()):
        notes.append(f"{left:,} labels are not checked: their class has no other image, or only near-duplicates")
    indices, features = indices[judged], read.values[judged]
    if len(np.unique(labelled.images.targets[indices])) < 2:
        raise ValueError(f"{labelled.dataset.source} has fewer than 2 classes of 2 images or more: add images")
    labels = labelled.images.targets[indices]
    options = {"folds": folds, "neighbours": neighbours, "seed": seed, "progress": progress}
    # Classes without a judged image would have no threshold: the others are numbered anew.
    present, numbered = np.unique(labels, return_inverse=True)
    names = tuple(labelled.classes[number] for number in present)
    scores = score_labels(features, numbered, len(present), groups=groups[indices], **options)
    paths = tuple(labelled.images.name(int(index)) for index in indices)
    return LabelErrors(
        data=labelled.dataset.source,
        model=opened.name,
        classes=labelled.classes,
        suspects=list_suspects(scores, names, paths, labelled.splits[indices]),
        n_labels=len(labels),
        noise_rate=scores.joint.noise_rate,
        class_noise=dict(zip(names, scores.joint.class_noise.tolist(), strict=True)),
        confusions=list_confusions(scores.joint, names, len(labels)),
        notes=tuple(notes),
        unreadable=read.unreadable,
        scores=scores,
        paths=paths,
    )


def find_judged(labels: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return which labels can be judged, [n]: their class has images of two groups or more."""
    pairs = np.unique(np.stack((labels, groups), 1), axis=0)
    return np.bincount(pairs[:, 0], minlength=int(labels.max()) + 1)[labels] >= 2


def list_suspects(
    scores: LabelScores, names: tuple[str, ...], paths: tuple[str, ...], splits: np.ndarray
) -> tuple[Suspect, ...]:
    """Return the suspected labels, most suspicious first."""
    chosen = np.flatnonzero(scores.suspected)
    chosen = chosen[np.argsort(-scores.score[chosen], kind="stable")]
    mean, margins = scores.mean, compute_margins(scores.labels, scores.mean)
    suspects = []
    for rank, index in enumerate(chosen.tolist(), 1):
        given, suggested = int(scores.labels[index]), int(mean[index].argmax())
        suspects.append(
            Suspect(
                rank,
                paths[index],
                names[given],
                names[suggested],
                score=float(scores.score[index]),
                confidence=float(mean[index, suggested]),
                self_confidence=float(mean[index, given]),
                margin=float(margins[index]),
                neighbour_agreement=float(scores.neighbours[index, given]),
                classifier_confidence=float(scores.classifier[index, given]),
                split=str(splits[index]),
            )
        )
    return tuple(suspects)


def list_confusions(joint: ConfidentJoint, names: tuple[str, ...], count: int) -> tuple[tuple[str, str, float], ...]:
    """Return the pairs of given and true class with at least half a label by the estimate, most first."""
    numbers = joint.joint * count
    np.fill_diagonal(numbers, 0)
    order = np.argsort(-numbers, axis=None, kind="stable")
    pairs = [(int(cell) // len(names), int(cell) % len(names)) for cell in order[: int((numbers >= 0.5).sum())]]
    return tuple((names[i], names[j], float(numbers[i, j])) for i, j in pairs)
