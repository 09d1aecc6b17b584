"""DINO (Caron et al. 2021): crops of one picture are to be answered alike, by a student and by the mean of what it was.

    vitrail pretrain photos/ --method dino
    vitrail pretrain cifar-10 --method dino --epochs 20

Its features are good as they are: nearest neighbours find classes that nobody named. Several crops of each picture make a step
dear. Watch the signals: an alarm stops a run whose features collapse. Features are standardised for the heads, without which
short runs do not begin to learn; for photographs the published settings are 100 to 800 epochs of ImageNet with ViT-S/16, batch
1,024, 65,536 outputs, and no standardising.
Expected: CIFAR-10 in 24.5 epochs (--steps 8600) 51 % of held-out pictures by nearest neighbours, where raw pixels have 36 % and
the untrained network 26 % (measured: docs/results.md). Photographs were not measured.
"""

from vitrail.data.augment import AugmentSlot, ColourJitter, Flip
from vitrail.data.crops import RandomResizedCrop
from vitrail.data.photometric import Blur, Grey, Solarise
from vitrail.data.views import Views
from vitrail.engine.optim import AdamW, Muon, OptimizerSlot
from vitrail.engine.schedule import Cosine
from vitrail.models.build import configure_vit
from vitrail.models.vit import ViTConfig
from vitrail.objectives.dino import DINO
from vitrail.recipe import Data, Facts, Recipe
from vitrail.recipes.unlabelled import encoder, is_small, lasting, pipeline, watched


def recipe(facts: Facts, data: Data) -> Recipe:
    small = is_small(facts)
    model = compact(facts) if small and facts.init is None and not facts.wishes.get("model") else encoder(facts)
    patch, size = model.embed.stride, model.image_size
    batch = facts.choose("batch_size", 128 if facts.images >= 2_000 else 32, f"{facts.images:,} pictures to learn from")
    length = lasting(facts, 1_000_000 if small else 100_000)
    total = length.get("steps") or facts.steps(length["epochs"], batch)
    part = (max(patch, size[0] // 2 // patch * patch), max(patch, size[1] // 2 // patch * patch))
    # What shows next to nothing can only be answered by nothing: tiny pictures are cropped little.
    large = RandomResizedCrop(size, scale=(0.6, 1.0) if max(facts.side) < 24 else (0.4, 1.0))
    return Recipe(
        name="dino",
        data=data,
        model=model,
        preprocessing=pipeline(facts, model),
        augment=(large, *changes(facts, small, 0.0 if small else 1.0, 0.0)),
        views=Views(
            second=(large, *changes(facts, small, 0.0 if small else 0.1, 0.2)),
            local=(RandomResizedCrop(part, scale=(0.05, 0.4)), *changes(facts, small, 0.0 if small else 0.5, 0.0)),
            count=0 if small else 4,  # a part of a small picture is a few pixels
            size=part,
        ),
        # The published temperature of up to 0.07 is for 65,536 outputs and long runs; so are features as they are.
        objective=DINO(out=2048, momentum=0.99 if total < 10_000 else 0.996, teacher_temperature=0.04, standardise=0.9),
        optimizer=optimizer(facts, batch, small),
        schedule=Cosine(warmup=max(1, total // 10)),
        batch_size=batch,
        **length,
        validate_every=watched(facts, batch, total),
    )


def compact(facts: Facts) -> ViTConfig:
    """A model for small pictures that sees a crop at about the size it was cut: convolutions make a few tokens of it."""
    side = max(facts.side)
    patch = 4 if side <= 16 else 8
    near = max(16, round(0.75 * side / patch) * patch)
    width = facts.choose("width", 128, "for small pictures")
    size = facts.choose("size", (near, near), f"crops of pictures of {facts.side[0]}×{facts.side[1]} pixels")
    return configure_vit(
        patch=patch,
        width=width,
        depth=facts.choose("depth", 4, "for small pictures"),
        heads=max(1, width // 32),
        embed="conv-stem",
        position="sincos2d",
        pool="mean",
        classes=None,
        channels=facts.channels,
        image_size=size,
    )


def optimizer(facts: Facts, batch: int, small: bool) -> OptimizerSlot:
    """Muon learns in fewer steps, which is what small pictures allow; photographs are trained as published."""
    if small:
        rate = facts.choose("lr", 5e-3 * (batch / 128) ** 0.5, "5e-3 for a batch of 128, suits Muon")
        return Muon(lr=rate, matrix_lr=4 * rate, clip=None)
    rate = facts.choose("lr", 5e-4 * (batch / 128) ** 0.5, "5e-4 for a batch of 128")
    return AdamW(lr=rate, weight_decay=0.04, decay_end=0.4, clip=3.0)


def changes(facts: Facts, small: bool, blurred: float, solarised: float) -> tuple[AugmentSlot, ...]:
    """What happens to a crop. Grey pictures have no colours to change, and no left and right that may be exchanged."""
    steps: list[AugmentSlot] = []
    if facts.channels == 1:
        steps.append(ColourJitter(0.2, 0.2, 0.0, 0.0, rate=0.5))
    else:
        steps += [Flip(), ColourJitter(0.4, 0.4, 0.2, 0.1, rate=0.8), Grey(0.2)]
    if blurred:
        steps.append(Blur(blurred, (0.1, 2.0)))
    if solarised:
        steps.append(Solarise(solarised, 128))
    return tuple(steps)
