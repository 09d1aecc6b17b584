"""Blur, grey, solarise and colour jitter: their rates, and equality of single images and batches."""

from functools import partial

import numpy as np
import pytest
import torch

from vitrail.data.rng import BatchRandom, SampleRandom
from vitrail.data.transforms import operations
from vitrail.data.transforms.augment import Blur, ColourJitter, Grey, Solarise
from vitrail.data.transforms.pipeline import TrainPipeline
from vitrail.utils.json import to_json, value_from_json


def make_images(count: int = 40, channels: int = 3) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).integers(0, 256, (count, channels, 20, 24), dtype=np.uint8))


STEPS = [
    Blur(),
    Blur(1.0, (3.0, 9.0)),
    Grey(0.5),
    Solarise(),
    Solarise(1.0, 0),
    ColourJitter(0.4, 0.4, 0.2, 0.1, rate=0.8),
]


@pytest.mark.parametrize("step", STEPS, ids=repr)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_batch_equals_single_images(step, channels) -> None:
    pixels = make_images(channels=channels)
    before = pixels.clone()
    whole = step.apply_batch(pixels, BatchRandom(5, 1, np.arange(100, 140), 2))
    single = [step.apply(image, SampleRandom(5, 1, 100 + i, 2)) for i, image in enumerate(pixels)]
    assert (whole == torch.stack(single)).all()
    assert (pixels == before).all()
    assert (whole != pixels).any() == (not (isinstance(step, Grey) and channels == 1))


@pytest.mark.parametrize(
    "make", [lambda rate: Blur(rate, (0.5, 2.0)), Grey, Solarise, lambda rate: ColourJitter(0.4, 0.4, 0.4, rate=rate)]
)
def test_rate_of_changed_images(make) -> None:
    pixels, rng = make_images(500), BatchRandom(0, 0, np.arange(500))
    for rate in (0.0, 0.3, 1.0):
        changed = (make(rate).apply_batch(pixels, rng) != pixels).flatten(1).any(1)
        assert abs(changed.float().mean() - rate) < 0.06


def test_blur_radii_cover_the_range() -> None:
    point = torch.zeros(200, 1, 15, 15, dtype=torch.uint8)
    point[:, :, 7, 7] = 255
    tops = Blur(1.0, (0.5, 2.0)).apply_batch(point, BatchRandom(0, 0, np.arange(200))).amax((1, 2, 3))
    for radius, found in ((0.5, tops.max()), (2.0, tops.min())):
        assert abs(int(operations.blur_image(point[0], radius).max()) - int(found)) <= 3


@pytest.mark.parametrize("radius", [0.1, 0.5, 1.0, 2.0, 7.0])
def test_blur_is_close_to_pillow(radius) -> None:
    fine = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 3, 40, 31), dtype=np.uint8))
    found = operations.blur_batch(fine, torch.full((3,), radius, dtype=torch.float64))
    apart = (found.int() - torch.stack([operations.blur_image(each, radius) for each in fine]).int()).abs().float()
    assert apart.mean() < 2
    even = torch.full((1, 4, 9, 5), 201, dtype=torch.uint8)
    assert torch.equal(operations.blur_batch(even, torch.tensor([radius], dtype=torch.float64)), even)


def test_jitter_at_rate_1_matches_earlier_versions() -> None:
    """The rate uses the last random number, so augmentations without a rate are unchanged."""
    pixels = make_images(1)[0]
    order, factors = ColourJitter(0.4, 0.4, 0.4, 0.1)._sample_factors(BatchRandom(0, 0, np.array([3])))
    expected = pixels
    for kind in order[0].tolist():
        change = (
            operations.scale_brightness,
            operations.scale_contrast,
            operations.scale_saturation,
            operations.rotate_hue,
        )[kind]
        factor = float(factors[0, kind])
        expected = operations.change_colours(expected, partial(change, **{"shift" if kind == 3 else "factor": factor}))
    assert torch.equal(ColourJitter(0.4, 0.4, 0.4, 0.1).apply(pixels, SampleRandom(0, 0, 3)), expected)


def test_slots_round_trip_through_json() -> None:
    for step in STEPS:
        assert value_from_json(to_json(step), type(step), "step") == step
    assert TrainPipeline(tuple(STEPS), (20, 24)).augments_batches


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Blur(1.5),
        lambda: Blur(0.5, (2.0, 1.0)),
        lambda: Blur(0.5, (0.0, 1.0)),
        lambda: Grey(-0.1),
        lambda: Solarise(2.0),
        lambda: Solarise(0.5, 300),
        lambda: ColourJitter(rate=1.1),
    ],
)
def test_invalid_arguments_raise(wrong) -> None:
    with pytest.raises(ValueError, match=r"rate|radius|solarise"):
        wrong()
