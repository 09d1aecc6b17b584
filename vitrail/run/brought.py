"""The decoder that a checkpoint brings along, for a masked autoencoder that goes on with it."""

from torch import Tensor

from vitrail.checkpoints.loading import describe
from vitrail.checkpoints.mae import has_decoder, read_mae
from vitrail.models.decoder import Decoder
from vitrail.models.vit import ViTConfig


def brought(init: str, config: ViTConfig, spec: Decoder) -> tuple[dict[str, Tensor], str]:
    """The decoder's tensors and a line about them; none where there is no decoder in the file that fits."""
    afresh = "the decoder begins afresh"
    with describe(init) as checkpoint:
        there = has_decoder(checkpoint)
    if not there:
        return {}, f"{afresh}: there is none in {init}"
    try:
        found = read_mae(init)
    except ValueError as error:
        return {}, f"{afresh}: {error}"
    theirs, ours = found.decoder.spec, spec.sized(config)
    if theirs != ours:
        names = [name for name in ("depth", "width", "heads", "mlp") if getattr(theirs, name) != getattr(ours, name)]
        settings = " ".join(f"--set objective.decoder.{name}={getattr(theirs, name)}" for name in names)
        return {}, f"{afresh}: that of {init} is of another size, use {settings} to go on with it"
    if (found.model.config.image_size, found.model.config.channels) != (config.image_size, config.channels):
        return {}, f"{afresh}: that of {init} is for pictures of another size, or of other channels"
    return found.decoder.state_dict(), f"the decoder goes on from {init}, as the encoder does"
