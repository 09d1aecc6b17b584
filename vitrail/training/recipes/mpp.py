"""Masked patch prediction, the ViT paper's own experiment (section 4.6, appendix B.1.2): mean colours of corrupted patches.

    vitrail pretrain photos/ --method mpp
    vitrail pretrain photos/ --method mpp --set objective.target=down --set objective.corrupt=0.15

The paper pre-trains ViT-B/16 on JFT this way and fine-tunes it to 79.9 % on ImageNet: 2 % better than from scratch, 4 % behind
pretraining with labels. Half of the patches are corrupted, and all go through the encoder: a step costs as much as with labels.
Expected: not measured at its full length.
"""

from vitrail.data.transforms.augment import Flip
from vitrail.data.transforms.crops import RandomResizedCrop
from vitrail.objectives.masked_patches import MaskedPatches
from vitrail.training.optim import AdamW
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes.common import (
    choose_length,
    choose_preprocessing,
    configure_encoder,
    is_small,
    validation_interval,
)
from vitrail.training.schedule import Cosine


def recipe(facts: Facts, data: Data) -> Recipe:
    model = configure_encoder(facts)
    batch = facts.choose("batch_size", 256 if facts.images >= 2_000 else 64, f"{facts.images:,} training images")
    length = choose_length(facts, 1_000_000 if is_small(facts) else 200_000)
    total = length.get("steps") or facts.steps(length["epochs"], batch)
    flip = () if facts.channels == 1 else (Flip(),)
    return Recipe(
        name="mpp",
        data=data,
        model=model,
        preprocessing=choose_preprocessing(facts, model),
        augment=(RandomResizedCrop(model.image_size, scale=(0.5 if is_small(facts) else 0.2, 1.0)), *flip),
        objective=MaskedPatches(),
        optimizer=AdamW(lr=facts.choose("lr", 1e-3 * batch / 256, "1e-3 for a batch of 256"), weight_decay=0.05),
        schedule=Cosine(warmup=max(1, total // 10)),
        batch_size=batch,
        **length,
        validate_every=validation_interval(facts, batch, total),
    )
