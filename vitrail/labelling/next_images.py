"""Choose which unlabelled images to label next: those that teach a classifier of frozen features most."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitrail.labelling import DEFAULT_MODEL, METHODS
from vitrail.labelling.folds import fit_linear_classifier
from vitrail.labelling.images import (
    Compute,
    compute_features,
    load_labelled,
    load_unlabelled_images,
    open_features,
    require_classes,
)
from vitrail.labelling.selection import (
    choose_images,
    compute_class_margins,
    compute_distances,
    compute_entropy,
)
from vitrail.metrics.knn import normalise_rows
from vitrail.utils.progress import ProgressCallback


@dataclass(frozen=True)
class ImageToLabel:
    """An unlabelled image that is worth a label."""

    rank: int
    path: str
    suggested_label: str
    confidence: float  # probability of the suggestion
    margin: float  # to the second class
    entropy: float  # in bits
    distance: float  # in feature space to the nearest labelled image, 0 to 2
    second_label: str


@dataclass(frozen=True)
class ImagesToLabel:
    """The images to label next, the most useful first."""

    data: str
    unlabelled: str
    model: str
    method: str
    classes: tuple[str, ...]
    images: tuple[ImageToLabel, ...]
    n_labelled: int
    n_unlabelled: int
    notes: tuple[str, ...] = ()
    unreadable: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        names = ("data", "unlabelled", "model", "method", "n_labelled", "n_unlabelled", "unreadable")
        return {name: getattr(self, name) for name in names} | {
            "images": [vars(image) for image in self.images],
            "notes": list(self.notes),
        }


def choose_images_to_label(
    data: Any,
    unlabelled: str,
    model: str = DEFAULT_MODEL,
    *,
    budget: int = 50,
    method: str = METHODS[0],
    label_from: str | None = None,
    seed: int = 0,
    compute: Compute = Compute(),  # noqa: B008
    progress: ProgressCallback | None = None,
) -> ImagesToLabel:
    """Return the `budget` unlabelled images whose labels would help most.

    `model` is a checkpoint, whose frozen features a linear classifier of the training labels takes: so the choice knows the
    latest labels without another training. `method` is one of `vitrail.labelling.selection.METHODS`.
    """
    if budget < 1:
        raise ValueError(f"budget= must be >= 1, got {budget}")
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: use {', '.join(METHODS)}")
    labelled = load_labelled(data, label_from=label_from, progress=progress)
    source = labelled.dataset.source
    require_classes(labelled)
    images, n_known = load_unlabelled_images(unlabelled, labelled, progress)
    opened = open_features(model, compute)
    train = labelled.images.select(np.flatnonzero(labelled.splits == "train"), "train")
    if len(np.unique(train.targets)) < 2:
        raise ValueError(f"{source} has training images of fewer than 2 classes: label more")
    known = compute_features(opened, train, compute, progress)
    pool = compute_features(opened, images, compute, progress)
    options: dict[str, Any] = {"seed": seed, "progress": progress}
    classifier = fit_linear_classifier(known.values, train.targets[known.indices], len(labelled.classes), **options)
    predicted = classifier.predict(pool.values)
    chosen = choose_images(method, pool.values, predicted, known.values, budget, seed)
    ranked = np.argsort(-predicted[chosen], axis=1, kind="stable")
    margins, entropy = compute_class_margins(predicted[chosen]), compute_entropy(predicted[chosen])
    distances = compute_distances(normalise_rows(pool.values[chosen]), normalise_rows(known.values))
    notes = list(pool.notes)
    if n_known:
        notes.append(f"{n_known:,} images of {unlabelled} are labelled already: left out")
    if len(chosen) < budget:
        notes.append(f"there are only {len(chosen):,} unlabelled images")
    return ImagesToLabel(
        data=source,
        unlabelled=unlabelled,
        model=opened.name,
        method=method,
        classes=labelled.classes,
        images=tuple(
            ImageToLabel(
                rank=row + 1,
                path=images.name(int(pool.indices[index])),
                suggested_label=labelled.classes[ranked[row, 0]],
                confidence=float(predicted[index, ranked[row, 0]]),
                margin=float(margins[row]),
                entropy=float(entropy[row]),
                distance=float(distances[row]),
                second_label=labelled.classes[ranked[row, 1]],
            )
            for row, index in enumerate(chosen.tolist())
        ),
        n_labelled=len(known.indices),
        n_unlabelled=len(pool.indices),
        notes=tuple(notes),
        unreadable=known.unreadable | pool.unreadable,
    )
