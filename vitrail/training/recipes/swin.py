"""Swin Transformer on ImageNet-1k from scratch (Liu et al. 2021, section 4.1 and appendix A2.1; v2 2022).

    vitrail train imagenet/ --recipe swin
    vitrail train imagenet/ --recipe swin --model Swin-B
    vitrail train imagenet/ --recipe swin --model SwinV2-T

AdamW at 1e-3 for batch 1024, weight decay 0.05, 300 epochs, 20 of warm-up, cosine to 1 % of that, gradients clipped to
norm 5, mixup 0.8 and CutMix 1.0, RandAugment (2, 9), random erasing 0.25, label smoothing 0.1, stochastic depth 0.2, 0.3 and 0.5
for T, S and B. The end of the learning rate and the clipping are those of the published code. As in the paper, without repeated
augmentation and EMA. The paper trains L only after ImageNet-22k; here it gets the stochastic depth of B.
Expected: 81.3 % top-1 for Swin-T, 83.0 % for Swin-S, 83.5 % for Swin-B at 224² (published; not run here).
"""

from dataclasses import replace

from vitrail.models.base import refuse
from vitrail.models.registry import configure, find_family
from vitrail.models.swin import SwinConfig
from vitrail.training.optim import AdamW
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes.common import plan_deit_augmentation
from vitrail.training.schedule import Cosine

STOCHASTIC_DEPTH = {(96, 12): 0.2, (96, 24): 0.3}  # by width and number of layers; else 0.5


def recipe(facts: Facts, data: Data) -> Recipe:
    name = facts.choose("model", "Swin-T", "the authors' smallest")
    if not issubclass((family := find_family(name)).config, SwinConfig):
        raise refuse(family.configure(name), f"this recipe (model={name!r})", "use a Swin Transformer, such as Swin-T")
    size = facts.choose("size", configure(name).image_size, "the authors'")
    model = configure(name, classes=facts.classes, channels=facts.channels, image_size=size)
    assert isinstance(model, SwinConfig)
    batch = facts.choose("batch_size", 1024, "the authors'")
    return Recipe(
        name="swin",
        data=data,
        model=replace(model, stochastic_depth=STOCHASTIC_DEPTH.get((model.width, model.depth), 0.5)),
        **plan_deit_augmentation(facts, size),
        optimizer=AdamW(lr=facts.choose("lr", 1e-3 * batch / 1024, "for this batch size"), weight_decay=0.05, clip=5.0),
        schedule=Cosine(warmup=facts.steps(20, batch), end=0.01),
        batch_size=batch,
        **facts.choose_length(epochs=300.0, why="the authors'"),
    )
