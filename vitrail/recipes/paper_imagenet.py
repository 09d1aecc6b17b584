"""ViT trained on ImageNet from scratch as in the paper: table 3, last row.

    vitrail train imagenet/ --recipe paper-imagenet
    vitrail train imagenet/ --recipe paper-imagenet --model L/16

Adam (0.9, 0.999) with weight decay 0.3, batch 4,096, 300 epochs, learning rate 3e-3 after 10,000 steps of warm-up, cosine,
dropout 0.1, gradients clipped to norm 1, 224², a head with one hidden layer (section 3.1).
Expected: 77.9 % top-1 for B/16 after fine-tuning at 384² (published, table 5; not run here).
"""

from vitrail.data.augment import Flip
from vitrail.data.crops import RandomResizedCrop
from vitrail.data.preprocessing import Preprocessing
from vitrail.engine.optim import AdamW
from vitrail.engine.schedule import Cosine
from vitrail.models.build import configure_vit
from vitrail.objectives.classification import Classification
from vitrail.recipe import Data, Facts, Recipe


def recipe(facts: Facts, data: Data) -> Recipe:
    size = facts.choose("size", (224, 224), "the paper's")
    return Recipe(
        name="paper-imagenet",
        data=data,
        model=configure_vit(
            facts.choose("model", "B/16", "the paper's base model"),
            head="pre-logits",
            dropout=0.1,
            classes=facts.classes,
            image_size=size,
        ),
        preprocessing=Preprocessing(size, size, turn=True).larger(256 / 224),
        augment=(RandomResizedCrop(size, scale=(0.05, 1.0), interpolation="bilinear"), Flip()),
        objective=Classification(loss=facts.loss),
        optimizer=AdamW(lr=3e-3, weight_decay=0.3, clip=1.0),
        schedule=Cosine(warmup=10_000),
        batch_size=facts.choose("batch_size", 4096, "the paper's"),
        **facts.lasting(epochs=300.0, why="the paper's"),
    )
