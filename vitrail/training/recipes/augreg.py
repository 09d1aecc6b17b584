"""ViT with augmentation and regularisation, after "How to train your ViT?" (Steiner et al. 2021), on ImageNet-1k.

    vitrail train imagenet/ --recipe augreg
    vitrail train imagenet/ --recipe augreg --model B/16

The "medium" settings of the authors' code: mixup 0.5, RandAugment (2, 15), a sigmoid for each class, weight decay
0.1, Adam at 1e-3, batch 4,096, 300 epochs, 10,000 steps of warm-up; dropout and stochastic depth 0.1 for B and L, where they
helped. The initial bias of their head (-6.9) is not set.
Expected: about 80 % top-1 for B/16 at 224² (read from the authors' figures; not run here).
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
    name = facts.choose("model", "S/16", "the authors' smallest with these settings")
    dropout = 0.1 if name.startswith(("B", "L")) else 0.0
    model = configure_tokens(name, dropout=dropout, stochastic_depth=dropout, classes=facts.classes, image_size=size)
    crop = RandomResizedCrop(size, scale=(0.05, 1.0), interpolation="bilinear")
    return Recipe(
        name="augreg",
        data=data,
        model=model,
        preprocessing=Preprocessing(size, size, interpolation="bilinear", turn=True).with_resize_factor(256 / 224),
        augment=(crop, Flip(), RandAugment(2, 15, rate=1.0)),
        objective=Classification(loss="sigmoid", mixup=0.5),
        optimizer=AdamW(lr=1e-3, weight_decay=0.1, clip=1.0),
        schedule=Cosine(warmup=10_000),
        batch_size=facts.choose("batch_size", 4096, "the authors'"),
        **facts.choose_length(epochs=300.0, why="the authors'"),
    )
