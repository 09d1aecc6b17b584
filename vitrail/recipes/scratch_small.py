"""A small Vision Transformer from scratch, for data and machines that are small too. The default without --init.

    vitrail train digits
    vitrail train fashion-mnist
    vitrail train photos/ --recipe scratch-small

Convolutions make the tokens, positions are fixed, the patches' mean is the image; Muon trains the matrices. Size of the model,
epochs and augmentation follow the size of the data.
Expected: see docs/results.md.
"""

from vitrail.data.augment import Flip
from vitrail.data.crops import Fit, RandomResizedCrop
from vitrail.data.preprocessing import Preprocessing
from vitrail.engine.optim import Muon
from vitrail.engine.schedule import Linear
from vitrail.models.build import configure_vit
from vitrail.objectives.classification import Classification
from vitrail.recipe import Data, Facts, Recipe

SMALL = 64  # pixels: pictures up to this side are taken whole


def recipe(facts: Facts, data: Data) -> Recipe:
    side = max(facts.side)
    small = side <= SMALL and not facts.several_sizes
    patch = 16 if not small else 8 if side > 16 else 2
    whole = -(-side // patch) * patch
    size = facts.choose(
        "size",
        (whole, whole) if small else (128, 128),
        f"pictures of {side} pixels, in patches of {patch}" if small else "enough for a small model",
    )
    width = 64
    model = configure_vit(
        patch=patch,
        width=width,
        depth=4,
        heads=2,
        embed="conv-stem",
        position="sincos2d",
        pool="mean",
        classes=facts.classes,
        channels=facts.channels,
        image_size=size,
    )
    batch = facts.choose("batch_size", 256 if facts.images >= 20_000 else 64, f"{facts.images:,} training pictures")
    epochs = 2.0 if facts.images >= 20_000 else 30.0
    lasting = facts.lasting(epochs=epochs, why=f"{facts.images:,} training pictures")
    half = (0.5,) * facts.channels
    return Recipe(
        name="scratch-small",
        data=data,
        model=model,
        preprocessing=Preprocessing(size, size, mean=half, std=half, turn=True),
        augment=(Fit(size),) if small else (RandomResizedCrop(size, scale=(0.25, 1.0)), Flip()),
        objective=Classification(loss=facts.loss),
        optimizer=Muon(lr=facts.choose("lr", 1e-2, "what suits Muon"), matrix_lr=0.03, clip=None),
        schedule=Linear(warmup=max(1, facts.steps(epochs, batch) // 10)),
        batch_size=batch,
        **lasting,
    )
