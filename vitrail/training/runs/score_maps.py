"""Cache of a teacher's score maps of whole images, in the user's cache directory.

The teacher sees the whole image, squashed to its input size, so that every crop has a region on the map.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from vitrail.data.cache import ScoreMapFile, ScoreMaps, compute_image_key
from vitrail.data.dataset import Images
from vitrail.data.transforms.pipeline import read_image_size
from vitrail.inference import run_batches
from vitrail.objectives.teacher import Teacher, map_shape, top_scores
from vitrail.utils.files import cache_directory
from vitrail.utils.progress import ProgressCallback

BATCH_SIZE = 64
VERSION = 2  # increased when the computation changes


def score_map_path(teacher: Teacher, identity: str, top: int, turn: bool, device: torch.device) -> Path:
    """Return the cache file of a teacher's maps. `identity` is the hash of its model."""
    order = None if teacher.order is None else teacher.order.tolist()
    key = hashlib.sha256(f"{VERSION} {identity} {order} {top} {turn} {device.type}".encode()).hexdigest()[:40]
    return cache_directory() / "maps" / f"{key}.maps"


def compute_score_maps(
    teacher: Teacher,
    path: Path,
    images: Images,
    top: int,
    turn: bool,
    device: torch.device,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> int:
    """Compute the maps that the file lacks, append them batch by batch, and return their number."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot cache the teacher's score maps in {path.parent}: {error.strerror or error}") from error
    shape = map_shape(teacher, top)
    file = ScoreMapFile(path, shape)
    missing = file.find_missing(images)
    if not len(missing):
        return 0
    # Keys are computed before the images are read: a file that changes meanwhile gets another key.
    keys = [compute_image_key(images, index) for index in missing.tolist()]
    size = teacher.preprocessing.size
    pipeline = replace(teacher.preprocessing, fit="squash", resize=size, turn=turn)

    def forward(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        samples = pipeline.normalise(torch.from_numpy(pixels).to(device, non_blocking=True))
        logits = teacher.dense_logits(samples, pipeline.mean, pipeline.std)
        if not logits.isfinite().all():
            raise ValueError("the teacher's score maps are not finite: check its file")
        classes, scores = top_scores(logits, shape.top)
        return classes.cpu().numpy(), scores.cpu().numpy()

    done, stage = 0, "score maps of the teacher"
    for batch in run_batches(
        forward,
        images.select(missing),
        pipeline,
        {},
        batch_size=BATCH_SIZE,
        workers=workers,
        device=device,
        progress=progress,
        stage=stage,
    ):
        (classes, scores), indices = batch.outputs, missing[batch.indices].tolist()
        sizes = [read_image_size(images, index, turn) for index in indices]
        file.append([keys[index] for index in batch.indices.tolist()], size=sizes, classes=classes, scores=scores)
        done += len(indices)
    return done


def open_score_maps(teacher: Teacher, path: Path, images: Images, top: int) -> ScoreMaps:
    """Return the maps of these images from the file that `compute` filled."""
    return ScoreMapFile(path, map_shape(teacher, top)).load_maps(images)
