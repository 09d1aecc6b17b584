"""Masked autoencoding (He et al. 2022): three quarters of the patches are hidden and predicted from the others.

    vitrail pretrain photos/ --method mae
    vitrail pretrain cifar-10 --method mae --epochs 40

Only the visible quarter goes through the encoder, so a step is fast. Fine-tune the result (`vitrail train photos/ --init
RUN/model.safetensors`): the k-NN accuracy of its features is below DINO's, as published. The decoder is saved in
RUN/pretraining.safetensors. For photographs the published settings are 800 epochs of ImageNet with ViT-L/16.
Expected: not measured at its full length.
"""

from vitrail.models.mae_decoder import Decoder
from vitrail.objectives.mae import MAE
from vitrail.training.optim import AdamW
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes.common import configure_encoder, crop_and_flip, plan_pretraining


def recipe(facts: Facts, data: Data) -> Recipe:
    model = configure_encoder(facts)
    plan, _ = plan_pretraining(facts, model, batch=256, small=2_000_000, photos=400_000)
    base = 1.5e-3 if model.size.width < 384 else 1.5e-4  # the second is published, for B and L
    lr = facts.choose("lr", base * plan["batch_size"] / 256, f"{base:g} for a batch of 256 and this width")
    return Recipe(
        name="mae",
        data=data,
        augment=crop_and_flip(facts, model.image_size, photos=0.2),
        objective=MAE(decoder=Decoder(depth=2)),
        optimizer=AdamW(lr=lr, weight_decay=0.05, betas=(0.9, 0.95), clip=None),
        **plan,
    )
