"""A small Vision Transformer from scratch, for data and machines that are small too. The default without --init.

    vitrail train digits
    vitrail train fashion-mnist
    vitrail train photos/ --recipe scratch-small

Convolutions make the tokens, positions are fixed, the patches' mean is the image; Muon trains the matrices and filters. How
large the model is, how long it trains and how pictures are changed follow the size of the pictures and their number.
Expected: digits 98 %, Fashion-MNIST 91 %, CIFAR-10 80 % on their test pictures (measured, with the time each took:
docs/results.md). With fewer than some thousand photographs, fine-tuning a trained model is far better.
"""

from vitrail.data.augment import AugmentSlot, Fit, Flip, PadCrop, RandomErasing, RandomResizedCrop, Warp
from vitrail.data.preprocessing import Preprocessing
from vitrail.engine.optim import Muon
from vitrail.engine.schedule import Linear
from vitrail.models.build import configure_vit
from vitrail.models.vit import ViTConfig
from vitrail.objectives.classification import Classification
from vitrail.recipe import Data, Facts, Recipe
from vitrail.recipes.pieces import named

SMALL = 64  # pixels: pictures up to this side are taken whole
MANY = 20_000  # pictures from which on a few epochs are enough


def recipe(facts: Facts, data: Data) -> Recipe:
    small = max(facts.side) <= SMALL and not facts.several_sizes
    many = facts.images >= MANY
    wish = facts.wishes.get("model")
    model = named(facts, position="sincos2d", pool="mean") if wish else architecture(facts, small)
    size = model.image_size
    batch = facts.choose("batch_size", 256 if many else 128, f"{facts.images:,} training pictures")
    epochs = (10.0 if facts.channels == 1 else 15.0) if many else max(20.0, min(100.0, round(25_000 / facts.images)))
    lasting = facts.lasting(epochs=epochs, why=f"{facts.images:,} training pictures")
    total = lasting.get("steps") or facts.steps(lasting["epochs"], batch)
    half = (0.5,) * facts.channels
    return Recipe(
        name="scratch-small",
        data=data,
        model=model,
        preprocessing=Preprocessing(
            size, size, interpolation="bilinear" if small else "bicubic", mean=half, std=half, turn=True
        ),
        augment=augmentation(facts, small, size, total * batch / facts.images),
        objective=Classification(loss=facts.loss),
        optimizer=Muon(lr=facts.choose("lr", 1e-2, "suits Muon at this size"), matrix_lr=0.03, clip=None),
        schedule=Linear(warmup=max(1, total // 10)),
        batch_size=batch,
        **lasting,
        validate_every=max(1.0, lasting.get("epochs", 0) // 20),
    )


def architecture(facts: Facts, small: bool) -> ViTConfig:
    """Sixteen tokens or so for small pictures, sixty-four for photographs."""
    side = max(facts.side)
    patch = (4 if side <= 16 else 8) if small else 16
    near = max(16, -(-side // patch) * patch) if small else 128
    why = f"pictures of {facts.side[0]}×{facts.side[1]} pixels, a multiple of the patch" if small else "for photographs"
    size = facts.choose("size", (near, near), why)
    large = facts.images >= MANY
    count = f"{facts.images:,} training pictures"
    width = facts.choose("width", (96 if facts.channels == 1 else 128) if large else 64, count)
    depth = facts.choose("depth", 6 if large and facts.channels > 1 else 4, count)
    return configure_vit(
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


def augmentation(facts: Facts, small: bool, size: tuple[int, int], epochs: float) -> tuple[AugmentSlot, ...]:
    """Small pictures are moved, photographs cropped. Mirrored only in colour: digits and letters have a left and a right.

    A picture that is seen a few times needs no change: it is not learnt by heart.
    """
    if not small:
        return (RandomResizedCrop(size, scale=(0.25, 1.0)), Flip())
    fit = Fit(size, interpolation="bilinear")
    if epochs <= 4:
        return (fit,)
    if facts.channels == 1:
        return (fit, Warp()) if facts.images < MANY else (fit, PadCrop(2), RandomErasing(0.25))
    return (fit, PadCrop(4, "reflect"), Flip())
