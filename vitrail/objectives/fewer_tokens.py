"""Fewer tokens in training steps: slots of `Classification.tokens`, each a function of the step alone.

A slot shortens the sequence in the first part of a run; the last part, `full`, trains with all tokens, as the model is evaluated
and shipped. What a step computes depends on (seed, step), so a resumed run computes the same.

B images, N patches, P pixels along a patch, K classes.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.rng import StepRandom
from vitrail.models.base import Model, TokenModel
from vitrail.models.token_merging import merge_model
from vitrail.nn.embed import Patches, patchify
from vitrail.nn.linear import linear
from vitrail.utils.json import check_fields

KEEP_STREAM, PATCH_SIZE_STREAM = 4, 5  # random streams


@dataclass(frozen=True)
class FewerTokens:
    """Base of the slots. `full` is the fraction of the run, at its end, that trains with all tokens."""

    full: float = 0.2

    def __post_init__(self) -> None:
        check_fields(self, ">= 0 and < 1", "full, the fraction of the run with all tokens")

    def progress(self, step: int, steps: int) -> float:
        """Return the fraction of the part with fewer tokens that has passed at step `step`, from 0; 1 after it."""
        return min(1.0, step / max(1.0, (1 - self.full) * steps))

    def check(self, model: Model) -> None:
        """Raise ValueError for a model that this slot cannot shorten."""
        model.require_tokens(f"objective.tokens={type(self).__name__}")

    @property
    def kept(self) -> float:
        """Return the mean fraction of the tokens over the run, to estimate its time before it is measured."""
        return 1.0

    def compute_logits(self, model: TokenModel, images: Tensor, draw: StepRandom, steps: int) -> Tensor:
        """Return the logits of a training step, [B, K]."""
        raise NotImplementedError


@dataclass(frozen=True)
class PatchDropout(FewerTokens):
    """Drop random patches, a fraction that moves from `start` to `end` (PatchDropout, Liu et al. 2023)."""

    start: float = 0.5
    end: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, ">= 0 and < 1", "start", "end")

    def rate_at(self, step: int, steps: int) -> float:
        """Return the fraction of dropped patches at step `step`."""
        done = self.progress(step, steps)
        return 0.0 if done >= 1 else self.start + (self.end - self.start) * done

    @property
    def kept(self) -> float:
        return (1 - self.full) * (1 - (self.start + self.end) / 2) + self.full

    def compute_logits(self, model: TokenModel, images: Tensor, draw: StepRandom, steps: int) -> Tensor:
        rate = self.rate_at(draw.step, steps)
        return model(images, draw_patches(model, images, rate, draw)) if rate else model(images)


@dataclass(frozen=True)
class ProgressiveResolution(FewerTokens):
    """Resize images to `start` of their side at first, growing to the whole side (progressive resizing; EfficientNetV2)."""

    start: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "> 0 and < 1", "start, the first fraction of the image side")

    def size_at(self, step: int, steps: int, size: tuple[int, int], stride: int) -> tuple[int, int]:
        """Return the image size at step `step`: whole patches, at least one."""
        scale = self.start + (1 - self.start) * self.progress(step, steps)
        height, width = (max(stride, round(side * scale / stride) * stride) for side in size)
        return height, width

    def check(self, model: Model) -> None:
        super().check(model)
        size, stride = model.config.image_size, model.config.stride
        if self.size_at(0, 1, size, stride) == size:
            fewer = f"{self.start:g} of {'×'.join(map(str, size))} is no fewer patches of {stride}"
            raise ValueError(f"{fewer}: set a smaller objective.tokens.start")

    @property
    def kept(self) -> float:
        return (1 - self.full) * (1 + self.start + self.start**2) / 3 + self.full  # the mean of scale²

    def compute_logits(self, model: TokenModel, images: Tensor, draw: StepRandom, steps: int) -> Tensor:
        size = self.size_at(draw.step, steps, model.config.image_size, model.config.stride)
        if size != tuple(images.shape[-2:]):
            images = F.interpolate(images, size=size, mode="bilinear", antialias=True)
        return model(images)


@dataclass(frozen=True)
class TokenMerging(FewerTokens):
    """Merge `r` tokens in each layer after the first quarter (Bolya et al. 2023, who train with it too)."""

    r: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, ">= 1", "r, the tokens merged in a layer")

    def check(self, model: Model) -> None:
        super().check(model)
        merge_model(model.require_tokens("token merging"), self.r)  # raises for positions inside the layers

    def compute_logits(self, model: TokenModel, images: Tensor, draw: StepRandom, steps: int) -> Tensor:
        return model(images) if self.progress(draw.step, steps) >= 1 else merge_model(model, self.r)(images)


@dataclass(frozen=True)
class FlexiblePatches(FewerTokens):
    """Cut the images of a step into patches of one of `sizes` pixels (FlexiViT, Beyer et al. 2023).

    The matrix E is resized to the patch size by the pseudoinverse of bilinear resizing, so that a resized patch has the same
    embedding. The model learns all sizes; it is evaluated at its own.
    """

    sizes: tuple[int, ...] = (16, 32)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"sizes, the patch sizes, must be a list of numbers >= 1, got {list(self.sizes)}")

    def check(self, model: Model) -> None:
        super().check(model)
        config = model.config.require_tokens("flexible patches")
        embed = config.embed
        if not isinstance(embed, Patches) or embed.normed or embed.overlap:
            got = (
                f"{type(embed).__name__} with norms or overlap" if isinstance(embed, Patches) else type(embed).__name__
            )
            raise ValueError(f"FlexiblePatches needs linear patches, got {got}: set model.embed=Patches")
        for size in self.sizes:
            if any(side % size for side in config.image_size):
                sides = "×".join(map(str, config.image_size))
                raise ValueError(f"patches of {size} do not divide an image of {sides}: set objective.tokens.sizes")

    def size_at(self, draw: StepRandom, steps: int, own: int) -> int:
        """Return the patch size of a step, the model's own in the last part."""
        return (
            own if self.progress(draw.step, steps) >= 1 else self.sizes[draw.choose(len(self.sizes), PATCH_SIZE_STREAM)]
        )

    def compute_logits(self, model: TokenModel, images: Tensor, draw: StepRandom, steps: int) -> Tensor:
        own = model.config.stride
        patch = self.size_at(draw, steps, own)
        if patch == own:
            return model(images)
        projection = model.embed.get_submodule("projection")
        weight, bias = projection.weight, projection.bias
        assert isinstance(weight, Tensor)
        x = linear(patchify(images, patch), resize_patches(weight, own, patch), bias)  # type: ignore[arg-type]
        grid = tuple(side // patch for side in images.shape[-2:])
        z = model.encode(model.add_positions(x, grid), grid, n_outputs=model.pool.n_inputs)
        return model.head(model.pool(z))


TokenSlot = PatchDropout | ProgressiveResolution | TokenMerging | FlexiblePatches


def draw_patches(model: TokenModel, images: Tensor, rate: float, draw: StepRandom) -> Tensor:
    """Return the patches of each image that remain if a fraction is dropped, in order, [B, n]."""
    patches = math.prod(model.embed.grid(images))
    count = max(1, round(patches * (1 - rate)))
    return draw.uniform(patches, KEEP_STREAM).argsort(1)[:, :count].sort(1).values


@lru_cache(maxsize=32)
def patch_resize_matrix(old: int, new: int, device: torch.device) -> Tensor:
    """Return the matrix [new², old²] that resizes weights of patches: the pseudoinverse of Bᵀ, where B resizes the pixels."""
    with torch.inference_mode(False), torch.no_grad():
        basis = torch.eye(old * old).view(old * old, 1, old, old)
        pixels = F.interpolate(basis, size=(new, new), mode="bilinear", antialias=True).flatten(1)  # Bᵀ, [old², new²]
        return torch.linalg.pinv(pixels).to(device)


def resize_patches(weight: Tensor, old: int, new: int) -> Tensor:
    """Return E for patches of another size, [D, C·new²], from [D, C·old²]."""
    matrix = patch_resize_matrix(old, new, weight.device).to(weight.dtype)
    return (weight.unflatten(1, (-1, old * old)) @ matrix.t()).flatten(1)
