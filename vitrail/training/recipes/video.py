"""A small Vision Transformer of clips from scratch. The default for videos without --init.

    vitrail train videos/
    vitrail train videos/ --clip 16x2
    vitrail train videos/ --recipe video --model S/16

Tubelets of two frames, fixed positions, mean pooling; Muon trains the matrices, as in scratch-small. The clip, the size of the
model and the length of the run depend on the videos. Frames are shifted or cropped, all of a clip alike, and not flipped: left
and right may be classes. With fewer than some thousand videos, fine-tuning a trained model of clips or of images is better.
Expected: moving-digits with --epochs 4: 97.0 ± 0.2 % of 400 test videos (measured, three seeds: docs/results.md). Not measured
at its full length.
"""

from vitrail.data.transforms.augment import AugmentSlot, Fit, PadCrop, RandomResizedCrop
from vitrail.models.base import ModelConfig
from vitrail.models.registry import configure_tokens
from vitrail.objectives.classification import Classification
from vitrail.training.optim import Muon
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes import common
from vitrail.training.recipes.clips import choose_clip, fit_clip
from vitrail.training.recipes.scratch_small import plan_training

SMALL_FRAMES, FRAMES = 8, 16  # of a clip of small frames, and of others
SAMPLES = 25_000  # clips of a whole run on little data


def recipe(facts: Facts, data: Data) -> Recipe:
    small = common.is_small(facts)
    default = fit_clip(facts, SMALL_FRAMES if small else FRAMES)
    clip = choose_clip(facts, default, "for small frames" if small else "published")
    slots = {"position": "sinusoid1d", "pool": "mean", "frames": clip.frames}
    model = common.configure_named(facts, **slots) if facts.overrides.get("model") else configure_model(facts, slots)
    epochs = max(15.0, min(100.0, round(SAMPLES / facts.images)))
    plan = plan_training(facts, model, 128 if small else 32, epochs, clip=clip)
    plan["augment"] = choose_augmentation(facts, model.image_size)
    lr = facts.choose("lr", 1e-2 if small else 5e-3, "suits Muon at this size")
    return Recipe(
        name="video",
        data=data,
        objective=Classification(loss=facts.loss),
        optimizer=Muon(lr=lr, matrix_lr=0.03, clip=None),
        **plan,
    )


def configure_model(facts: Facts, slots: dict[str, object]) -> ModelConfig:
    """Return a model with 4×4 patches per tubelet for frames of 32×32 pixels, 7×7 for frames of 112×112."""
    small = common.is_small(facts)
    patch = (4 if max(facts.side) <= 16 else 8) if small else 16
    near = max(16, -(-max(facts.side) // patch) * patch) if small else 112
    size = facts.choose("size", (near, near), f"frames of {facts.side[0]}×{facts.side[1]} pixels")
    width = facts.choose("width", 96 if small else 192, "for a laptop")
    depth = facts.choose("depth", 4 if small else 6, "for a laptop")
    shape = {"classes": facts.classes, "channels": facts.channels, "image_size": size}
    return configure_tokens(patch=patch, width=width, depth=depth, heads=max(1, width // 32), **slots, **shape)


def choose_augmentation(facts: Facts, size: tuple[int, int]) -> tuple[AugmentSlot, ...]:
    """Return the augmentation: shifts of small frames, crops of others."""
    if common.is_small(facts):
        return (Fit(size, interpolation="bilinear"), PadCrop(max(1, size[0] // 16)))
    return (RandomResizedCrop(size, scale=(0.35, 1.0)),)
