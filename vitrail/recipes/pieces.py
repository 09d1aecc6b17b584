"""What several recipes need: the model to begin with, or a named one, fitted to the task."""

from dataclasses import replace
from typing import Any

from vitrail.models.build import Config, configure, is_resnet
from vitrail.models.vit import ViTConfig
from vitrail.nn.head import Linear, Projection
from vitrail.recipe import Facts

SMALL = 64  # pixels: of what is no larger, a ResNet's usual first layers would leave little


def started(facts: Facts, size: tuple[int, int] | None = None) -> ViTConfig:
    """The configuration of the checkpoint to begin with, for this data's classes."""
    if facts.init is None:
        raise ValueError("this recipe fine-tunes: give a checkpoint to begin with, --init FILE")
    if not isinstance(facts.init, ViTConfig):
        raise ValueError("this recipe fine-tunes Vision Transformers, and the checkpoint is a ResNet")
    head = Linear() if isinstance(facts.init.head, Projection) else facts.init.head
    return replace(facts.init, classes=facts.classes, head=head, image_size=size or facts.init.image_size)


def named(facts: Facts, **slots: Any) -> Config:
    """The model that --model names, for this data's classes; `slots` are of a Vision Transformer and mean nothing to a ResNet."""
    name = facts.choose("model", None, "")
    size = facts.choose("size", (224, 224), "usual for named models")
    shape: dict[str, Any] = {"classes": facts.classes, "channels": facts.channels, "image_size": size}
    if is_resnet(name):
        return configure(name, root="small" if max(size) <= SMALL else "large", **shape)
    return configure(name, **slots, **shape)
