"""Blurred, grey, solarised, jittered: as often as told, and the same by the picture and by the batch."""

import numpy as np
import pytest
import torch

from vitrail.data import operations
from vitrail.data.augment import ColourJitter
from vitrail.data.chance import Chance, Chances
from vitrail.data.photometric import Blur, Grey, Solarise
from vitrail.data.pipeline import Training
from vitrail.models.written import read_value, to_json


def pictures(count: int = 40, channels: int = 3) -> torch.Tensor:
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
def test_a_batch_is_its_pictures_one_by_one(step, channels) -> None:
    pixels = pictures(channels=channels)
    before = pixels.clone()
    whole = step.batch(pixels, Chances(5, 1, np.arange(100, 140), 2))
    single = [step.picture(each, Chance(5, 1, 100 + place, 2)) for place, each in enumerate(pixels)]
    assert (whole == torch.stack(single)).all()
    assert (pixels == before).all()
    assert (whole != pixels).any() == (not (isinstance(step, Grey) and channels == 1))


@pytest.mark.parametrize(
    "make", [lambda rate: Blur(rate, (0.5, 2.0)), Grey, Solarise, lambda rate: ColourJitter(0.4, 0.4, 0.4, rate=rate)]
)
def test_as_many_pictures_change_as_the_rate_says(make) -> None:
    pixels, chances = pictures(500), Chances(0, 0, np.arange(500))
    for rate in (0.0, 0.3, 1.0):
        changed = (make(rate).batch(pixels, chances) != pixels).flatten(1).any(1)
        assert abs(changed.float().mean() - rate) < 0.06


def test_blurs_are_drawn_from_the_whole_range_and_flatten_a_point() -> None:
    point = torch.zeros(200, 1, 15, 15, dtype=torch.uint8)
    point[:, :, 7, 7] = 255
    tops = Blur(1.0, (0.5, 2.0)).batch(point, Chances(0, 0, np.arange(200))).amax((1, 2, 3))
    for radius, found in ((0.5, tops.max()), (2.0, tops.min())):
        assert abs(int(operations.blur(point[0], radius).max()) - int(found)) <= 3


@pytest.mark.parametrize("radius", [0.1, 0.5, 1.0, 2.0, 7.0])
def test_blur_is_nearly_pillows_and_keeps_what_is_even(radius) -> None:
    fine = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 3, 40, 31), dtype=np.uint8))
    found = operations.smooth(fine, torch.full((3,), radius, dtype=torch.float64))
    apart = (found.int() - torch.stack([operations.blur(each, radius) for each in fine]).int()).abs().float()
    assert apart.mean() < 2
    even = torch.full((1, 4, 9, 5), 201, dtype=torch.uint8)
    assert torch.equal(operations.smooth(even, torch.tensor([radius], dtype=torch.float64)), even)


def test_jitter_at_rate_1_is_what_it_was_without_one() -> None:
    """The rate is drawn behind everything else: no number of an augmentation that has none moved."""
    pixels = pictures(1)[0]
    order, factors = ColourJitter(0.4, 0.4, 0.4, 0.1)._choices(Chances(0, 0, np.array([3])))
    expected = pixels
    for kind in order[0].tolist():
        change = (operations.brightness, operations.contrast, operations.saturation, operations.hue)[kind]
        expected = change(expected, float(factors[0, kind]))
    assert torch.equal(ColourJitter(0.4, 0.4, 0.4, 0.1).picture(pixels, Chance(0, 0, 3)), expected)


def test_they_are_slots_that_can_be_written_down() -> None:
    for step in STEPS:
        assert read_value(to_json(step), type(step), "step") == step
    assert Training(tuple(STEPS), (20, 24)).in_batches


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
def test_what_makes_no_sense_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match=r"rate|radius|solarise"):
        wrong()
