"""Feature distillation without labels (AM-RADIO, Ranzinger et al. 2024): a small model learns a trained model's features.

    vitrail pretrain photos/ --method features --teacher clip.safetensors
    vitrail pretrain photos/ --method features --teacher deit_tiny.safetensors --teacher-cache

The teacher may be any model file, ending in features or in classes, which are ignored: the student's vector learns the direction
of the input of the teacher's head. The teacher sees the student's crops and mixed images, as in "A good teacher is patient and
consistent" (Beyer et al. 2022). With --teacher-cache its features of whole images are computed once, which is faster, and images
are not mixed.
Expected: not measured at its full length; docs/pretraining.md has two short runs. Few steps are not enough for photographs.
"""

from vitrail.objectives.feature_distillation import FeatureDistillation
from vitrail.training.optim import AdamW
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes.common import configure_encoder, crop_and_flip, plan_pretraining


def recipe(facts: Facts, data: Data) -> Recipe:
    if facts.teacher is None:
        raise ValueError("this recipe needs a teacher: give teacher=MODEL")
    model = configure_encoder(facts)
    plan, _ = plan_pretraining(facts, model, batch=128, small=500_000, photos=100_000)
    base = 1e-3 if model.size.width < 384 else 5e-4
    lr = facts.choose("lr", base * (plan["batch_size"] / 128) ** 0.5, f"{base:g} for a batch of 128 and this width")
    return Recipe(
        name="features",
        data=data,
        augment=crop_and_flip(facts, model.image_size, photos=0.25),
        objective=FeatureDistillation(mixup=0.0 if facts.teacher.cached else 0.5),
        optimizer=AdamW(lr=lr, weight_decay=0.05, clip=1.0),
        teacher=facts.teacher,
        **plan,
    )
