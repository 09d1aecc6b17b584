"""A trained Vision Transformer for your own pictures. The default with --init.

    vitrail train photos/ --init deit_tiny.safetensors
    vitrail train photos/ --init deit_tiny.safetensors --tune lora

AdamW with a lower rate for each layer further from the head, a new head that begins at zero, random crops and flips. How many
epochs depends on how many pictures there are.
Expected: DeiT-Ti on 800 photographs of clothing in ten classes: 85 % (80.9–88.4) of 341 (measured: docs/results.md).
"""

from dataclasses import replace

from vitrail.data.augment import Flip
from vitrail.data.crops import RandomResizedCrop
from vitrail.data.preprocessing import Preprocessing
from vitrail.engine.ema import EMA
from vitrail.engine.optim import AdamW
from vitrail.engine.schedule import Cosine
from vitrail.objectives.classification import Classification
from vitrail.recipe import Data, Facts, Recipe
from vitrail.recipes.pieces import started

FEW = 5_000  # pictures up to which small batches and many epochs are better


def recipe(facts: Facts, data: Data) -> Recipe:
    size = facts.choose("size", started(facts).image_size, "the size that the checkpoint was trained at")
    model = started(facts, size)
    pipeline = facts.init_preprocessing or Preprocessing(model.image_size, model.image_size)
    batch = facts.choose("batch_size", 32 if facts.images < FEW else 128, f"{facts.images:,} training pictures")
    epochs = float(min(24, max(4, round(12_000 / facts.images))))
    lasting = facts.lasting(epochs=epochs, why=f"{facts.images:,} training pictures")
    total = lasting.get("steps") or facts.steps(lasting["epochs"], batch)
    whole = facts.wishes.get("tune") in (None, "full")
    rate = facts.choose("lr", 1e-3 * (batch / 32) ** 0.5, "for this batch size, lower for each layer below the head")
    return Recipe(
        name="finetune",
        data=data,
        model=model,
        preprocessing=replace(pipeline.at(size), turn=True),
        augment=(RandomResizedCrop(size, scale=(0.35, 1.0)), Flip()),
        objective=Classification(
            loss=facts.loss,
            smoothing=0.0 if facts.several else 0.1,
            patch_dropout=facts.choose("patch_dropout", 0.5, "a step takes little more than half of the time"),
        ),
        optimizer=AdamW(lr=rate, weight_decay=0.05, layer_decay=0.65 if whole else 1.0, betas=(0.9, 0.98)),
        schedule=Cosine(warmup=max(1, total // 10)),
        batch_size=batch,
        **lasting,
        ema=EMA(0.98),
    )
