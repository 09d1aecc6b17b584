"""Masked autoencoding of clips (Tong et al. 2022): nine in ten places are hidden in all frames and predicted from the others.

    vitrail pretrain videos/ --method videomae
    vitrail pretrain videos/ --method videomae --init RUN/model.safetensors

Only the visible tenth goes through the encoder. Fine-tune the result (`vitrail train videos/ --init RUN/model.safetensors`). The
decoder is saved in RUN/pretraining.safetensors. The published settings are 16 frames at stride 4, 1600 epochs of Kinetics-400
with a batch of 1,024 clips, ViT-B/16 with tubelets of two frames.
Expected: not measured.
"""

from dataclasses import replace

from vitrail.data.clip import Clip
from vitrail.models.base import TokenConfig
from vitrail.models.mae_decoder import Decoder
from vitrail.models.registry import configure_tokens
from vitrail.nn.block import PreNorm
from vitrail.objectives.videomae import VideoMAE
from vitrail.training.optim import AdamW
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes.clips import adapt_to_clips, choose_clip, fit_clip
from vitrail.training.recipes.common import crop_and_flip, is_small, plan_pretraining


def recipe(facts: Facts, data: Data) -> Recipe:
    model, clip = configure_clip_encoder(facts)
    plan, _ = plan_pretraining(facts, model, batch=64, small=200_000, photos=100_000, clip=clip)
    base = 1.5e-3 if model.size.width < 384 else 1.5e-4  # the second is published, for B
    lr = facts.choose("lr", base * plan["batch_size"] / 256, f"{base:g} for a batch of 256 and this width")
    return Recipe(
        name="videomae",
        data=data,
        augment=crop_and_flip(facts, model.image_size, photos=0.5),
        objective=VideoMAE(decoder=Decoder(depth=4)),
        optimizer=AdamW(lr=lr, weight_decay=0.05, betas=(0.9, 0.95), clip=None),
        **plan,
    )


def configure_clip_encoder(facts: Facts) -> tuple[TokenConfig, Clip]:
    """Return the model of --init or --model, or one that a laptop can train, and its clip; with tubelets of two frames."""
    if facts.init is not None:
        init = facts.init.require_tokens("pretraining without labels (init=)", clips=True)
        init = replace(init, classes=None, image_size=facts.choose("size", init.image_size, "size of the checkpoint"))
        model, clip = adapt_to_clips(facts, init, "joint")
        if clip is None:
            raise ValueError("the data has images, and VideoMAE learns from clips: give videos, or use method='mae'")
        return model.require_tokens("pretraining without labels (init=)", clips=True), clip
    small = is_small(facts)
    clip = choose_clip(facts, fit_clip(facts, 8 if small else 16), "for small frames" if small else "published")
    shape = {"position": "sinusoid1d", "pool": "mean", "block": PreNorm(key_bias=False), "channels": facts.channels}
    shape |= {"classes": None, "frames": clip.frames}
    if facts.overrides.get("model"):
        size, name = facts.choose("size", (224, 224), "usual for named models"), facts.choose("model", None, "")
        return configure_tokens(name, purpose="pretraining without labels", image_size=size, **shape), clip
    width, depth = facts.choose("width", 192, "for a laptop"), facts.choose("depth", 6, "for a laptop")
    patch = 8 if small else 16
    near = max(16, -(-max(facts.side) // patch) * patch) if small else 112  # half of the published side
    size = facts.choose("size", (near, near), f"frames of {facts.side[0]}×{facts.side[1]} pixels")
    heads = max(1, width // 32)
    return configure_tokens(patch=patch, width=width, depth=depth, heads=heads, image_size=size, **shape), clip
