"""Shared choices of recipes for videos: the clip, and a model of clips."""

from dataclasses import replace

from vitrail.data.clip import Clip
from vitrail.models.base import ModelConfig
from vitrail.models.inflate import inflate_config
from vitrail.training.recipe import Facts

STRIDE_SECONDS = 4 / 30  # between the frames of a clip: every fourth of 30 per second, as published
SHORT_VIDEO = 64  # frames up to which a clip is spread over the whole video
INFLATED_FRAMES = 8  # of a clip for a model that has seen images only, as in TimeSformer


def choose_clip(facts: Facts, default: Clip, why: str) -> Clip:
    """Return the clip of --clip, or the default."""
    clip = facts.choose("clip", default, f"{why}; {describe_videos(facts)}")
    return replace(clip, clips=1, crops=1)


def fit_clip(facts: Facts, frames: int) -> Clip:
    """Return a clip of so many frames: as long as the videos if these are short, else with the published stride in time."""
    stride, length = max(1, round(STRIDE_SECONDS * (facts.rate or 30.0))), facts.frames or frames
    longest = max(1, (length - 1) // max(1, frames - 1))
    return Clip(frames, longest if length <= SHORT_VIDEO else min(stride, longest))


def describe_videos(facts: Facts) -> str:
    """Return the length of the videos in words."""
    rate = "" if facts.rate is None else f" at {facts.rate:.4g} per second"
    return f"videos of {facts.frames:,} frames{rate}" if facts.frames else "images"


def adapt_to_clips(facts: Facts, model: ModelConfig, attention: str | None = None) -> tuple[ModelConfig, Clip | None]:
    """Return the model of a checkpoint for clips of the data's videos, and the clip; for images the model itself, and None.

    A model of images is inflated, with the given `attention`, "joint" or "divided".
    """
    if model.frames is not None:
        stored = facts.init_preprocessing.clip if facts.init_preprocessing is not None else None
        default = fit_clip(facts, model.frames) if stored is None else stored
        clip = choose_clip(facts, default, "frames of the checkpoint" if stored is None else "the checkpoint's")
        return (model if clip.frames == model.frames else model.with_frames(clip.frames)), clip
    if facts.frames is None:
        return model, None
    clip = choose_clip(facts, fit_clip(facts, INFLATED_FRAMES), "for a model that has seen images only")
    inflated = inflate_config(model, clip.frames, attention)
    facts.chosen.append(f"{model.describe()} inflated to {inflated.describe()}: weights of images, for clips")
    return inflated, clip
