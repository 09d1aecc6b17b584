"""Fine-tuning as in the paper: table 4 and appendix B.1.1.

    vitrail train cifar-10 --recipe paper-finetune --init vit_b16.npz
    vitrail train cifar-10 --recipe paper-finetune --init vit_b16.npz --set optimizer.lr=0.003

SGD with momentum 0.9, batch 512, cosine, no weight decay, gradients clipped to norm 1, 384², a new head that starts at zero.
Steps by the size of the data: 20,000 as for ImageNet, 10,000 as for CIFAR, 500 as for Pets and Flowers, 2,500 at 0.01 for the
1,000 images of a VTAB task. On ImageNet L/16 is tuned at 512² and H/14 at 518², with the weights averaged (0.9999). Warm-
up, which the table does not give, is 500 steps as in the published code, 100 for short runs. The paper tries four learning
rates on a held-out part of the training set: 0.003, 0.01, 0.03, 0.06 for ImageNet, 0.001, 0.003, 0.01, 0.03 for the others.
The one used here is the third.
Expected: 98.95 % on CIFAR-10 for B/16 from ImageNet-21k (published, table 5; not run here).
"""

from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augment import Flip, RandomResizedCrop
from vitrail.objectives.classification import Classification
from vitrail.training.optim import SGD
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes.common import configure_init
from vitrail.training.schedule import EMA, Cosine

TABLE_4 = {"ImageNet": (20_000, 0.03), "CIFAR": (10_000, 0.01), "Pets and Flowers": (500, 0.01), "VTAB": (2_500, 0.01)}
VTAB_SIZES = (800, 1_000)  # training images of its tasks, with and without a held-out part
IMAGENET_SIZE, CIFAR_SIZE = 500_000, 20_000  # training images from which on data is treated like ImageNet, like CIFAR


def recipe(facts: Facts, data: Data) -> Recipe:
    like = "CIFAR" if facts.images >= CIFAR_SIZE else "VTAB" if facts.images in VTAB_SIZES else "Pets and Flowers"
    like = "ImageNet" if facts.images >= IMAGENET_SIZE else like
    steps, lr = TABLE_4[like]
    init = configure_init(facts).require_tokens("the recipe paper-finetune")
    side = {(24, 16): 512, (32, 14): 518}.get((init.size.depth, init.embed.stride), 384) if like == "ImageNet" else 384
    side = side // init.embed.stride * init.embed.stride  # 14 does not divide 384
    size = facts.choose("size", (side, side), f"the paper's for {like}")
    pipeline = facts.init_preprocessing or Preprocessing().with_channels(init.channels)
    return Recipe(
        name="paper-finetune",
        data=data,
        model=configure_init(facts, size),
        preprocessing=Preprocessing(
            size, size, fit="squash", interpolation="bilinear", mean=pipeline.mean, std=pipeline.std, turn=True
        ),
        augment=(RandomResizedCrop(size, scale=(0.05, 1.0), interpolation="bilinear"), Flip()),
        objective=Classification(loss=facts.loss),
        optimizer=SGD(lr=lr, momentum=0.9, weight_decay=0.0, clip=1.0),
        schedule=Cosine(warmup=500 if steps > 500 else 100),
        batch_size=facts.choose("batch_size", 512, "the paper's"),
        **facts.choose_length(steps=steps, why=f"{facts.training_size}, like {like}"),
        ema=EMA(0.9999, warmup=False) if like == "ImageNet" else None,
    )
