"""Hybrids (section 3.1): the patches are cut from a ResNet's feature map instead of the image.

B images, C channels, P pixels of the map along a patch, N patches, D width.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from vitrail.models.bit import RootedTrunk
from vitrail.models.sizes import RESNETS
from vitrail.nn.embed import Embedding, choose, patchify


class HybridEmbedding(Embedding):
    """ResNet, then linear patches of its feature map."""

    def __init__(self, stages: tuple[int, ...], patch: int, channels: int, width: int) -> None:
        super().__init__()
        self.trunk = RootedTrunk(stages, channels)
        self.patch, self.channels = patch, channels
        self.stride = self.trunk.stride * patch
        self.projection = nn.Linear(self.trunk.channels * patch * patch, width)

    def forward(self, image: Tensor, keep: Tensor | None = None) -> Tensor:
        x_p = choose(patchify(self.trunk(image), self.patch), keep)  # [B, N, channels·P²]
        return self.projection(x_p)  # [B, N, D]


@dataclass(frozen=True)
class Hybrid:
    """Blocks in each stage of the ResNet, and the side of a patch on its feature map."""

    stages: tuple[int, ...] = (3, 4, 9)
    patch: int = 1

    def __post_init__(self) -> None:
        if self.patch < 1 or (self.stages and min(self.stages) < 1):
            raise ValueError(f"{self}: patches and stages must be at least 1")

    @property
    def stride(self) -> int:
        return 4 * 2 ** max(0, len(self.stages) - 1) * self.patch

    def build(self, channels: int, width: int) -> Embedding:
        return HybridEmbedding(self.stages, self.patch, channels, width)


def published_hybrid(resnet: str, patch: int) -> Hybrid:
    """R50+B/16 takes stage 3 with stage 4's blocks moved into it, R50+B/32 all four stages, R+Ti/16 the root alone.

    The name of the last follows its authors, who cut patches of 8×8 from a root of stride 4: 32 pixels to a token.
    """
    if resnet == "":
        if patch != 16:
            raise ValueError(
                f"a hybrid on the ResNet's root alone was published as R+Ti/16, not with /{patch}: use /16"
            )
        return Hybrid((), 8)
    if int(resnet) not in RESNETS:
        raise ValueError(f"unknown ResNet R{resnet} in a hybrid: use R{', R'.join(map(str, RESNETS))} or R alone")
    one, two, three, four = RESNETS[int(resnet)]
    if patch == 32:
        return Hybrid((one, two, three, four))
    if patch == 16:
        return Hybrid((one, two, three + four))
    raise ValueError(
        f"a hybrid R{resnet}+…/{patch} cannot be: the ResNet's map has 16 or 32 pixels to a token, use /16 or /32"
    )
