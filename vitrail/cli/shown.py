"""The pictures that an exported file is proven and calibrated on."""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

from vitrail.cli.export import GENERATED
from vitrail.data.loader import Loader
from vitrail.data.pictures import Pictures
from vitrail.data.pipeline import Evaluation
from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.gate import Shown
from vitrail.deploy.generated import generated
from vitrail.deploy.inputs import gathered
from vitrail.deploy.runtime import Deployed
from vitrail.deploy.unlabelled import pixels_of, spread
from vitrail.evaluation.choosing import Wanted, choose
from vitrail.evaluation.matching import match
from vitrail.evaluation.translation import read_translation

Told = Callable[[str, int, int], None]


def shown(options: argparse.Namespace, found: Deployed, told: Told) -> tuple[Shown, list[str], set[str]]:
    """The pictures of --verify with their labels in the model's outputs, or generated ones; notes; and their names."""
    pipeline = found.contract.preprocessing
    if options.verify is None:
        note = "no --verify: generated pictures show whether the numbers are the same, not how good the model is"
        return Shown(generated(pipeline, min(GENERATED, options.limit)), "generated"), [note], set()
    try:
        chosen = choose(
            Wanted(options.verify, options.split, limit=options.limit, label_from=options.label_from), progress=told
        )
    except ValueError as error:
        if options.split is not None or options.map is not None or options.label_from is not None:
            raise
        return unlabelled(options, pipeline, error, told)
    pixels, read = prepared(chosen.pictures, pipeline, told)
    pictures, notes = chosen.pictures.only(read), list(chosen.notes)
    targets = None
    try:
        targets = targets_of(options, found, pictures)
    except ValueError as error:
        if options.map is not None:
            raise
        notes.append(f"{options.verify} is compared without its labels: {error}")
    return Shown(pixels, f"{options.verify}, {chosen.word}", targets), notes, names_of(pictures)


def unlabelled(
    options: argparse.Namespace, pipeline: Preprocessing, error: ValueError, told: Told
) -> tuple[Shown, list[str], set[str]]:
    """The same of pictures that nobody labelled, for which `error` says what was looked for."""
    try:
        inputs = gathered([options.verify], told)
    except (ValueError, OSError):  # so there is more amiss than labels
        raise error from None
    pixels, read = pixels_of(inputs, spread(inputs, options.limit), pipeline, told)
    notes = [f"{options.verify} is compared without labels, so nothing is said of accuracy: {error}", *inputs.notes]
    return Shown(pixels, f"{options.verify}, unlabelled"), notes, {inputs.name(place) for place in read}


def targets_of(options: argparse.Namespace, found: Deployed, pictures: Pictures) -> np.ndarray | None:
    """What the pictures show, in the model's outputs; None for a model without classes."""
    assert found.model is not None
    outputs, labels = found.model.config.classes, found.model.labels
    if outputs is None:
        return None
    translation: Any = options.map
    if translation is not None and translation != "index":
        translation = read_translation(translation, labels, outputs)
    matching = match(pictures, labels, outputs, translation)
    return matching.targets(pictures)


def calibrating(
    options: argparse.Namespace, found: Deployed, judged_by: set[str], told: Told
) -> tuple[np.ndarray, list[str]]:
    """Pictures that int8 measures its ranges on: other ones than those that it is judged by, where there are any."""
    pipeline, count = found.contract.preprocessing, options.calibration
    where = options.calibrate or options.verify
    if where is None:
        note = "int8 is calibrated on generated pictures, which are unlike yours: give --calibrate DATA"
        return generated(pipeline, count, seed=1), [note]
    inputs = gathered([where], told)  # labels are not needed, so none are looked for
    pixels, read = pixels_of(inputs, spread(inputs, count, judged_by), pipeline, told)
    both = sum(inputs.name(place) in judged_by for place in read)
    note = f"{both:,} pictures that int8 is judged by are among those it is calibrated on: give --calibrate DATA"
    return pixels, [note] if both else []


def names_of(pictures: Pictures) -> set[str]:
    return {pictures.name(place) for place in range(len(pictures))}


def prepared(pictures: Pictures, pipeline: Preprocessing, told: Told) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [n, C, H, W] of the pictures that can be read, and which these are."""
    loader = Loader(pictures, None, Evaluation(pipeline), batch_size=16, memory=0)
    parts, places = [], []
    try:
        for batch in loader.once():
            parts.append(batch.pixels.numpy().copy())
            places.append(batch.indices.numpy().copy())
            told("preparing", sum(map(len, places)), len(pictures))
    finally:
        loader.close()
    read = np.concatenate(places) if places else np.zeros(0, np.int64)
    if not len(read):
        raise ValueError(f"none of the {len(pictures):,} pictures can be read")
    return np.concatenate(parts), read
