"""Batches: the same whatever the workers, the processes and the memory; nothing unreadable is silent."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data import memory
from vitrail.data.augment import ColourJitter, Flip, PadCrop, RandAugment, RandomErasing
from vitrail.data.crops import RandomResizedCrop
from vitrail.data.loader import Batch, Loader
from vitrail.data.order import balanced, drawn, shuffled
from vitrail.data.pictures import Pictures
from vitrail.data.pipeline import Evaluation, Training
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources.pixels import Pixels

COUNT = 37


class Files:
    """A store of files, as a folder is one."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, item: int) -> str:
        return self.paths[item].name

    def open(self, item: int) -> Image.Image:
        return Image.open(self.paths[item])

    def data(self, item: int) -> bytes:
        return self.paths[item].read_bytes()

    def stamp(self, item: int) -> tuple[int, int] | None:
        return None


@pytest.fixture
def photographs(tmp_path) -> Pictures:
    """JPEGs of which some are large enough to be decoded at a smaller scale, some turned, some grey, some PNGs."""
    random = np.random.default_rng(0)
    paths = []
    for index in range(COUNT):
        height, width = (90, 120) if index % 5 == 0 else (40 + index % 7, 50)
        small = random.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
        exif = Image.Exif()
        if index % 4 == 0:
            exif[0x0112] = 1 + index % 8
        if index % 6 == 0:
            image = image.convert("L")
        paths.append(tmp_path / f"{index}.{'png' if index % 3 == 0 else 'jpg'}")
        image.save(paths[-1], exif=exif)
    classes = ("few", "many")
    return Pictures(Files(paths), np.arange(COUNT), (np.arange(COUNT) % 4 > 0).astype(np.int64), classes)


@pytest.fixture
def pixels() -> Pictures:
    array = np.random.default_rng(0).integers(0, 256, (50, 16, 16, 3), dtype=np.uint8)
    items = np.arange(50)[::-1][:COUNT].copy()
    return Pictures(Pixels(array, ((0, "array"),)), items, np.arange(COUNT) % 3, ("a", "b", "c"))


LARGE = Training((RandomResizedCrop((32, 32)), Flip(), RandAugment(2, 9), RandomErasing(0.5)), (32, 32))
SMALL = Training((PadCrop(2), Flip(), ColourJitter(0.3, 0.3, 0.3, 0.1), RandomErasing(0.5)), (16, 16))
CROPPED = Training((RandomResizedCrop((16, 16), (0.3, 1.0)), Flip()), (16, 16))
EVALUATION = Evaluation(Preprocessing(size=(32, 32), resize=(36, 36), turn=True))


def collected(batches) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found: list[Batch] = list(batches)
    return tuple(torch.cat([getattr(each, name) for each in found]) for name in ("pixels", "targets", "indices"))  # pyright: ignore


def two_epochs(loader: Loader):
    made = collected(batch for epoch in (0, 1) for batch in loader.epoch(epoch))
    loader.close()
    return made


def equal(first, second) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize(("which", "prepare"), [("photographs", LARGE), ("pixels", SMALL), ("pixels", CROPPED)])
def test_batches_are_the_same_with_any_number_of_workers(which, prepare, workers, request):
    pictures = request.getfixturevalue(which)
    alone = two_epochs(Loader(pictures, None, prepare, batch_size=8, seed=3))
    assert equal(alone, two_epochs(Loader(pictures, None, prepare, batch_size=8, seed=3, workers=workers)))
    assert alone[0].shape == (64, 3, *prepare.size)
    assert alone[0].dtype == torch.uint8


@pytest.mark.slow
def test_workers_that_are_spawned_give_the_same(photographs):
    alone = two_epochs(Loader(photographs, None, LARGE, batch_size=8, seed=3))
    spawned = Loader(photographs, None, LARGE, batch_size=8, seed=3, workers=2, start_method="spawn")
    assert equal(alone, two_epochs(spawned))


@pytest.mark.parametrize(("which", "prepare"), [("photographs", LARGE), ("pixels", SMALL)])
@pytest.mark.parametrize("weights", [None, "balanced"])
def test_processes_share_the_batches_of_one(which, prepare, weights, request):
    pictures = request.getfixturevalue(which)
    whole = list(Loader(pictures, None, prepare, batch_size=8, seed=3, weights=weights).epoch(1))
    parts = [
        list(Loader(pictures, None, prepare, batch_size=8, seed=3, rank=r, world=4, weights=weights).epoch(1))
        for r in range(4)
    ]
    for step, batch in enumerate(whole):
        for name in ("pixels", "targets", "indices"):
            assert torch.equal(getattr(batch, name), torch.cat([getattr(part[step], name) for part in parts]))


def test_memory_does_not_change_the_pixels(photographs):
    inside, outside = (Loader(photographs, None, LARGE, batch_size=8, memory=most) for most in (2**30, 0))
    assert equal(two_epochs(inside), two_epochs(outside))
    held = inside._work.held
    assert held is not None
    reducible = [index for index in range(COUNT) if index % 5 == 0 and index % 3]
    assert [index for index in range(COUNT) if held.get(index) is None] == reducible
    assert outside._work.held is None


def test_what_does_not_fit_is_not_held(photographs):
    assert memory.hold(photographs, 3, (32, 32), True, 10_000) is None
    told = []
    assert memory.hold(photographs, 3, (32, 32), True, 10**8, lambda done, of: told.append((done, of))) is not None
    assert told[-1][0] == told[-1][1] == len(told)


def test_an_epoch_has_every_picture_once_in_an_order_of_its_own(pixels):
    loader = Loader(pixels, None, SMALL, batch_size=1, seed=5)
    orders = [collected(loader.epoch(epoch))[2].tolist() for epoch in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(COUNT))
    assert orders[0] != orders[1]
    assert orders[0] == loader.order(0).tolist()
    assert Loader(pixels, None, SMALL, batch_size=1, seed=6).order(0).tolist() != orders[0]


def test_targets_go_with_their_pictures(pixels):
    targets = np.eye(3, dtype=np.uint8)[np.arange(COUNT) % 3]
    batch = next(Loader(pixels, targets, SMALL, batch_size=8).epoch(0))
    assert batch.targets.dtype == torch.float32
    assert torch.equal(batch.targets.argmax(1), batch.indices % 3)
    assert Loader(pixels, None, SMALL, batch_size=8).targets.dtype == torch.int64


@pytest.mark.parametrize("workers", [0, 2])
def test_starting_later_skips_without_reading(photographs, workers):
    loader = Loader(photographs, None, LARGE, batch_size=4, workers=workers, memory=0, epochs=2)
    whole = list(loader.epoch(0))
    later = Loader(photographs, None, LARGE, batch_size=4, workers=workers, memory=0, epochs=1)
    for index in loader.order(0)[:20]:
        photographs.store.paths[index].unlink()
    rest = list(later.epoch(0, start=5))
    assert len(rest) == len(whole) - 5 == later.steps - 5
    assert equal(collected(rest), collected(whole[5:]))
    assert not later.unreadable
    loader.close()
    later.close()


def test_epochs_follow_each_other_without_new_workers(photographs):
    loader = Loader(photographs, None, LARGE, batch_size=8, workers=2)
    first = collected(loader.epoch(0))
    processes = {worker.pid for worker in loader._crew._loader._iterator._workers}  # pyright: ignore
    for _ in loader.epoch(1):
        break
    again = collected(loader.epoch(0))
    assert equal(first, again)
    assert {worker.pid for worker in loader._crew._loader._iterator._workers} == processes  # pyright: ignore
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_an_unreadable_picture_is_replaced_and_named(photographs, workers, world):
    bad = (7, 8, 20)
    whole = photographs.store.paths[8].read_bytes()
    photographs.store.paths[7].unlink()
    photographs.store.paths[8].write_bytes(whole[: len(whole) // 2])
    photographs.store.paths[20].write_bytes(b"")
    parts = [
        Loader(photographs, None, LARGE, batch_size=8, seed=1, workers=workers, rank=rank, world=world, epochs=1)
        for rank in range(world)
    ]
    found = [list(part.epoch(0)) for part in parts]
    order = parts[0].order(0).tolist()
    indices = [i for step in zip(*found, strict=True) for batch in step for i in batch.indices.tolist()]
    for place, index in enumerate(indices):
        expected = place
        while order[expected % COUNT] in bad:
            expected += 1
        assert index == order[expected % COUNT]
    named: dict[str, str] = {}
    for part in parts:
        named |= part.unreadable
        part.close()
    expected_names = {photographs.name(index) for index in bad if index in order[:32]}
    assert set(named) >= expected_names
    assert all(reason and "\n" not in reason for reason in named.values())


@pytest.mark.parametrize("workers", [0, 2])
def test_data_that_has_gone_away_is_an_error_and_no_endless_search(photographs, workers):
    loader = Loader(photographs, None, LARGE, batch_size=8, workers=workers, memory=0)
    for path in photographs.store.paths:
        path.unlink()
    with pytest.raises(OSError, match=r"^[^\n]*has the data gone away\?$"):
        next(loader.epoch(0))
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_last_batch_of_one_bad_picture_is_no_failure(photographs, workers):
    some = photographs.only(range(9))
    photographs.store.paths[8].write_bytes(b"bad")
    loader = Loader(some, None, EVALUATION, batch_size=8, workers=workers, memory=0)
    assert [len(batch.indices) for batch in loader.once()] == [8, 0]
    assert set(loader.unreadable) == {some.name(8)}
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 3])
def test_evaluation_sees_every_picture_once_in_order(photographs, workers, world):
    expected = torch.stack([EVALUATION(photographs.open(index)) for index in range(COUNT)])
    loaders = [
        Loader(photographs, None, EVALUATION, batch_size=9, workers=workers, rank=rank, world=world)
        for rank in range(world)
    ]
    for _ in range(2):  # the second time from memory
        found = [list(loader.once()) for loader in loaders]
        assert {len(each) for each in found} == {5}
        pixels, targets, indices = collected(batch for part in found for batch in part)
        place = indices.argsort()
        assert indices[place].tolist() == list(range(COUNT))
        assert torch.equal(pixels[place], expected)
        assert torch.equal(targets[place], torch.from_numpy(photographs.targets))
    assert all(loader._crew is None for loader in loaders)


def test_evaluation_leaves_out_what_it_cannot_read_and_names_it(photographs):
    photographs.store.paths[5].write_bytes(b"no picture")
    loader = Loader(photographs, None, EVALUATION, batch_size=10)
    assert collected(loader.once())[2].tolist() == [index for index in range(COUNT) if index != 5]
    assert list(loader.unreadable) == ["5.jpg"]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(16, 16), (20, 20)])
def test_evaluation_of_arrays_is_the_preprocessing(pixels, size, channels):
    preprocessing = Preprocessing(size=size, resize=size).with_channels(channels)
    found = collected(Loader(pixels, None, Evaluation(preprocessing), batch_size=10).once())[0]
    expected = torch.stack([preprocessing.pixels(pixels.open(index)) for index in range(COUNT)])
    assert torch.equal(found, expected)


def test_without_augmentation_a_training_epoch_still_replaces(photographs):
    photographs.store.paths[3].unlink()
    loader = Loader(photographs, None, EVALUATION, batch_size=37)
    assert len(next(loader.epoch(0)).indices) == 37
    assert list(loader.unreadable) == ["3.png"]


def test_balanced_sampling_draws_classes_equally_often(pixels):
    targets = np.array([0] * 30 + [1] * 5 + [2] * 2)
    weights = balanced(targets)
    drawn_classes = np.concatenate([targets[drawn(weights, 0, epoch) % 37] for epoch in range(200)])
    assert np.abs(np.bincount(drawn_classes) / len(drawn_classes) - 1 / 3).max() < 0.03
    several = np.array([[1, 0], [1, 0], [1, 1], [0, 0]])
    assert balanced(several).tolist() == [1 / 3, 1 / 3, 1.0, 1 / 3]


def test_weights_may_be_of_classes(pixels):
    loader = Loader(pixels, None, SMALL, batch_size=8, weights=np.array([0.0, 1.0, 0.0]))
    assert set(collected(loader.epoch(0))[1].tolist()) == {1}


def test_a_picture_drawn_twice_is_augmented_differently(pixels):
    weights = np.zeros(COUNT)
    weights[4] = 1
    batch = next(Loader(pixels, None, SMALL, batch_size=32, weights=weights).epoch(0))
    assert set(batch.indices.tolist()) == {4}
    assert len({each.numpy().tobytes() for each in batch.pixels}) > 28


def test_shards_are_read_a_window_at_a_time():
    shards = np.repeat(np.arange(40), 25)
    order = shuffled(1000, 0, 0, shards)
    assert sorted(order.tolist()) == list(range(1000))
    for start in range(0, 1000, 200):
        assert len(set(shards[order[start : start + 200]])) == 8
    assert (order != shuffled(1000, 0, 1, shards)).any()


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_killed_worker_is_one_clear_error(photographs):
    loader = Loader(photographs, None, LARGE, batch_size=4, workers=2, memory=0)
    batches = loader.epoch(0)
    next(batches)
    for worker in loader._crew._loader._iterator._workers:  # pyright: ignore
        os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(OSError, match=r"^a worker process [^\n]*died[^\n]*fewer workers$"):
        list(batches)
    loader.close()


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_group_leave_the_workers_at_work(photographs, which):
    alone = collected(Loader(photographs, None, LARGE, batch_size=4).epoch(0))
    loader = Loader(photographs, None, LARGE, batch_size=4, workers=2)
    batches = loader.epoch(0)
    first = next(batches)
    for worker in loader._crew._loader._iterator._workers:  # pyright: ignore
        os.kill(worker.pid, which)
    assert equal(alone, collected([first, *batches]))
    loader.close()


def test_decompression_bombs_are_refused_by_name(photographs, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3000)
    loader = Loader(photographs, None, LARGE, batch_size=8, memory=0)
    list(loader.epoch(0))
    assert {int(name.split(".")[0]) % 5 for name in loader.unreadable} == {0}
    assert all("too large" in reason for reason in loader.unreadable.values())


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"batch_size": 9, "world": 2},
        {"batch_size": 8, "rank": 2, "world": 2},
        {"batch_size": 8, "workers": -1},
        {"batch_size": 8, "weights": "fair"},
        {"batch_size": 8, "weights": np.array([1.0, 2.0])},
        {"batch_size": 8, "weights": np.zeros(COUNT)},
        {"batch_size": 8, "targets": np.zeros(3)},
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(pixels, wrong):
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        Loader(pixels, wrong.pop("targets", None), SMALL, **wrong)


def test_a_batch_larger_than_the_data_is_refused(pixels):
    with pytest.raises(ValueError, match="use a smaller batch size"):
        next(Loader(pixels, None, SMALL, batch_size=64).epoch(0))
