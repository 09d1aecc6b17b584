"""Which parameter of a task is decayed, by how much its rate is scaled, and which are matrices."""

from torch import nn

from vitrail.engine.optim import Rule, Rules
from vitrail.models.bit import BiT
from vitrail.models.layers import decays, depth_of, layer_of
from vitrail.models.vit import ViT


def rules(task: nn.Module, layer_decay: float) -> Rules:
    """A rule for each parameter. The model inside the task is `task.model`; what else it has is trained at the full rate."""
    model = task.model
    assert isinstance(model, ViT | BiT)
    top = depth_of(model) + 1
    found: Rules = {}
    for name, parameter in task.named_parameters():
        inside = name.removeprefix("model.") if name.startswith("model.") else None
        plain = (inside or name).replace("parametrizations.weight.original", "weight")
        distance = 0 if inside is None else top - layer_of(model, inside)
        decay = decays(plain, parameter)
        # A filter of a few values (the first of a stem on grey pictures) is no matrix worth the name.
        matrix = decay and inside is not None and not inside.startswith("head.") and parameter[0].numel() > 9
        found[name] = Rule(
            decay=decay,
            scale=layer_decay**distance,
            matrix=matrix,
            parts=3 if matrix and plain.endswith("msa.qkv.weight") else 1,
        )
    return found
