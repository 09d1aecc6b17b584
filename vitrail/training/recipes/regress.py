"""Regression: one or several numbers per image. The default with --targets.

    vitrail train houses.csv --targets price --init deit_tiny.safetensors
    vitrail train people.csv --targets age,height --init deit_tiny.safetensors --tune lora
    vitrail train houses.csv --targets price                    a small model from scratch

As `finetune` with --init and as `scratch-small`, or `video`, without it, but with Huber's loss of targets in units of their
standard deviation, and little augmentation: flips and strong crops change angles, positions and sizes. If they do not change
your numbers, use more: --set 'augment.0.scale=[0.35,1]'.

With --init the model sees the whole image, resized without keeping the aspect ratio, so that nothing is cut off.
Expected: DeiT-Ti on 400 photographs of pets, 8 epochs, the share of the animal in the image (0 to 89 %, standard deviation 16):
mean absolute error 4.6, R² 0.87 on 150 others; 7.3 and 0.73 if images are cropped (measured, one seed: docs/regression.md).
"""

from dataclasses import replace

from vitrail.data.transforms.augment import AugmentSlot, Fit, RandomResizedCrop
from vitrail.models.base import ModelConfig
from vitrail.objectives.regression import Regression
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes import common, scratch_small, video
from vitrail.training.recipes.finetune import plan_tuning

CROP_SCALE = (0.8, 1.0)  # of the area of a photograph


def choose_augmentation(facts: Facts, model: ModelConfig) -> tuple[AugmentSlot, ...]:
    """Return the augmentation: none of small images, weak crops of photographs."""
    if common.is_small(facts):
        return (Fit(model.image_size, interpolation="bilinear"),)
    return (RandomResizedCrop(model.image_size, scale=CROP_SCALE),)


def recipe(facts: Facts, data: Data) -> Recipe:
    objective = Regression(loss="huber")
    if facts.init is None:
        whole = (video if facts.frames else scratch_small).recipe(facts, data)
        augment = choose_augmentation(facts, whole.model)
        return replace(whole, name="regress", objective=objective, augment=augment, calibrate="none")
    plan, _ = plan_tuning(facts)
    size = plan["model"].image_size
    plan["preprocessing"] = replace(plan["preprocessing"], resize=size, fit="squash")  # nothing is cut off
    augment = choose_augmentation(facts, plan["model"])
    return Recipe(name="regress", data=data, objective=objective, augment=augment, calibrate="none", **plan)
