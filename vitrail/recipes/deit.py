"""DeiT on ImageNet-1k alone, without a teacher (Touvron et al. 2021).

    vitrail train imagenet/ --recipe deit
    vitrail train imagenet/ --recipe deit --model B/16

AdamW at 5e-4 for 512 pictures, weight decay 0.05, 300 epochs, 5 of warm-up, mixup 0.8 and CutMix 1.0, RandAugment (2, 9),
random erasing 0.25, label smoothing 0.1, stochastic depth 0.1. Repeated augmentation, which the authors also use, is not done.
Expected: 72.2 % top-1 for Ti/16, 79.9 % for S/16, 81.8 % for B/16 (published; not run here).
"""

from vitrail.data.augment import Flip, RandAugment, RandomErasing
from vitrail.data.crops import RandomResizedCrop
from vitrail.data.preprocessing import IMAGENET, Preprocessing
from vitrail.engine.optim import AdamW
from vitrail.engine.schedule import Cosine
from vitrail.models.build import configure_vit
from vitrail.objectives.classification import Classification
from vitrail.recipe import Data, Facts, Recipe


def recipe(facts: Facts, data: Data) -> Recipe:
    size = facts.choose("size", (224, 224), "the authors'")
    batch = facts.choose("batch_size", 1024, "the authors'")
    return Recipe(
        name="deit",
        data=data,
        model=configure_vit(
            facts.choose("model", "S/16", "the authors' middle size"),
            init="deit",
            stochastic_depth=0.1,
            classes=facts.classes,
            image_size=size,
        ),
        preprocessing=Preprocessing(size, size, turn=True, **IMAGENET).larger(256 / 224),
        augment=(RandomResizedCrop(size), Flip(), RandAugment(2, 9, spread=0.5, increasing=True), RandomErasing(0.25)),
        objective=Classification(loss=facts.loss, smoothing=0.0 if facts.several else 0.1, mixup=0.8, cutmix=1.0),
        optimizer=AdamW(lr=5e-4 * batch / 512, weight_decay=0.05, clip=None),
        schedule=Cosine(warmup=facts.steps(5, batch), end=0.01),
        batch_size=batch,
        **facts.lasting(epochs=300.0, why="the authors'"),
    )
