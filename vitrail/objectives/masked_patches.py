"""Masked patch prediction, the paper's own self-supervision (appendix B.1.2): half of the patch embeddings are corrupted, and
the tokens that come out in their places tell what colour the patches had.

B pictures of C channels, N patches, n of them corrupted, S cells of a patch, K colours, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from vitrail.models.hybrid import Hybrid
from vitrail.models.vit import ViT, ViTConfig
from vitrail.nn.embed import choose, patchify
from vitrail.objectives.draw import Draw
from vitrail.objectives.hiding import check_encoder, check_share
from vitrail.objectives.reconstruction import Guess
from vitrail.objectives.task import Task

WHICH, HOW, OTHER = 8, 9, 10  # streams of chance
MASKED, EXCHANGED = 0.8, 0.1  # of the corrupted patches; the others are kept, as in BERT
LEVELS = 8  # three bits a channel
TARGETS = {"colour": 1, "down": 4, "pixels": 0}  # cells along a patch that are told, each one colour


@dataclass(frozen=True)
class MaskedPatches:
    """How much is corrupted, and what is to be told of it.

    `colour` is the mean colour of a patch in 3 bits a channel: one of 512 classes, or of 8 where pictures are grey. `down` asks
    the same of 4×4 cells of the patch at once. `pixels` is the whole patch, by squared error. The paper reports the first, which
    was best with few labels; it found squared error slightly worse, and 15 % corrupted too.
    """

    target: Literal["colour", "down", "pixels"] = "colour"
    corrupt: float = 0.5
    keeps: ClassVar[str] = "model"

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise ValueError(f"unknown target {self.target!r}: use {', '.join(TARGETS)}")
        check_share("corrupt", self.corrupt, "that are corrupted")

    def corrupted(self, patches: int) -> int:
        """How many of so many patches: the same for every picture, so that parts of a batch weigh the same."""
        return round(patches * self.corrupt)

    def check(self, config: ViTConfig, batch: int) -> None:
        """An error in one line for what cannot work."""
        config = check_encoder(config, "masked patch prediction")
        if isinstance(config.embed, Hybrid):
            raise ValueError(
                "a ResNet's features see far beyond their patch, so hiding them hides little: set model.embed=Patches or ConvStem"
            )
        if self.target == "down" and config.embed.stride < 4:
            raise ValueError(
                f"patches of {config.embed.stride}×{config.embed.stride} pixels have no 4×4 cells: set objective.target=colour"
            )
        if self.target != "pixels" and config.channels not in (1, 3):
            raise ValueError(
                f"colours in 3 bits a channel are for 1 or 3 channels, not {config.channels}: set objective.target=pixels"
            )
        patches = config.shape.patches
        if not 0 < self.corrupted(patches) < patches:
            raise ValueError(
                f"corrupt {self.corrupt} of {patches} patches is {self.corrupted(patches)}: some must be corrupted and some "
                "not, use another share or a smaller patch"
            )

    def build(
        self,
        model: ViT,
        steps: int,
        group: ProcessGroup | None = None,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> "MaskedPatchPredictor":
        """The model with what predicts. `mean` and `std` are those that pictures are normalised with, 0.5 unless given:
        colours are those of the pictures before that."""
        self.check(model.config, 1)
        half = (0.5,) * model.config.channels
        return MaskedPatchPredictor(model, self, tuple(mean or half), tuple(std or half))


class Corruption(NamedTuple):
    """What is done to the patches of each picture."""

    patches: Tensor  # [B, n], the corrupted ones, those that were kept as they are among them
    masked: Tensor  # [B, N], where the mask token stands
    source: Tensor  # [B, N], whose embedding stands elsewhere: mostly the patch's own


class MaskedPatchPredictor(Task):
    """A model, a token for what is hidden, and a linear layer that tells what was there."""

    model: ViT

    def __init__(self, model: ViT, spec: MaskedPatches, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.model = model  # type: ignore[assignment] (`check` refuses what is no ViT)
        self.spec, self.mean, self.std = spec, mean, std
        config, self.side = model.config, TARGETS[spec.target]
        assert len(mean) == len(std) == config.channels, (mean, std, config.channels)
        self.colours = LEVELS**config.channels
        answers = self.side**2 * self.colours if self.side else config.channels * config.embed.stride**2
        self.mask_token = nn.Parameter(torch.empty(1, 1, config.size.width))
        self.head = nn.Linear(config.size.width, answers)
        nn.init.normal_(self.mask_token, std=0.02)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, targets: Tensor | None = None, draw: Draw | None = None) -> dict[str, Tensor]:
        """The `loss` over corrupted patches: cross-entropy of their colours, or squared error of their pixels."""
        assert draw is not None
        corruption = self.corruption(images, draw)
        answers = self.answers(images, corruption).float()
        wanted = choose(self.wanted(images), corruption.patches)
        if not self.side:
            return {"loss": F.mse_loss(answers, wanted)}
        return {"loss": F.cross_entropy(answers.reshape(-1, self.colours), wanted.flatten())}

    def corruption(self, images: Tensor, draw: Draw) -> Corruption:
        """Which patches, and whether the mask token takes their place, another patch of the picture, or nothing."""
        h, w = self.model.embed.grid(images)
        count = h * w
        patches = draw.uniform(count, WHICH).argsort(1)[:, : self.spec.corrupted(count)]
        how, far = draw.uniform(count, HOW), draw.uniform(count, OTHER)
        chosen = torch.zeros_like(how, dtype=torch.bool).scatter(1, patches, True)
        index = torch.arange(count, device=images.device).expand_as(how)
        other = (index + 1 + (far * (count - 1)).long().clamp(max=count - 2)) % count  # any patch but itself
        exchanged = chosen & (how >= MASKED) & (how < MASKED + EXCHANGED)
        return Corruption(patches, chosen & (how < MASKED), torch.where(exchanged, other, index))

    def answers(self, images: Tensor, corruption: Corruption) -> Tensor:
        """What is told of each corrupted patch, [B, n, S·K]."""
        model = self.model
        grid = model.embed.grid(images)
        x = choose(model.embed(images), corruption.source)  # x_p E, exchanged
        x = torch.where(corruption.masked.unsqueeze(-1), self.mask_token.to(x.dtype), x)
        z, e_pos = model.prefix.before(x), model.position.stem(grid, None)
        z = model.token_norm(model.dropout(z if e_pos is None else z + e_pos))  # eq. 1
        z = model.encode(z, grid)[:, model.config.prefix.count :]
        return self.head(model.pool.norm(choose(z, corruption.patches)))

    def wanted(self, images: Tensor) -> Tensor:
        """Of every patch, the colours of its cells as numbers of their classes, [B, N, S], or its values, [B, N, C·P²]."""
        if not self.side:
            return patchify(images, self.model.embed.stride).float()
        (h, w), channels = self.model.embed.grid(images), images.shape[1]
        cells = F.adaptive_avg_pool2d(images.float(), (h * self.side, w * self.side))
        cells = patchify(cells, self.side).unflatten(-1, (channels, -1))  # [B, N, C, S]
        scale, shift = (cells.new_tensor(v).unsqueeze(-1) for v in (self.std, self.mean))
        levels = ((cells * scale + shift) * LEVELS).long().clamp(0, LEVELS - 1)
        digits = LEVELS ** torch.arange(channels - 1, -1, -1, device=images.device)
        return (levels * digits.unsqueeze(-1)).sum(2)

    @torch.no_grad()
    def signals(self, images: Tensor | tuple[Tensor, ...], draw: Draw) -> dict[str, Tensor]:
        """The loss."""
        assert isinstance(images, Tensor)
        return self(images, None, draw)

    @torch.no_grad()
    def guess(self, images: Tensor, draw: Draw) -> Guess:
        """The embeddings that were exchanged as the patches they are of; each corrupted patch as it was told: the likeliest
        colours, each a cell, or the pixels."""
        corruption = self.corruption(images, draw)
        patches = patchify(images, self.model.embed.stride).float()
        answers = self.answers(images, corruption).float()
        told = self.painted(answers) if self.side else answers
        at = corruption.patches.unsqueeze(-1).expand_as(told)
        return Guess(choose(patches, corruption.source), corruption.masked, patches.scatter(1, at, told))

    def painted(self, answers: Tensor) -> Tensor:
        """Patches in their likeliest colours, [B, n, C·P²], from answers [B, n, S·K]."""
        channels, stride = self.model.config.channels, self.model.config.embed.stride
        number = answers.unflatten(-1, (-1, self.colours)).argmax(-1).unsqueeze(2)  # [B, n, 1, S]
        digits = LEVELS ** torch.arange(channels - 1, -1, -1, device=answers.device).unsqueeze(-1)
        middle = ((number // digits) % LEVELS + 0.5) / LEVELS  # [B, n, C, S], between 0 and 1
        scale, shift = (middle.new_tensor(v).unsqueeze(-1) for v in (self.std, self.mean))
        cells = ((middle - shift) / scale).flatten(0, 1).unflatten(-1, (self.side, self.side))
        return F.interpolate(cells, size=(stride, stride)).reshape(*answers.shape[:2], -1)
