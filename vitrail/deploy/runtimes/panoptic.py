"""Panoptic segments of images by an EoMT model: every object of a thing class, and one region for each stuff class.

Q queries, K classes, N values of a query, C channels, images of H×W pixels, models of h×w.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image

from vitrail.data.preprocessing import Preprocessing
from vitrail.data.things import find_things
from vitrail.deploy.runtimes.base import DeployedModel, ModelContract
from vitrail.deploy.runtimes.masks import MaskInput, prepare_whole
from vitrail.metrics.segmentation import IGNORED
from vitrail.models.base import Model
from vitrail.models.eomt import find_segments, keep_queries, unpack_queries
from vitrail.nn.shape import Grid
from vitrail.reports.masks import Colour, overlay_mask
from vitrail.tasks.base import encode_jpeg

THRESHOLDS = ("score_threshold", "mask_threshold", "overlap_threshold")
MAX_SHADES = 5  # of the colour of a class, for its objects in an overlay


@dataclass(frozen=True)
class PanopticOptions:
    """Thresholds of `vitrail.models.eomt.find_segments`, with the defaults of transformers."""

    score_threshold: float = 0.8  # of the probability of a segment's class
    mask_threshold: float = 0.5  # of the probability of a pixel in its mask
    overlap_threshold: float = 0.8  # of the share of a mask that no other segment covers

    def __post_init__(self) -> None:
        for name in THRESHOLDS:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}= must be from 0 to 1, got {getattr(self, name):g}")


@dataclass(frozen=True)
class PanopticSegment:
    """One object, or the region of a stuff class. The pixels of it have its `id` in the map of the image."""

    id: int  # from 1
    index: int  # of the class
    label: str
    thing: bool
    score: float
    area: int  # pixels
    box: tuple[int, int, int, int]  # left, top, width and height


@dataclass(frozen=True)
class PanopticOutput:
    """The segments of an image, and a JPEG of them over it if that was asked for."""

    ids: np.ndarray  # int32 [H, W]: 0 where there is no segment
    segments: tuple[PanopticSegment, ...]
    overlay: bytes | None = None

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + len(self.overlay or b"")


@dataclass(frozen=True)
class PanopticReader:
    """The way from the packed queries of an image to its segments."""

    input_size: tuple[int, int]  # of the model
    mask_grid: Grid
    labels: tuple[str, ...]
    things: tuple[bool, ...]  # of the classes
    options: PanopticOptions = field(default_factory=PanopticOptions)

    def find(self, packed: np.ndarray, size: tuple[int, int], max_values: int | None = None) -> PanopticOutput:
        """Return the segments of packed queries, float32 [Q, N], at the size of the image.

        Raise ValueError if the queries to resize have more than `max_values` pixels.
        """
        predicted = unpack_queries(torch.from_numpy(packed), len(self.labels), self.mask_grid)
        queries = keep_queries(predicted, self.options.score_threshold)
        if max_values is not None and len(queries.scores) * size[0] * size[1] > max_values:
            limit = max_values / len(queries.scores) / 1e6
            text = f"{size[1]}×{size[0]} pixels, the limit for {len(queries.scores)} queries is {limit:.1f} million"
            raise ValueError(text)
        stuff = {index for index, thing in enumerate(self.things) if not thing}
        thresholds = self.options.mask_threshold, self.options.overlap_threshold
        ids, found = find_segments(queries, self.input_size, size, *thresholds, stuff)
        pixels = ids.numpy()
        segments = (
            PanopticSegment(number, label, self.labels[label], self.things[label], score, *place)
            for number, ((label, score), place) in enumerate(
                zip(found, measure_segments(pixels, len(found)), strict=True), start=1
            )
        )
        return PanopticOutput(pixels, tuple(segments))


def measure_segments(ids: np.ndarray, count: int) -> list[tuple[int, tuple[int, int, int, int]]]:
    """Return the pixels and the box of each segment 1 … count of a map [H, W]."""
    from scipy.ndimage import find_objects

    areas = np.bincount(ids.ravel(), minlength=count + 1)
    boxes = [
        (columns.start, rows.start, columns.stop - columns.start, rows.stop - rows.start)
        for rows, columns in find_objects(ids, count)
    ]
    return [(int(area), box) for area, box in zip(areas[1:], boxes, strict=True)]


@dataclass(frozen=True)
class PanopticInference:
    """The way from images to segments. Images are upright: their EXIF orientation is applied."""

    preprocessing: Preprocessing
    reader: PanopticReader
    overlay_colours: tuple[Colour, ...] | None = None  # of the classes; None: no overlays

    def prepare(self, image: Image.Image) -> MaskInput:
        """Return the pixels of an image at the model's size."""
        return prepare_whole(image, self.preprocessing, self.overlay_colours is not None)

    def count_bytes(self, item: MaskInput | PanopticOutput) -> int:
        """Return the bytes of an image and of the map that it will get, or of its segments."""
        if isinstance(item, PanopticOutput):
            return item.nbytes
        return item.nbytes + 3 * item.size[0] * item.size[1]  # a map has four bytes for each pixel

    def run(
        self, run: Callable[[np.ndarray], np.ndarray], inputs: Sequence[MaskInput]
    ) -> Iterator[PanopticOutput | None]:
        """Yield the segments of each image; None if the model's outputs are not finite."""
        for item, packed in zip(inputs, run(np.stack([item.pixels[0] for item in inputs])), strict=True):
            if not np.isfinite(packed).all():
                yield None
                continue
            output = self.reader.find(packed, item.size)
            if item.image is not None and self.overlay_colours is not None:
                drawn = overlay_segments(item.image, output, self.overlay_colours)
                output = PanopticOutput(output.ids, output.segments, encode_jpeg(Image.fromarray(drawn)))
            yield output


def overlay_segments(image: np.ndarray, output: PanopticOutput, colours: Sequence[Colour]) -> np.ndarray:
    """Return an image, uint8 [H, W, 3], with its segments in shades of the colours of their classes, and borders between them.

    At most 255 segments are drawn, the first ones.
    """
    counts: dict[int, int] = {}
    shades = []
    for segment in output.segments[:IGNORED]:
        counts[segment.index] = counts.get(segment.index, -1) + 1
        shades.append(shade_colour(colours[segment.index], counts[segment.index]))
    drawn = np.where((output.ids > 0) & (output.ids <= IGNORED), output.ids - 1, IGNORED).astype(np.uint8)
    return overlay_mask(image, drawn, shades)


def shade_colour(colour: Colour, number: int) -> Colour:
    """Return a colour itself for the first object of a class, lighter and darker ones for the next."""
    step = number % MAX_SHADES
    towards, part = (255 if step % 2 else 0), 0.25 * ((step + 1) // 2)
    red, green, blue = (round(value + part * (towards - value)) for value in colour)
    return red, green, blue


def build_reader(
    deployed: DeployedModel, options: PanopticOptions, stuff: str | Sequence[str] | None = None
) -> PanopticReader:
    """Return the reader of a model opened for queries; `stuff` are its classes without objects [those of the model file]."""
    model, contract = deployed.model, deployed.contract
    assert model is not None, "queries need a model"
    size, labels = contract.preprocessing.size, contract.labels or ()
    grid = model.require_queries("panoptic=").mask_grid(model.config.grid_of(size))
    return PanopticReader(size, grid, labels, choose_things(model, contract, stuff), options)


def choose_things(model: Model, contract: ModelContract, stuff: str | Sequence[str] | None) -> tuple[bool, ...]:
    """Return which classes have objects: all but those of `stuff`, or those of the model file, or all."""
    labels = contract.labels or ()
    return find_things(stuff, labels) if stuff is not None else read_things(model) or (True,) * len(labels)


def read_things(model: Model) -> tuple[bool, ...] | None:
    """Return which classes have objects, as the model file states it; None if it does not."""
    things = model.card.get("things")
    if not isinstance(things, list | tuple) or len(things) != model.config.classes:  # none, or of an earlier head
        return None
    if not all(type(thing) is bool for thing in things):
        raise ValueError(f"things in the model file must be true or false for each class, got {str(things)[:60]}")
    return tuple(things)
