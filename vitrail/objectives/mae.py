"""Masked autoencoders (He et al. 2022): encode a quarter of the patches, reconstruct the pixels of the others.

B images, N patches, n of them visible, C·P² values of a patch.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.checkpoints.load import inspect_checkpoint
from vitrail.checkpoints.mae import Autoencoder, has_decoder, read_mae, write_mae
from vitrail.data.rng import StepRandom
from vitrail.models.base import Model, ModelConfig, TokenConfig, TokenModel
from vitrail.models.mae_decoder import Decoder, PixelDecoder, build_decoder, count_patch_values, reconstruct_patches
from vitrail.nn.embed import Patches, select_tokens
from vitrail.objectives.base import Losses, LossInputs, LossModule, Objective, Parts, require_draw
from vitrail.objectives.masking import PatchLoss, PatchPrediction, check_encoder
from vitrail.reports.run import MethodText
from vitrail.utils.json import check_fields

MASK_STREAM = 11  # random stream
DECODER_FILE = "pretraining.safetensors"  # encoder and decoder, in a run directory


@dataclass(frozen=True)
class MAE(Objective):
    """The fraction of hidden patches, their targets, and the decoder.

    With `norm_pix` the targets are a patch's values minus their mean, divided by their standard deviation, which He et al. found
    better for the encoder.
    """

    method: ClassVar[str | None] = "mae"
    report: ClassVar[MethodText] = MethodText(
        "MAE",
        "Lower is better. With normalised patches, a constant prediction has a loss of 1; it should be well below.",
        "Grey patches were masked and predicted from the others. Approximate shapes and colours are good, even if blurred; "
        "the same grey everywhere is bad. The loss counts masked patches only.",
    )

    mask: float = 0.75
    norm_pix: bool = True
    decoder: Decoder = Decoder()

    def __post_init__(self) -> None:
        check_fields(self, "> 0 and < 1", "mask, the fraction of hidden patches")

    @property
    def kept_patches(self) -> float:
        return 1 - self.mask

    def count_visible(self, patches: int) -> int:
        """Return how many of so many patches are visible."""
        return int(patches * (1 - self.mask))

    def check(self, config: TokenConfig, batch: int) -> None:
        self.check_patches(config)
        patches = config.shape.patches
        visible = self.count_visible(patches)
        if not 0 < visible < patches:
            raise ValueError(f"mask {self.mask} leaves {visible} of {patches} patches: change it or the patch size")
        if self.norm_pix and count_patch_values(config) < 2:
            raise ValueError("a patch of one value has no standard deviation: set objective.norm_pix=false")
        self.decoder.fill_sizes(config)

    def check_patches(self, config: TokenConfig) -> None:
        """Raise ValueError for an encoder without patches to hide."""
        config = check_encoder(config, "MAE")
        if not isinstance(config.embed, Patches) or config.embed.overlap:
            name = type(config.embed).__name__
            raise ValueError(f"MAE needs patches that do not overlap, and those of {name} do: set model.embed=Patches")

    def build(self, model: TokenModel, steps: int, *, decoder: PixelDecoder | None = None) -> "MaskedAutoencoder":
        """Return the loss module, with a new decoder unless one is given."""
        self.check(model.config, 1)
        return MaskedAutoencoder(model, decoder or build_decoder(model.config, self.decoder), self)

    def build_loss(self, model: Model, inputs: LossInputs) -> LossModule:
        loss_module = self.build(model.require_tokens("MAE", clips=True), inputs.steps)
        if "decoder" in inputs.parts:
            loss_module.decoder.load_state_dict(inputs.parts["decoder"])
        return loss_module

    def read_parts(self, path: str, config: ModelConfig) -> tuple[Parts, str]:
        """Read the decoder of the initial checkpoint, where it has one of the right size."""
        config, new = config.require_tokens("MAE", clips=True), "the decoder starts new"
        with inspect_checkpoint(path) as checkpoint:
            present = has_decoder(checkpoint)
        if not present:
            return {}, f"{new}: {path} has none"
        try:
            source = read_mae(path)
        except ValueError as error:
            return {}, f"{new}: {error}"
        theirs, ours = source.decoder.spec, self.decoder.fill_sizes(config)
        if theirs != ours:
            fields = [(name, getattr(theirs, name)) for name in ("depth", "width", "heads", "mlp", "norm_eps")]
            differ = [(name, value) for name, value in fields if value != getattr(ours, name)]
            settings = f"settings={[f'objective.decoder.{name}={value}' for name, value in differ]}"
            return {}, f"{new}: that of {path} has another size, use {settings} to continue with it"
        if (source.model.config.input_size, source.model.config.channels) != (config.input_size, config.channels):
            return {}, f"{new}: that of {path} is for another image size or other channels"
        return {"decoder": source.decoder.state_dict()}, f"the decoder continues from {path}, like the encoder"

    @property
    def saved_parts(self) -> tuple[str, ...]:
        return ("decoder",)

    def write_parts(self, model: Model, parts: Parts, directory: Path) -> None:
        """Write encoder and decoder to pretraining.safetensors."""
        encoder = model.require_tokens("MAE", clips=True)
        decoder = build_decoder(encoder.config, self.decoder)
        decoder.load_state_dict(parts["decoder"])
        write_mae(Autoencoder(encoder, decoder, self.mask, self.norm_pix), directory / DECODER_FILE, "vitrail")


class MaskedAutoencoder(PatchLoss):
    """An encoder of visible patches and a decoder that predicts the pixels of hidden ones."""

    model: TokenModel

    def __init__(self, model: TokenModel, decoder: PixelDecoder, spec: MAE) -> None:
        super().__init__()
        self.model = model  # type: ignore[assignment] (`check` refuses models without tokens)
        self.decoder, self.spec = decoder, spec

    def forward(self, images: Tensor, targets: Tensor | None = None, draw: StepRandom | None = None) -> Losses:
        """Return the `loss`: the mean squared error of the values of hidden patches."""
        draw = require_draw(draw)
        visible, hidden = self.split_patches(images, draw)
        predicted = reconstruct_patches(self.model, self.decoder, images, visible, hidden).float()
        return {"loss": F.mse_loss(predicted, self.target_pixels(images, hidden)[0])}

    def split_patches(self, images: Tensor, draw: StepRandom) -> tuple[Tensor, Tensor]:
        """Return the visible patches, [B, n], and the hidden ones, [B, N-n], in the order of their noise."""
        patches = math.prod(self.model.embed.grid(images))
        order = draw.uniform(patches, MASK_STREAM).argsort(1)
        count = self.spec.count_visible(patches)
        return order[:, :count], order[:, count:]

    def target_pixels(self, images: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the targets, and the mean and deviation that were removed: 0 and 1 without `norm_pix`."""
        pixels = select_tokens(self.model.embed.cut_patches(images), hidden).float()
        if not self.spec.norm_pix:
            return pixels, pixels.new_zeros(()), pixels.new_ones(())
        mean = pixels.mean(-1, keepdim=True)
        centred = pixels - mean
        variance = centred.square().sum(-1, keepdim=True) / (pixels.shape[-1] - 1)  # four times faster than torch.var
        deviation = (variance + 1e-6).sqrt()
        return centred / deviation, mean, deviation

    @torch.no_grad()
    def predict_patches(self, images: Tensor, draw: StepRandom) -> PatchPrediction:
        """Return visible patches unchanged and hidden ones as predicted; with `norm_pix`, at their true mean and deviation."""
        visible, hidden = self.split_patches(images, draw)
        predicted = reconstruct_patches(self.model, self.decoder, images, visible, hidden).float()
        _, mean, deviation = self.target_pixels(images, hidden)
        patches = self.model.embed.cut_patches(images).float()
        at = hidden.unsqueeze(-1).expand_as(predicted)
        return PatchPrediction(
            input=patches,
            hidden=torch.zeros(patches.shape[:2], dtype=torch.bool, device=images.device).scatter(1, hidden, True),
            predicted=patches.scatter(1, at, predicted * deviation + mean),
        )
