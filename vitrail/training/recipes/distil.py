"""A small Vision Transformer from scratch, distilled from a trained model. The default with --teacher.

    vitrail train photos/ --teacher runs/photos-finetune-1
    vitrail train photos/ --teacher runs/photos-finetune-1 --teacher-cache
    vitrail train photos/ --teacher dino.safetensors --distil features

DeiT's distillation (Touvron et al. 2021) for a folder of photographs: a token for the labels and one for the teacher, whose mean
is the output. As in "A good teacher is patient and consistent" (Beyer et al. 2022), the teacher sees the student's crops and
mixed images, the student matches the whole distribution, and training is long. The stem is convolutional and Muon trains the
matrices, as in scratch-small. With --model Ti/16 the student is DeiT's own.
Expected: clothing at 96×96 in 300 steps, DeiT-Ti as teacher with --teacher-cache: 54.5 %, without a teacher 51.1 %, mean of three
seeds (measured: docs/results.md). Not measured at its full length.
"""

from dataclasses import replace

from vitrail.models.base import ModelConfig, TokenConfig
from vitrail.nn.embed import Prefix
from vitrail.nn.pool import ClassToken
from vitrail.objectives.distillation import Distillation
from vitrail.objectives.feature_distillation import FeatureDistillation
from vitrail.objectives.token_labelling import TokenLabelling
from vitrail.training.optim import Muon
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes.common import configure_compact, configure_named, is_small
from vitrail.training.recipes.scratch_small import configure_model, plan_training

SMALL_DATA = 5_000  # training images up to which small batches are better


def recipe(facts: Facts, data: Data) -> Recipe:
    if facts.teacher is None:
        raise ValueError("this recipe needs a teacher: give teacher=MODEL")
    how = facts.choose("distil", "soft", "the teacher's whole distribution has more information than its top class")
    model = configure_student(facts, how)
    epochs = max(20.0, min(300.0, round(80_000 / facts.images)))
    plan = plan_training(facts, model, 64 if facts.images < SMALL_DATA else 128, epochs, ", and a fast student")
    lr = facts.choose("lr", 5e-3, "suits Muon at this size")
    return Recipe(
        name="distil",
        data=data,
        objective=choose_objective(facts, how),
        optimizer=Muon(lr=lr, matrix_lr=0.02, clip=None),
        teacher=facts.teacher,
        **plan,
    )


def choose_objective(facts: Facts, how: str) -> Distillation | FeatureDistillation | TokenLabelling:
    """Return the objective. Labels have a small share: the teacher's outputs contain them, and more.

    On its own training images a teacher outputs little but their labels, so images are mixed: mixup 0.5, which mostly draws
    small shares of the second image, because halves need long training. With cached outputs mixing adds no information.
    """
    if how == "features":
        return FeatureDistillation(loss=facts.loss)
    if how == "tokens":
        return TokenLabelling(loss=facts.loss)
    assert facts.teacher is not None
    blend = 0.0 if facts.teacher.cached else 0.5
    if how == "soft":
        return Distillation(loss=facts.loss, mixup=blend, kind="soft", alpha=0.9, temperature=2.0, per="picture")
    return Distillation(loss=facts.loss, mixup=blend, kind="hard", alpha=0.5)


def configure_student(facts: Facts, how: str) -> ModelConfig:
    """Return the student: 1.3 million parameters for photographs, with DeiT's two tokens to learn logits."""
    tokens = how in ("hard", "soft")
    if facts.overrides.get("model"):
        return configure_named(facts, prefix="class+distillation" if tokens else "class")
    model = configure_model(facts) if is_small(facts) else configure_photo_student(facts)
    return replace(model, prefix=Prefix(2), pool=ClassToken(), init="deit") if tokens else model


def configure_photo_student(facts: Facts) -> TokenConfig:
    """Return a student for photographs, larger than without a teacher, which reduces overfitting."""
    width = facts.choose("width", 128, "a teacher allows a larger student")
    depth = facts.choose("depth", 6, "as above")
    size = facts.choose("size", (128, 128), "for photographs")
    return configure_compact(facts, facts.classes, 16, width, depth, size)
