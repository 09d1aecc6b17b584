"""Comparison of two models by layer: attention, token frequencies, and linear probes if the data has labels."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitrail import __version__
from vitrail.analysis import comparison as results
from vitrail.analysis.comparison import MODEL_LETTERS, LayerProbes, ModelComparison, ModelResult
from vitrail.analysis.figures.comparison import build_panels, draw_comparison, draw_panel
from vitrail.analysis.inputs import InspectedModel, list_images, make_images
from vitrail.analysis.output import OutputFolder
from vitrail.analysis.page.comparison import render_model_comparison_page
from vitrail.analysis.profile import pool_tokens, profile_model
from vitrail.analysis.results import space_evenly
from vitrail.data.dataset import Dataset, Images
from vitrail.data.decode import IMAGE_SUFFIXES
from vitrail.data.labels import LabelMap
from vitrail.data.sources import load_dataset
from vitrail.data.sources import splits as parts
from vitrail.data.sources.files import FileStore, NoClassFoldersError
from vitrail.metrics.linear import fit_linear_probe
from vitrail.utils.progress import ProgressCallback

MAX_MEASURED_IMAGES = 128  # for attention and frequencies, as in figure 7 (right)
MAX_PROBE_IMAGES = 1024  # for training and for testing of probes, each
MIN_TRAIN_PER_CLASS, MIN_TEST_IMAGES = 2, 10  # of probes
NO_LABELS_REASON = "the images have no labels: give one folder that has a folder for each class"
# Values of C: there are many layers, and weaker penalties take longest and are rarely best.
PROBE_C_GRID = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


@dataclass(frozen=True)
class ComparisonData:
    """Images for the statistics and for the probes, or the reason why there are no probes."""

    source: str
    measured: Images
    probe_train: Images | None = None
    probe_test: Images | None = None
    no_probe_reason: str = ""
    notes: tuple[str, ...] = ()


def gather_images(
    paths: list[str], limit: int | None = None, progress: ProgressCallback | None = None
) -> ComparisonData:
    """Return the images of one dataset, or of files and folders without labels."""
    source = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    if len(paths) == 1 and Path(source).suffix.lower() not in IMAGE_SUFFIXES:
        try:
            return gather_dataset(source, limit, progress)
        except NoClassFoldersError:
            pass  # a folder of images without labels
    files = FileStore.from_paths(str(path) for path in list_images(paths))
    measured = subsample_images(make_images(files), limit or MAX_MEASURED_IMAGES)
    return ComparisonData(source, measured, no_probe_reason=NO_LABELS_REASON)


def gather_dataset(source: str, limit: int | None, progress: ProgressCallback | None) -> ComparisonData:
    """Return the test or validation images of a dataset, or all; and images for probes if it has labels."""
    whole = load_dataset(source, fractions=parts.TRAIN_ONLY_FRACTIONS, progress=progress)
    splits = {name: images for name, images in whole.splits.items() if len(images)}
    if not splits:
        raise ValueError(f"{source} has no images: give a folder or a dataset with images")
    first = next(iter(splits.values()))
    if len(first.classes) < 2 and not first.is_multi_label and Path(source).is_dir():
        raise NoClassFoldersError(f"{source} has one class")
    held_out = next((splits[name] for name in ("test", "validation") if name in splits), None)
    measured = subsample_images(held_out or first, limit or MAX_MEASURED_IMAGES)
    if first.is_multi_label:
        reason = "its images have several labels each"
        return ComparisonData(source, measured, no_probe_reason=reason, notes=whole.notes)
    divided = whole if held_out is not None else load_dataset(source, progress=progress)
    try:
        train, test = split_for_probe(divided, limit or MAX_PROBE_IMAGES)
    except ValueError as error:
        return ComparisonData(source, measured, no_probe_reason=str(error), notes=divided.notes)
    return ComparisonData(source, measured, train, test, notes=divided.notes)


def split_for_probe(dataset: Dataset, max_images: int) -> tuple[Images, Images]:
    """Return training and test images of the same classes; raise ValueError if there are none or too few."""
    splits = {name: images for name, images in dataset.splits.items() if len(images)}
    name = next((name for name in ("test", "validation") if name in splits), None)
    if name is None or "train" not in splits:
        raise ValueError(f"the data has no {'test' if name is None else 'training'} images")
    labels = LabelMap.from_images(splits["train"], allow_mismatch=True)
    test = labels.apply(splits[name], allow_mismatch=True).images
    if not len(test):
        raise ValueError(f"the {name} split has no image of a training class")
    train, test = subsample_images(splits["train"], max_images), subsample_images(test, max_images)
    check_probe_size(train.targets, test.targets)
    return train, test


class TooFewImagesError(ValueError):
    """Too few images for a probe."""


def check_probe_size(train_targets: np.ndarray, test_targets: np.ndarray) -> None:
    """Raise TooFewImagesError if the targets [n] and [m] are too few for a probe."""
    classes = len(np.unique(train_targets))
    if classes < 2:
        raise TooFewImagesError("its training images are of one class")
    if len(train_targets) < MIN_TRAIN_PER_CLASS * classes or len(test_targets) < MIN_TEST_IMAGES:
        counts = f"{len(train_targets):,} training and {len(test_targets):,} test images"
        needed = f"{MIN_TRAIN_PER_CLASS * classes} and {MIN_TEST_IMAGES}"
        raise TooFewImagesError(f"{counts} are too few for {classes} classes: it needs {needed}")


def subsample_images(images: Images, max_images: int) -> Images:
    """Return at most `max_images` of the images, evenly spaced."""
    return images.select(space_evenly(len(images), max_images))


def compare_models(
    models: Sequence[InspectedModel],
    data: ComparisonData,
    on_progress: ProgressCallback | None = None,
    on_layer_progress: ProgressCallback | None = None,
) -> ModelComparison:
    """Measure both models, each with its own preprocessing.

    `on_progress` gets the number of processed images, `on_layer_progress` the number of probed layers.
    """
    skipped: list[str] = []
    no_probe, profiles, probes = data.no_probe_reason, [], []
    for letter, compared in zip(MODEL_LETTERS, models, strict=True):
        stage = f"{letter}, attention and frequencies"
        try:
            batches = compared.iter_batches(data.measured, [], skipped, stage, on_progress)
            profiles.append(profile_model(compared.model, batches))
        except ValueError as error:
            raise ValueError(f"{compared.name}: {error}") from error
    try:
        if not no_probe:
            for letter, compared in zip(MODEL_LETTERS, models, strict=True):
                probes.append(probe_layers(compared, data, letter, skipped, on_progress, on_layer_progress))
    except TooFewImagesError as error:
        no_probe, probes = str(error), []
    names = [compared.name for compared in models]
    first, second = map(ModelResult, MODEL_LETTERS, names, profiles, probes or (None, None))
    return ModelComparison((first, second), data.source, no_probe, data.notes, list(dict.fromkeys(skipped)))


def probe_layers(
    compared: InspectedModel,
    data: ComparisonData,
    letter: str,
    skipped: list[str],
    on_progress: ProgressCallback | None,
    on_layer_progress: ProgressCallback | None,
) -> LayerProbes:
    """Fit a linear probe to the pooled patch tokens of every layer and count its correct predictions."""
    features, targets = [], []
    assert data.probe_train is not None
    assert data.probe_test is not None
    for images in (data.probe_train, data.probe_test):
        read: list[int] = []
        stage = f"{letter}, tokens of {images.split} images"
        batches = compared.iter_batches(images, read, skipped, stage, on_progress)
        features.append(pool_tokens(compared.model, batches))  # [n, L+1, D]
        targets.append(images.targets[read])
    (train, test), (train_targets, test_targets) = features, targets
    check_probe_size(train_targets, test_targets)
    correct, chosen_c = [], []
    for layer in range(train.shape[1]):
        n_classes = len(data.probe_train.classes)
        probe = fit_linear_probe(train[:, layer], train_targets, test[:, layer], n_classes, PROBE_C_GRID)
        correct.append(int((probe.logits.argmax(1) == test_targets).sum()))
        chosen_c.append(probe.c)
        if on_layer_progress:
            on_layer_progress(f"{letter}, linear probes", layer + 1, train.shape[1])
    majority = float((test_targets == np.bincount(train_targets).argmax()).mean())
    counts = len(train_targets), len(test_targets), len(np.unique(train_targets))
    return LayerProbes(tuple(correct), tuple(chosen_c), *counts, majority)


def write_comparison(comparison: ModelComparison, folder: OutputFolder) -> None:
    """Write figures, arrays, JSON and the page."""
    panels = build_panels(comparison)
    figures = {panel.file: draw_panel(panel, comparison) for panel in panels}
    for file, png in {**figures, "comparison.png": draw_comparison(comparison)}.items():
        folder.write_file(file, png)
    folder.save_arrays("comparison.npz", results.comparison_to_arrays(comparison))
    folder.write_file("comparison.json", json.dumps(results.comparison_to_dict(comparison), indent=2).encode("utf-8"))
    folder.write_file("index.html", render_model_comparison_page(comparison, panels, figures).encode("utf-8"))
    folder.write_record({"vitrail": __version__, "compared": [side.name for side in comparison.sides]}, finished=True)
