"""Load the images that an exported file is verified and calibrated on."""

import argparse

import numpy as np

from vitrail.cli.export import MAX_GENERATED_IMAGES, VERIFY_OPTIONS
from vitrail.data.dataset import Images
from vitrail.deploy.export.comparison import VerificationImages, generate_images
from vitrail.deploy.predict.inputs import collect_inputs, sample_evenly
from vitrail.deploy.predict.predict import check_input_media
from vitrail.deploy.runtimes.base import DeployedModel
from vitrail.evaluation.evaluate import EVALUATIONS, check_target_kind
from vitrail.evaluation.selection import EvaluationData, select_images
from vitrail.inference import load_pixels
from vitrail.utils.progress import ProgressCallback


def load_verification_images(
    options: argparse.Namespace, deployed: DeployedModel, progress: ProgressCallback
) -> tuple[VerificationImages, list[str], set[str]]:
    """Return the images of --verify with targets as output indices, or generated images; notes; and their names."""
    pipeline, media = deployed.contract.preprocessing, deployed.contract.media
    if options.verify is None:
        note = f"no --verify: generated {media}s test numerical equality, not accuracy"
        pixels = generate_images(pipeline, min(MAX_GENERATED_IMAGES[media], options.limit))
        return VerificationImages(pixels, "generated"), [note], set()
    try:
        selection = select_images(
            EvaluationData(
                options.verify,
                options.split,
                limit=options.limit,
                label_from=options.label_from,
                ignore=options.ignore,
                targets=deployed.contract.targets,
            ),
            progress=progress,
            models=[deployed],
        )
    except ValueError as error:
        if any(getattr(options, name) is not None for name in VERIFY_OPTIONS):
            raise
        return load_unlabelled_images(options, deployed, error, progress)
    pixels, read = load_pixels(selection.images, pipeline, progress)
    images, notes = selection.images.select(read), list(selection.notes)
    targets, names = None, image_names(images)
    try:
        targets = match_targets(options, deployed, images)
    except ValueError as error:
        if options.map is not None or options.ignore is not None:
            raise
        notes.append(f"{options.verify} is compared without labels: {error}")
    return VerificationImages(pixels, f"{options.verify}, {selection.split_label}", targets), notes, names


def load_unlabelled_images(
    options: argparse.Namespace, deployed: DeployedModel, error: ValueError, progress: ProgressCallback
) -> tuple[VerificationImages, list[str], set[str]]:
    """Return images without labels; `error` is the reason why no labels were found."""
    try:
        inputs = collect_inputs([options.verify], progress, lambda: deployed.contract.media)
    except (ValueError, OSError):  # not only the labels are missing
        raise error from None
    check_input_media(deployed, inputs)
    pipeline = deployed.contract.preprocessing
    images = inputs.select(sample_evenly(inputs, options.limit))
    pixels, read = load_pixels(images, pipeline, progress)
    notes = [f"{options.verify} is compared without labels, accuracy is not measured: {error}", *inputs.notes]
    return VerificationImages(pixels, f"{options.verify}, unlabelled"), notes, image_names(images.select(read))


def match_targets(options: argparse.Namespace, deployed: DeployedModel, images: Images) -> np.ndarray | None:
    """Return the targets as the model predicts them: output indices, masks or numbers; None for a model without classes."""
    if deployed.contract.labels is not None:
        check_target_kind(deployed, images)
    return EVALUATIONS[deployed.contract.target_kind].verification_targets(deployed, images, options.map)


def load_calibration_images(
    options: argparse.Namespace, deployed: DeployedModel, verification_names: set[str], progress: ProgressCallback
) -> tuple[np.ndarray, list[str]]:
    """Return the images for the calibration of int8: others than those it is verified on, where there are enough."""
    pipeline, count = deployed.contract.preprocessing, options.calibration
    data = options.calibrate or options.verify
    if data is None:
        note = "int8 is calibrated on generated images, which differ from yours: give --calibrate DATA"
        return generate_images(pipeline, count, seed=1), [note]
    inputs = collect_inputs([data], progress, lambda: deployed.contract.media)  # labels are not needed
    check_input_media(deployed, inputs)
    images = inputs.select(sample_evenly(inputs, count, verification_names))
    pixels, read = load_pixels(images, pipeline, progress)
    overlap = sum(images.name(index) in verification_names for index in read.tolist())
    note = f"{overlap:,} images are used for both calibration and verification of int8: give --calibrate DATA"
    return pixels, [note] if overlap else []


def image_names(images: Images) -> set[str]:
    return {images.name(index) for index in range(len(images))}
