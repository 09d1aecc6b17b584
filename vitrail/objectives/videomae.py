"""VideoMAE (Tong et al. 2022): a masked autoencoder of clips. The same places are hidden in every frame, so that no hidden
patch can be copied from a neighbouring frame, and so many that the task stays hard: nine in ten.

B clips, C channels, t×h×w tubelets, C·F·P² values of a tubelet.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vitrail.data.rng import StepRandom
from vitrail.models.base import TokenConfig, TokenModel, Unsupported
from vitrail.models.mae_decoder import Decoder, PixelDecoder, build_decoder
from vitrail.nn.embed import Tubelets, select_tokens
from vitrail.objectives.base import Reconstruction
from vitrail.objectives.mae import MAE, MASK_STREAM, MaskedAutoencoder
from vitrail.objectives.masking import check_encoder, to_uint8
from vitrail.objectives.teacher import ChannelValues
from vitrail.reports.run import MethodText


@dataclass(frozen=True)
class VideoMAE(MAE):
    """The fraction of hidden places, the targets of hidden tubelets, and the decoder.

    With `norm_pix` the targets are a tubelet's values of each channel minus their mean, divided by their standard deviation.
    """

    method: ClassVar[str | None] = "videomae"
    report: ClassVar[MethodText] = MethodText(
        "VideoMAE",
        "Lower is better. With normalised tubelets, a constant prediction has a loss of 1; it should be well below.",
        "Shown is the frame in the middle of each clip. Grey patches were masked in all frames and predicted from the others. "
        "Approximate shapes and colours are good, even if blurred; the same grey everywhere is bad.",
    )

    mask: float = 0.9
    decoder: Decoder = Decoder()

    def count_visible(self, patches: int) -> int:
        return patches - int(patches * self.mask)

    def check_patches(self, config: TokenConfig) -> None:
        config = check_encoder(config, "VideoMAE", clips=True)
        if not isinstance(config.embed, Tubelets):
            raise ValueError("VideoMAE trains models of clips: give frames, or use method='mae' for images")
        if config.block.is_divided:
            raise Unsupported(
                "VideoMAE hides patches, and divided attention needs every patch: set model.block=PreNorm"
            )
        places = math.prod(config.shape.grid[1:])
        if not 0 < self.count_visible(places) < places:
            visible = self.count_visible(places)
            raise ValueError(f"mask {self.mask} leaves {visible} of {places} places: change it or the patch size")

    def build(self, model: TokenModel, steps: int, *, decoder: PixelDecoder | None = None) -> "TubeAutoencoder":
        self.check(model.config, 1)
        return TubeAutoencoder(model, decoder or build_decoder(model.config, self.decoder), self)


class TubeAutoencoder(MaskedAutoencoder):
    """An encoder of the visible tubes of a clip and a decoder that predicts the pixels of hidden tubelets."""

    def split_patches(self, images: Tensor, draw: StepRandom) -> tuple[Tensor, Tensor]:
        """Return the visible tubelets, [B, t·n], and the hidden ones: the same n places in every step of a clip."""
        steps, *frame = self.model.embed.grid(images)
        places = math.prod(frame)
        order = draw.uniform(places, MASK_STREAM).argsort(1)
        tubes = order.unsqueeze(1) + torch.arange(0, steps * places, places, device=order.device).unsqueeze(1)
        count = self.spec.count_visible(places)
        return tubes[:, :, :count].flatten(1), tubes[:, :, count:].flatten(1)

    def target_pixels(self, images: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.spec.norm_pix:
            return super().target_pixels(images, hidden)
        pixels = select_tokens(self.model.embed.cut_patches(images), hidden).float()
        channels = pixels.unflatten(-1, (images.shape[1], -1))  # [B, N-n, C, F·P²]
        mean = channels.mean(-1, keepdim=True)
        deviation = channels.std(-1, keepdim=True) + 1e-6
        return tuple((part.expand_as(channels).flatten(2)) for part in ((channels - mean) / deviation, mean, deviation))  # type: ignore[return-value]

    def reconstruct(self, images: Tensor, draw: StepRandom, mean: ChannelValues, std: ChannelValues) -> Reconstruction:
        """Return the frame in the middle of each normalised clip, with its masked and predicted versions."""
        prediction, grid = self.predict_patches(images, draw), self.model.embed.grid(images)
        frame, embed = images.shape[2] // 2, self.model.config.embed
        assert isinstance(embed, Tubelets)
        scale, shift = (torch.tensor(v, device=images.device).view(-1, 1, 1) for v in (std, mean))

        def show(tubelets: Tensor) -> Tensor:
            clip = untubeletify(tubelets, grid, images.shape[1], embed.frames)
            return clip[:, :, frame]

        grey = show(prediction.hidden.unsqueeze(-1).expand(-1, -1, prediction.input.shape[2]))
        return Reconstruction(
            original=to_uint8(images[:, :, frame] * scale + shift),
            masked=to_uint8(show(prediction.input) * scale + shift).masked_fill(grey, 128),
            reconstructed=to_uint8(show(prediction.predicted) * scale + shift),
        )


def untubeletify(tubelets: Tensor, grid: tuple[int, ...], channels: int, frames: int) -> Tensor:
    """Return the clips [B, C, T, H, W] that were cut into tubelets [B, N, C·F·P²]."""
    patch = round((tubelets.shape[2] // (channels * frames)) ** 0.5)
    x = tubelets.unflatten(2, (channels, frames, patch, patch)).unflatten(1, grid)  # [B, t, h, w, C, F, P, P]
    return x.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6).flatten(4, 5).flatten(2, 3)
