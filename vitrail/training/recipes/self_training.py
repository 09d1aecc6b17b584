"""Fine-tuning with noise, for the students of self-training. The default of `vitrail train --unlabelled` with --init.

    vitrail train photos/ --unlabelled more-photos/ --init deit_tiny.safetensors
    vitrail train photos/ --unlabelled more-photos/ --init deit_tiny.safetensors --teacher runs/photos-finetune-1

The recipe finetune with RandAugment and stochastic depth: a student that sees distorted images has to learn more than its teacher
knew (Xie et al. 2020, "Self-training with Noisy Student improves ImageNet classification"). Patch dropout, which finetune has, is
noise too. Images with and without labels of their own are learnt alike.
Expected: see docs/self-training.md.
"""

from dataclasses import replace

from vitrail.data.transforms.randaugment import RandAugment
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes import finetune

STOCHASTIC_DEPTH = 0.1
DISTORTION = RandAugment(layers=2, magnitude=9.0, spread=0.5)


def recipe(facts: Facts, data: Data) -> Recipe:
    base = finetune.recipe(facts, data)
    model = base.model
    if hasattr(model, "stochastic_depth"):
        model = replace(model, stochastic_depth=STOCHASTIC_DEPTH)  # type: ignore[call-arg]
    return replace(base, name="self-training", model=model, augment=(*base.augment, DISTORTION))
