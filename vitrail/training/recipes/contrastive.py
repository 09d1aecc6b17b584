"""Images and captions: two towers like CLIP or SigLIP. The default with --objective, and for tables with captions.

    vitrail train pairs.csv --objective clip
    vitrail train pairs.csv --init-image deit-tiny --tune text        locked image tower (LiT)
    vitrail train pairs.csv --init clip.safetensors --objective siglip

Without --init both towers are small and start from scratch, and a tokeniser of byte pairs is learnt from the captions.
--init-image takes a trained image tower; --tune text locks it. --init continues with both towers of a checkpoint.

AdamW without label noise: crops of at least 90 % of the image, as OpenCLIP; no flips, because a caption may say left and right.
Every image is compared with every caption of its batch, so a larger batch is a harder task. Zero-shot accuracy needs many
captions of many things: from scratch on a few thousand pairs, expect little more than the classes in the captions.
Expected: DeiT-Ti locked, 25 of 37 breeds of pets in captions, zero-shot on the 12 others 10 to 20 % (chance 8 %;
three seeds, measured on features computed once: docs/results.md).
"""

from dataclasses import replace

import torch

from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augment import AugmentSlot, Fit, RandomResizedCrop
from vitrail.models.base import ModelConfig
from vitrail.models.registry import lay_out
from vitrail.models.sizes import Size
from vitrail.models.text import TextConfig
from vitrail.models.two_towers import TwoTowersConfig
from vitrail.nn.head import Projection
from vitrail.objectives.contrastive import Contrastive
from vitrail.objectives.registry import CONTRASTIVE
from vitrail.training.optim import AdamW
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes import common
from vitrail.training.recipes.scratch_small import LARGE_DATA
from vitrail.training.schedule import Cosine

SAMPLES = 60_000  # of a run on few images
MIN_STEPS_PER_EPOCH = 8


def recipe(facts: Facts, data: Data) -> Recipe:
    count = f"{facts.images:,} training pairs"
    objective = choose_objective(facts)
    model = configure_towers(facts, objective)
    batch = facts.choose("batch_size", choose_batch(facts.images), f"{count}: each is compared with the whole batch")
    length = facts.choose_length(epochs=float(max(4, min(40, round(SAMPLES / facts.images)))), why=count)
    total = facts.total_steps(length, batch)
    lr, why, layer_decay = choose_rate(facts)
    return Recipe(
        name="contrastive",
        data=data,
        model=model,
        preprocessing=choose_preprocessing(facts, model),
        augment=choose_augmentation(facts, model),
        objective=objective,
        optimizer=AdamW(
            lr=facts.choose("lr", lr, why), weight_decay=0.1, betas=(0.9, 0.98), layer_decay=layer_decay, clip=1.0
        ),
        schedule=Cosine(warmup=max(1, total // 10)),
        batch_size=batch,
        validate_every=max(1.0, length.get("epochs", 0) // 10),
        calibrate="none",
        **length,
    )


def choose_batch(images: int) -> int:
    """Return the largest power of two, from 8 to 256, that leaves a few steps per epoch."""
    batch = 8
    while batch < 256 and 2 * batch * MIN_STEPS_PER_EPOCH <= images:
        batch *= 2
    return batch


def choose_objective(facts: Facts) -> Contrastive:
    """Return the loss that was asked for, or that of the initial checkpoint: a bias of its logits is SigLIP's."""
    init = facts.init
    biased = isinstance(init, TwoTowersConfig) and init.logit_bias
    name = facts.choose("objective", "siglip" if biased else "clip", "as the checkpoint" if biased else "the usual one")
    objective = CONTRASTIVE[name]
    assert isinstance(objective, Contrastive)
    if biased and objective.loss == "softmax":
        raise ValueError("the checkpoint has a bias of the logits, which the softmax loss cannot train: use siglip")
    if isinstance(init, TwoTowersConfig) and not biased and objective.loss == "sigmoid":
        raise ValueError("the checkpoint has no bias of the logits, which the sigmoid loss needs: use clip")
    return objective


def choose_rate(facts: Facts) -> tuple[float, str, float]:
    """Return the learning rate, the reason, and the layer decay of the image tower."""
    if facts.init is not None:
        return 5e-5, "both towers are trained already", 1.0
    if facts.init_image is None or facts.overrides.get("tune") == "text":
        return 1e-3, "for a tower from scratch", 1.0
    return 1e-3, "for a text tower from scratch, lower for each layer of the image tower", 0.65


def configure_towers(facts: Facts, objective: Contrastive) -> TwoTowersConfig:
    """Return both towers: those of the checkpoint, or an image tower and a text tower with features of its width."""
    if isinstance(facts.init, TwoTowersConfig):
        size = facts.choose("size", facts.init.image_size, "size of the checkpoint")
        return facts.init.with_image_size(size)
    image = configure_image(facts)
    image.with_similarity(2)  # raises for a family without zero-shot classification
    with torch.device("meta"):
        features = lay_out(image).feature_dim
    width = 256 if facts.images >= LARGE_DATA else 128
    text = TextConfig(Size(depth=4, width=width, mlp=4 * width, heads=width // 32), features)
    if facts.tokenizer is not None:
        text = replace(text, vocabulary=facts.tokenizer.vocabulary, context=facts.tokenizer.context)
    return TwoTowersConfig(image, text, logit_bias=objective.loss == "sigmoid")


def configure_image(facts: Facts) -> ModelConfig:
    """Return the image tower: that of --init-image, that of --model, or one that a laptop can train."""
    if facts.init_image is not None:
        size = facts.choose("size", facts.init_image.image_size, "size of the checkpoint")
        return facts.init_image.with_classes(None).with_image_size(size)
    if facts.overrides.get("model"):
        size = facts.choose("size", (224, 224), "usual for named models")
        named = common.configure_tokens(
            facts.choose("model", None, ""),
            purpose="training with captions",
            classes=None,
            image_size=size,
            channels=facts.channels,
        )
        return replace(named, head=Projection(named.size.width))
    small = common.is_small(facts)
    patch = (4 if max(facts.side) <= 16 else 8) if small else 16
    size = common.choose_size(facts, small, patch)
    count = f"{facts.images:,} training pairs"
    width = facts.choose("width", 256 if facts.images >= LARGE_DATA else 128, count)
    depth = facts.choose("depth", 6, count)
    compact = common.configure_compact(facts, None, patch, width, depth, size)
    return replace(compact, head=Projection(width))


def choose_preprocessing(facts: Facts, model: ModelConfig) -> Preprocessing:
    """Return the preprocessing of the checkpoint, or that of a model from scratch."""
    return replace(common.choose_preprocessing(facts, model), turn=True)


def choose_augmentation(facts: Facts, model: ModelConfig) -> tuple[AugmentSlot, ...]:
    """Return weak crops of photographs, none of small images."""
    if common.is_small(facts):
        return (Fit(model.image_size, interpolation="bilinear"),)
    return (RandomResizedCrop(model.image_size, scale=(0.9, 1.0)),)
