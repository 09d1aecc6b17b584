"""DeiT on ImageNet-1k alone, without a teacher (Touvron et al. 2021).

    vitrail train imagenet/ --recipe deit
    vitrail train imagenet/ --recipe deit --model B/16

AdamW at 5e-4 for batch 512, weight decay 0.05, 300 epochs, 5 of warm-up, mixup 0.8 and CutMix 1.0, RandAugment (2, 9),
random erasing 0.25, label smoothing 0.1, stochastic depth 0.1. Repeated augmentation, which the authors use, is not implemented.
Expected: 72.2 % top-1 for Ti/16, 79.9 % for S/16, 81.8 % for B/16 (published; not run here).
"""

from vitrail.models.registry import configure_tokens
from vitrail.training.optim import AdamW
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes.common import plan_deit_augmentation
from vitrail.training.schedule import Cosine


def recipe(facts: Facts, data: Data) -> Recipe:
    size = facts.choose("size", (224, 224), "the authors'")
    batch = facts.choose("batch_size", 1024, "the authors'")
    name = facts.choose("model", "S/16", "the authors' middle size")
    return Recipe(
        name="deit",
        data=data,
        model=configure_tokens(name, init="deit", stochastic_depth=0.1, classes=facts.classes, image_size=size),
        **plan_deit_augmentation(facts, size),
        optimizer=AdamW(lr=5e-4 * batch / 512, weight_decay=0.05, clip=None),
        schedule=Cosine(warmup=facts.steps(5, batch), end=0.01),
        batch_size=batch,
        **facts.choose_length(epochs=300.0, why="the authors'"),
    )
