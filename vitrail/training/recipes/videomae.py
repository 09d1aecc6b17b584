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
from vitrail.training.recipes.common import crop_and_flip, plan_pretraining


def recipe(facts: Facts, data: Data) -> Recipe:
    model = configure_clip_encoder(facts)
    plan, _ = plan_pretraining(facts, model, batch=64, small=200_000, photos=100_000)
    if plan["preprocessing"].clip is None:
        plan["preprocessing"] = replace(plan["preprocessing"], clip=Clip(model.frames or 16))
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


def configure_clip_encoder(facts: Facts) -> TokenConfig:
    """Return the model of --init or --model, or one that a laptop can train; of 16 frames in tubelets of two."""
    if facts.init is not None:
        init = facts.init.require_tokens("pretraining without labels (init=)", clips=True)
        return replace(init, classes=None, image_size=facts.choose("size", init.image_size, "size of the checkpoint"))
    shape = {"position": "sinusoid1d", "pool": "mean", "block": PreNorm(key_bias=False), "channels": facts.channels}
    shape |= {"classes": None, "frames": facts.choose("frames", 16, "published")}
    if facts.overrides.get("model"):
        size, name = facts.choose("size", (224, 224), "usual for named models"), facts.choose("model", None, "")
        return configure_tokens(name, purpose="pretraining without labels", image_size=size, **shape)
    width, depth = facts.choose("width", 192, "for a laptop"), facts.choose("depth", 6, "for a laptop")
    size = facts.choose("size", (112, 112), "half of the published side")
    return configure_tokens(patch=16, width=width, depth=depth, heads=max(1, width // 32), image_size=size, **shape)
