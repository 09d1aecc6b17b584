"""Swin Transformer fine-tuned on ImageNet-1k, from ImageNet-22k or to larger images (Liu et al. 2021, appendix A2).

    vitrail train imagenet/ --recipe swin-finetune --init swin_base_patch4_window7_224_22k.pth
    vitrail train imagenet/ --recipe swin-finetune --init swin_base_patch4_window12_384_22k.pth --size 384

AdamW at a constant 1e-5 for batch 1024, weight decay 1e-8, 30 epochs, the augmentation of training from scratch, stochastic depth
0.1; 0.2 for B and L, as in the published code. (That code has a cosine from 4e-5 for batch 1024 with 5 epochs of warm-up where
the paper has a constant: `--set schedule=Cosine`.) For few images of your own, the recipe finetune is better.
Expected: 85.2 % top-1 for Swin-B at 224², 86.4 % at 384², 87.3 % for Swin-L at 384², from ImageNet-22k (published; not run here).
"""

from dataclasses import replace

from vitrail.models.base import refuse
from vitrail.models.swin import SwinConfig
from vitrail.training.optim import AdamW
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes.common import configure_init, plan_deit_augmentation
from vitrail.training.schedule import Constant


def recipe(facts: Facts, data: Data) -> Recipe:
    init = configure_init(facts)
    if not isinstance(init, SwinConfig):
        raise refuse(init, "the recipe swin-finetune", "use recipe='finetune'")
    size = facts.choose("size", init.image_size, "size of the checkpoint")
    batch = facts.choose("batch_size", 1024, "the authors'")
    planned = plan_deit_augmentation(facts, size)
    pipeline = facts.init_preprocessing or planned["preprocessing"].with_channels(init.channels)
    planned["preprocessing"] = pipeline.with_size(size)
    return Recipe(
        name="swin-finetune",
        data=data,
        model=replace(configure_init(facts, size), stochastic_depth=0.1 if init.width <= 96 else 0.2),
        **planned,
        optimizer=AdamW(lr=facts.choose("lr", 1e-5 * batch / 1024, "for this batch size"), weight_decay=1e-8, clip=5.0),
        schedule=Constant(),
        batch_size=batch,
        **facts.choose_length(epochs=30.0, why="the authors'"),
    )
