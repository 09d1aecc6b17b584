"""Fine-tuning of a trained model on your own images. The default with --init.

    vitrail train photos/ --init deit_tiny.safetensors
    vitrail train photos/ --init deit_tiny.safetensors --tune lora
    vitrail train videos/ --init videomae.safetensors --clip 16x4

AdamW with a lower learning rate for each layer further from the head, a new head that starts at zero, random crops and flips. The
number of epochs depends on the number of images. A head alone (--tune head) and LoRA (--tune lora) get three times the learning
rate; a head alone gets no patch dropout.

For videos, a model of images is inflated to one of clips. Clips are not flipped: left and right may be classes. For sounds, a
model of images becomes one of spectrograms, as the Audio Spectrogram Transformer does; spectrograms are augmented as in `sound`.

Runs of fewer than 500 steps of 32 images get a higher learning rate for the head and for lower layers, and less label smoothing.
With Adam each weight moves by about its learning rate in a step: in few steps a head that starts at zero stays so small that
predictions have a low confidence and the layers below it get small gradients, and the lowest layers hardly move.
Expected: DeiT-Ti on 800 photographs of clothing in ten classes: 85 % (80.9–88.4) of 341 (measured: docs/results.md).
"""

from dataclasses import replace
from typing import Any

from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augment import Flip, RandomResizedCrop
from vitrail.objectives.classification import Classification
from vitrail.training.optim import AdamW
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes.clips import adapt_to_clips
from vitrail.training.recipes.common import configure_init
from vitrail.training.recipes.sound import adapt_to_sounds, choose_augmentation
from vitrail.training.schedule import EMA, Cosine

SMALL_DATA = 5_000  # training images up to which small batches and many epochs are better
LONG_RUN = 500  # steps of 32 images from which on nothing depends on the number of steps
MAX_HEAD_SCALE = 16.0  # reached at 31 steps; not measured above


def run_share(steps: int, batch: int) -> float:
    """Return the distance that the head can move in a run as a fraction of that in a long one, from 0 to 1.

    The distance is the learning rate, which is proportional to the root of the batch size, times the number of steps.
    """
    return min(1.0, max(1, steps) * (batch / 32) ** 0.5 / LONG_RUN)


def choose_head_scale(share: float, lr_factor: float = 1.0) -> float:
    """Return the factor of the head's learning rate that lets it move as far as in a long run.

    `lr_factor` is what the learning rate of all parameters has been multiplied by already. In 60 steps a head at 8 times the
    learning rate, without label smoothing, has an accuracy of 84.9 % on Pets instead of 79.2 %, and a calibration error of 7 %
    instead of 55 % (docs/results.md).
    """
    return round(max(1.0, min(MAX_HEAD_SCALE, 1 / share) / lr_factor), 2)


def choose_layer_decay(share: float) -> float:
    """Return the layer decay: 0.65 in a long run, up to 0.8 in a short one, where low layers otherwise hardly move.

    In 60 steps the accuracy is 84.8 % with 0.8 and 81.1 % with 0.65 on clothing, 80.8 and 83.8 % on Pets, whose breeds are
    ImageNet classes (docs/results.md).
    """
    return round(0.8 - 0.15 * share, 3)


def recipe(facts: Facts, data: Data) -> Recipe:
    plan, share = plan_tuning(facts)
    model, frozen = plan["model"], facts.overrides.get("tune") == "head"
    # With a frozen body, patch dropout would train the head on features that differ from those of whole images.
    dropout, half = 0.5, "a step takes little more than half of the time"
    if frozen or not model.can_drop_patches:
        dropout = 0.0
        half = "the head needs features of complete images" if frozen else f"{model.describe()} needs every patch"
    flip = () if model.frames is not None else (Flip(),)
    augment = (RandomResizedCrop(model.image_size, scale=(0.35, 1.0)), *flip)
    return Recipe(
        name="finetune",
        data=data,
        augment=augment if facts.seconds is None else choose_augmentation(model.image_size),
        objective=Classification(
            loss=facts.loss,
            smoothing=0.0 if facts.several else round(0.1 * share, 3),  # lowers confidence, which few steps leave low
            patch_dropout=facts.choose("patch_dropout", dropout, half),
        ),
        **plan,
    )


def plan_tuning(facts: Facts) -> tuple[dict[str, Any], float]:
    """Return the fields of a recipe that are chosen alike for classes and numbers, and the share of a long run."""
    if facts.seconds is None:
        size = facts.choose("size", configure_init(facts).image_size, "size of the checkpoint")
        model, clip = adapt_to_clips(facts, configure_init(facts, size))
        default = Preprocessing(model.image_size, model.image_size).with_channels(model.channels)
        pipeline = replace((facts.init_preprocessing or default).with_size(size), turn=True, clip=clip)
    else:
        model, pipeline = adapt_to_sounds(facts)
    batch = facts.choose("batch_size", 32 if facts.images < SMALL_DATA else 128, facts.training_size)
    epochs = float(min(24, max(4, round(16_000 / facts.images))))
    lasting = facts.choose_length(epochs=epochs, why=facts.training_size)
    total = facts.total_steps(lasting, batch)
    how = facts.overrides.get("tune") or "full"
    # Tuned on held-out training images of clothing.
    few = how == "head" or how.startswith("lora")
    why = f"for this batch size and tune={how!r}" if few else "for this batch size, lower for each layer below the head"
    factor, share = 3.0 if few else 1.0, run_share(total, batch)
    lr = facts.choose("lr", factor * 1e-3 * (batch / 32) ** 0.5, why)
    new_head = f"a new head needs more than {lr:.2g} in {total:,} steps" if share < 1 else f"enough in {total:,} steps"
    head_scale = facts.choose("head_scale", choose_head_scale(share, factor), new_head)
    fields = {
        "model": model,
        "preprocessing": pipeline,
        "optimizer": AdamW(
            lr=lr,
            weight_decay=0.05,
            layer_decay=choose_layer_decay(share) if how == "full" else 1.0,
            betas=(0.9, 0.98),
            head_scale=head_scale,
        ),
        "schedule": Cosine(warmup=max(1, total // 10)),
        "batch_size": batch,
        "validate_every": max(1.0, lasting.get("epochs", 0) // 10),  # at most a tenth of the training time
        "ema": EMA(0.98),
    }
    return fields | lasting, share
