"""A small Vision Transformer from scratch that learns from a trained model. The default with --teacher.

    vitrail train photos/ --teacher runs/photos-finetune-1
    vitrail train photos/ --teacher runs/photos-finetune-1 --teacher-cache
    vitrail train photos/ --teacher dino.safetensors --distil features

DeiT's distillation (Touvron et al. 2021) for a folder of photographs: a token for the labels and one for the teacher, and the
answer is the mean of both. As in "A good teacher is patient and consistent" (Beyer et al. 2022), the teacher sees every crop and
every blend that the student sees, is followed in all that it says and not in its surest class alone, and that for long.
Convolutions make the tokens and Muon trains the matrices, as in scratch-small. With --model Ti/16 the student is DeiT's own.
Expected: clothing at 96×96 in 300 steps, taught by DeiT-Ti with --teacher-cache, 54.5 % where the same student without a
teacher has 51.1 %, the mean of three seeds (measured: docs/results.md). Not measured at its full length.
"""

from dataclasses import replace

from vitrail.data.preprocessing import Preprocessing
from vitrail.engine.optim import Muon
from vitrail.engine.schedule import Linear
from vitrail.models.build import Config, configure_vit
from vitrail.models.vit import ViTConfig
from vitrail.nn.pool import ClassToken
from vitrail.nn.prefix import Prefix
from vitrail.objectives.distillation import Distillation
from vitrail.objectives.feature_distillation import FeatureDistillation
from vitrail.objectives.token_labelling import TokenLabelling
from vitrail.recipe import Data, Facts, Recipe, TaughtSlot
from vitrail.recipes.pieces import named
from vitrail.recipes.scratch_small import SMALL, architecture, augmentation

FEW = 5_000  # pictures up to which small batches are better


def recipe(facts: Facts, data: Data) -> Recipe:
    if facts.teacher is None:
        raise ValueError("this recipe learns from a teacher: give --teacher MODEL")
    small = max(facts.side) <= SMALL and not facts.several_sizes
    how = facts.choose("distil", "soft", "the whole of the teacher's answer tells more than its surest class")
    model = student(facts, small, how)
    size = model.image_size
    batch = facts.choose("batch_size", 64 if facts.images < FEW else 128, f"{facts.images:,} training pictures")
    epochs = max(20.0, min(300.0, round(80_000 / facts.images)))
    lasting = facts.lasting(epochs=epochs, why=f"{facts.images:,} training pictures, and a student that is quick")
    total = lasting.get("steps") or facts.steps(lasting["epochs"], batch)
    half = (0.5,) * facts.channels
    return Recipe(
        name="distil",
        data=data,
        model=model,
        preprocessing=Preprocessing(
            size, size, interpolation="bilinear" if small else "bicubic", mean=half, std=half, turn=True
        ),
        augment=augmentation(facts, small, size, total * batch / facts.images),
        objective=objective(facts, how),
        optimizer=Muon(lr=facts.choose("lr", 5e-3, "suits Muon at this size"), matrix_lr=0.02, clip=None),
        schedule=Linear(warmup=max(1, total // 10)),
        batch_size=batch,
        **lasting,
        teacher=facts.teacher,
        validate_every=max(1.0, lasting.get("epochs", 0) // 20),
    )


def objective(facts: Facts, how: str) -> TaughtSlot:
    """What is asked of the student, in which labels have a small share: a teacher who learnt them says what they say, and more.

    On the few pictures that it was trained on, a teacher says little but their labels. So it is asked about blends of two,
    where it has no label to repeat; many with little of the second, because a student needs long to learn from halves. Where it
    was asked beforehand there is nothing of that to learn.
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


def student(facts: Facts, small: bool, how: str) -> Config:
    """One and a third million parameters for photographs, with DeiT's two tokens where there are answers to learn."""
    tokens = how in ("hard", "soft")
    if facts.wishes.get("model"):
        return named(facts, prefix="class+distillation" if tokens else "class")
    found = architecture(facts, small) if small else for_photographs(facts)
    return replace(found, prefix=Prefix(2), pool=ClassToken(), init="deit") if tokens else found


def for_photographs(facts: Facts) -> ViTConfig:
    """Larger than without a teacher, who keeps it from learning its pictures by heart."""
    width = facts.choose("width", 128, "a student with a teacher may be larger than one without")
    return configure_vit(
        patch=16,
        width=width,
        depth=facts.choose("depth", 6, "as above"),
        heads=max(1, width // 32),
        embed="conv-stem",
        position="sincos2d",
        pool="mean",
        classes=facts.classes,
        channels=facts.channels,
        image_size=facts.choose("size", (128, 128), "for photographs"),
    )
