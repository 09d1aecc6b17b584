"""Batches of images and masks do not depend on workers, processes or the cache; unreadable masks are reported."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from tests.data.test_loader import Files, collected, equal, kill_workers, two_epochs
from vitrail.data import workers as batch_workers
from vitrail.data.dataset import IGNORED, Images
from vitrail.data.loader import Loader
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources.arrays import ArrayStore
from vitrail.data.transforms.augment import ColourJitter, Flip, PadCrop, RandAugment, RandomErasing, Rotate
from vitrail.data.transforms.crops import Fit, RandomResizedCrop, ScaleJitter
from vitrail.data.transforms.pipeline import TrainPipeline, Views

COUNT = 29
CLASSES = ("one", "two", "three")


@dataclass
class MemoryMasks:
    """A store of masks in memory; those in `broken` raise an error."""

    masks: list[np.ndarray]
    broken: set[int]

    def __len__(self) -> int:
        return len(self.masks)

    def name(self, item: int) -> str:
        return f"masks/{item}.png"

    def read(self, item: int) -> np.ndarray:
        if item in self.broken:
            raise OSError(f"{self.name(item)}: broken data")
        return self.masks[item]

    def stamp(self, item: int) -> tuple[int, int] | None:
        return None


@pytest.fixture
def photographs(tmp_path: Path) -> Images:
    """Return JPEGs (some reducible, some with EXIF orientation, some grey) and PNGs, painted by class."""
    random, paths, masks = np.random.default_rng(0), [], []
    for index in range(COUNT):
        height, width = (90, 120) if index % 5 == 0 else (40 + index % 7, 50)
        cells = random.integers(0, 3, (3, 4), dtype=np.uint8).repeat(30, 0).repeat(30, 1)[:height, :width]
        image = Image.fromarray(np.repeat(60 + 60 * cells[..., None], 3, 2))
        exif = Image.Exif()
        if index % 4 == 0:
            exif[0x0112] = 1 + index % 8
        if index % 6 == 0:
            image = image.convert("L")
        paths.append(tmp_path / f"{index}.{'png' if index % 3 == 0 else 'jpg'}")
        image.save(paths[-1], exif=exif)
        with Image.open(paths[-1]) as saved:
            upright = np.asarray(ImageOps.exif_transpose(saved).convert("L"))
        masks.append(((upright.astype(np.float32) - 60) / 60).round().astype(np.uint8))
    order = np.arange(COUNT)[::-1].copy()  # masks are stored in another order than images
    return Images(Files(paths), np.arange(COUNT), order, CLASSES, masks=MemoryMasks(masks[::-1], set()))


@pytest.fixture
def pixels() -> Images:
    random = np.random.default_rng(0)
    masks = random.integers(0, 3, (COUNT, 16, 16), dtype=np.uint8)
    array = np.repeat(60 + 60 * masks[..., None], 3, 3)
    return Images(
        ArrayStore(array, ((0, "array"),)),
        np.arange(COUNT),
        np.arange(COUNT),
        CLASSES,
        masks=MemoryMasks(list(masks), set()),
    )


LARGE = TrainPipeline(
    (RandomResizedCrop((32, 32)), Flip(), RandAugment(2, 9), ColourJitter(), Rotate()), (32, 32), masks=True
)
HUGE = TrainPipeline((ScaleJitter((80, 72)), Flip(), RandAugment(2, 9, spread=0.5)), (80, 72), masks=True)  # one by one
SMALL = TrainPipeline((PadCrop(2), Flip(), ColourJitter(0.3, 0.3, 0.3, 0.1)), (16, 16), masks=True)
EVALUATION = Preprocessing(size=(32, 32), resize=(36, 36), turn=True)
EVERY = [("photographs", LARGE), ("photographs", HUGE), ("pixels", SMALL)]


@pytest.mark.parametrize(("which", "pipeline"), EVERY)
def test_batches_are_the_same_with_any_number_of_workers(which, pipeline, request):
    images = request.getfixturevalue(which)
    alone = two_epochs(Loader(images, None, pipeline, batch_size=8, seed=3))
    assert equal(alone, two_epochs(Loader(images, None, pipeline, batch_size=8, seed=3, workers=3)))
    pixels, masks, indices = alone
    assert pixels.shape == (48, 3, *pipeline.size)
    assert masks.shape == (48, *pipeline.size)
    assert pixels.dtype == masks.dtype == torch.uint8
    assert indices.dtype == torch.int64
    assert set(masks.unique().tolist()) == {0, 1, 2, IGNORED}
    assert pixels.is_contiguous()


@pytest.mark.slow
def test_spawned_workers_give_the_same_batches(photographs):
    alone = two_epochs(Loader(photographs, None, LARGE, batch_size=8, seed=3))
    spawned = Loader(photographs, None, LARGE, batch_size=8, seed=3, workers=2, start_method="spawn")
    assert equal(alone, two_epochs(spawned))


@pytest.mark.parametrize(("which", "pipeline"), EVERY)
def test_ranks_share_the_batches(which, pipeline, request):
    images = request.getfixturevalue(which)
    weights = np.linspace(0, 1, COUNT)
    whole = list(Loader(images, None, pipeline, batch_size=8, seed=3, weights=weights).iter_epoch(1))
    parts = [
        list(Loader(images, None, pipeline, batch_size=8, seed=3, rank=r, world_size=4, weights=weights).iter_epoch(1))
        for r in range(4)
    ]
    for step, batch in enumerate(whole):
        for name in ("pixels", "targets", "indices"):
            assert torch.equal(getattr(batch, name), torch.cat([getattr(part[step], name) for part in parts]))


@pytest.mark.parametrize(("which", "pipeline"), EVERY)
def test_the_cache_does_not_change_batches(which, pipeline, request):
    images = request.getfixturevalue(which)
    inside, outside = (Loader(images, None, pipeline, batch_size=8, cache_bytes=most) for most in (2**30, 0))
    assert equal(two_epochs(inside), two_epochs(outside))
    assert inside._preparer.cache is not None
    assert outside._preparer.cache is None


def test_masks_count_towards_the_bytes_of_the_cache(photographs):
    cache = batch_workers.cache_images(photographs, 3, (32, 32), True, 10**8)
    assert cache is not None
    total = cache.pixels.numel()
    assert batch_workers.cache_images(photographs, 3, (32, 32), True, total) is not None
    assert batch_workers.cache_images(photographs, 3, (32, 32), True, total - 1) is None
    without = batch_workers.cache_images(replace(photographs, masks=None), 3, (32, 32), True, 10**8)
    assert without is not None
    assert without.pixels.numel() * 4 == total * 3


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_resumes_at_any_step(photographs, workers):
    whole = list(Loader(photographs, None, LARGE, batch_size=4, cache_bytes=0).iter_epoch(1))
    for start in (1, 5):
        later = Loader(photographs, None, LARGE, batch_size=4, workers=workers, cache_bytes=0, epochs=2)
        assert equal(collected(later.iter_epoch(1, start)), collected(whole[start:]))
        later.close()


def test_killed_workers_do_not_change_batches(photographs):
    expected = collected(Loader(photographs, None, LARGE, batch_size=4).iter_epoch(0))
    loader = Loader(photographs, None, LARGE, batch_size=4, workers=2, report=lambda line: None)
    batches = loader.iter_epoch(0)
    first = next(batches)
    kill_workers(loader)
    assert equal(collected([first, *batches]), expected)
    loader.close()


def test_masks_show_the_classes_of_their_images(photographs):
    """Every pixel away from borders has the colour of its class, from files with any orientation and scale."""
    steps = (RandomResizedCrop((32, 32), (0.2, 1.0), interpolation="nearest"), Flip())
    for turn in (True, False):
        pipeline = TrainPipeline(steps, (32, 32), turn=turn)
        pixels, masks, _ = collected(Loader(photographs, None, pipeline, batch_size=8).iter_epoch(0))
        agree = ((pixels[:, 0].float() - 60) / 60).round() == masks
        assert agree.float().mean() > 0.98
        assert agree.flatten(1).float().mean(1).min() > 0.9


@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fit", ["cover", "squash"])
def test_evaluation_reads_every_mask_once_in_order(photographs, workers, fit, turn):
    preprocessing = replace(EVALUATION, fit=fit, interpolation="nearest", turn=turn)
    loader = Loader(photographs, None, preprocessing, batch_size=9, workers=workers)
    for _ in range(2):  # the second time from memory
        pixels, masks, indices = collected(loader.iter_once())
        assert indices.tolist() == list(range(COUNT))
        expected = torch.stack([preprocessing.to_pixels(photographs.open(index)) for index in range(COUNT)])
        assert torch.equal(pixels, expected)
        agree = ((pixels[:, 0].float() - 60) / 60).round() == masks
        assert agree.flatten(1).float().mean(1).min() > 0.9
    loader.close()


def test_values_are_mapped_to_the_classes_of_the_model(photographs):
    table = np.full(256, IGNORED, dtype=np.uint8)
    table[:3] = (2, 0, IGNORED)
    plain, mapped = (
        collected(Loader(images, None, EVALUATION, batch_size=8).iter_once())[1]
        for images in (photographs, replace(photographs, mask_classes=table))
    )
    assert torch.equal(mapped, torch.from_numpy(table)[plain.long()])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cache_bytes", [0, 2**30])
def test_an_unreadable_mask_is_replaced_and_named(photographs, workers, cache_bytes):
    photographs.masks.broken |= {0, 5}
    photographs.masks.masks[7] = np.zeros((3, 4), dtype=np.uint8)
    loader = Loader(photographs, None, LARGE, batch_size=8, workers=workers, cache_bytes=cache_bytes, epochs=1)
    indices = collected(loader.iter_epoch(0))[2].tolist()
    loader.close()
    bad = {COUNT - 1 - item: item for item in (0, 5, 7)}
    assert len(indices) == 24
    assert not set(indices) & set(bad)
    drawn = set(loader.epoch_order(0)[:24].tolist())
    expected = {photographs.mask_name(index) for index in drawn & set(bad) if bad[index] != 7}
    assert expected
    assert expected <= set(loader.unreadable)
    for name, reason in loader.unreadable.items():
        if name.startswith("masks/"):
            assert reason == "broken data"
        else:
            assert name == photographs.name(COUNT - 1 - 7)
            assert reason == "its mask has 4×3 pixels, the image 50×40: both must have the same size"


def test_evaluation_leaves_out_unreadable_masks(photographs):
    photographs.masks.broken.add(3)
    loader = Loader(photographs, None, EVALUATION, batch_size=10)
    assert collected(loader.iter_once())[2].tolist() == [index for index in range(COUNT) if index != COUNT - 1 - 3]
    assert loader.unreadable == {"masks/3.png": "broken data"}


def test_lost_masks_are_an_error(photographs):
    photographs.masks.broken |= set(range(COUNT))
    with pytest.raises(OSError, match=r"masks/\d+\.png \(broken data\): check that the data is still there$"):
        next(Loader(photographs, None, LARGE, batch_size=8).iter_epoch(0))


def test_what_masks_do_not_support_is_refused(photographs):
    with pytest.raises(ValueError, match=r"^sampling weights 'balanced' do not apply to masks: give one for each"):
        Loader(photographs, None, LARGE, weights="balanced", batch_size=4)
    with pytest.raises(ValueError, match=r"^sampling weights 3 per class do not apply to masks"):
        Loader(photographs, None, LARGE, weights=np.ones(3), batch_size=4)
    erasing = TrainPipeline((Fit((32, 32)), RandomErasing()), (32, 32))
    with pytest.raises(ValueError, match=r"^RandomErasing cannot augment images with masks"):
        Loader(photographs, None, erasing, batch_size=4)
    views = Views().build_pipeline((RandomResizedCrop(),), (224, 224))
    with pytest.raises(ValueError, match=r"^several crops of each image \(views\) are not supported"):
        Loader(photographs, None, views, batch_size=4)


def test_a_pipeline_for_masks_serves_images_without(photographs):
    plain = replace(photographs, masks=None)
    batch = next(Loader(plain, None, LARGE, batch_size=4).iter_epoch(0))
    assert batch.pixels.shape == (4, 3, 32, 32)
    assert batch.targets.shape == (4,)
