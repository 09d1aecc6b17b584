"""A small Vision Transformer of sounds from scratch. The default for sounds without --init.

    vitrail train sounds/
    vitrail train sounds/ --size 128x256
    vitrail train sounds/ --model AST-Ti/16

A sound is an image of one channel: its log-mel spectrogram, rows are mel bins and columns frames of 10 ms. Convolutions before
the encoder, fixed positions, mean pooling; Muon trains the matrices, as in scratch-small. The sample rate, the number of frames,
the size of the model and the length of the run depend on the sounds. Spectrograms are stretched, shifted and masked
(SpecAugment), and pairs of them mixed (mixup).
Expected: spoken digits of six speakers, all in training, 450 steps: 97.7 to 99.0 % of 300 test recordings (measured, three
seeds: docs/results.md).
"""

from dataclasses import replace

from vitrail.data.log_mel import LogMel
from vitrail.data.preprocessing import Preprocessing, sound_preprocessing
from vitrail.data.transforms.augment import AugmentSlot
from vitrail.data.transforms.spectrogram import SpecAugment, SpectrogramWarp
from vitrail.models.base import ModelConfig
from vitrail.models.spectrograms import configure_spectrograms
from vitrail.objectives.classification import Classification
from vitrail.training.optim import Muon
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes import common
from vitrail.training.schedule import Linear

MAX_RATE, SPEECH_RATE = 16_000, 8_000  # Hz: higher rates are reduced; up to SPEECH_RATE 64 mel bins are enough
MIN_FRAMES, MAX_FRAMES = 64, 1024
AUDIOSET_MEAN, AUDIOSET_STD = -4.2677393, 4.5689974
LARGE_DATA = 20_000  # training sounds from which on a few epochs are enough
SAMPLES = 30_000  # sounds of a whole run on little data


def recipe(facts: Facts, data: Data) -> Recipe:
    if facts.seconds is None:
        raise ValueError(f"recipe sound is for sounds, and the data has {facts.training_size}: leave out recipe=sound")
    facts = replace(facts, channels=1)
    preprocessing = choose_preprocessing(facts)
    named = facts.overrides.get("model")
    model = configure_named(facts, preprocessing.size) if named else configure_model(facts, preprocessing.size)
    count = f"{facts.images:,} training sounds"
    batch = facts.choose("batch_size", 256 if facts.images >= LARGE_DATA else 64, count)
    epochs = 15.0 if facts.images >= LARGE_DATA else max(15.0, min(100.0, round(SAMPLES / facts.images)))
    length = facts.choose_length(epochs=epochs, why=count)
    total = facts.total_steps(length, batch)
    lr = facts.choose("lr", 1e-2, "suits Muon at this size")
    return Recipe(
        name="sound",
        data=data,
        model=model,
        preprocessing=preprocessing,
        augment=choose_augmentation(preprocessing.size),
        objective=Classification(loss=facts.loss, mixup=0.2),
        optimizer=Muon(lr=lr, matrix_lr=0.03, clip=None),
        schedule=Linear(warmup=max(1, total // 10)),
        batch_size=batch,
        validate_every=max(1.0, length.get("epochs", 0) // 20),
        **length,
    )


def adapt_to_sounds(facts: Facts) -> tuple[ModelConfig, Preprocessing]:
    """Return the model of a checkpoint for spectrograms of the data's sounds, and its preprocessing.

    A model of images becomes one of spectrograms with 128 mel bins, as the Audio Spectrogram Transformer.
    """
    init, stored = common.configure_init(facts), facts.init_preprocessing
    if stored is not None and stored.sound is not None:
        preprocessing = choose_preprocessing(facts)
        return init.with_image_size(preprocessing.size), preprocessing
    preprocessing = choose_preprocessing(facts, 128)
    model = configure_spectrograms(init, preprocessing.size).with_classes(facts.classes)
    facts.chosen.append(f"{init.describe()} as {model.describe()}: weights of images, for spectrograms")
    return model, preprocessing


def choose_preprocessing(facts: Facts, least_bins: int = 64) -> Preprocessing:
    """Return the preprocessing of the checkpoint, or features for the rate and the length of the sounds."""
    stored = facts.init_preprocessing
    if stored is not None and stored.sound is not None:
        return stored.with_size(facts.choose("size", stored.size, "size of the checkpoint"))
    rate = min(MAX_RATE, facts.sample_rate or MAX_RATE)
    bins = least_bins if rate <= SPEECH_RATE else 128
    longest = 100 * (facts.seconds or 1.0)  # frames
    frames = min(MAX_FRAMES, max(MIN_FRAMES, 16 * round(longest / 16 + 0.49)))
    why = f"mel bins of sounds at {rate:,} Hz, and frames of 10 ms for {longest / 100:.3g} s"
    size = facts.choose("size", (bins, frames), why)
    features = LogMel(rate, size[0], rate // 40, rate // 100, "centre")
    return sound_preprocessing(features, size[1], AUDIOSET_MEAN, 2 * AUDIOSET_STD)


def configure_named(facts: Facts, size: tuple[int, int]) -> ModelConfig:
    """Return the model of --model for spectrograms of this size; AST-… as published."""
    sized = replace(facts, overrides={**facts.overrides, "size": size})
    slots = {} if facts.overrides["model"].startswith("AST-") else {"position": "sincos2d", "pool": "mean"}
    return common.configure_named(sized, **slots)


def configure_model(facts: Facts, size: tuple[int, int]) -> ModelConfig:
    """Return a small model with patches of 16 mel bins and 16 frames: patches of 8 take three times as long."""
    count = f"{facts.images:,} training sounds"
    width = facts.choose("width", 192 if facts.images >= LARGE_DATA else 128, count)
    depth = facts.choose("depth", 6 if facts.images >= LARGE_DATA else 4, count)
    return common.configure_compact(facts, facts.classes, 16, width, depth, size)


def choose_augmentation(size: tuple[int, int]) -> tuple[AugmentSlot, ...]:
    """Return small changes of speed, pitch and loudness, then SpecAugment."""
    return (SpectrogramWarp(pitch=round(size[0] / 20, 1)), SpecAugment())
