"""Models of spectrograms from trained models of images, as the Audio Spectrogram Transformer does (Gong et al. 2021).

The weights of a patch are summed over the channels. Positions are cut from the middle of an axis that has fewer patches than the
image, and interpolated linearly along one that has more. Of a distilled DeiT, the mean of both tokens is pooled. The classifier
is new: a LayerNorm and a linear layer.
"""

from dataclasses import replace

import torch

from vitrail.models.adapt import assemble, with_channels
from vitrail.models.base import Model, ModelConfig, Unsupported
from vitrail.models.vit_config import ViTConfig, choose_ast_stride
from vitrail.nn.embed import Patches
from vitrail.nn.head import NormLinear
from vitrail.nn.pool import ClassToken, OutputMean

SPECTROGRAM = (128, 1024)  # mel bins and frames of the published models


def configure_spectrograms(
    config: ModelConfig, image_size: tuple[int, int] = SPECTROGRAM, overlap: int | None = None
) -> ViTConfig:
    """Return the configuration of a model of images for spectrograms of so many mel bins and frames, without classes.

    `overlap` is the number of pixels that neighbouring patches share; by default the published 6 of 16.
    """
    if not isinstance(config, ViTConfig) or type(config.embed) is not Patches or config.embed.normed:
        raise Unsupported(f"take_spectrograms does not support {config.describe()}: use a ViT with linear patches")
    patch = config.embed.patch
    if overlap is None:
        overlap = patch - choose_ast_stride(patch)
    if config.resampling is not None:
        config = config.with_resampling("ast")
    has_both = config.pool == ClassToken() and config.prefix.outputs == 2
    return replace(
        config,
        embed=replace(config.embed, overlap=overlap),
        pool=OutputMean() if has_both else config.pool,
        head=NormLinear(),
        classes=None,
        channels=1,
        image_size=image_size,
    )


def take_spectrograms(model: Model, image_size: tuple[int, int] = SPECTROGRAM, overlap: int | None = None) -> Model:
    """Return a model of spectrograms, without classes, with the weights of a model of images; see `configure_spectrograms`.

    It has no preprocessing: set one with a `sound`. `replace_head` adds classes.
    """
    new = configure_spectrograms(model.config, image_size, overlap)
    before = replace(new, embed=replace(new.embed, overlap=model.config.overlap), image_size=model.config.image_size)
    _, state = with_channels(model.config, dict(model.state_dict()), 1)
    state = before.resize_to_grid(state, new.shape.grid)
    norm = next(tensor for name, tensor in state.items() if name.endswith("norm1.weight"))
    state = {name: tensor for name, tensor in state.items() if not name.startswith("head.")}
    state |= {"head.pre_logits.weight": torch.ones_like(norm), "head.pre_logits.bias": torch.zeros_like(norm)}
    adapted = assemble(new, state, next(iter(model.parameters())))
    adapted.card = {name: value for name, value in model.card.items() if name != "calibration"}
    return adapted.train(model.training)
