"""Propose labels for unlabelled images, above a confidence whose precision holds on validation images.

n validation images, m unlabelled ones, K classes.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitrail.data.dataset import Images
from vitrail.data.labels import drop_placeholder_labels
from vitrail.deploy.runtimes.base import DeployedModel
from vitrail.deploy.runtimes.open import open_checkpoint
from vitrail.inference import probabilities
from vitrail.labelling.folds import fit_linear_classifier
from vitrail.labelling.images import (
    Compute,
    LabelledImages,
    compute_features,
    load_labelled,
    load_unlabelled_images,
    open_features,
    require_classes,
)
from vitrail.metrics.precision_bound import ThresholdFit, count_needed, find_threshold
from vitrail.utils.devices import pick_device
from vitrail.utils.progress import ProgressCallback
from vitrail.utils.text import format_percent


@dataclass(frozen=True)
class Proposal:
    """A proposed label."""

    path: str
    label: str
    confidence: float


@dataclass(frozen=True)
class LabelProposals:
    """Proposed labels with the thresholds above which they were proposed."""

    data: str
    unlabelled: str
    model: str
    precision_target: float
    split: str  # that the thresholds hold on
    thresholds: dict[str, ThresholdFit]  # by class; one under "" for all classes
    proposals: tuple[Proposal, ...]  # in the order of the files
    n_images: int  # unlabelled ones that were predicted
    notes: tuple[str, ...] = ()
    unreadable: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        fits = {name or "all": vars(fit) | {"precision": fit.precision} for name, fit in self.thresholds.items()}
        names = ("data", "unlabelled", "model", "precision_target", "split")
        return {
            **{name: getattr(self, name) for name in names},
            "images": self.n_images,
            "proposed": len(self.proposals),
            "thresholds": fits,
            "notes": list(self.notes),
            "unreadable": self.unreadable,
        }


@dataclass(frozen=True)
class Predictions:
    """The probabilities of the classes of the data, for images that can be read."""

    values: np.ndarray  # [n, K]
    indices: np.ndarray  # int64 [n]
    unreadable: dict[str, str]


def propose_labels(
    data: Any,
    unlabelled: str,
    *,
    model: str | None = None,
    init: str | None = None,
    precision_target: float = 0.98,
    per_class: bool = False,
    split: str = "validation",
    label_from: str | None = None,
    seed: int = 0,
    compute: Compute = Compute(),  # noqa: B008
    progress: ProgressCallback | None = None,
) -> LabelProposals:
    """Return labels for the unlabelled images that are predicted with enough confidence; raise ValueError if none is enough.

    `model` is a classifier of the classes of the data. With `init`, a checkpoint, a linear classifier of its frozen features is
    fitted to the training images. The threshold is the lowest confidence at which the precision on the images of `split` is at
    least `precision_target`, by the lower one-sided 95 % bound; `per_class` finds one for each predicted class.
    """
    if (model is None) == (init is None):
        raise ValueError("give either model=, a trained classifier, or init=, a checkpoint for features")
    if not 0 < precision_target < 1:
        raise ValueError(f"precision_target= must be above 0 and below 1, got {precision_target:g}")
    labelled = load_labelled(data, label_from=label_from, fractions=None, progress=progress)
    check_splits(labelled, split, init is not None)
    images, n_known = load_unlabelled_images(unlabelled, labelled, progress)
    held = labelled.images.select(np.flatnonzero(labelled.splits == split), split)
    if init is not None:
        name, validated, predicted = predict_with_features(init, labelled, held, images, compute, seed, progress)
    else:
        assert model is not None
        name, validated, predicted = predict_with_classifier(model, labelled, held, images, compute, progress)
    targets = held.targets[validated.indices]
    fits = fit_thresholds(validated.values, targets, labelled.classes if per_class else None, precision_target)
    if all(fit.threshold is None for fit in fits.values()):
        raise ValueError(explain_refusal(fits, precision_target, split))
    best, confidence = predicted.values.argmax(1), predicted.values.max(1)
    limits = np.array([find_limit(fits, label) for label in labelled.classes])
    proposals = tuple(
        Proposal(images.name(int(predicted.indices[row])), labelled.classes[best[row]], float(confidence[row]))
        for row in np.flatnonzero(confidence >= limits[best])
    )
    notes = [*labelled.dataset.notes, f"the bound holds for images like those of the {split} split"]
    if n_known:
        notes.append(f"{n_known:,} images of {unlabelled} are labelled already: left out")
    if refused := [label for label, fit in fits.items() if fit.threshold is None]:
        notes.append(f"no threshold holds for {len(refused)} of {len(fits)} classes: none of their labels is proposed")
    return LabelProposals(
        data=labelled.dataset.source,
        unlabelled=unlabelled,
        model=name,
        precision_target=precision_target,
        split=split,
        thresholds=fits,
        proposals=proposals,
        n_images=len(predicted.indices),
        notes=tuple(notes),
        unreadable=validated.unreadable | predicted.unreadable,
    )


def check_splits(labelled: LabelledImages, split: str, fits: bool) -> None:
    """Raise ValueError unless there are two classes and the splits that are needed."""
    source, found = labelled.dataset.source, labelled.dataset.splits
    require_classes(labelled)
    for name in (split, *(("train",) if fits else ())):
        if name not in found or not len(found[name]):
            raise ValueError(f"{source} has no {name} images: it has {', '.join(found)}")
    if fits and split == "train":
        raise ValueError("split='train' is what the classifier is fitted to: use validation or test")


def predict_with_features(
    init: str,
    labelled: LabelledImages,
    held: Images,
    images: Images,
    compute: Compute,
    seed: int,
    progress: ProgressCallback | None,
) -> tuple[str, Predictions, Predictions]:
    """Return the name of the model, and the predictions of a linear classifier for held-out and for unlabelled images."""
    opened = open_features(init, compute)
    train = labelled.images.select(np.flatnonzero(labelled.splits == "train"), "train")
    known = compute_features(opened, train, compute, progress)
    options: dict[str, Any] = {"seed": seed, "progress": progress}
    classifier = fit_linear_classifier(known.values, train.targets[known.indices], len(labelled.classes), **options)
    predictions = []
    for part in (held, images):
        read = compute_features(opened, part, compute, progress)
        predictions.append(Predictions(classifier.predict(read.values), read.indices, read.unreadable))
    return f"linear classifier of {opened.name} features", predictions[0], predictions[1]


def predict_with_classifier(
    model: str,
    labelled: LabelledImages,
    held: Images,
    images: Images,
    compute: Compute,
    progress: ProgressCallback | None,
) -> tuple[str, Predictions, Predictions]:
    """Return the name of a classifier, and its predictions for held-out and for unlabelled images."""
    options = {"size": compute.size, "assume": compute.assume, "take": compute.take}
    opened = open_checkpoint(model, pick_device(compute.device), output_kind="logits", **options)
    outputs = match_outputs(opened, labelled.classes)
    predictions = []
    for part in (held, images):
        read = compute_features(opened, part, compute, progress)
        values = probabilities(read.values, multilabel=False)[:, outputs]
        predictions.append(Predictions(values, read.indices, read.unreadable))
    return opened.name, predictions[0], predictions[1]


def match_outputs(opened: DeployedModel, classes: tuple[str, ...]) -> np.ndarray:
    """Return the number of the output of each class of the data; raise ValueError if the model lacks one."""
    if opened.contract.target_kind != "single":
        raise ValueError(f"{opened.where} has {opened.contract.task.title}: give a classifier of one class per image")
    labels = drop_placeholder_labels(opened.contract.labels)
    if labels is None:
        raise ValueError(f"{opened.where} has no class names: use a model that vitrail trained, or init= for features")
    if missing := [name for name in classes if name not in labels]:
        raise ValueError(f"{opened.where} does not predict {missing[0]!r}: train it on these classes, or use init=")
    return np.array([labels.index(name) for name in classes])


def fit_thresholds(
    values: np.ndarray, targets: np.ndarray, classes: tuple[str, ...] | None, target: float
) -> dict[str, ThresholdFit]:
    """Return the threshold of each predicted class, or one for all under the name ""."""
    best, confidence = values.argmax(1), values.max(1)
    correct = best == targets
    if classes is None:
        return {"": find_threshold(confidence, correct, target)}
    return {name: find_threshold(confidence[best == k], correct[best == k], target) for k, name in enumerate(classes)}


def find_limit(fits: dict[str, ThresholdFit], label: str) -> float:
    """Return the least confidence for a label; infinite if none is enough."""
    fit = fits.get("", fits.get(label))
    return np.inf if fit is None or fit.threshold is None else fit.threshold


def explain_refusal(fits: dict[str, ThresholdFit], target: float, split: str) -> str:
    """Return why no threshold holds."""
    name, fit = max(fits.items(), key=lambda item: (item[1].bound, item[1].images))
    what = f"{split} images" + (f" predicted {name!r}" if name else "")
    if fit.images < fit.needed:
        shown = f"{fit.images:,} {what}" if fit.images else f"no {what}"
        reason = f"{shown} cannot prove a precision of {100 * target:g} %, at least {count_needed(target):,} are needed"
        return f"no threshold holds: {reason}: label more, or lower precision_target="
    found = f"{fit.errors:,} errors in the top {fit.count:,} {what} (bound {format_percent(fit.bound)})"
    return f"no threshold holds {100 * target:g} %: {found}: lower precision_target="
