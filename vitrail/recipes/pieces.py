"""What several recipes need: the model to begin with, fitted to the task."""

from dataclasses import replace

from vitrail.models.vit import ViTConfig
from vitrail.nn.head import Linear, Projection
from vitrail.recipe import Facts


def started(facts: Facts, size: tuple[int, int] | None = None) -> ViTConfig:
    """The configuration of the checkpoint to begin with, for this data's classes."""
    if facts.init is None:
        raise ValueError("this recipe fine-tunes: give a checkpoint to begin with, --init FILE")
    if not isinstance(facts.init, ViTConfig):
        raise ValueError("this recipe fine-tunes Vision Transformers, and the checkpoint is a ResNet")
    head = Linear() if isinstance(facts.init.head, Projection) else facts.init.head
    return replace(facts.init, classes=facts.classes, head=head, image_size=size or facts.init.image_size)
