"""Masked autoencoders (He et al. 2022): see a quarter of the patches, paint the rest.

B pictures, N patches, n of them visible, C·P² values of a patch.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from vitrail.models.decoder import Decoder, PixelDecoder, build_decoder, painted
from vitrail.models.vit import ViT, ViTConfig
from vitrail.nn.embed import Patches, choose, patchify
from vitrail.objectives.draw import Draw
from vitrail.objectives.hiding import check_encoder, check_share
from vitrail.objectives.reconstruction import Guess
from vitrail.objectives.task import Task

NOISE = 11  # stream of chance


@dataclass(frozen=True)
class MAE:
    """How much is hidden, what is to be painted, and the decoder that does it.

    With `norm_pix` a patch's values are wanted less their mean and divided by their deviation, which He et al. found better
    for what the encoder learns.
    """

    mask: float = 0.75
    norm_pix: bool = True
    decoder: Decoder = Decoder()
    keeps: ClassVar[str] = "model"

    def __post_init__(self) -> None:
        check_share("mask", self.mask, "that are hidden")

    def visible(self, patches: int) -> int:
        """How many of so many patches are seen."""
        return int(patches * (1 - self.mask))

    def check(self, config: ViTConfig, batch: int) -> None:
        """An error in one line for what cannot work."""
        config = check_encoder(config, "MAE")
        if not isinstance(config.embed, Patches):
            raise ValueError(
                f"MAE hides pixels, and a {type(config.embed).__name__} looks beyond its patch: set model.embed=Patches"
            )
        patches = config.shape.patches
        if not 0 < self.visible(patches) < patches:
            raise ValueError(
                f"mask {self.mask} of {patches} patches leaves {self.visible(patches)} to see: some must be seen and some "
                "hidden, use another mask or a smaller patch"
            )
        if self.norm_pix and config.channels * config.embed.stride**2 < 2:
            raise ValueError("a patch of one value has no contrast to normalise: set objective.norm_pix=false")
        self.decoder.sized(config)

    def build(
        self, model: ViT, steps: int, group: ProcessGroup | None = None, *, decoder: PixelDecoder | None = None
    ) -> "MaskedAutoencoder":
        """The model with a decoder, fresh unless one is given."""
        self.check(model.config, 1)
        return MaskedAutoencoder(model, decoder or build_decoder(model.config, self.decoder), self)


class MaskedAutoencoder(Task):
    """An encoder that sees few patches, and a decoder that has to tell the others."""

    model: ViT

    def __init__(self, model: ViT, decoder: PixelDecoder, spec: MAE) -> None:
        super().__init__()
        self.model = model  # type: ignore[assignment] (`check` refuses what is no ViT)
        self.decoder, self.spec = decoder, spec

    def forward(self, images: Tensor, targets: Tensor | None = None, draw: Draw | None = None) -> dict[str, Tensor]:
        """The `loss`: squared error over the values of hidden patches."""
        assert draw is not None
        visible, hidden = self.split(images, draw)
        told = painted(self.model, self.decoder, images, visible, hidden).float()
        wanted, _, _ = self.wanted(images, hidden)
        return {"loss": F.mse_loss(told, wanted)}

    def split(self, images: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
        """Which patches are seen, [B, n], and which are hidden, [B, N-n], in the order of their noise."""
        h, w = self.model.embed.grid(images)
        order = draw.uniform(h * w, NOISE).argsort(1)
        count = self.spec.visible(h * w)
        return order[:, :count], order[:, count:]

    def wanted(self, images: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What they should be, and the mean and deviation that were taken out: 0 and 1 without `norm_pix`."""
        pixels = choose(patchify(images, self.model.embed.stride), hidden).float()
        if not self.spec.norm_pix:
            return pixels, pixels.new_zeros(()), pixels.new_ones(())
        mean = pixels.mean(-1, keepdim=True)
        centred = pixels - mean
        variance = centred.square().sum(-1, keepdim=True) / (pixels.shape[-1] - 1)  # four times quicker than torch.var
        deviation = (variance + 1e-6).sqrt()
        return centred / deviation, mean, deviation

    @torch.no_grad()
    def signals(self, images: Tensor | tuple[Tensor, ...], draw: Draw) -> dict[str, Tensor]:
        """The loss."""
        assert isinstance(images, Tensor)
        return self(images, None, draw)

    @torch.no_grad()
    def guess(self, images: Tensor, draw: Draw) -> Guess:
        """Visible patches as they are, hidden ones as they are told; with `norm_pix`, in their true mean and contrast."""
        visible, hidden = self.split(images, draw)
        told = painted(self.model, self.decoder, images, visible, hidden).float()
        _, mean, deviation = self.wanted(images, hidden)
        patches = patchify(images, self.model.embed.stride).float()
        at = hidden.unsqueeze(-1).expand_as(told)
        return Guess(
            seen=patches,
            hidden=torch.zeros(patches.shape[:2], dtype=torch.bool, device=images.device).scatter(1, hidden, True),
            told=patches.scatter(1, at, told * deviation + mean),
        )
