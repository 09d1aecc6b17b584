"""Masked patch prediction, the ViT paper's own experiment (section 4.6, appendix B.1.2): half of the patches are corrupted, and
their mean colours told.

    vitrail pretrain photos/ --method mpp
    vitrail pretrain photos/ --method mpp --set objective.target=down --set objective.corrupt=0.15

The paper pre-trains ViT-B/16 on JFT this way and fine-tunes it to 79.9 % on ImageNet: 2 % better than from scratch, 4 % behind
learning with labels. Every patch goes through the encoder, so a step costs what a step with labels costs.
Expected: not measured at its full length.
"""

from vitrail.data.augment import Flip
from vitrail.data.crops import RandomResizedCrop
from vitrail.engine.optim import AdamW
from vitrail.engine.schedule import Cosine
from vitrail.objectives.masked_patches import MaskedPatches
from vitrail.recipe import Data, Facts, Recipe
from vitrail.recipes.unlabelled import encoder, is_small, lasting, pipeline, watched


def recipe(facts: Facts, data: Data) -> Recipe:
    model = encoder(facts)
    batch = facts.choose("batch_size", 256 if facts.images >= 2_000 else 64, f"{facts.images:,} pictures to learn from")
    length = lasting(facts, 1_000_000 if is_small(facts) else 200_000)
    total = length.get("steps") or facts.steps(length["epochs"], batch)
    turned = () if facts.channels == 1 else (Flip(),)
    return Recipe(
        name="mpp",
        data=data,
        model=model,
        preprocessing=pipeline(facts, model),
        augment=(RandomResizedCrop(model.image_size, scale=(0.5 if is_small(facts) else 0.2, 1.0)), *turned),
        objective=MaskedPatches(),
        optimizer=AdamW(lr=facts.choose("lr", 1e-3 * batch / 256, "1e-3 for a batch of 256"), weight_decay=0.05),
        schedule=Cosine(warmup=max(1, total // 10)),
        batch_size=batch,
        **length,
        validate_every=watched(facts, batch, total),
    )
