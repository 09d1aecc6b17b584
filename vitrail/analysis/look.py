"""One picture's way through a model, with everything there is to see on it.

The picture goes forward once, as always, and the tokens of each layer are kept. Then the layers are gone through from the
last to the first, each computed again, and of its attention a few rows are in memory at a time. So the price of looking is
that of the tokens, not of the attention.

L layers, H heads, h×w patches, N of them, T tokens, D width, K classes.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.analysis.between import CELLS, Between, coarse
from vitrail.analysis.distance import Distance
from vitrail.analysis.heads import Alike, Entropy
from vitrail.analysis.inside import evaluating, vit_in, whole_vit_in
from vitrail.analysis.positions import added
from vitrail.analysis.relevance import Relevance
from vitrail.analysis.rollout import Rollout
from vitrail.analysis.seen import Seen
from vitrail.analysis.spectrum import frequencies, spectrum
from vitrail.analysis.tokens import colours, norms, similar
from vitrail.analysis.walk import Layer, back
from vitrail.analysis.watch import uncompiled
from vitrail.models.vit import ViT
from vitrail.nn.shape import Grid

OF_ATTENTION = ("attention", "between", "distance", "entropy", "alike", "rollout", "relevance")
OF_TOKENS = ("colours", "similar", "norms", "spectrum")
VIEWS = (*OF_ATTENTION, *OF_TOKENS, "embedded", "positions")


def look(
    model: nn.Module,
    image: Tensor,
    *,
    at: tuple[int, int] | None = None,
    target: int | None = None,
    cells: int = CELLS,
    views: Iterable[str] | None = None,
    tell: Callable[[str, int, int], None] | None = None,
) -> Seen:
    """What a model sees in one normalised picture, [1, C, H, W].

    `at` is the row and column of a patch whose attention and likeness are wanted as well (`patch_at` finds it from a pixel).
    `target` is the class that relevance explains: the predicted one unless given; a model without classes has no relevance.
    `between` is kept on a grid of at most `cells`: attention is summed over the keys of a cell and averaged over its queries.
    `views` are names of VIEWS, all unless given. `tell` hears how many layers are done, and of how many.

    The model is looked at in evaluation mode, uncompiled, and left as it was. Models whose positions bias attention hold that
    bias for one layer, H·T·T numbers, as they do whenever they run.
    """
    vit = whole_vit_in(model)
    wanted = known(VIEWS if views is None else views)
    grid = vit.embed.grid(image)
    if len(image) != 1:
        raise ValueError(f"a batch of {len(image)} pictures: look at one at a time, [1, C, H, W]")
    if not image.isfinite().all():
        raise ValueError("the picture holds values that are infinite or no numbers: give finite ones")
    if at is not None and not (0 <= at[0] < grid[0] and 0 <= at[1] < grid[1]):
        raise ValueError(f"patch {at[0]},{at[1]} of a grid of {grid[0]}×{grid[1]}: rows and columns count from 0")
    classes = vit.config.classes
    if target is not None and not 0 <= target < (classes or 0):
        few = f"0 to {classes - 1}" if classes else "none: this model ends in features and has no classes"
        raise ValueError(f"class {target} cannot be explained: classes are {few}")
    with evaluating(model), uncompiled(), torch.inference_mode(False), torch.no_grad():
        return Looking(vit, image, grid, at, target, cells, wanted, tell).seen()


def known(views: Iterable[str]) -> frozenset[str]:
    wanted = frozenset((views,) if isinstance(views, str) else views)
    if strange := sorted(wanted - set(VIEWS)):
        raise ValueError(f"unknown view {strange[0]!r}: use {', '.join(VIEWS)}")
    return wanted


def patch_at(model: nn.Module, x: int, y: int, size: tuple[int, int] | None = None) -> tuple[int, int]:
    """Row and column of the patch that covers a pixel of the picture as the model sees it: x to the right, y down.

    `size` is the picture's height and width, the model's own unless given.
    """
    vit = vit_in(model)
    height, width = vit.config.image_size if size is None else size
    if not (0 <= x < width and 0 <= y < height):
        raise ValueError(
            f"pixel {x},{y} is outside of a picture of {width}×{height} pixels: use 0,0 to {width - 1},{height - 1}"
        )
    return y // vit.embed.stride, x // vit.embed.stride


def array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()


class Looking:
    """The state of one look: what is wanted, and what was found so far, by the names of Seen's fields."""

    def __init__(
        self,
        vit: ViT,
        image: Tensor,
        grid: Grid,
        at: tuple[int, int] | None,
        target: int | None,
        cells: int,
        wanted: frozenset[str],
        tell: Callable[[str, int, int], None] | None,
    ) -> None:
        self.vit, self.image, self.grid, self.at, self.target = vit, image, grid, at, target
        self.cells, self.wanted, self.tell = cells, wanted, tell
        self.prefix, self.patches = vit.config.prefix.count, grid[0] * grid[1]
        self.index = None if at is None else at[0] * grid[1] + at[1]  # of the chosen patch
        self.reads_class = vit.config.pool.needs > 0
        self.found: dict[str, Any] = {}

    def seen(self) -> Seen:
        vit, depth = self.vit, len(self.vit.blocks)
        self.stem()
        states = [vit.tokens(self.image)]
        states += vit.states(states[0], self.grid)  # z_0 … z_L
        for number, z in enumerate(states):
            if not z.isfinite().all():
                where = f"after layer {number}" if number else "before the first layer"
                raise ValueError(f"this model's tokens are infinite or no numbers {where}: nothing can be seen in them")
        self.tokens(states)
        gradient = self.answer(states[-1])
        if self.wanted.intersection(OF_ATTENTION):
            layers: list[dict[str, np.ndarray]] = []
            rollout, relevance = Rollout(self.reader()), Relevance(self.reader())
            for layer in back(vit, states, self.grid, gradient):
                layers.insert(0, self.layer(layer, rollout, relevance))
                states.pop()  # what lies above is done with
                if self.tell is not None:
                    self.tell("looking at layers", len(layers), depth)
            self.found |= {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}
            if "rollout" in self.wanted:
                self.found["rollout"] = self.map(rollout.row[self.prefix :])
            if gradient is not None:
                self.found["relevance"] = self.map(relevance.row[self.prefix :])
        return Seen(
            self.grid,
            vit.embed.stride,
            self.prefix,
            "class token" if self.reads_class else "mean of patches",
            at=self.at,
            between_grid=coarse(self.grid, self.cells)[0] if "between" in self.found else None,
            frequencies=array(frequencies(self.grid)) if "spectrum" in self.found else None,
            **self.found,
        )

    def map(self, patches: Tensor) -> np.ndarray:
        """Values of patches in the grid's shape: [..., N] to [..., h, w]."""
        return array(patches.unflatten(-1, self.grid))

    def stem(self) -> None:
        """The way in: patches after their projection, and what is added to them."""
        if "embedded" in self.wanted:
            self.found["embedded"] = array(self.vit.embed(self.image)[0].unflatten(0, self.grid))
        table = added(self.vit, self.grid) if "positions" in self.wanted else None
        if table is not None:
            self.found["positions"] = array(table.unflatten(0, self.grid))

    def tokens(self, states: list[Tensor]) -> None:
        """What each layer's tokens look like, one layer after the other."""
        rows: dict[str, list[np.ndarray]] = {}
        for z in states:
            patches = z[0, self.prefix :]
            if "colours" in self.wanted:
                rows.setdefault("colours", []).append(array(colours(patches).unflatten(0, self.grid)))
            if "similar" in self.wanted and self.index is not None:
                rows.setdefault("similar", []).append(self.map(similar(patches, self.index)))
            if "norms" in self.wanted:
                rows.setdefault("norms", []).append(self.map(norms(patches)))
                rows.setdefault("prefix_norms", []).append(array(norms(z[0, : self.prefix])))
            if "spectrum" in self.wanted:
                rows.setdefault("spectrum", []).append(array(spectrum(patches, self.grid)))
        self.found |= {name: np.stack(layers) for name, layers in rows.items()}

    def answer(self, z: Tensor) -> Tensor | None:
        """The logits; and where relevance is wanted, the gradient of the target's by z_L."""
        if self.vit.config.classes is None:
            return None
        explain = "relevance" in self.wanted
        with torch.set_grad_enabled(explain):
            z = z.detach().requires_grad_(explain)
            logits = self.vit.head(self.vit.pool(z))[0]  # [K]
            self.found["logits"] = array(logits)
            if not explain:
                return None
            target = int(logits.argmax()) if self.target is None else self.target
            self.found["target"] = target
            return torch.autograd.grad(logits[target], z)[0]

    def reader(self) -> Tensor:
        """Whose row is followed: the class token's, or the mean of the patches', [T]."""
        row = torch.zeros(self.prefix + self.patches, device=self.image.device)
        if self.reads_class:
            row[0] = 1
        else:
            row[self.prefix :] = 1 / self.patches
        return row

    def layer(self, layer: Layer, rollout: Rollout, relevance: Relevance) -> dict[str, np.ndarray]:
        """One layer's views, and rollout and relevance carried through it."""
        heads, device = layer.heads.q.shape[0], layer.heads.q.device
        watchers: dict[str, Distance | Entropy | Alike | Between] = {}
        if "distance" in self.wanted:
            watchers["distance"] = Distance(heads, self.grid, self.vit.embed.stride, self.prefix, device)
        if "entropy" in self.wanted:
            watchers["entropy"] = Entropy(heads, device)
        if "alike" in self.wanted:
            watchers["alike"] = Alike(heads, self.prefix + self.patches, device)
        if "between" in self.wanted:
            watchers["between"] = Between(heads, self.grid, self.prefix, self.cells, device)
        reader, read = self.reader(), torch.zeros(heads, self.prefix + self.patches, device=device)
        for rows, attention, gradient in layer.rows():
            for watcher in watchers.values():
                watcher.see(rows, attention)
            read += torch.einsum("r,hrt->ht", reader[rows], attention)
            rollout.see(rows, attention)
            if gradient is not None:
                relevance.see(rows, attention, gradient)
        rollout.descend()
        relevance.descend()
        found = {name: array(watcher.result()) for name, watcher in watchers.items()}
        if "between" in found:
            found["between"] = found["between"].astype(np.float16)
        if "attention" in self.wanted:
            found["attention"] = self.map(read[:, self.prefix :])
            if self.index is not None:
                chosen = layer.heads.attention([self.prefix + self.index])[:, 0]
                found["attention_at"] = self.map(chosen[:, self.prefix :])
        return found
