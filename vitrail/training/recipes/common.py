"""Shared choices of recipes: the model, its preprocessing, augmentation, the length of the run."""

from dataclasses import replace
from typing import Any

from vitrail.data.clip import Clip
from vitrail.data.preprocessing import IMAGENET_STATS, Preprocessing
from vitrail.data.transforms.augment import AugmentSlot, Flip, RandAugment, RandomErasing, RandomResizedCrop
from vitrail.models.base import ModelConfig, TokenConfig, refuse
from vitrail.models.registry import configure, configure_tokens, find_family
from vitrail.objectives.classification import Classification
from vitrail.training.recipe import Facts
from vitrail.training.schedule import Cosine

MAX_SMALL_SIDE = 64  # pixels: up to this side, a ResNet gets a small stem and images are not cropped


def configure_init(facts: Facts, size: tuple[int, int] | None = None) -> ModelConfig:
    """Return the configuration of the initial checkpoint with this data's classes; of a segmentation model, its backbone's."""
    if facts.init is None:
        raise ValueError("this recipe fine-tunes: give the initial checkpoint, init=FILE")
    whole = facts.init.find_decoder() is None
    init = (facts.init if whole else facts.init.as_backbone()).with_classes(facts.classes)
    return init.with_image_size(size or init.image_size)


def configure_named(facts: Facts, **slots: Any) -> ModelConfig:
    """Return the model of --model with this data's classes; `slots` but `frames` are for families with patch tokens."""
    name = facts.choose("model", None, "")
    size = facts.choose("size", (224, 224), "usual for named models")
    shape: dict[str, Any] = {"classes": facts.classes, "channels": facts.channels, "image_size": size}
    family = find_family(name)
    if issubclass(family.config, TokenConfig):
        return configure(name, **slots, **shape)
    if "frames" in slots:
        if "frames" not in (family.options or ()):
            purpose = f"the recipe for videos (model={name!r})"
            raise refuse(family.configure(name), purpose, "use a Vision Transformer or an MViT, such as S/16")
        shape["frames"] = slots["frames"]
    if "root" in (family.options or ()):
        shape["root"] = "small" if max(size) <= MAX_SMALL_SIDE else "large"
    return configure(name, **shape)


def is_small(facts: Facts) -> bool:
    """Return whether images are small and of one size, so that they are used whole."""
    return max(facts.side) <= MAX_SMALL_SIDE and not facts.several_sizes


def configure_encoder(facts: Facts) -> TokenConfig:
    """Return the model of --init or --model, or one that a laptop can train.

    It ends in the features of the class token, like published MAE and DINO.
    """
    if facts.init is not None:
        init = facts.init.require_tokens("pretraining without labels (init=)", clips=True)
        size = facts.choose("size", init.image_size, "size of the checkpoint")
        return replace(init, classes=None, image_size=size)
    shape: dict[str, Any] = {"position": "sincos2d", "classes": None, "channels": facts.channels}
    if facts.overrides.get("model"):
        size = facts.choose("size", (224, 224), "usual for named models")
        purpose = "pretraining without labels"
        return configure_tokens(facts.choose("model", None, ""), purpose=purpose, image_size=size, **shape)
    patch = 4 if is_small(facts) else 16
    size = choose_size(facts, is_small(facts), patch)
    count = facts.training_size
    width = facts.choose("width", 192 if facts.images >= 2_000 else 96, count)
    depth = facts.choose("depth", 6, count)
    return configure_tokens(patch=patch, width=width, depth=depth, heads=max(1, width // 32), image_size=size, **shape)


def configure_compact(
    facts: Facts, classes: int | None, patch: int, width: int, depth: int, size: Any, embed: str = "conv-stem"
) -> TokenConfig:
    """Return a model with a convolutional stem, fixed positions and mean pooling, for few tokens."""
    slots = {"embed": embed, "position": "sincos2d", "pool": "mean"}
    shape = {"classes": classes, "channels": facts.channels, "image_size": size}
    return configure_tokens(patch=patch, width=width, depth=depth, heads=max(1, width // 32), **slots, **shape)


def choose_size(facts: Facts, small: bool, patch: int) -> tuple[int, int]:
    """Return the input size: the smallest multiple of the patch that covers small images, 128 pixels for photographs."""
    near = max(16, -(-max(facts.side) // patch) * patch) if small else 128
    why = f"images of {facts.side[0]}×{facts.side[1]} pixels, a multiple of the patch" if small else "for photographs"
    return facts.choose("size", (near, near), why)


def choose_preprocessing(facts: Facts, model: ModelConfig, clip: Clip | None = None) -> Preprocessing:
    """Return the preprocessing of the checkpoint, or a resize with mean and std 0.5, for images or for these clips."""
    if facts.init_preprocessing is not None:
        return replace(facts.init_preprocessing.with_size(model.image_size), clip=clip)
    half = (0.5,) * model.channels
    filter = "bilinear" if is_small(facts) else "bicubic"
    size = model.image_size
    return Preprocessing(size, size, interpolation=filter, mean=half, std=half, turn=True, clip=clip)


def crop_and_flip(facts: Facts, size: tuple[int, int], photos: float) -> tuple[AugmentSlot, ...]:
    """Return crops of at least half of small images and a fraction `photos` of photographs. Grey images are not flipped."""
    crop = RandomResizedCrop(size, scale=(0.5 if is_small(facts) else photos, 1.0))
    return (crop,) if facts.channels == 1 else (crop, Flip())


def plan_deit_augmentation(facts: Facts, size: tuple[int, int], operations: int = 2) -> dict[str, Any]:
    """Return preprocessing, augmentation and objective of DeiT, which Swin and MViT took over: mixup 0.8, CutMix 1.0, smoothing
    0.1, RandAugment of magnitude 9 and random erasing 0.25."""
    spread = {"spread": 0.5, "increasing": True}
    return {
        "preprocessing": Preprocessing(size, size, turn=True, **IMAGENET_STATS).with_resize_factor(256 / 224),
        "augment": (RandomResizedCrop(size), Flip(), RandAugment(operations, 9, **spread), RandomErasing(0.25)),
        "objective": Classification(loss=facts.loss, smoothing=0.0 if facts.several else 0.1, mixup=0.8, cutmix=1.0),
    }


def plan_pretraining(
    facts: Facts, model: TokenConfig, batch: int, small: int, photos: int, clip: Clip | None = None
) -> tuple[dict[str, Any], int]:
    """Return the fields of a recipe that all methods of pretraining choose alike, and the number of steps.

    `batch` is the batch size from 2,000 images on, a quarter of it with fewer. `small` and `photos` are the samples of the
    whole run, for small images and for photographs, in at least 5 epochs and at most 1000.
    """
    count = facts.training_size
    batch = facts.choose("batch_size", batch if facts.images >= 2_000 else batch // 4, count)
    samples = small if is_small(facts) else photos
    length = facts.choose_length(epochs=float(min(1000, max(5, round(samples / facts.images)))), why=count)
    total = facts.total_steps(length, batch)
    fields = {
        "model": model,
        "preprocessing": choose_preprocessing(facts, model, clip),
        "schedule": Cosine(warmup=max(1, total // 10)),
        "batch_size": batch,
        "validate_every": max(1, total // 20) / max(1, facts.images // batch),  # 20 in all: the alarm comes in time
    }
    return fields | length, total
