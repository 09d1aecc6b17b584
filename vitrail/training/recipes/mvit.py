"""MViT v2 on ImageNet-1k from scratch (Li et al. 2021, with the values of the published code).

    vitrail train imagenet/ --recipe mvit
    vitrail train imagenet/ --recipe mvit --model MViTv2-B

AdamW at 2.5e-4 for batch 256, weight decay 0.05, 300 epochs, 70 of warm-up, cosine to 0.4 % of that, gradients clipped to
norm 1, mixup 0.8 and CutMix 1.0, RandAugment (6, 9), random erasing 0.25, label smoothing 0.1, stochastic depth 0.1 for T and S,
0.3 for B and 0.5 for L. Relative positions have no weight decay, as in timm; in the published code they have.
Expected: 82.3 % top-1 for MViTv2-T, 83.6 % for MViTv2-S, 84.4 % for MViTv2-B, 85.3 % for MViTv2-L at 224² (published; not run
here).
"""

from dataclasses import replace

from vitrail.models.base import refuse
from vitrail.models.mvit_config import MViTConfig
from vitrail.models.registry import configure, find_family
from vitrail.training.optim import AdamW
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes.common import plan_deit_augmentation
from vitrail.training.schedule import Cosine

STOCHASTIC_DEPTH = {(96, 10): 0.1, (96, 16): 0.1, (96, 24): 0.3}  # by width and number of layers; else 0.5


def recipe(facts: Facts, data: Data) -> Recipe:
    name = facts.choose("model", "MViTv2-T", "the authors' smallest")
    if not issubclass((family := find_family(name)).config, MViTConfig):
        raise refuse(family.configure(name), f"this recipe (model={name!r})", "use an MViT, such as MViTv2-T")
    size = facts.choose("size", configure(name).image_size, "the authors'")
    model = configure(name, classes=facts.classes, channels=facts.channels, image_size=size)
    assert isinstance(model, MViTConfig)
    batch = facts.choose("batch_size", 256, "the authors'")
    lr = facts.choose("lr", 2.5e-4 * batch / 256, "for this batch size")
    return Recipe(
        name="mvit",
        data=data,
        model=replace(model, stochastic_depth=STOCHASTIC_DEPTH.get((model.width, model.depth), 0.5)),
        **plan_deit_augmentation(facts, size, operations=6),
        optimizer=AdamW(lr=lr, weight_decay=0.05, clip=1.0),
        schedule=Cosine(warmup=facts.steps(70, batch), end=0.004),
        batch_size=batch,
        **facts.choose_length(epochs=300.0, why="the authors'"),
    )
