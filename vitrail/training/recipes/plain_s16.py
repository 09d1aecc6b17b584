"""ViT-S/16 on ImageNet-1k in 90 epochs, after "Better plain ViT baselines" (Beyer et al. 2022).

    vitrail train imagenet/ --recipe plain-s16

Fixed 2-D positions, mean pooling, a linear head, RandAugment (2, 10), mixup 0.2, batch 1,024, no dropout. The authors' weight
decay, 1e-4, does not multiply the learning rate; PyTorch's does, so it is 1e-4 / 1e-3 = 0.1 here.
Expected: 76.5 % top-1 after 90 epochs, 80.0 % after 300 (published by the authors; not run here).
"""

from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augment import Flip, RandAugment, RandomResizedCrop
from vitrail.models.registry import configure_tokens
from vitrail.objectives.classification import Classification
from vitrail.training.optim import AdamW
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.schedule import Cosine


def recipe(facts: Facts, data: Data) -> Recipe:
    size = facts.choose("size", (224, 224), "the authors'")
    name = facts.choose("model", "S/16", "the authors'")
    crop = RandomResizedCrop(size, scale=(0.05, 1.0), interpolation="bilinear")
    return Recipe(
        name="plain-s16",
        data=data,
        model=configure_tokens(name, position="sincos2d", pool="mean", classes=facts.classes, image_size=size),
        preprocessing=Preprocessing(size, size, interpolation="bilinear", turn=True).with_resize_factor(256 / 224),
        augment=(crop, Flip(), RandAugment(2, 10, rate=1.0)),
        objective=Classification(loss=facts.loss, mixup=0.2),
        optimizer=AdamW(lr=1e-3, weight_decay=0.1, clip=1.0),
        schedule=Cosine(warmup=10_000),
        batch_size=facts.choose("batch_size", 1024, "the authors'"),
        **facts.choose_length(epochs=90.0, why="the authors'"),
    )
