"""DINO (Caron et al. 2021): a student predicts the output of its EMA teacher for other crops of the same image.

    vitrail pretrain photos/ --method dino
    vitrail pretrain cifar-10 --method dino --epochs 20

Its features need no fine-tuning for k-NN. Several crops of each image make a step expensive. The alarm stops a run whose
features collapse. Features are standardised for the heads, without which short runs do not start to learn; for photographs the
published settings are 100 to 800 epochs of ImageNet with ViT-S/16, batch 1,024, 65,536 outputs, and no standardisation.
Expected: CIFAR-10 in 24.5 epochs (--steps 8600): k-NN accuracy 51 % on held-out images, where raw pixels have 36 % and the
untrained network 26 % (measured: docs/results.md). Photographs were not measured.
"""

from vitrail.data.transforms.augment import AugmentSlot, Blur, ColourJitter, Flip, Grey, RandomResizedCrop, Solarise
from vitrail.data.transforms.pipeline import Views
from vitrail.models.base import TokenConfig
from vitrail.objectives.dino import DINO
from vitrail.training.optim import AdamW, Muon, OptimizerSlot
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes.common import configure_compact, configure_encoder, is_small, plan_pretraining


def recipe(facts: Facts, data: Data) -> Recipe:
    small = is_small(facts)
    own_model = small and facts.init is None and not facts.overrides.get("model")
    model = configure_small(facts) if own_model else configure_encoder(facts)
    plan, total = plan_pretraining(facts, model, batch=128, small=1_000_000, photos=100_000)
    patch, size = model.embed.stride, model.image_size
    part = (max(patch, size[0] // 2 // patch * patch), max(patch, size[1] // 2 // patch * patch))
    # Small crops of tiny images contain next to nothing, so these are cropped less.
    large = RandomResizedCrop(size, scale=(0.6, 1.0) if max(facts.side) < 24 else (0.4, 1.0))
    local = RandomResizedCrop(part, scale=(0.05, 0.4))
    blurs = (0.0, 0.0, 0.0) if small else (1.0, 0.1, 0.5)  # probabilities in the first, second and local crops
    return Recipe(
        name="dino",
        data=data,
        augment=(large, *choose_augmentation(facts, blurs[0], 0.0)),
        views=Views(
            second=(large, *choose_augmentation(facts, blurs[1], 0.2)),
            local=(local, *choose_augmentation(facts, blurs[2], 0.0)),
            count=0 if small else 4,  # a local crop of a small image is a few pixels
            size=part,
        ),
        # The published temperature of up to 0.07 and plain features are for 65,536 outputs and long runs.
        objective=DINO(out=2048, momentum=0.99 if total < 10_000 else 0.996, teacher_temperature=0.04, standardise=0.9),
        optimizer=choose_optimizer(facts, plan["batch_size"], small),
        **plan,
    )


def configure_small(facts: Facts) -> TokenConfig:
    """Return a model with few tokens, for crops at about their original size."""
    side = max(facts.side)
    patch = 4 if side <= 16 else 8
    near = max(16, round(0.75 * side / patch) * patch)
    width = facts.choose("width", 128, "for small images")
    size = facts.choose("size", (near, near), f"crops of images of {facts.side[0]}×{facts.side[1]} pixels")
    return configure_compact(facts, None, patch, width, facts.choose("depth", 4, "for small images"), size)


def choose_optimizer(facts: Facts, batch: int, small: bool) -> OptimizerSlot:
    """Return Muon for small images, which needs fewer steps, and the published AdamW for photographs."""
    if small:
        lr = facts.choose("lr", 5e-3 * (batch / 128) ** 0.5, "5e-3 for a batch of 128, suits Muon")
        return Muon(lr=lr, matrix_lr=4 * lr, clip=None)
    lr = facts.choose("lr", 5e-4 * (batch / 128) ** 0.5, "5e-4 for a batch of 128")
    return AdamW(lr=lr, weight_decay=0.04, decay_end=0.4, clip=3.0)


def choose_augmentation(facts: Facts, blurred: float, solarised: float) -> tuple[AugmentSlot, ...]:
    """Return the augmentation of a crop. Grey images, such as digits, are neither recoloured nor flipped."""
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
