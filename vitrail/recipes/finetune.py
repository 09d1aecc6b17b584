"""A trained Vision Transformer for your own pictures. The default with --init.

    vitrail train photos/ --init deit_tiny.safetensors
    vitrail train photos/ --init deit_tiny.safetensors --tune lora

AdamW with a lower rate for each layer further from the head, a new head that begins at zero, random crops and flips. How many
epochs depends on how many pictures there are.
Expected: see docs/results.md.
"""

from dataclasses import replace

from vitrail.data.augment import Flip
from vitrail.data.crops import RandomResizedCrop
from vitrail.data.preprocessing import Preprocessing
from vitrail.engine.optim import AdamW
from vitrail.engine.schedule import Cosine
from vitrail.objectives.classification import Classification
from vitrail.recipe import Data, Facts, Recipe
from vitrail.recipes.pieces import started


def recipe(facts: Facts, data: Data) -> Recipe:
    model = started(facts)
    size = facts.choose("size", model.image_size, "the size that the checkpoint was trained at")
    model = started(facts, size)
    pipeline = facts.init_preprocessing or Preprocessing(model.image_size, model.image_size)
    batch = facts.choose("batch_size", 64 if facts.images < 20_000 else 256, f"for {facts.images:,} training pictures")
    epochs = min(20.0, max(3.0, round(16_000 / facts.images)))
    lasting = facts.lasting(epochs=epochs, why=f"for {facts.images:,} training pictures")
    rate = facts.choose("lr", 5e-4 * (batch / 64) ** 0.5, "for this batch size")
    return Recipe(
        name="finetune",
        data=data,
        model=model,
        preprocessing=replace(pipeline.at(size), turn=True),
        augment=(RandomResizedCrop(size, scale=(0.35, 1.0)), Flip()),
        objective=Classification(loss=facts.loss, smoothing=0.0 if facts.several else 0.1),
        optimizer=AdamW(lr=rate, weight_decay=0.05, layer_decay=0.75),
        schedule=Cosine(warmup=max(1, facts.steps(epochs, batch) // 10)),
        batch_size=batch,
        **lasting,
    )
