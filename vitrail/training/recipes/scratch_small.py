"""A small Vision Transformer from scratch, for small data and small machines. The default without --init.

    vitrail train digits
    vitrail train fashion-mnist
    vitrail train photos/ --recipe scratch-small

Convolutional stem, fixed positions, mean pooling; Muon trains the matrices and filters. The size of the model, the length of the
run and the augmentation depend on the size and number of the images.
Expected: digits 98 %, Fashion-MNIST 91 %, CIFAR-10 80 % on their test images (measured, with the time each took:
docs/results.md). With fewer than some thousand photographs, fine-tuning a trained model is far better.
"""

from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augment import AugmentSlot, Fit, Flip, PadCrop, RandomErasing, RandomResizedCrop, Warp
from vitrail.models.base import TokenConfig
from vitrail.models.registry import configure_tokens
from vitrail.objectives.classification import Classification
from vitrail.training.optim import Muon
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes.common import configure_named, is_small
from vitrail.training.schedule import Linear

LARGE_DATA = 20_000  # training images from which on a few epochs are enough


def recipe(facts: Facts, data: Data) -> Recipe:
    small = is_small(facts)
    many = facts.images >= LARGE_DATA
    override = facts.overrides.get("model")
    model = configure_named(facts, position="sincos2d", pool="mean") if override else configure_model(facts, small)
    size = model.image_size
    batch = facts.choose("batch_size", 256 if many else 128, f"{facts.images:,} training images")
    epochs = (10.0 if facts.channels == 1 else 15.0) if many else max(20.0, min(100.0, round(25_000 / facts.images)))
    lasting = facts.choose_length(epochs=epochs, why=f"{facts.images:,} training images")
    total = lasting.get("steps") or facts.steps(lasting["epochs"], batch)
    half = (0.5,) * facts.channels
    return Recipe(
        name="scratch-small",
        data=data,
        model=model,
        preprocessing=Preprocessing(
            size, size, interpolation="bilinear" if small else "bicubic", mean=half, std=half, turn=True
        ),
        augment=choose_augmentation(facts, small, size, total * batch / facts.images),
        objective=Classification(loss=facts.loss),
        optimizer=Muon(lr=facts.choose("lr", 1e-2, "suits Muon at this size"), matrix_lr=0.03, clip=None),
        schedule=Linear(warmup=max(1, total // 10)),
        batch_size=batch,
        **lasting,
        validate_every=max(1.0, lasting.get("epochs", 0) // 20),
    )


def configure_model(facts: Facts, small: bool) -> TokenConfig:
    """Return a model with about 16 tokens for small images, 64 for photographs."""
    side = max(facts.side)
    patch = (4 if side <= 16 else 8) if small else 16
    near = max(16, -(-side // patch) * patch) if small else 128
    why = f"images of {facts.side[0]}×{facts.side[1]} pixels, a multiple of the patch" if small else "for photographs"
    size = facts.choose("size", (near, near), why)
    large = facts.images >= LARGE_DATA
    count = f"{facts.images:,} training images"
    width = facts.choose("width", (96 if facts.channels == 1 else 128) if large else 64, count)
    depth = facts.choose("depth", 6 if large and facts.channels > 1 else 4, count)
    return configure_tokens(
        patch=patch,
        width=width,
        depth=depth,
        heads=max(1, width // 32),
        embed="conv-stem",
        position="sincos2d",
        pool="mean",
        classes=facts.classes,
        channels=facts.channels,
        image_size=size,
    )


def choose_augmentation(facts: Facts, small: bool, size: tuple[int, int], epochs: float) -> tuple[AugmentSlot, ...]:
    """Return the augmentation: shifts for small images, crops for photographs. Grey images, such as digits, are not flipped.

    Images that are seen a few times only need no augmentation.
    """
    if not small:
        return (RandomResizedCrop(size, scale=(0.25, 1.0)), Flip())
    fit = Fit(size, interpolation="bilinear")
    if epochs <= 4:
        return (fit,)
    if facts.channels == 1:
        return (fit, Warp()) if facts.images < LARGE_DATA else (fit, PadCrop(2), RandomErasing(0.25))
    return (fit, PadCrop(4, "reflect"), Flip())
