"""Masked autoencoding (He et al. 2022): three quarters of the patches are hidden and predicted from the others.

    vitrail pretrain photos/ --method mae
    vitrail pretrain cifar-10 --method mae --epochs 40

Only the visible quarter goes through the encoder, so a step is fast. Fine-tune the result (`vitrail train photos/ --init
RUN/model.safetensors`): the k-NN accuracy of its features is below DINO's, as published. The decoder is saved in
RUN/pretraining.safetensors. For photographs the published settings are 800 epochs of ImageNet with ViT-L/16.
Expected: not measured at its full length.
"""

from vitrail.data.transforms.augment import Flip
from vitrail.data.transforms.crops import RandomResizedCrop
from vitrail.models.mae_decoder import Decoder
from vitrail.objectives.mae import MAE
from vitrail.training.optim import AdamW
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes.common import (
    choose_length,
    choose_preprocessing,
    configure_encoder,
    is_small,
    validation_interval,
)
from vitrail.training.schedule import Cosine


def recipe(facts: Facts, data: Data) -> Recipe:
    model = configure_encoder(facts)
    batch = facts.choose("batch_size", 256 if facts.images >= 2_000 else 64, f"{facts.images:,} training images")
    length = choose_length(facts, 2_000_000 if is_small(facts) else 400_000)
    total = length.get("steps") or facts.steps(length["epochs"], batch)
    base = 1.5e-3 if model.size.width < 384 else 1.5e-4  # the second is published, for B and L
    lr = facts.choose("lr", base * batch / 256, f"{base:g} for a batch of 256 and this width")
    flip = () if facts.channels == 1 else (Flip(),)
    return Recipe(
        name="mae",
        data=data,
        model=model,
        preprocessing=choose_preprocessing(facts, model),
        augment=(RandomResizedCrop(model.image_size, scale=(0.5 if is_small(facts) else 0.2, 1.0)), *flip),
        objective=MAE(decoder=Decoder(depth=2)),
        optimizer=AdamW(lr=lr, weight_decay=0.05, betas=(0.9, 0.95), clip=None),
        schedule=Cosine(warmup=max(1, total // 10)),
        batch_size=batch,
        **length,
        validate_every=validation_interval(facts, batch, total),
    )
