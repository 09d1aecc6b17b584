"""Feature distillation without labels (AM-RADIO, Ranzinger et al. 2024): a small model learns a trained model's features.

    vitrail pretrain photos/ --method features --teacher clip.safetensors
    vitrail pretrain photos/ --method features --teacher deit_tiny.safetensors --teacher-cache

The teacher may be any model file, ending in features or in classes, which are ignored: the student's vector learns the direction
of the input of the teacher's head. The teacher sees the student's crops and mixed images, as in "A good teacher is patient and
consistent" (Beyer et al. 2022). With --teacher-cache its features of whole images are computed once, which is faster, and images
are not mixed.
Expected: not measured at its full length; docs/pretraining.md has two short runs. Few steps are not enough for photographs.
"""

from vitrail.data.transforms.augment import Flip
from vitrail.data.transforms.crops import RandomResizedCrop
from vitrail.objectives.feature_distillation import FeatureDistillation
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
    if facts.teacher is None:
        raise ValueError("this recipe needs a teacher: give --teacher MODEL")
    model, small = configure_encoder(facts), is_small(facts)
    batch = facts.choose("batch_size", 128 if facts.images >= 2_000 else 32, f"{facts.images:,} training images")
    length = choose_length(facts, 500_000 if small else 100_000)
    total = length.get("steps") or facts.steps(length["epochs"], batch)
    base = 1e-3 if model.size.width < 384 else 5e-4
    lr = facts.choose("lr", base * (batch / 128) ** 0.5, f"{base:g} for a batch of 128 and this width")
    flip = () if facts.channels == 1 else (Flip(),)
    return Recipe(
        name="features",
        data=data,
        model=model,
        preprocessing=choose_preprocessing(facts, model),
        augment=(RandomResizedCrop(model.image_size, scale=(0.5 if small else 0.25, 1.0)), *flip),
        objective=FeatureDistillation(mixup=0.0 if facts.teacher.cached else 0.5),
        optimizer=AdamW(lr=lr, weight_decay=0.05, clip=1.0),
        schedule=Cosine(warmup=max(1, total // 10)),
        batch_size=batch,
        **length,
        teacher=facts.teacher,
        validate_every=validation_interval(facts, batch, total),
    )
