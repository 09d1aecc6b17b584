"""Masked patch prediction, the ViT paper's own experiment (section 4.6, appendix B.1.2): mean colours of corrupted patches.

    vitrail pretrain photos/ --method mpp
    vitrail pretrain photos/ --method mpp --set objective.target=down --set objective.corrupt=0.15

The paper pre-trains ViT-B/16 on JFT this way and fine-tunes it to 79.9 % on ImageNet: 2 % better than from scratch, 4 % behind
pretraining with labels. Half of the patches are corrupted, and all go through the encoder: a step costs as much as with labels.
Expected: not measured at its full length.
"""

from vitrail.objectives.masked_patches import MaskedPatches
from vitrail.training.optim import AdamW
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes.common import configure_encoder, crop_and_flip, plan_pretraining


def recipe(facts: Facts, data: Data) -> Recipe:
    model = configure_encoder(facts)
    plan, _ = plan_pretraining(facts, model, batch=256, small=1_000_000, photos=200_000)
    lr = facts.choose("lr", 1e-3 * plan["batch_size"] / 256, "1e-3 for a batch of 256")
    return Recipe(
        name="mpp",
        data=data,
        augment=crop_and_flip(facts, model.image_size, photos=0.2),
        objective=MaskedPatches(),
        optimizer=AdamW(lr=lr, weight_decay=0.05),
        **plan,
    )
