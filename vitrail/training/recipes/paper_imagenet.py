"""ViT trained from scratch as in the paper: table 3.

    vitrail train imagenet/ --recipe paper-imagenet
    vitrail train imagenet/ --recipe paper-imagenet --model L/16

On ImageNet: Adam (0.9, 0.999) with weight decay 0.3, batch 4,096, 300 epochs, learning rate 3e-3 after 10,000 steps of warm-
up, cosine, dropout 0.1, gradients clipped to norm 1, 224², a head with one hidden layer (section 3.1). On more than five
million images the rows of ImageNet-21k, on more than a hundred million those of JFT-300M: their learning rates and epochs, with
a linear decay.
Expected: 77.9 % top-1 for B/16 after fine-tuning at 384² (published, table 5; not run here).
"""

from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augment import Flip, RandomResizedCrop
from vitrail.models.registry import configure_tokens
from vitrail.objectives.classification import Classification
from vitrail.training.optim import AdamW
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.schedule import Cosine, Linear

JFT = {  # by model: learning rate, epochs
    **dict.fromkeys(("B/16", "B/32", "R50+B/16", "R50+B/32"), (8e-4, 7)),
    "L/32": (6e-4, 7),
    "L/16": (4e-4, 14),
    "H/14": (3e-4, 14),
    "R50+L/32": (2e-4, 7),
    "R50+L/16": (4e-4, 14),
}


def recipe(facts: Facts, data: Data) -> Recipe:
    size = facts.choose("size", (224, 224), "the paper's")
    name = facts.choose("model", "B/16", "the paper's base model")
    if facts.images > 100_000_000:
        row, (lr, epochs), decay, dropout = "JFT-300M", JFT.get(name, (8e-4, 7)), 0.1, 0.0
    elif facts.images > 5_000_000:
        row, (lr, epochs), decay, dropout = "ImageNet-21k", (1e-3, 90), 0.03, 0.1
    else:
        row, (lr, epochs), decay, dropout = "ImageNet", (3e-3, 300), 0.3, 0.1
    return Recipe(
        name="paper-imagenet",
        data=data,
        model=configure_tokens(name, head="pre-logits", dropout=dropout, classes=facts.classes, image_size=size),
        preprocessing=Preprocessing(size, size, turn=True).with_resize_factor(256 / 224),
        augment=(RandomResizedCrop(size, scale=(0.05, 1.0), interpolation="bilinear"), Flip()),
        objective=Classification(loss=facts.loss),
        optimizer=AdamW(lr=lr, weight_decay=decay, clip=1.0 if row == "ImageNet" else None),
        schedule=Cosine(warmup=10_000) if row == "ImageNet" else Linear(warmup=10_000),
        batch_size=facts.choose("batch_size", 4096, "the paper's"),
        **facts.choose_length(epochs=float(epochs), why=f"the paper's for {row}"),
    )
