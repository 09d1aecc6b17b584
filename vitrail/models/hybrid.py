"""Hybrids (section 3.1): patches of a ResNet's feature map instead of the image.

B images, C channels, P pixels of the map along a patch, N patches, D width.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vitrail.models.sizes import RESNETS
from vitrail.nn.embed import Embedding, compute_grid, patchify, select_tokens
from vitrail.nn.linear import LinearLayer
from vitrail.nn.resnet import RootedTrunk
from vitrail.nn.shape import Grid


class HybridEmbedding(Embedding):
    """ResNet, then linear patches of its feature map."""

    def __init__(self, slot: "Hybrid", channels: int, width: int) -> None:
        super().__init__(slot, channels)
        self.trunk = RootedTrunk(slot.stages, channels)
        self.patch = slot.patch
        self.projection = LinearLayer(self.trunk.channels * slot.patch**2, width)

    def forward(self, image: Tensor, keep: Tensor | None = None) -> Tensor:
        x_p = select_tokens(patchify(self.trunk(image), self.patch), keep)  # [B, N, channels·P²]
        return self.projection(x_p)  # [B, N, D]


@dataclass(frozen=True)
class Hybrid:
    """The number of blocks in each stage of the ResNet, and the patch size on its feature map."""

    stages: tuple[int, ...] = (3, 4, 9)
    patch: int = 1
    input_weight: ClassVar[str] = "trunk.root.weight"

    def __post_init__(self) -> None:
        if self.patch < 1 or (self.stages and min(self.stages) < 1):
            raise ValueError(f"{self}: patches and stages must be at least 1")

    @property
    def stride(self) -> int:
        return 4 * 2 ** max(0, len(self.stages) - 1) * self.patch

    @property
    def channels(self) -> int:
        """Return the channels of the ResNet's feature map."""
        return 256 * 2 ** (len(self.stages) - 1) if self.stages else 64

    def grid_of(self, size: tuple[int, ...]) -> Grid:
        return compute_grid(size, self.stride)

    def build(self, channels: int, width: int) -> Embedding:
        return HybridEmbedding(self, channels, width)


def configure_hybrid(resnet: str, patch: int) -> Hybrid:
    """Return the published hybrid: R50+B/16 has three stages, stage 3 with stage 4's blocks; R50+B/32 has four.

    R+Ti/16 has the root only. Its authors' name counts 16, but patches of 8×8 on a root of stride 4 cover 32 pixels.
    """
    if resnet == "":
        if patch != 16:
            raise ValueError(f"the hybrid on the ResNet's root is R+Ti/16, got patch size {patch}: use /16")
        return Hybrid((), 8)
    if int(resnet) not in RESNETS:
        raise ValueError(f"unknown ResNet R{resnet} in a hybrid: use R{', R'.join(map(str, RESNETS))} or R alone")
    one, two, three, four = RESNETS[int(resnet)]
    if patch == 32:
        return Hybrid((one, two, three, four))
    if patch == 16:
        return Hybrid((one, two, three + four))
    raise ValueError(f"the patch size of a hybrid R{resnet} must be 16 or 32, got {patch}")
