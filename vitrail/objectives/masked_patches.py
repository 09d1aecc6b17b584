"""Masked patch prediction, the paper's own self-supervision (appendix B.1.2).

Half of the patch embeddings are corrupted, and the output tokens at their positions predict the colours of the patches.

B images of C channels, N patches, n of them corrupted, S cells of a patch, K colours, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.rng import StepRandom
from vitrail.models.base import Model, TokenConfig, TokenModel
from vitrail.models.hybrid import Hybrid
from vitrail.nn.embed import Patches, patchify, select_tokens
from vitrail.nn.linear import LinearLayer
from vitrail.objectives.base import Losses, LossInputs, LossModule, Objective, require_draw
from vitrail.objectives.masking import PatchLoss, PatchPrediction, check_encoder
from vitrail.reports.run import MethodText
from vitrail.utils.devices import constant_tensor
from vitrail.utils.json import check_fields

PATCH_STREAM, CORRUPTION_STREAM, SWAP_STREAM = 8, 9, 10  # random streams
MASK_FRACTION, SWAP_FRACTION = 0.8, 0.1  # of the corrupted patches; the others are unchanged, as in BERT
LEVELS = 8  # three bits a channel
TARGETS = {"colour": 1, "down": 4, "pixels": 0}  # cells along a patch whose colours are predicted


@dataclass(frozen=True)
class MaskedPatches(Objective):
    """The fraction of corrupted patches, and their targets.

    `colour` is the mean colour of a patch in 3 bits a channel: one of 512 classes, or of 8 for grey images. `down` is the same
    for 4×4 cells of the patch. `pixels` is the whole patch, with squared error. The paper reports the first, which was best
    with few labels; it found squared error slightly worse, and 15 % corrupted too.
    """

    method: ClassVar[str | None] = "mpp"
    report: ClassVar[MethodText] = MethodText(
        "masked patch prediction",
        "Lower is better. If it levels off at once, the model learned only how frequent each colour is.",
        "Some patches were masked or swapped. The prediction is the mean colour of each patch: it should be close to that of "
        "the image, also in masked patches.",
    )

    target: Literal["colour", "down", "pixels"] = "colour"
    corrupt: float = 0.5

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise ValueError(f"unknown target {self.target!r}: use {', '.join(TARGETS)}")
        check_fields(self, "> 0 and < 1", "corrupt, the fraction of corrupted patches")

    def count_corrupted(self, patches: int) -> int:
        """Return how many of so many patches are corrupted: the same for every image, so parts of a batch weigh the same."""
        return round(patches * self.corrupt)

    def check(self, config: TokenConfig, batch: int) -> None:
        config = check_encoder(config, "masked patch prediction")
        stride, patches = config.embed.stride, config.shape.patches
        if isinstance(config.embed, Hybrid):
            raise ValueError("ResNet features see beyond their patch, so masking hides little: set model.embed=Patches")
        if isinstance(config.embed, Patches) and config.embed.overlap:
            raise ValueError("masked patch prediction needs patches that do not overlap: set model.embed.overlap=0")
        if self.target == "down" and stride < 4:
            raise ValueError(f"patches of {stride}×{stride} pixels have no 4×4 cells: set objective.target=colour")
        if self.target != "pixels" and config.channels not in (1, 3):
            raise ValueError(f"colours need 1 or 3 channels, got {config.channels}: set objective.target=pixels")
        corrupted = self.count_corrupted(patches)
        if not 0 < corrupted < patches:
            what = f"{corrupted} of {patches} patches"
            raise ValueError(f"corrupt {self.corrupt} corrupts {what}: change it or the patch size")

    def build(
        self, model: TokenModel, steps: int, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> "MaskedPatchPredictor":
        """Return the loss module. `mean` and `std` normalise images, 0.5 by default: colours are those before normalisation."""
        self.check(model.config, 1)
        half = (0.5,) * model.config.channels
        return MaskedPatchPredictor(model, self, tuple(mean or half), tuple(std or half))

    def build_loss(self, model: Model, inputs: LossInputs) -> LossModule:
        encoder, pipeline = model.require_tokens("masked patch prediction"), inputs.preprocessing
        return self.build(encoder, inputs.steps, mean=pipeline.mean, std=pipeline.std)


class Corruption(NamedTuple):
    """The corrupted patches of each image."""

    patches: Tensor  # [B, n], including those that are left unchanged
    masked: Tensor  # [B, N], where the mask token is
    source: Tensor  # [B, N], the patch whose embedding is used: mostly its own


class MaskedPatchPredictor(PatchLoss):
    """A model, a mask token, and a linear layer that predicts the patches."""

    model: TokenModel

    def __init__(self, model: TokenModel, spec: MaskedPatches, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.model = model  # type: ignore[assignment] (`check` refuses models without tokens)
        self.spec, self.mean, self.std = spec, mean, std
        config, self.side = model.config, TARGETS[spec.target]
        assert len(mean) == len(std) == config.channels, (mean, std, config.channels)
        self.colours = LEVELS**config.channels
        outputs = self.side**2 * self.colours if self.side else config.channels * config.embed.stride**2
        self.mask_token = nn.Parameter(torch.empty(1, 1, config.size.width))
        self.head = LinearLayer(config.size.width, outputs)
        nn.init.normal_(self.mask_token, std=0.02)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, targets: Tensor | None = None, draw: StepRandom | None = None) -> Losses:
        """Return the `loss` over corrupted patches: cross-entropy of their colours, or squared error of their pixels."""
        draw = require_draw(draw)
        corruption = self.draw_corruption(images, draw)
        outputs = self.predict_corrupted(images, corruption).float()
        wanted = select_tokens(self.patch_targets(images), corruption.patches)
        if not self.side:
            return {"loss": F.mse_loss(outputs, wanted)}
        return {"loss": F.cross_entropy(outputs.reshape(-1, self.colours), wanted.flatten())}

    def draw_corruption(self, images: Tensor, draw: StepRandom) -> Corruption:
        """Draw the corrupted patches, and whether each becomes the mask token, another patch of the image, or stays."""
        h, w = self.model.embed.grid(images)
        count = h * w
        patches = draw.uniform(count, PATCH_STREAM).argsort(1)[:, : self.spec.count_corrupted(count)]
        kind, offset = draw.uniform(count, CORRUPTION_STREAM), draw.uniform(count, SWAP_STREAM)
        chosen = torch.zeros_like(kind, dtype=torch.bool).scatter(1, patches, True)
        index = torch.arange(count, device=images.device).expand_as(kind)
        other = (index + 1 + (offset * (count - 1)).long().clamp(max=count - 2)) % count  # any patch but itself
        swapped = chosen & (kind >= MASK_FRACTION) & (kind < MASK_FRACTION + SWAP_FRACTION)
        return Corruption(patches, chosen & (kind < MASK_FRACTION), torch.where(swapped, other, index))

    def predict_corrupted(self, images: Tensor, corruption: Corruption) -> Tensor:
        """Return the outputs for each corrupted patch, [B, n, S·K]."""
        model = self.model
        grid = model.embed.grid(images)
        x = select_tokens(model.embed(images), corruption.source)  # x_p E, with swaps
        x = torch.where(corruption.masked.unsqueeze(-1), self.mask_token.to(x.dtype), x)
        z = model.encode(model.add_positions(x, grid), grid)[:, model.config.prefix.count :]
        return self.head(model.pool.norm(select_tokens(z, corruption.patches)))

    def patch_targets(self, images: Tensor) -> Tensor:
        """Return the colour class of each cell of every patch, [B, N, S], or the values of the patch, [B, N, C·P²]."""
        if not self.side:
            return patchify(images, self.model.embed.stride).float()
        (h, w), channels = self.model.embed.grid(images), images.shape[1]
        cells = F.adaptive_avg_pool2d(images.float(), (h * self.side, w * self.side))
        cells = patchify(cells, self.side).unflatten(-1, (channels, -1))  # [B, N, C, S]
        scale, shift = (constant_tensor(tuple(v), cells.device).unsqueeze(-1) for v in (self.std, self.mean))
        levels = ((cells * scale + shift) * LEVELS).long().clamp(0, LEVELS - 1)
        digits = LEVELS ** torch.arange(channels - 1, -1, -1, device=images.device)
        return (levels * digits.unsqueeze(-1)).sum(2)

    @torch.no_grad()
    def predict_patches(self, images: Tensor, draw: StepRandom) -> PatchPrediction:
        """Return swapped embeddings as the patches they come from, and corrupted patches as predicted: the most probable colour
        of each cell, or the pixels."""
        corruption = self.draw_corruption(images, draw)
        patches = patchify(images, self.model.embed.stride).float()
        outputs = self.predict_corrupted(images, corruption).float()
        pixels = self.colours_to_pixels(outputs) if self.side else outputs
        at = corruption.patches.unsqueeze(-1).expand_as(pixels)
        source = select_tokens(patches, corruption.source)
        return PatchPrediction(source, corruption.masked, patches.scatter(1, at, pixels))

    def colours_to_pixels(self, outputs: Tensor) -> Tensor:
        """Return patches in their most probable colours, [B, n, C·P²], from outputs [B, n, S·K]."""
        channels, stride = self.model.config.channels, self.model.config.embed.stride
        number = outputs.unflatten(-1, (-1, self.colours)).argmax(-1).unsqueeze(2)  # [B, n, 1, S]
        digits = LEVELS ** torch.arange(channels - 1, -1, -1, device=outputs.device).unsqueeze(-1)
        middle = ((number // digits) % LEVELS + 0.5) / LEVELS  # [B, n, C, S], between 0 and 1
        scale, shift = (middle.new_tensor(v).unsqueeze(-1) for v in (self.std, self.mean))
        cells = ((middle - shift) / scale).flatten(0, 1).unflatten(-1, (self.side, self.side))
        return F.interpolate(cells, size=(stride, stride)).reshape(*outputs.shape[:2], -1)
