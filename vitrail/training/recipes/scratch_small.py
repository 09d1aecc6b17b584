"""A small Vision Transformer from scratch, for small data and small machines. The default without --init.

    vitrail train digits
    vitrail train fashion-mnist
    vitrail train photos/ --recipe scratch-small

Convolutions before the encoder, fixed positions, mean pooling; Muon trains the matrices and filters. The size of the model,
the length of the run and the augmentation depend on the size and number of the images.
Expected: digits 98 %, Fashion-MNIST 92 %, CIFAR-10 87 % on their test images (measured, with the time each took:
docs/results.md). With fewer than some thousand photographs, fine-tuning a trained model is far better.
"""

from typing import Any

from vitrail.data.clip import Clip
from vitrail.data.transforms.augment import AugmentSlot, Fit, Flip, PadCrop, RandomErasing, RandomResizedCrop, Warp
from vitrail.models.base import ModelConfig, TokenConfig
from vitrail.objectives.classification import Classification
from vitrail.training.optim import Muon
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes import common
from vitrail.training.schedule import Linear

LARGE_DATA = 20_000  # training images from which on a few epochs are enough


def recipe(facts: Facts, data: Data) -> Recipe:
    many, named = facts.images >= LARGE_DATA, facts.overrides.get("model")
    model = common.configure_named(facts, position="sincos2d", pool="mean") if named else configure_model(facts)
    epochs = (10.0 if facts.channels == 1 else 15.0) if many else max(20.0, min(100.0, round(25_000 / facts.images)))
    plan = plan_training(facts, model, 256 if many else 128, epochs)
    lr = facts.choose("lr", 1e-2, "suits Muon at this size")
    return Recipe(
        name="scratch-small",
        data=data,
        objective=Classification(loss=facts.loss),
        optimizer=Muon(lr=lr, matrix_lr=0.03, clip=None),
        **plan,
    )


def plan_training(
    facts: Facts, model: ModelConfig, batch: int, epochs: float, why: str = "", clip: Clip | None = None
) -> dict[str, Any]:
    """Return the fields of a recipe that are chosen alike with and without a teacher, and for the clips of videos.

    `why` explains the epochs further.
    """
    count = facts.training_size
    batch = facts.choose("batch_size", batch, count)
    length = facts.choose_length(epochs=epochs, why=count + why)
    total = facts.total_steps(length, batch)
    fields = {
        "model": model,
        "preprocessing": common.choose_preprocessing(facts, model, clip),
        "augment": choose_augmentation(facts, model.image_size, total * batch / facts.images),
        "schedule": Linear(warmup=max(1, total // 10)),
        "batch_size": batch,
        "validate_every": max(1.0, length.get("epochs", 0) // 20),
    }
    return fields | length


def configure_model(facts: Facts) -> TokenConfig:
    """Return a model with about 16 tokens for small images, 64 for photographs."""
    small, large, count = common.is_small(facts), facts.images >= LARGE_DATA, facts.training_size
    patch = (4 if max(facts.side) <= 16 else 8) if small else 16
    size = common.choose_size(facts, small, patch)
    width = facts.choose("width", (96 if facts.channels == 1 else 128) if large else 64, count)
    layers = (2 if small else 6) if large else 4  # after the convolutions of conv-pool, two layers learn fastest
    depth = facts.choose("depth", layers, count)
    embed = "conv-pool" if small and large else "conv-stem"
    return common.configure_compact(facts, facts.classes, patch, width, depth, size, embed)


def choose_augmentation(facts: Facts, size: tuple[int, int], epochs: float) -> tuple[AugmentSlot, ...]:
    """Return the augmentation: shifts for small images, crops for photographs. Grey images, such as digits, are not flipped.

    Images that are seen a few times only need no augmentation.
    """
    if not common.is_small(facts):
        return (RandomResizedCrop(size, scale=(0.25, 1.0)), Flip())
    fit = Fit(size, interpolation="bilinear")
    if epochs <= 4:
        return (fit,)
    if facts.channels == 1:
        return (fit, Warp()) if facts.images < LARGE_DATA else (fit, PadCrop(2), RandomErasing(0.25))
    return (fit, PadCrop(4, "reflect"), Flip())
