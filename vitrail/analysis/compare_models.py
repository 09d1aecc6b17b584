"""Comparison of two models by layer: attention, token frequencies, and linear probes if the data has labels."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail import __version__
from vitrail.analysis.comparison import (
    MODEL_LETTERS,
    LayerProbes,
    ModelComparison,
    ModelResult,
    comparison_to_arrays,
    comparison_to_dict,
)
from vitrail.analysis.figures.comparison import build_panels, draw_comparison, draw_panel
from vitrail.analysis.inputs import (
    ProgressCallback,
    UnusableImageError,
    ignore_progress,
    iter_image_batches,
    list_images,
)
from vitrail.analysis.output import OutputFolder
from vitrail.analysis.page.comparison import render_model_comparison_page
from vitrail.analysis.profile import pool_tokens, profile_model
from vitrail.analysis.results import space_evenly
from vitrail.data.dataset import Dataset, Images
from vitrail.data.decode import IMAGE_ERRORS, IMAGE_SUFFIXES, name_image_errors
from vitrail.data.labels import LabelMap
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources import load_dataset
from vitrail.data.sources import splits as parts
from vitrail.data.sources.files import FileStore
from vitrail.data.sources.folders import NoClassFoldersError
from vitrail.metrics.linear import fit_linear_probe
from vitrail.models.base import TokenModel

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
    paths: list[str], limit: int | None = None, progress: parts.ProgressCallback | None = None
) -> ComparisonData:
    """Return the images of one dataset, or of files and folders without labels."""
    source = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    if len(paths) == 1 and Path(source).suffix.lower() not in IMAGE_SUFFIXES:
        try:
            return gather_dataset(source, limit, progress)
        except NoClassFoldersError:
            pass  # a folder of images without labels
    files = FileStore.from_paths(str(path) for path in list_images(paths))
    images = Images(files, np.arange(len(files)), np.zeros(len(files), dtype=np.int64), ("",))
    measured = subsample_images(images, limit or MAX_MEASURED_IMAGES)
    return ComparisonData(source, measured, no_probe_reason=NO_LABELS_REASON)


def gather_dataset(source: str, limit: int | None, progress: parts.ProgressCallback | None) -> ComparisonData:
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
        return ComparisonData(
            source, measured, no_probe_reason="its images have several labels each", notes=whole.notes
        )
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


def check_probe_size(train_targets: np.ndarray, test_targets: np.ndarray) -> None:
    """Raise ValueError if the targets [n] and [m] are too few for a probe."""
    classes = len(np.unique(train_targets))
    if classes < 2:
        raise ValueError("its training images are of one class")
    if len(train_targets) < MIN_TRAIN_PER_CLASS * classes or len(test_targets) < MIN_TEST_IMAGES:
        counts = f"{len(train_targets):,} training and {len(test_targets):,} test images"
        needed = f"{MIN_TRAIN_PER_CLASS * classes} and {MIN_TEST_IMAGES}"
        raise ValueError(f"{counts} are too few for {classes} classes: it needs {needed}")


def subsample_images(images: Images, max_images: int) -> Images:
    """Return at most `max_images` of the images, evenly spaced."""
    if len(images) <= max_images:
        return images
    return images.select(np.array(space_evenly(len(images), max_images), dtype=np.int64))


class ImageReader:
    """Reader of normalised batches with a model's preprocessing; it skips unreadable images."""

    def __init__(self, images: Images, preprocessing: Preprocessing, patches: int, device: torch.device) -> None:
        self.images, self.preprocessing, self.patches, self.device = images, preprocessing, patches, device
        self.read_indices: list[int] = []
        self.skipped: list[str] = []

    @property
    def targets(self) -> np.ndarray:
        """Return the targets of the images that were read."""
        return self.images.targets[self.read_indices]

    def iter_batches(self, on_progress: ProgressCallback, label: str) -> Iterator[Tensor]:
        """Yield batches [B, C, H, W] on the device."""

        def report(done: int, total: int) -> None:
            on_progress(label, done, total)

        count, skip = len(self.images), self.skipped.append
        return iter_image_batches(self.load_pixels, count, self.preprocessing, self.patches, self.device, skip, report)

    def load_pixels(self, index: int) -> Tensor:
        """Return the pixels of one image; raise UnusableImageError if it cannot be read."""
        name = self.images.name(index)
        try:
            with name_image_errors(name), self.images.open(index) as image:
                pixels = self.preprocessing.to_pixels(image)
        except IMAGE_ERRORS as error:
            reason = " ".join(str(error).split())
            message = reason if name in reason else f"{name}: {reason or type(error).__name__}"
            raise UnusableImageError(message) from error
        self.read_indices.append(index)
        return pixels


@dataclass(frozen=True)
class ComparedModel:
    """Model with its preprocessing and name."""

    model: TokenModel
    preprocessing: Preprocessing
    name: str

    def make_reader(self, images: Images) -> ImageReader:
        device = next(self.model.parameters()).device
        height, width = (side // self.model.embed.stride for side in self.preprocessing.size)
        return ImageReader(images, self.preprocessing, height * width, device)


def compare_models(
    models: Sequence[ComparedModel],
    data: ComparisonData,
    on_progress: ProgressCallback = ignore_progress,
    on_layer_progress: ProgressCallback = ignore_progress,
) -> ModelComparison:
    """Measure both models, each with its own preprocessing.

    `on_progress` gets the number of processed images, `on_layer_progress` the number of probed layers.
    """
    skipped: list[str] = []
    no_probe, profiles, probes = data.no_probe_reason, [], []
    for letter, compared in zip(MODEL_LETTERS, models, strict=True):
        reader = compared.make_reader(data.measured)
        batches = reader.iter_batches(on_progress, f"{letter}, attention and frequencies")
        try:
            profiles.append(profile_model(compared.model, batches))
        except ValueError as error:
            raise ValueError(f"{compared.name}: {error}") from error
        skipped += reader.skipped
    for letter, compared in zip(MODEL_LETTERS, models, strict=True):
        if no_probe or data.probe_train is None or data.probe_test is None:
            break
        try:
            callbacks = on_progress, on_layer_progress
            probes.append(probe_layers(compared, data.probe_train, data.probe_test, letter, *callbacks, skipped))
        except TooFewImagesError as error:
            no_probe, probes = str(error), []
    first, second = (
        ModelResult(MODEL_LETTERS[k], models[k].name, profiles[k], probes[k] if probes else None) for k in range(2)
    )
    return ModelComparison((first, second), data.source, no_probe, data.notes, list(dict.fromkeys(skipped)))


class TooFewImagesError(ValueError):
    """Too few images for a probe could be read."""


def probe_layers(
    compared: ComparedModel,
    train_images: Images,
    test_images: Images,
    letter: str,
    on_progress: ProgressCallback,
    on_layer_progress: ProgressCallback,
    skipped: list[str],
) -> LayerProbes:
    """Fit a linear probe to the pooled patch tokens of every layer and count its correct predictions."""
    readers = [compared.make_reader(images) for images in (train_images, test_images)]
    labels = [f"{letter}, tokens of {reader.images.split} images" for reader in readers]
    train, test = (
        pool_tokens(compared.model, reader.iter_batches(on_progress, label))
        for reader, label in zip(readers, labels, strict=True)
    )  # [n, L+1, D], [m, L+1, D]
    for reader in readers:
        skipped += reader.skipped
    targets, truth = (reader.targets for reader in readers)
    try:
        check_probe_size(targets, truth)
    except ValueError as error:
        raise TooFewImagesError(str(error)) from error
    correct, chosen_c = [], []
    for layer in range(train.shape[1]):
        probe = fit_linear_probe(train[:, layer], targets, test[:, layer], len(train_images.classes), PROBE_C_GRID)
        correct.append(int((probe.logits.argmax(1) == truth).sum()))
        chosen_c.append(probe.c)
        on_layer_progress(f"{letter}, linear probes", layer + 1, train.shape[1])
    majority = float((truth == np.bincount(targets).argmax()).mean())
    classes = len(np.unique(targets))
    return LayerProbes(tuple(correct), tuple(chosen_c), len(targets), len(truth), classes, majority)


def write_comparison(comparison: ModelComparison, folder: OutputFolder) -> None:
    """Write figures, arrays, JSON and the page."""
    metadata: dict[str, Any] = {"vitrail": __version__, "compared": [side.name for side in comparison.sides]}
    panels = build_panels(comparison)
    figures = {panel.file: draw_panel(panel, comparison) for panel in panels}
    for file, png in {**figures, "comparison.png": draw_comparison(comparison)}.items():
        folder.write_file(file, png)
    folder.save_arrays("comparison.npz", comparison_to_arrays(comparison))
    folder.write_file("comparison.json", json.dumps(comparison_to_dict(comparison), indent=2).encode("utf-8"))
    folder.write_file("index.html", render_model_comparison_page(comparison, panels, figures).encode("utf-8"))
    folder.write_record(metadata, finished=True)
