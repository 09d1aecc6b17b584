"""A teacher's features without labels (as in AM-RADIO, Ranzinger et al. 2024): a small model learns what a trained one sees.

    vitrail pretrain photos/ --method features --teacher clip.safetensors
    vitrail pretrain photos/ --method features --teacher deit_tiny.safetensors --teacher-cache

The teacher may be any model file, ending in features or in classes of its own, which do not matter: the student's vector is to
point the way of the one that comes to the teacher's head. The teacher is shown every crop that the student sees, also blends of
two pictures, as in "A good teacher is patient and consistent" (Beyer et al. 2022). With --teacher-cache it is asked once about
each picture as it is, which is quicker, and nothing is blended.
Expected: not measured at its full length; docs/pretraining.md has two short runs. Few steps are not enough for photographs.
"""

from vitrail.data.augment import Flip
from vitrail.data.crops import RandomResizedCrop
from vitrail.engine.optim import AdamW
from vitrail.engine.schedule import Cosine
from vitrail.objectives.feature_distillation import FeatureDistillation
from vitrail.recipe import Data, Facts, Recipe
from vitrail.recipes.unlabelled import encoder, is_small, lasting, pipeline, watched


def recipe(facts: Facts, data: Data) -> Recipe:
    if facts.teacher is None:
        raise ValueError("this recipe learns a teacher's features: give --teacher MODEL")
    model, small = encoder(facts), is_small(facts)
    batch = facts.choose("batch_size", 128 if facts.images >= 2_000 else 32, f"{facts.images:,} pictures to learn from")
    length = lasting(facts, 500_000 if small else 100_000)
    total = length.get("steps") or facts.steps(length["epochs"], batch)
    base = 1e-3 if model.size.width < 384 else 5e-4
    rate = facts.choose("lr", base * (batch / 128) ** 0.5, f"{base:g} for a batch of 128 and this width")
    turned = () if facts.channels == 1 else (Flip(),)
    return Recipe(
        name="features",
        data=data,
        model=model,
        preprocessing=pipeline(facts, model),
        augment=(RandomResizedCrop(model.image_size, scale=(0.5 if small else 0.25, 1.0)), *turned),
        objective=FeatureDistillation(mixup=0.0 if facts.teacher.cached else 0.5),
        optimizer=AdamW(lr=rate, weight_decay=0.05, clip=1.0),
        schedule=Cosine(warmup=max(1, total // 10)),
        batch_size=batch,
        **length,
        teacher=facts.teacher,
        validate_every=watched(facts, batch, total),
    )
