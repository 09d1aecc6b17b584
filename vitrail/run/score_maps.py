"""A teacher's score maps of whole pictures: computed once, picture by picture, and kept in the user's cache directory.

The teacher sees all of a picture, squashed to its size, so that every crop of it lies somewhere on the map.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from vitrail.data.audit.cache import directory
from vitrail.data.loader import Loader
from vitrail.data.maps import MapFile, Maps
from vitrail.data.pictures import Pictures
from vitrail.data.pipeline import Evaluation
from vitrail.data.places import size_of
from vitrail.data.records import key_of
from vitrail.data.sources.pixels import Pixels
from vitrail.objectives.score_map import best, map_shape
from vitrail.objectives.teacher import Teacher

Progress = Callable[[str, int, int], None]
VERSION = 2  # another way to compute them is another number: old files are not misread
BATCH = 64


def place_of(teacher: Teacher, identity: str, top: int, turn: bool, device: torch.device) -> Path:
    """Where the maps of this teacher are kept. `identity` is the content of its model."""
    order = None if teacher.order is None else teacher.order.tolist()
    key = hashlib.sha256(f"{VERSION} {identity} {order} {top} {turn} {device.type}".encode()).hexdigest()[:40]
    return directory() / "maps" / f"{key}.maps"


def compute(
    teacher: Teacher,
    place: Path,
    pictures: Pictures,
    top: int,
    turn: bool,
    device: torch.device,
    workers: int | None = None,
    progress: Progress | None = None,
) -> int:
    """Adds the maps that are not there yet, and gives their number. What was computed before a kill is not computed again."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"the teacher's score maps cannot be kept in {place.parent}: {error.strerror or error}"
        ) from error
    shape = map_shape(teacher, top)
    file = MapFile(place, shape)
    lacking = file.lacking(pictures)
    if not len(lacking):
        return 0
    # Known before they are read: one that changes meanwhile is another.
    keys = [key_of(pictures, index) for index in lacking.tolist()]
    size = teacher.preprocessing.size
    pipeline = replace(teacher.preprocessing, fit="squash", resize=size, turn=turn)
    if workers is None:
        few = isinstance(pictures.store, Pixels) or len(lacking) < BATCH
        workers = 0 if few else max(1, min(8, (os.cpu_count() or 1) // (1 if device.type == "cuda" else 2)))
    loader = Loader(pictures.only(lacking), None, Evaluation(pipeline), batch_size=BATCH, workers=workers, memory=0)
    done = 0
    try:
        for batch in loader.once():
            if not len(batch.indices):  # none of it could be read
                continue
            images = pipeline.normalise(batch.pixels.to(device, non_blocking=True))
            answers = teacher.maps(images, pipeline.mean, pipeline.std)
            if not answers.isfinite().all():
                raise ValueError("the teacher gives score maps that are not finite: is its file whole?")
            classes, scores = (each.cpu().numpy() for each in best(answers, shape.top))
            indices = lacking[batch.indices.numpy()].tolist()
            sizes = [size_of(pictures, index, turn) for index in indices]
            file.add([keys[place] for place in batch.indices.tolist()], size=sizes, classes=classes, scores=scores)
            done += len(indices)
            if progress:
                progress("score maps of the teacher", done + len(loader.unreadable), len(lacking))
    finally:
        loader.close()
    return done


def score_maps(teacher: Teacher, place: Path, pictures: Pictures, top: int) -> Maps:
    """The maps of these pictures from the file that `compute` filled."""
    return MapFile(place, map_shape(teacher, top)).maps(pictures)
