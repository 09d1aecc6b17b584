"""A trained Vision Transformer for your own pictures. The default with --init.

    vitrail train photos/ --init deit_tiny.safetensors
    vitrail train photos/ --init deit_tiny.safetensors --tune lora

AdamW with a lower rate for each layer further from the head, a new head that begins at zero, random crops and flips. How many
epochs depends on how many pictures there are. A head alone (--tune head) and low-rank additions (--tune lora) take three times
the rate, and a head alone sees whole pictures.
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
    epochs = float(min(24, max(4, round(16_000 / facts.images))))
    lasting = facts.lasting(epochs=epochs, why=f"{facts.images:,} training pictures")
    total = lasting.get("steps") or facts.steps(lasting["epochs"], batch)
    how = facts.wishes.get("tune") or "full"
    # Found on held-out training pictures of clothing. A frozen body has never seen half of a picture: its head would learn from
    # features that it will not meet.
    frozen, few = how == "head", how == "head" or how.startswith("lora")
    why = f"for this batch size and --tune {how}" if few else "for this batch size, lower for each layer below the head"
    rate = facts.choose("lr", (3e-3 if few else 1e-3) * (batch / 32) ** 0.5, why)
    half = "a frozen body knows whole pictures" if frozen else "a step takes little more than half of the time"
    return Recipe(
        name="finetune",
        data=data,
        model=model,
        preprocessing=replace(pipeline.at(size), turn=True),
        augment=(RandomResizedCrop(size, scale=(0.35, 1.0)), Flip()),
        objective=Classification(
            loss=facts.loss,
            smoothing=0.0 if facts.several else 0.1,
            patch_dropout=facts.choose("patch_dropout", 0.0 if frozen else 0.5, half),
        ),
        optimizer=AdamW(lr=rate, weight_decay=0.05, layer_decay=0.65 if how == "full" else 1.0, betas=(0.9, 0.98)),
        schedule=Cosine(warmup=max(1, total // 10)),
        batch_size=batch,
        **lasting,
        validate_every=max(1.0, lasting.get("epochs", 0) // 10),  # to watch it costs less than a tenth of training
        ema=EMA(0.98),
    )
