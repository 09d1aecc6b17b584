"""EoMT ("Your ViT is Secretly an Image Segmentation Model", Kerssies et al. 2025): queries inside a plain ViT.

Learned queries join the tokens before the last blocks, which then compute both. Each query predicts a class, or none, and a
mask: the product of the query with the patches' features at a finer grid. During training a query attends in each of these
blocks only to patches of the mask that it predicts there; this masking is removed block by block until the end, so that
inference needs none.

B images, T tokens of the ViT, Q queries, D width, K classes, a grid of h×w patches, 2ᵘ the factor of the finer grid.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.base import Model, ModelConfig, TokenModel, Unsupported
from vitrail.nn.block import run_block
from vitrail.nn.decoder import Decoder, resize_map
from vitrail.nn.linear import LinearLayer
from vitrail.nn.position import LayerPosition, Relative1D
from vitrail.nn.shape import Grid

RESIZED_VALUES = 2**24  # of masks at the size of the image that are in memory at once: 64 MB
MASKED = -1e9  # added to the scores of patches that a query does not attend to


class QueryLogits(NamedTuple):
    """What the queries predict after a layer."""

    masks: Tensor  # [B, Q, 2ᵘh, 2ᵘw]
    classes: Tensor  # [B, Q, K + 1]: the last is "no object"


class Upscale(nn.Module):
    """Twice the grid: a transposed convolution, GELU, a depthwise convolution and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.expansion = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(F.gelu(self.expansion(x)))
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class QueryDecoder(Decoder):
    """Queries that the last blocks of a ViT compute, and the modules that read them."""

    def __init__(self, slot: "EoMT", depth: int, width: int, classes: int) -> None:
        super().__init__()
        self.n_blocks, self.last_layer = slot.blocks, depth  # `blocks` would be modules
        self.queries = nn.Parameter(torch.empty(slot.queries, width))
        self.mask_mlp = nn.Sequential(
            *(LinearLayer(width, width), nn.GELU(), LinearLayer(width, width), nn.GELU(), LinearLayer(width, width))
        )
        self.upscale = nn.Sequential(*(Upscale(width) for _ in range(slot.upscales)))
        self.classifier = LinearLayer(width, classes + 1)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.queries)

    def decode(self, backbone: Model, images: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the logarithm of each class's score at every pixel, [B, K, H, W]."""
        return combine_queries(self.predict_layers(backbone, images)[-1], images.shape[2:])

    def predict_layers(self, backbone: Model, images: Tensor, masked: Tensor | None = None) -> list[QueryLogits]:
        """Return the predictions after the last layer; with `masked`, for training, also those before each last block.

        `masked`, bool [B, n, Q], selects for each of the n blocks the queries that attend only to patches of their mask.
        """
        vit = backbone.require_tokens("EoMT")
        grid, z = vit.embed.grid(images), vit.tokens(images)
        first = vit.config.depth - self.n_blocks
        for _, z_l in zip(range(first), vit.layer_outputs(z, grid), strict=False):
            z = z_l
        z = torch.cat((z, self.queries.expand(images.shape[0], -1, -1)), 1)  # [B, T + Q, D]
        positions = list(vit.position.layer_positions(grid, None))[first:]
        predictions: list[QueryLogits] = []
        for index, (block, position) in enumerate(zip(vit.blocks[first:], positions, strict=True)):
            mask = None
            if masked is not None:
                predictions.append(self.predict(vit, z, grid))
                mask = mask_attention(predictions[-1].masks, masked[:, index], vit.config.prefix.count, grid)
            position = pad_position(position, len(self.queries), mask)
            z = run_block(block, vit.activation_checkpointing, position.add_to(z), position)
        return [*predictions, self.predict(vit, z, grid)]

    def mask_grid(self, grid: Grid) -> Grid:
        """Return the rows and columns of the masks of a grid of patches."""
        scale = 2 ** len(self.upscale)
        return grid[0] * scale, grid[1] * scale

    def predict(self, vit: TokenModel, z: Tensor, grid: Grid) -> QueryLogits:
        """Return the masks and classes of the queries at the end of z, [B, T + Q, D]."""
        y, n, prefix = vit.final_norm(z), len(self.queries), vit.config.prefix.count
        queries, patches = y[:, -n:], y[:, prefix:-n]
        features = self.upscale(patches.transpose(1, 2).unflatten(2, grid))  # [B, D, 2ᵘh, 2ᵘw]
        masks = torch.bmm(self.mask_mlp(queries), features.flatten(2)).unflatten(2, features.shape[2:])
        return QueryLogits(masks, self.classifier(queries))


def mask_attention(masks: Tensor, masked: Tensor, prefix: int, grid: Grid) -> Tensor:
    """Return the bias that hides from the `masked` queries, [B, Q], patches outside their mask: [B, 1, T + Q, T + Q]."""
    hidden = resize_map(masks, grid).flatten(2) <= 0  # [B, Q, N]
    n, length = hidden.shape[1], prefix + hidden.shape[2] + hidden.shape[1]
    bias = masks.new_zeros(len(masks), 1, length, length)
    bias[:, 0, -n:, prefix:-n].masked_fill_(hidden & masked[..., None], MASKED)
    return bias


def pad_position(position: LayerPosition, n: int, mask: Tensor | None) -> LayerPosition:
    """Return the positions of a layer with n further tokens that have none, and a mask added to the attention's bias."""
    embedding, bias, rotation = position.embedding, position.bias, position.rotation
    if embedding is not None:
        embedding = F.pad(embedding, (0, 0, 0, n))
    if bias is not None:
        bias = F.pad(bias, (0, n, 0, n))
    if rotation is not None:
        cosine, sine = F.pad(rotation.cosine, (0, 0, 0, n), value=1.0), F.pad(rotation.sine, (0, 0, 0, n))
        rotation = rotation._replace(cosine=cosine, sine=sine)
    if mask is not None:
        bias = mask if bias is None else bias + mask
    return LayerPosition(embedding, bias, rotation)


def combine_queries(predicted: QueryLogits, size: Sequence[int]) -> Tensor:
    """Return log Σ_q p(class of q) · p(pixel in the mask of q), [B, K, H, W]: softmax over classes normalises the scores.

    Without gradients, a few masks at a time have the size of the image.
    """
    n, block = predicted.masks.shape[1], limit_queries(predicted.masks, size)
    classes = predicted.classes.softmax(-1)[..., :-1].transpose(1, 2)  # [B, K, Q], without "no object"
    if block >= n:
        scores = torch.bmm(classes, resize_map(predicted.masks, size).sigmoid().flatten(2))
        return scores.clamp(min=torch.finfo(scores.dtype).tiny).log().unflatten(2, tuple(size))
    scores = classes.new_zeros(*classes.shape[:2], size[0] * size[1], dtype=torch.float32)
    for first in range(0, n, block):
        masks = resize_map(predicted.masks[:, first : first + block], size).sigmoid()
        scores.baddbmm_(classes[:, :, first : first + block].float(), masks.flatten(2).float())
    return scores.clamp_(min=torch.finfo(scores.dtype).tiny).log_().unflatten(2, tuple(size))


def limit_queries(masks: Tensor, size: Sequence[int]) -> int:
    """Return the number of masks that are resized at once; all where gradients, a graph or the count of costs need them."""
    if masks.requires_grad or masks.is_meta or torch.compiler.is_compiling() or torch._C._is_tracing():
        return masks.shape[1]
    return max(1, RESIZED_VALUES // (len(masks) * size[0] * size[1]))


class PackedQueries(nn.Module):
    """A model whose queries' predictions are one tensor, [B, Q, 2ᵘh·2ᵘw + K + 1]: runtimes return one array for a batch."""

    def __init__(self, model: Model, purpose: str) -> None:
        super().__init__()
        model.require_queries(purpose)
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        (predicted,) = self.model.predict_queries(images)
        return torch.cat((predicted.masks.flatten(2), predicted.classes), 2)


def unpack_queries(packed: Tensor, classes: int, grid: Grid | None = None) -> QueryLogits:
    """Return the predictions of `PackedQueries`, [..., Q, N]; without the grid of the masks, these are [..., Q, 1, cells]."""
    cells = packed.shape[-1] - classes - 1
    return QueryLogits(packed[..., :cells].unflatten(-1, grid or (1, cells)), packed[..., cells:])


class Segment(NamedTuple):
    """One object, or the region of a class without objects."""

    label: int
    score: float


class SegmentMap(NamedTuple):
    """The segments of an image, which do not overlap."""

    ids: Tensor  # int32 [H, W]: 1 for the first segment; 0 where there is none
    segments: list[Segment]


class KeptQueries(NamedTuple):
    """Queries of one image that predict a class with some confidence."""

    masks: Tensor  # [n, 2ᵘh, 2ᵘw]
    scores: Tensor  # [n]
    labels: Tensor  # [n]


def keep_queries(predicted: QueryLogits, score_threshold: float = 0.8) -> KeptQueries:
    """Return the queries of one image, masks [Q, h, w] and classes [Q, K + 1], whose class has a higher probability."""
    scores, labels = predicted.classes.softmax(-1).max(-1)
    kept = (labels != predicted.classes.shape[-1] - 1) & (scores > score_threshold)
    return KeptQueries(predicted.masks[kept], scores[kept], labels[kept])


def find_segments(
    queries: KeptQueries,
    input_size: Sequence[int],
    size: Sequence[int],
    mask_threshold: float = 0.5,
    overlap_threshold: float = 0.8,
    stuff: Collection[int] = (),
) -> SegmentMap:
    """Return the panoptic segments of an image at its height and width; masks are resized to the model's input size first.

    A pixel belongs to the query with the largest product of its score and of the mask's probability, if the latter is at least
    `mask_threshold`. A segment that keeps at most `overlap_threshold` of its mask is dropped. Segments of a class in `stuff`
    (sky, road) are joined. One mask at a time has the size of the image.
    """
    height, width = size
    n, device = len(queries.scores), queries.masks.device
    best = torch.full((height, width), -torch.inf, device=device)
    winner = torch.zeros(height, width, dtype=torch.int32, device=device)
    inside = torch.zeros(height, width, dtype=torch.bool, device=device)  # the mask of the winner
    whole = torch.zeros(n, dtype=torch.int64, device=device)  # pixels of each mask
    for index, mask in enumerate(resize_map(queries.masks[None], input_size)[0] if n else ()):
        p = resize_map(mask[None, None], size)[0, 0].sigmoid()
        own, product = p >= mask_threshold, queries.scores[index] * p
        whole[index] = own.sum()
        better = product > best  # of equal ones the first wins, as in argmax
        winner[better], inside[better] = index, own[better]
        torch.maximum(best, product, out=best)
    won, kept = (torch.bincount(part.flatten(), minlength=n) for part in (winner, winner[inside]))
    ids, segments, joined = torch.zeros(max(1, n), dtype=torch.int32, device=device), [], dict[int, int]()
    for index, (score, label) in enumerate(zip(queries.scores.tolist(), queries.labels.tolist(), strict=True)):
        if not kept[index] or not (won[index] / whole[index]).item() > overlap_threshold:
            continue
        if label not in joined:
            segments.append(Segment(label, score))
        ids[index] = joined.get(label, len(segments))
        if label in stuff:
            joined[label] = int(ids[index])
    return SegmentMap(torch.where(inside, ids[winner], 0), segments)


@dataclass(frozen=True)
class EoMT:
    """Queries in the last blocks of a Vision Transformer; `upscales` doublings of the grid before the masks."""

    queries: int = 100
    blocks: int = 4
    upscales: int = 2
    any_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.queries < 1 or self.blocks < 1 or self.upscales < 0:
            raise ValueError(f"{self}: queries and blocks must be at least 1, upscales at least 0")

    def build(self, config: ModelConfig, classes: int) -> QueryDecoder:
        vit = config.require_tokens("EoMT")
        if self.blocks > vit.depth:
            raise ValueError(f"EoMT needs a model of at least {self.blocks} layers, got {vit.depth}: use fewer blocks")
        if isinstance(vit.position, Relative1D):
            raise Unsupported("EoMT does not support relative1d positions: queries have no position")
        return QueryDecoder(self, vit.depth, vit.size.width, classes)
