"""DeiT III on ImageNet-1k, "Revenge of the ViT" (Touvron et al. 2022).

    vitrail train imagenet/ --recipe deit3
    vitrail train imagenet/ --recipe deit3 --model B/16

LAMB at 3e-3, batch 2,048, weight decay 0.02, 800 epochs, 5 of warm-up, 3-Augment, mixup 0.8 and CutMix 1.0, a sigmoid for
each class instead of a softmax (summed over the classes here, averaged there), LayerScale from 1e-4, class positions left
out, stochastic depth by size. Repeated augmentation, and the authors' last epochs at another resolution, are not implemented.
Expected: 81.4 % top-1 for S/16, 83.8 % for B/16 at 224² (published, with those two; not run here).
"""

from vitrail.data.preprocessing import IMAGENET_STATS, Preprocessing
from vitrail.data.transforms.augment import Flip, RandomResizedCrop, ThreeAugment
from vitrail.models.registry import configure_tokens
from vitrail.nn.position import Learned1D
from vitrail.objectives.classification import Classification
from vitrail.training.optim import Lamb
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.schedule import Cosine

STOCHASTIC_DEPTH = {"S": 0.05, "B": 0.2, "L": 0.45, "H": 0.55}  # stochastic depth of the published commands


def recipe(facts: Facts, data: Data) -> Recipe:
    size = facts.choose("size", (224, 224), "the authors'")
    name = facts.choose("model", "S/16", "the authors' smallest")
    batch = facts.choose("batch_size", 2048, "the authors'")
    return Recipe(
        name="deit3",
        data=data,
        model=configure_tokens(
            name,
            init="deit",
            position=Learned1D(prefix="none"),
            layer_scale=1e-4,
            stochastic_depth=STOCHASTIC_DEPTH.get(name.split("/")[0], 0.05),
            classes=facts.classes,
            image_size=size,
        ),
        preprocessing=Preprocessing(size, size, turn=True, **IMAGENET_STATS),
        augment=(RandomResizedCrop(size), ThreeAugment(jitter=0.3), Flip()),
        objective=Classification(loss="sigmoid", mixup=0.8, cutmix=1.0),
        optimizer=Lamb(lr=3e-3, weight_decay=0.02, clip=None),
        schedule=Cosine(warmup=facts.steps(5, batch)),
        batch_size=batch,
        **facts.choose_length(epochs=800.0, why="the authors'"),
    )
