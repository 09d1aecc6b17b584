"""Masked autoencoding (He et al. 2022): three quarters of the patches are hidden, and told from the rest.

    vitrail pretrain photos/ --method mae
    vitrail pretrain cifar-10 --method mae --epochs 40

Only the visible quarter goes through the encoder, so a step is quick. Fine-tune what comes out (`vitrail train photos/ --init
RUN/model.safetensors`): its features alone, asked by nearest neighbours, are worse than DINO's, as published. The decoder is
kept in RUN/pretraining.safetensors. For photographs the published settings are 800 epochs of ImageNet with ViT-L/16.
Expected: not measured at its full length.
"""

from vitrail.data.augment import Flip
from vitrail.data.crops import RandomResizedCrop
from vitrail.engine.optim import AdamW
from vitrail.engine.schedule import Cosine
from vitrail.models.decoder import Decoder
from vitrail.objectives.mae import MAE
from vitrail.recipe import Data, Facts, Recipe
from vitrail.recipes.unlabelled import encoder, is_small, lasting, pipeline, watched


def recipe(facts: Facts, data: Data) -> Recipe:
    model = encoder(facts)
    batch = facts.choose("batch_size", 256 if facts.images >= 2_000 else 64, f"{facts.images:,} pictures to learn from")
    length = lasting(facts, 2_000_000 if is_small(facts) else 400_000)
    total = length.get("steps") or facts.steps(length["epochs"], batch)
    base = 1.5e-3 if model.size.width < 384 else 1.5e-4  # the second is published, for B and L
    rate = facts.choose("lr", base * batch / 256, f"{base:g} for a batch of 256 and this width")
    turned = () if facts.channels == 1 else (Flip(),)
    return Recipe(
        name="mae",
        data=data,
        model=model,
        preprocessing=pipeline(facts, model),
        augment=(RandomResizedCrop(model.image_size, scale=(0.5 if is_small(facts) else 0.2, 1.0)), *turned),
        objective=MAE(decoder=Decoder(depth=2)),
        optimizer=AdamW(lr=rate, weight_decay=0.05, betas=(0.9, 0.95), clip=None),
        schedule=Cosine(warmup=max(1, total // 10)),
        batch_size=batch,
        **length,
        validate_every=watched(facts, batch, total),
    )
