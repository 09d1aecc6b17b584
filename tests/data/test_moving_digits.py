"""Moving digits: every frame is as likely in every class, and videos are functions of the split and the index."""

import numpy as np
import pytest
import torch

from vitrail.data.cache import compute_image_key
from vitrail.data.clip import Clip
from vitrail.data.loader import Loader
from vitrail.data.sources import load_dataset
from vitrail.data.sources.moving_digits import CLASSES, FRAMES, MOTIONS, SIDE, MovingDigits, render_digit
from vitrail.data.transforms.augment import PadCrop
from vitrail.data.transforms.pipeline import TrainPipeline

OPPOSITE = {"left": "right", "up": "down", "clockwise": "anticlockwise", "grow": "shrink"}
OPPOSITE |= {value: key for key, value in OPPOSITE.items()}


def test_splits_are_made_in_any_number_with_digits_of_their_own() -> None:
    dataset = load_dataset("moving-digits")
    assert {split: len(images) for split, images in dataset.splits.items()} == {
        "train": 4000,
        "validation": 400,
        "test": 400,
    }
    large = load_dataset("moving-digits:20000")
    assert len(large["train"]) == 20_000
    assert large["train"].classes == CLASSES
    assert set(large["train"].class_counts.values()) == {2500}
    seen = [{digit.tobytes() for digit in images.store.digits} for images in dataset.splits.values()]
    assert not seen[0] & seen[1]
    assert not seen[0] & seen[2]
    assert not seen[1] & seen[2]
    for wrong in ("moving-digits:0", "moving-digits:many", "moving-digits:"):
        with pytest.raises(ValueError, match="give a number of videos from 8"):
            load_dataset(wrong)


def test_a_video_is_a_function_of_split_and_index() -> None:
    images = load_dataset("moving-digits:64")["train"]
    first = images.open_video(5).read_frames(range(FRAMES))
    assert first.shape == (FRAMES, SIDE, SIDE, 3)
    assert np.array_equal(first, load_dataset("moving-digits:20000")["train"].open_video(5).read_frames(range(FRAMES)))
    assert len({images.store.data(item) for item in range(64)}) == 64


def test_played_backwards_a_video_is_one_of_the_opposite_class() -> None:
    """The frames of a class are those of the opposite class, so their order alone tells the two apart."""
    store = load_dataset("moving-digits:64")["train"].store
    assert isinstance(store, MovingDigits)
    for item in range(16):
        states, name = store.states(item), CLASSES[store.label(item)]
        axis, direction = MOTIONS[OPPOSITE[name]]
        steps = (np.diff(states[::-1, axis]) + 0.5) % 1.0 - 0.5
        assert (np.sign(steps) == direction).all()
        assert np.allclose(steps, steps[0])
        assert np.ptp(np.delete(states, axis, 1), axis=0).max() == 0
        frames = render_digit(store.digits[0], states)
        assert np.array_equal(render_digit(store.digits[0], states[::-1]), frames[::-1])


def test_the_state_of_a_frame_has_one_distribution_for_all_classes_and_times() -> None:
    store = MovingDigits(0, 8000, np.zeros((1, 8, 8), dtype=np.uint8))
    states = np.stack([store.states(item) for item in range(len(store))])  # [n, T, 4]
    labels = np.arange(len(store)) % len(CLASSES)
    for label in range(len(CLASSES)):
        mine = np.sort(states[labels == label], axis=0)  # [m, T, 4], each coordinate and time sorted
        uniform = (np.arange(len(mine)) + 0.5) / len(mine)
        distance = np.abs(mine - uniform[:, None, None]).max(0)  # Kolmogorov and Smirnov, 64 of them
        assert distance.max() < 2.1 / np.sqrt(len(mine))  # one in 3,400 each


def test_single_frames_do_not_tell_the_class_but_their_order_does() -> None:
    """The mean frames of the classes differ by no more than those of random groups of videos."""
    images = load_dataset("moving-digits:1600")["train"]
    videos = np.stack([images.store.open(item).pixels for item in range(1600)]).astype(np.float32)  # type: ignore[attr-defined]
    labels = images.targets

    def measure_difference(groups: np.ndarray, shown: np.ndarray) -> float:
        return float(np.stack([shown[groups == label].mean(0) for label in range(len(CLASSES))]).var(0).sum())

    random = np.random.default_rng(0)
    for frame in (0, FRAMES // 2, FRAMES - 1):
        shown = videos[:, frame]
        by_chance = [measure_difference(random.permutation(labels), shown) for _ in range(20)]
        assert measure_difference(labels, shown) < np.mean(by_chance) + 4 * np.std(by_chance)
    x = np.arange(SIDE) * 2 * np.pi / SIDE
    phase = np.unwrap(np.angle((videos.sum(2) * np.exp(1j * x)).sum(2)), axis=1)  # of the centre across
    moved = phase[:, -1] - phase[:, 0]
    left, right = (moved[labels == CLASSES.index(name)] for name in ("left", "right"))
    assert (left < -1.2).all()
    assert (right > 1.2).all()


def test_batches_are_the_same_with_workers() -> None:
    images = load_dataset("moving-digits:64")["train"]
    pipeline = TrainPipeline((PadCrop(2),), (SIDE, SIDE), channels=1, clip=Clip(8, 2))

    def read(workers: int) -> list[torch.Tensor]:
        loader = Loader(images, None, pipeline, batch_size=16, workers=workers, epochs=1)
        batches = [batch.pixels for batch in loader.iter_epoch(0)]
        loader.close()
        return batches

    alone = read(0)
    assert alone[0].shape == (16, 1, 8, SIDE, SIDE)
    assert all(map(torch.equal, alone, read(2)))


def test_generated_videos_have_keys_of_their_content_for_cached_features() -> None:
    train, again = (load_dataset("moving-digits:8")["train"] for _ in range(2))
    keys = [compute_image_key(train, index) for index in range(8)]
    assert len(set(keys)) == 8
    assert keys == [compute_image_key(again, index) for index in range(8)]
