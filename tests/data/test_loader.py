"""Batches do not depend on workers, processes or the cache; unreadable images are reported."""

import os
import signal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data import workers as batch_workers
from vitrail.data.dataset import Images
from vitrail.data.loader import Batch, Loader, split_share
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.rng import compute_balanced_weights, sample_with_replacement, shuffle_indices
from vitrail.data.sources.arrays import ArrayStore
from vitrail.data.transforms.augment import ColourJitter, Flip, PadCrop, RandAugment, RandomErasing
from vitrail.data.transforms.crops import RandomResizedCrop
from vitrail.data.transforms.pipeline import TrainPipeline
from vitrail.data.worker_pool import WorkersLost

COUNT = 37
KILLED = "a data loading worker was killed, probably out of memory"


class Files:
    """A store of files."""

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
def photographs(tmp_path) -> Images:
    """Return JPEGs (some reducible, some with EXIF orientation, some grey) and PNGs."""
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
    return Images(Files(paths), np.arange(COUNT), (np.arange(COUNT) % 4 > 0).astype(np.int64), classes)


@pytest.fixture
def pixels() -> Images:
    array = np.random.default_rng(0).integers(0, 256, (50, 16, 16, 3), dtype=np.uint8)
    items = np.arange(50)[::-1][:COUNT].copy()
    return Images(ArrayStore(array, ((0, "array"),)), items, np.arange(COUNT) % 3, ("a", "b", "c"))


LARGE = TrainPipeline((RandomResizedCrop((32, 32)), Flip(), RandAugment(2, 9), RandomErasing(0.5)), (32, 32))
PLAIN = Preprocessing((32, 32), (32, 32))
SMALL = TrainPipeline((PadCrop(2), Flip(), ColourJitter(0.3, 0.3, 0.3, 0.1), RandomErasing(0.5)), (16, 16))
CROPPED = TrainPipeline((RandomResizedCrop((16, 16), (0.3, 1.0)), Flip()), (16, 16))
EVALUATION = Preprocessing(size=(32, 32), resize=(36, 36), turn=True)


def collected(batches) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found: list[Batch] = list(batches)
    return tuple(torch.cat([getattr(each, name) for each in found]) for name in ("pixels", "targets", "indices"))  # pyright: ignore


def worker_ids(loader: Loader) -> set[int]:
    assert loader._pool is not None
    return {worker.pid for worker in loader._pool.processes}


def two_epochs(loader: Loader):
    made = collected(batch for epoch in (0, 1) for batch in loader.iter_epoch(epoch))
    loader.close()
    return made


def equal(first, second) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize(("which", "pipeline"), [("photographs", LARGE), ("pixels", SMALL), ("pixels", CROPPED)])
def test_batches_are_the_same_with_any_number_of_workers(which, pipeline, workers, request):
    images = request.getfixturevalue(which)
    alone = two_epochs(Loader(images, None, pipeline, batch_size=8, seed=3))
    assert equal(alone, two_epochs(Loader(images, None, pipeline, batch_size=8, seed=3, workers=workers)))
    assert alone[0].shape == (64, 3, *pipeline.size)
    assert alone[0].dtype == torch.uint8


@pytest.mark.slow
def test_spawned_workers_give_the_same_batches(photographs):
    alone = two_epochs(Loader(photographs, None, LARGE, batch_size=8, seed=3))
    spawned = Loader(photographs, None, LARGE, batch_size=8, seed=3, workers=2, start_method="spawn")
    assert equal(alone, two_epochs(spawned))


@pytest.mark.parametrize(("which", "pipeline"), [("photographs", LARGE), ("pixels", SMALL)])
@pytest.mark.parametrize("weights", [None, "balanced"])
def test_ranks_share_the_batches(which, pipeline, weights, request):
    images = request.getfixturevalue(which)
    whole = list(Loader(images, None, pipeline, batch_size=8, seed=3, weights=weights).iter_epoch(1))
    parts = [
        list(Loader(images, None, pipeline, batch_size=8, seed=3, rank=r, world_size=4, weights=weights).iter_epoch(1))
        for r in range(4)
    ]
    for step, batch in enumerate(whole):
        for name in ("pixels", "targets", "indices"):
            assert torch.equal(getattr(batch, name), torch.cat([getattr(part[step], name) for part in parts]))


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_every_micro_batch(pixels, world):
    """Batch statistics are those of a micro-batch, so all processes together compute those of one."""
    whole = next(Loader(pixels, None, SMALL, batch_size=16, accumulate=2).iter_epoch(0))
    parts = [
        next(Loader(pixels, None, SMALL, batch_size=16, rank=rank, world_size=world, accumulate=2).iter_epoch(0))
        for rank in range(world)
    ]
    ends = split_share(16, 2), split_share(16 // world, 2)
    for (a, b), (c, d) in zip(*map(pairwise, ends), strict=True):
        assert torch.equal(whole.indices[a:b], torch.cat([part.indices[c:d] for part in parts]))
        assert torch.equal(whole.pixels[a:b], torch.cat([part.pixels[c:d] for part in parts]))


def test_the_cache_does_not_change_pixels(photographs):
    inside, outside = (Loader(photographs, None, LARGE, batch_size=8, cache_bytes=most) for most in (2**30, 0))
    assert equal(two_epochs(inside), two_epochs(outside))
    cache = inside._preparer.cache
    assert cache is not None
    reducible = [index for index in range(COUNT) if index % 5 == 0 and index % 3]
    assert [index for index in range(COUNT) if cache.get(index) is None] == reducible
    assert outside._preparer.cache is None


def test_images_that_do_not_fit_are_not_cached(photographs):
    assert batch_workers.cache_images(photographs, 3, (32, 32), True, 10_000) is None
    reports = []
    assert (
        batch_workers.cache_images(photographs, 3, (32, 32), True, 10**8, lambda done, of: reports.append((done, of)))
        is not None
    )
    assert reports[-1][0] == reports[-1][1] == len(reports)


def test_an_epoch_is_a_permutation(pixels):
    loader = Loader(pixels, None, SMALL, batch_size=1, seed=5)
    orders = [collected(loader.iter_epoch(epoch))[2].tolist() for epoch in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(COUNT))
    assert orders[0] != orders[1]
    assert orders[0] == loader.epoch_order(0).tolist()
    assert Loader(pixels, None, SMALL, batch_size=1, seed=6).epoch_order(0).tolist() != orders[0]


def test_targets_match_their_images(pixels):
    targets = np.eye(3, dtype=np.uint8)[np.arange(COUNT) % 3]
    batch = next(Loader(pixels, targets, SMALL, batch_size=8).iter_epoch(0))
    assert batch.targets.dtype == torch.float32
    assert torch.equal(batch.targets.argmax(1), batch.indices % 3)
    assert Loader(pixels, None, SMALL, batch_size=8).targets.dtype == torch.int64


@pytest.mark.parametrize("workers", [0, 2])
def test_start_skips_without_reading(photographs, workers):
    loader = Loader(photographs, None, LARGE, batch_size=4, workers=workers, cache_bytes=0, epochs=2)
    whole = list(loader.iter_epoch(0))
    later = Loader(photographs, None, LARGE, batch_size=4, workers=workers, cache_bytes=0, epochs=1)
    for index in loader.epoch_order(0)[:20]:
        photographs.store.paths[index].unlink()
    rest = list(later.iter_epoch(0, start=5))
    assert len(rest) == len(whole) - 5 == later.steps_per_epoch - 5
    assert equal(collected(rest), collected(whole[5:]))
    assert not later.unreadable
    loader.close()
    later.close()


def test_consecutive_epochs_reuse_workers(photographs):
    loader = Loader(photographs, None, LARGE, batch_size=8, workers=2)
    first = collected(loader.iter_epoch(0))
    processes = worker_ids(loader)
    for _ in loader.iter_epoch(1):
        break
    again = collected(loader.iter_epoch(0))
    assert equal(first, again)
    assert worker_ids(loader) == processes
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2])
def test_an_unreadable_image_is_replaced_and_named(photographs, workers, world):
    bad = (7, 8, 20)
    whole = photographs.store.paths[8].read_bytes()
    photographs.store.paths[7].unlink()
    photographs.store.paths[8].write_bytes(whole[: len(whole) // 2])
    photographs.store.paths[20].write_bytes(b"")
    parts = [
        Loader(photographs, None, LARGE, batch_size=8, seed=1, workers=workers, rank=rank, world_size=world, epochs=1)
        for rank in range(world)
    ]
    found = [list(part.iter_epoch(0)) for part in parts]
    order = parts[0].epoch_order(0).tolist()
    indices = [i for step in zip(*found, strict=True) for batch in step for i in batch.indices.tolist()]
    for row, index in enumerate(indices):
        expected = row
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
def test_lost_data_is_an_error(photographs, workers):
    loader = Loader(photographs, None, LARGE, batch_size=8, workers=workers, cache_bytes=0)
    for path in photographs.store.paths:
        path.unlink()
    with pytest.raises(OSError, match=r"^[^\n]*check that the data is still there$"):
        next(loader.iter_epoch(0))
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_last_batch_of_one_bad_image_does_not_fail(photographs, workers):
    some = photographs.select(range(9))
    photographs.store.paths[8].write_bytes(b"bad")
    loader = Loader(some, None, EVALUATION, batch_size=8, workers=workers, cache_bytes=0)
    assert [len(batch.indices) for batch in loader.iter_once()] == [8, 0]
    assert set(loader.unreadable) == {some.name(8)}
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 3])
def test_evaluation_reads_every_image_once_in_order(photographs, workers, world):
    expected = torch.stack([EVALUATION.to_pixels(photographs.open(index)) for index in range(COUNT)])
    loaders = [
        Loader(photographs, None, EVALUATION, batch_size=9, workers=workers, rank=rank, world_size=world)
        for rank in range(world)
    ]
    for _ in range(2):  # the second time from memory
        found = [list(loader.iter_once()) for loader in loaders]
        assert {len(each) for each in found} == {5}
        pixels, targets, indices = collected(batch for part in found for batch in part)
        order = indices.argsort()
        assert indices[order].tolist() == list(range(COUNT))
        assert torch.equal(pixels[order], expected)
        assert torch.equal(targets[order], torch.from_numpy(photographs.targets))
    assert not any(loader._pool.processes for loader in loaders if loader._pool)


def test_evaluation_skips_and_names_unreadable_images(photographs):
    photographs.store.paths[5].write_bytes(b"no image")
    loader = Loader(photographs, None, EVALUATION, batch_size=10)
    assert collected(loader.iter_once())[2].tolist() == [index for index in range(COUNT) if index != 5]
    assert list(loader.unreadable) == ["5.jpg"]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(16, 16), (20, 20)])
def test_evaluation_of_arrays_equals_preprocessing(pixels, size, channels):
    preprocessing = Preprocessing(size=size, resize=size).with_channels(channels)
    found = collected(Loader(pixels, None, preprocessing, batch_size=10).iter_once())[0]
    expected = torch.stack([preprocessing.to_pixels(pixels.open(index)) for index in range(COUNT)])
    assert torch.equal(found, expected)


def test_training_without_augmentation_replaces_unreadable_images(photographs):
    photographs.store.paths[3].unlink()
    loader = Loader(photographs, None, EVALUATION, batch_size=37)
    assert len(next(loader.iter_epoch(0)).indices) == 37
    assert list(loader.unreadable) == ["3.png"]


def test_balanced_sampling_draws_classes_equally_often(pixels):
    targets = np.array([0] * 30 + [1] * 5 + [2] * 2)
    weights = compute_balanced_weights(targets)
    drawn_classes = np.concatenate([targets[sample_with_replacement(weights, 0, epoch) % 37] for epoch in range(200)])
    assert np.abs(np.bincount(drawn_classes) / len(drawn_classes) - 1 / 3).max() < 0.03
    several = np.array([[1, 0], [1, 0], [1, 1], [0, 0]])
    assert compute_balanced_weights(several).tolist() == [1 / 3, 1 / 3, 1.0, 1 / 3]


def test_weights_per_class(pixels):
    loader = Loader(pixels, None, SMALL, batch_size=8, weights=np.array([0.0, 1.0, 0.0]))
    assert set(collected(loader.iter_epoch(0))[1].tolist()) == {1}


def test_repeated_draws_are_augmented_differently(pixels):
    weights = np.zeros(COUNT)
    weights[4] = 1
    batch = next(Loader(pixels, None, SMALL, batch_size=32, weights=weights).iter_epoch(0))
    assert set(batch.indices.tolist()) == {4}
    assert len({each.numpy().tobytes() for each in batch.pixels}) > 28


def test_shards_are_read_a_window_at_a_time():
    shards = np.repeat(np.arange(40), 25)
    order = shuffle_indices(1000, 0, 0, shards)
    assert sorted(order.tolist()) == list(range(1000))
    for start in range(0, 1000, 200):
        assert len(set(shards[order[start : start + 200]])) == 8
    assert (order != shuffle_indices(1000, 0, 1, shards)).any()


def kill_workers(loader: Loader, number: signal.Signals = signal.SIGKILL) -> None:
    assert loader._pool is not None
    for worker in loader._pool.processes:
        os.kill(worker.pid, number)
        worker.join()


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_killed_workers_are_replaced_once_and_no_batch_changes(photographs):
    expected = collected(Loader(photographs, None, LARGE, batch_size=4).iter_epoch(0))
    lines: list[str] = []
    loader = Loader(
        photographs, None, LARGE, batch_size=4, workers=2, cache_bytes=0, fallback=False, report=lines.append
    )
    batches = loader.iter_epoch(0)
    first = next(batches)
    kill_workers(loader)
    found = collected([first, *batches])
    assert equal(found, expected)
    assert lines == [f"{KILLED}: started new workers; fewer need less memory"]
    batches = loader.iter_epoch(1)
    next(batches)
    kill_workers(loader)
    with pytest.raises(WorkersLost, match=f"^{KILLED}: use fewer workers or a smaller image size$"):
        list(batches)
    assert len(lines) == 1
    loader.close()


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_after_a_second_death_this_process_evaluates(photographs):
    expected = collected(Loader(photographs, None, PLAIN, batch_size=4).iter_once())
    lines: list[str] = []
    loader = Loader(photographs, None, PLAIN, batch_size=4, workers=2, cache_bytes=0, report=lines.append)
    found = []
    for number, batch in enumerate(loader.iter_once()):
        found.append(batch)
        if number < 2:
            kill_workers(loader)
    assert equal(collected(found), expected)
    assert lines[1:] == [f"{KILLED}, again: this process prepares the images from now on"]
    assert loader._pool is not None
    assert not loader._pool.processes


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_workers_that_crash_are_an_error_the_second_time(photographs):
    loader = Loader(photographs, None, PLAIN, batch_size=4, workers=1, cache_bytes=0, report=lambda line: None)
    batches = loader.iter_once()
    for _ in range(2):
        next(batches)
        kill_workers(loader, signal.SIGSEGV)
    with pytest.raises(WorkersLost, match=r"^a data loading worker crashed \(SIGSEGV\): use fewer"):
        next(batches)


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_workers_ignore_signals_to_the_group(photographs, which):
    alone = collected(Loader(photographs, None, LARGE, batch_size=4).iter_epoch(0))
    loader = Loader(photographs, None, LARGE, batch_size=4, workers=2)
    batches = loader.iter_epoch(0)
    first = [next(batches), next(batches)]  # one of each worker: both have started
    for pid in worker_ids(loader):
        os.kill(pid, which)
    assert equal(alone, collected([*first, *batches]))
    loader.close()


def test_decompression_bombs_are_refused_by_name(photographs, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3000)
    loader = Loader(photographs, None, LARGE, batch_size=8, cache_bytes=0)
    list(loader.iter_epoch(0))
    assert {int(name.split(".")[0]) % 5 for name in loader.unreadable} == {0}
    assert all("too large" in reason for reason in loader.unreadable.values())


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"batch_size": 9, "world_size": 2},
        {"batch_size": 8, "rank": 2, "world_size": 2},
        {"batch_size": 8, "workers": -1},
        {"batch_size": 8, "weights": "fair"},
        {"batch_size": 8, "weights": np.array([1.0, 2.0])},
        {"batch_size": 8, "weights": np.zeros(COUNT)},
        {"batch_size": 8, "targets": np.zeros(3)},
    ],
)
def test_invalid_arguments_raise_one_line(pixels, wrong):
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        Loader(pixels, wrong.pop("targets", None), SMALL, **wrong)


def test_a_batch_larger_than_the_data_is_refused(pixels):
    with pytest.raises(ValueError, match="use a smaller batch size"):
        next(Loader(pixels, None, SMALL, batch_size=64).iter_epoch(0))
