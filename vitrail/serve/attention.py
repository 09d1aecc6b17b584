"""What a model looks at in one picture, as the page wants it and as one map.

L layers, H heads, h×w patches, n cells of a coarser grid.
"""

import math
import threading
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from vitrail.analysis.between import CELLS, coarse
from vitrail.analysis.look import look
from vitrail.analysis.seen import Seen
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.vit import ViT
from vitrail.serve.answers import answers
from vitrail.serve.decoding import Decoder
from vitrail.serve.limits import Refused
from vitrail.serve.models import Served
from vitrail.serve.multipart import Part
from vitrail.views.packed import image, quantised, text
from vitrail.views.shown import as_rgb

BYTES = 6_000_000  # that attention between patches may take in one answer
FEWEST = 16  # cells, however many layers and heads there are
TOP = 5


@dataclass(frozen=True)
class Map:
    """One map: of a layer from 1 or the last, of a head from 0 or the mean of all, of a patch or of what the model reads from."""

    layer: int | None
    head: int | Literal["mean"]
    patch: tuple[int, int] | None = None


class Looking:
    """Looks, one picture at a time."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.lock = threading.Lock()

    def __call__(self, served: Served, part: Part, wanted: Map | None) -> dict[str, Any]:
        """In a thread: what is to be said of one picture."""
        preprocessing = served.contract.preprocessing
        with self.lock:
            vit = vit_of(served)
            if wanted is not None:
                check(wanted, vit)
            found = self.decoder(part, preprocessing)
            if wanted is not None:
                return {"model": served.name, "map": one(vit, found, preprocessing, wanted).tolist()}
            return {"model": served.name, **everything(served, vit, found, preprocessing)}


def vit_of(served: Served) -> ViT:
    """The model itself, which is there also where another runtime answers for it."""
    if served.vit is None:
        raise Refused(
            409,
            f"{served.name!r} has no attention to look at: serve a Vision Transformer's checkpoint, not a file exported from it",
        )
    return served.vit


def check(wanted: Map, vit: ViT) -> None:
    """Refuses what the model does not have."""
    size, (h, w) = vit.config.size, vit.config.shape.grid
    if wanted.layer is not None and not 1 <= wanted.layer <= size.depth:
        raise Refused(404, f"layer {wanted.layer}: this model has 1 to {size.depth}")
    if wanted.head != "mean" and not 0 <= wanted.head < size.heads:
        raise Refused(404, f"head {wanted.head}: this model has 0 to {size.heads - 1}, or mean")
    if wanted.patch is not None and not (0 <= wanted.patch[0] < h and 0 <= wanted.patch[1] < w):
        raise Refused(404, f"patch {wanted.patch[0]},{wanted.patch[1]}: rows are 0 to {h - 1}, columns 0 to {w - 1}")


def normalised(found: np.ndarray, preprocessing: Preprocessing, vit: ViT) -> torch.Tensor:
    device = next(vit.parameters()).device
    return preprocessing.normalise(torch.from_numpy(found)[None].to(device))


def one(vit: ViT, found: np.ndarray, preprocessing: Preprocessing, wanted: Map) -> np.ndarray:
    """One map, [h, w]: shares of attention, which sum to 1 with what goes to the tokens before the patches."""
    seen = look(vit, normalised(found, preprocessing, vit), at=wanted.patch, views=("attention",))
    maps = seen.attention if wanted.patch is None else seen.attention_at
    assert maps is not None
    layer = maps[-1 if wanted.layer is None else wanted.layer - 1]
    return layer.mean(0) if wanted.head == "mean" else layer[wanted.head]


def everything(served: Served, vit: ViT, found: np.ndarray, preprocessing: Preprocessing) -> dict[str, Any]:
    """All that the page draws of one picture."""
    layers, heads = vit.config.size.depth, vit.config.size.heads
    cells = max(FEWEST, min(CELLS, math.isqrt(BYTES // (layers * heads))))
    views = ("attention", "between", "rollout", *(("relevance",) if vit.config.classes else ()))
    seen = look(vit, normalised(found, preprocessing, vit), cells=cells, views=views)
    labels, several = served.contract.labels, served.contract.several
    said = [] if seen.logits is None else answers(seen.logits, labels, several, TOP)
    return {
        "grid": list(seen.grid),
        "size": list(preprocessing.size),
        "picture": image(as_rgb(found)),
        "answers": said,
        "layers": layers,
        "heads": heads,
        "reader": seen.reader,
        **maps(seen, cells),
        "target": None if seen.target is None else (labels[seen.target] if labels else str(seen.target)),
    }


def maps(seen: Seen, cells: int) -> dict[str, Any]:
    """The maps as bytes in base64, each with the largest value that its bytes are shares of."""
    assert seen.attention is not None
    assert seen.between is not None
    assert seen.between_grid is not None
    attention, scale = quantised(seen.attention.reshape(*seen.attention.shape[:2], -1))
    between, between_scale = quantised(seen.between)
    made: dict[str, Any] = {
        "attention": text(attention),
        "attention_scale": rounded(scale),
        "between": text(between),
        "between_scale": text(between_scale),  # float32, [L, H, n]: a row each
        "between_grid": list(seen.between_grid),
        "between_side": coarse(seen.grid, cells)[1],  # patches along the side of a cell
    }
    for name in ("rollout", "relevance"):
        values = getattr(seen, name)
        if values is not None:
            codes, largest = quantised(values.reshape(1, -1).clip(0))
            made[name], made[f"{name}_scale"] = text(codes), float(largest[0])
    return made


def rounded(scale: np.ndarray) -> list[list[float]]:
    return [[float(f"{value:.6g}") for value in layer] for layer in scale]
