"""What the recipes without labels share: a plain Vision Transformer that suits the pictures, and how long it learns."""

from dataclasses import replace
from typing import Any

from vitrail.data.preprocessing import Preprocessing
from vitrail.models.build import configure_vit, is_resnet
from vitrail.models.vit import ViTConfig
from vitrail.recipe import Facts

SMALL = 64  # pixels: pictures up to this side are taken whole


def is_small(facts: Facts) -> bool:
    """Whether pictures are taken as they are, not cropped from photographs."""
    return max(facts.side) <= SMALL and not facts.several_sizes


def encoder(facts: Facts, patch: int | None = None) -> ViTConfig:
    """The model that --init or --model name; else one of a width and a number of patches that a laptop can train.

    It ends in features: the class token's, as MAE and DINO are published.
    """
    if facts.init is not None:
        if not isinstance(facts.init, ViTConfig):
            raise ValueError("--init is a ResNet, and learning without labels is for Vision Transformers")
        return _without_head(facts)
    shape: dict[str, Any] = {"position": "sincos2d", "classes": None, "channels": facts.channels}
    if facts.wishes.get("model"):
        if is_resnet(facts.wishes["model"]):
            raise ValueError(
                f"--model {facts.wishes['model']} is a ResNet, and learning without labels is for Vision Transformers: "
                "use a size and a patch, like S/16"
            )
        size = facts.choose("size", (224, 224), "usual for named models")
        return configure_vit(facts.choose("model", None, ""), image_size=size, **shape)
    side, small = max(facts.side), is_small(facts)
    patch = patch or (4 if small else 16)
    near = max(16, -(-side // patch) * patch) if small else 128
    why = f"pictures of {facts.side[0]}×{facts.side[1]} pixels, a multiple of the patch" if small else "for photographs"
    size = facts.choose("size", (near, near), why)
    count = f"{facts.images:,} pictures to learn from"
    width = facts.choose("width", 192 if facts.images >= 2_000 else 96, count)
    depth = facts.choose("depth", 6, count)
    return configure_vit(patch=patch, width=width, depth=depth, heads=max(1, width // 32), image_size=size, **shape)


def _without_head(facts: Facts) -> ViTConfig:
    assert isinstance(facts.init, ViTConfig)
    size = facts.choose("size", facts.init.image_size, "the size that the checkpoint was trained at")
    return replace(facts.init, classes=None, image_size=size)


def pipeline(facts: Facts, model: ViTConfig) -> Preprocessing:
    """The checkpoint's own preprocessing, or the plainest there is."""
    if facts.init_preprocessing is not None:
        return facts.init_preprocessing.at(model.image_size)
    half = (0.5,) * model.channels
    filter = "bilinear" if is_small(facts) else "bicubic"
    return Preprocessing(model.image_size, model.image_size, interpolation=filter, mean=half, std=half, turn=True)


def watched(facts: Facts, batch: int, total: int) -> float:
    """Epochs between validations: twenty of them in a run, however long it is, so that an alarm comes in time."""
    return max(1, total // 20) / max(1, facts.images // batch)


def lasting(facts: Facts, pictures: int) -> dict[str, Any]:
    """`epochs` or `steps`: so many pictures in all, at least five epochs and at most a thousand."""
    epochs = float(min(1000, max(5, round(pictures / facts.images))))
    return facts.lasting(epochs=epochs, why=f"{facts.images:,} pictures to learn from")
