"""Segmentation: a class for each pixel. The default for images with masks.

    vitrail train pets --init deit_tiny.safetensors
    vitrail train pets --init deit_tiny.safetensors --tune head      frozen backbone, linear decoder
    vitrail train pets --init dinov2_small.safetensors --decoder eomt

A backbone of any family with a decoder (--decoder): `upernet`, the default; `linear`, one layer on the last features, the
default for a frozen backbone (--tune head), as in DINO; `linear-4`, one layer on the last four, as in DINOv2; `eomt`, queries
within a plain Vision Transformer. AdamW with a lower learning rate for each layer further from the decoder, random crops and
flips of image and mask, cross-entropy and Dice loss; with `eomt`, the loss of matched masks. Without --init or --model a small
Vision Transformer is trained from scratch.

Expected: DeiT-Ti on 400 photographs of pets, border ignored: IoU of the pet 96.3 % in 463 steps, 91.9 % with a frozen backbone
(measured, one seed: docs/results.md).
"""

from dataclasses import replace

from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augment import ColourJitter, Flip, RandomResizedCrop
from vitrail.models.base import ModelConfig
from vitrail.models.eomt import EoMT
from vitrail.models.registry import parse_decoder
from vitrail.models.segmenter import DecoderSlot, SegmenterConfig
from vitrail.nn.decoder import UPerNet
from vitrail.objectives.mask_matching import MaskMatching
from vitrail.objectives.segmentation import Segmentation
from vitrail.training.optim import AdamW
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes.common import choose_preprocessing, configure_compact, configure_named
from vitrail.training.schedule import EMA, Cosine

SMALL_DATA = 5_000  # training images up to which small batches and many epochs are better
SAMPLES = 16_000  # images of a whole run on little data
MAX_CHANNELS = 256  # of UPerNet


def configure_backbone(facts: Facts) -> ModelConfig:
    """Return the backbone: that of the initial checkpoint, of --model, or a small one that is trained from scratch."""
    if facts.init is not None:
        size = facts.choose("size", facts.init.image_size, "size of the checkpoint")
        return facts.init.as_backbone().with_image_size(size)
    if facts.overrides.get("model"):
        return configure_named(facts).as_backbone()
    size = facts.choose("size", (128, 128), "for photographs")
    width, depth = facts.choose("width", 192, "from scratch"), facts.choose("depth", 6, "from scratch")
    return configure_compact(facts, None, patch=8, width=width, depth=depth, size=size).as_backbone()


def choose_decoder(facts: Facts, backbone: ModelConfig, frozen: bool) -> DecoderSlot:
    """Return the decoder: that of a segmentation checkpoint, linear for a frozen backbone, else UPerNet."""
    known = facts.init.find_decoder() if facts.init is not None else None
    if known is not None and not facts.overrides.get("decoder"):
        return known
    default, why = ("linear", "the backbone is frozen") if frozen else ("upernet", "the backbone is trained")
    decoder = parse_decoder(facts.choose("decoder", default, why))
    if isinstance(decoder, UPerNet):  # as wide as published for large models only
        decoder = UPerNet(min(MAX_CHANNELS, max(64, backbone.feature_shape(backbone.depth).channels // 2)))
    return decoder


def choose_objective(decoder: DecoderSlot, frozen: bool, size: tuple[int, int]) -> Segmentation | MaskMatching:
    """Return the loss of the decoder: matched masks for queries, else cross-entropy, with Dice if the backbone is trained."""
    if isinstance(decoder, EoMT):
        return MaskMatching(points=min(MaskMatching().points, size[0] * size[1] // 8))
    return Segmentation(dice=0.0 if frozen else 1.0)


def recipe(facts: Facts, data: Data) -> Recipe:
    how = facts.overrides.get("tune") or "full"
    frozen = how == "head"
    backbone = configure_backbone(facts)
    model = SegmenterConfig(backbone, choose_decoder(facts, backbone, frozen), facts.classes)
    size = model.image_size
    batch = facts.choose("batch_size", 16 if facts.images < SMALL_DATA else 64, facts.training_size)
    epochs = float(min(60, max(8, round(SAMPLES / facts.images))))
    lasting = facts.choose_length(epochs=epochs, why=facts.training_size)
    total = facts.total_steps(lasting, batch)
    few = frozen or how.startswith("lora")
    lr = facts.choose("lr", (3e-3 if few else 1e-3) * (batch / 16) ** 0.5, f"for this batch size and tune={how!r}")
    pipeline: Preprocessing = choose_preprocessing(facts, model)
    return Recipe(
        name="segment",
        data=data,
        model=model,
        preprocessing=replace(pipeline.with_size(size), resize=size, fit="squash", turn=True),  # the whole image
        augment=(RandomResizedCrop(size, scale=(0.25, 1.0)), Flip(), ColourJitter(0.3, 0.3, 0.3, 0.0, rate=0.5)),
        objective=choose_objective(model.decoder, frozen, size),
        optimizer=AdamW(
            lr=lr,
            weight_decay=0.05,
            layer_decay=0.75 if how == "full" and facts.init is not None else 1.0,
            betas=(0.9, 0.98),
        ),
        schedule=Cosine(warmup=max(1, total // 10)),
        batch_size=batch,
        **lasting,
        validate_every=max(1.0, lasting.get("epochs", 0) // 10),
        ema=EMA(0.98),
        calibrate="none",
    )
