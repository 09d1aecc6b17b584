"""Multi-crop rows equal the crops of single pipelines, for every source, worker count and cache."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.test_loader import Files
from vitrail.data import decode
from vitrail.data.dataset import Images
from vitrail.data.decode import Box, DecodedImage, LazyImage, start_decoding
from vitrail.data.loader import Loader
from vitrail.data.rng import BatchRandom, SampleRandom
from vitrail.data.sources.arrays import ArrayStore
from vitrail.data.transforms.augment import Blur, ColourJitter, Flip, Grey, Solarise
from vitrail.data.transforms.crops import RandomResizedCrop, SimpleCrop
from vitrail.data.transforms.pipeline import VIEW_STRIDE, MultiCropPipeline, TrainPipeline, Views
from vitrail.utils.json import to_json, value_from_json

COUNT = 21
JITTER = ColourJitter(0.4, 0.4, 0.2, 0.1, rate=0.8)
FIRST = (RandomResizedCrop((32, 32), (0.4, 1.0)), Flip(), JITTER, Grey(), Blur(0.5, (0.1, 1.0)))
VIEWS = Views(
    second=(RandomResizedCrop((32, 32), (0.4, 1.0)), Flip(), JITTER, Grey(), Solarise()),
    local=(RandomResizedCrop((16, 16), (0.05, 0.4)), Flip(), JITTER, Grey(), Blur(0.5, (0.1, 1.0))),
    count=3,
    size=(16, 16),
)
PREPARE = VIEWS.build_pipeline(FIRST, (32, 32))
LARGE = replace(VIEWS, second=(RandomResizedCrop((80, 80), (0.4, 1.0)), Flip())).build_pipeline(
    (RandomResizedCrop((80, 80), (0.4, 1.0)),), (80, 80)
)


@pytest.fixture
def photographs(tmp_path) -> Images:
    """Return JPEGs (some reducible, some with EXIF orientation) and PNGs."""
    random = np.random.default_rng(0)
    paths = []
    for index in range(COUNT):
        height, width = (400, 360) if index % 5 == 0 else (40 + index, 50)
        image = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((width, height))
        exif = Image.Exif()
        exif[0x0112] = 1 + index % 8
        paths.append(tmp_path / f"{index}.{'png' if index % 3 == 2 else 'jpg'}")
        image.save(paths[-1], exif=exif)
    return Images(Files(paths), np.arange(COUNT), np.zeros(COUNT, dtype=np.int64), ("all",))


@pytest.fixture
def pixels() -> Images:
    array = np.random.default_rng(0).integers(0, 256, (COUNT, 32, 32, 3), dtype=np.uint8)
    return Images(ArrayStore(array, ((0, "array"),)), np.arange(COUNT), np.zeros(COUNT, dtype=np.int64), ("all",))


def rows(images: Images, pipeline: MultiCropPipeline, **options) -> torch.Tensor:
    loader = Loader(images, None, pipeline, batch_size=5, seed=3, **options)
    made = torch.cat([batch.pixels for epoch in (0, 1) for batch in loader.iter_epoch(epoch)])
    loader.close()
    return made


@pytest.mark.parametrize("first", [FIRST, (RandomResizedCrop((32, 32), (0.2, 0.3)), Solarise(0.5)), ()])
def test_crops_equal_their_single_pipelines(pixels, first) -> None:
    batch = next(iter(Loader(pixels, None, VIEWS.build_pipeline(first, (32, 32)), batch_size=5, seed=3).iter_epoch(1)))
    large, small = VIEWS.split_crops(batch.pixels, (32, 32))
    assert large.shape == (5, 2, 3, 32, 32)
    assert small.shape == (5, 3, 3, 16, 16)
    steps = [first, VIEWS.second, VIEWS.local, VIEWS.local, VIEWS.local]
    for row, index in enumerate(batch.indices.tolist()):
        source = DecodedImage(torch.from_numpy(pixels.store.pixels[index]))  # pyright: ignore[reportAttributeAccessIssue]
        for view, found in enumerate([*large[row], *small[row]]):
            alone = TrainPipeline(steps[view], (32, 32) if view < 2 else (16, 16))
            assert torch.equal(found, alone.apply(source, SampleRandom(3, 1, index + view * VIEW_STRIDE)))


def test_batch_boxes_equal_single_boxes() -> None:
    for crop in (
        RandomResizedCrop((8, 8)),
        RandomResizedCrop((8, 8), (0.9, 1.0), (1.5, 2.0)),
    ):  # the last fits at times
        for size in ((32, 32), (20, 90), (1, 1)):
            boxes = crop.sample_boxes(*size, BatchRandom(4, 2, np.arange(500), 3)).tolist()
            assert [Box(*box) for box in boxes] == [
                crop.sample_box(*size, SampleRandom(4, 2, index, 3)) for index in range(500)
            ]


def test_crops_of_an_image_differ(pixels) -> None:
    steps = (RandomResizedCrop((32, 32), (0.2, 1.0)),)
    same = Views(steps, steps, 4, (32, 32)).build_pipeline(steps, (32, 32))
    for row in rows(pixels, same):
        crops = row.view(6, -1)
        assert len({bytes(crop.numpy()) for crop in crops}) == 6


@pytest.mark.parametrize(("which", "pipeline"), [("pixels", PREPARE), ("photographs", PREPARE), ("photographs", LARGE)])
def test_rows_do_not_depend_on_workers_or_cache(which, pipeline, request) -> None:
    images = request.getfixturevalue(which)
    alone = rows(images, pipeline)
    assert alone.shape == (40, *pipeline.shape)
    assert torch.equal(alone, rows(images, pipeline, workers=2))
    assert torch.equal(alone, rows(images, pipeline, cache_bytes=0))


def test_ranks_share_the_rows_of_a_batch(pixels) -> None:
    options = {"batch_size": 8, "seed": 3}
    whole = [b.pixels for b in Loader(pixels, None, PREPARE, **options).iter_epoch(0)]
    parts = [
        [b.pixels for b in Loader(pixels, None, PREPARE, rank=r, world_size=2, **options).iter_epoch(0)] for r in (0, 1)
    ]
    for step, batch in enumerate(whole):
        assert torch.equal(batch, torch.cat([part[step] for part in parts]))


def test_a_file_is_decoded_once_at_the_needed_scale(photographs, monkeypatch) -> None:
    decoded = []
    plain = decode.convert_image
    monkeypatch.setattr(
        decode, "convert_image", lambda image, channels: decoded.append(image.size) or plain(image, channels)
    )
    with photographs.open(0) as image:
        row = PREPARE.crop_image(start_decoding(image, 3, True), SampleRandom(0, 0, 0))
    assert len(row) == PREPARE.shape[0]
    assert len(decoded) == 1
    assert decoded[0] in ((90, 100), (180, 200))  # of 360×400, for crops of 32 pixels
    decoded.clear()
    with photographs.open(0) as image:
        LARGE.crop_image(start_decoding(image, 3, True), SampleRandom(0, 0, 0))
    assert len(decoded) == 1
    boxes = [
        each.crop.sample_box(400, 360, SampleRandom(0, 0, view * VIEW_STRIDE)) for view, each in enumerate(LARGE.views)
    ]
    narrowest = min(min(b.height // e.size[0], b.width // e.size[1]) for b, e in zip(boxes, LARGE.views, strict=True))
    assert decoded[0] == ((180, 200) if narrowest >= 2 else (360, 400))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_crops_of_a_reduced_image_match_full_scale(tmp_path, orientation) -> None:
    y, x = np.mgrid[0:1:480j, 0:1:640j]
    image = Image.fromarray(np.stack((255 * x, 255 * y, 127 + 127 * np.sin(9 * x * y)), -1).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "a.jpg", exif=exif, quality=95)
    steps = (RandomResizedCrop((32, 32), (0.4, 1.0)),)
    pipeline = Views(steps, (RandomResizedCrop((16, 16), (0.3, 0.4)),), 2, (16, 16)).build_pipeline(steps, (32, 32))
    for index in range(3):
        with Image.open(tmp_path / "a.jpg") as found:
            source = start_decoding(found, 3, True)
            assert isinstance(source, LazyImage)
            reduced = pipeline.crop_image(source, SampleRandom(0, 0, index))
        with Image.open(tmp_path / "a.jpg") as found:
            whole = pipeline.crop_image(start_decoding(found, 3, True).decode(), SampleRandom(0, 0, index))
        assert (reduced.float() - whole.float()).abs().mean() < 4


def test_without_small_crops_there_are_two_large_ones(pixels) -> None:
    none = replace(VIEWS, count=0)
    none.check_sizes((32, 32), 12)
    large, small = none.split_crops(rows(pixels, none.build_pipeline(FIRST, (32, 32))), (32, 32))
    assert large.shape == (40, 2, 3, 32, 32)
    assert small.shape == (40, 0, 3, 16, 16)


def test_an_unreadable_image_is_replaced_and_named(photographs) -> None:
    photographs.store.paths[7].write_bytes(b"")  # pyright: ignore[reportAttributeAccessIssue]
    loader = Loader(photographs, None, PREPARE, batch_size=7, seed=3)
    batches = list(loader.iter_epoch(0))
    assert [name.split(".")[0] for name in loader.unreadable] == ["7"]
    assert [len(batch.pixels) for batch in batches] == [7, 7, 7]


def test_grey_images_have_grey_views() -> None:
    array = np.random.default_rng(0).integers(0, 256, (8, 28, 28), dtype=np.uint8)
    images = Images(ArrayStore(array, ((0, "array"),)), np.arange(8), np.zeros(8, dtype=np.int64), ("all",))
    large, small = VIEWS.split_crops(rows(images, VIEWS.build_pipeline(FIRST, (32, 32), channels=1)), (32, 32), 1)
    assert large.shape[2:] == (1, 32, 32)
    assert small.shape[2:] == (1, 16, 16)


def test_views_round_trip_through_json() -> None:
    for views in (Views(), VIEWS):
        assert value_from_json(to_json(views), Views, "views") == views
    Views().check_sizes((224, 224), 16)
    assert Views().build_pipeline((), (224, 224)).shape == (3 * (2 * 224**2 + 8 * 96**2),)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Views(count=-1), "got -1"),
        (lambda: Views(size=(48, 48)).check_sizes((224, 224), 16), r"set views\.local\.0\.size=\[48,48\]"),
        (lambda: Views(size=(48, 48)).build_pipeline((), (224, 224)), "size 96×96 differs"),
        (lambda: VIEWS.check_sizes((32, 32), 32), "smaller than a 32×32 patch"),
        (lambda: Views().check_sizes((224, 224), 14), "use 98×98"),
        (lambda: Views().check_sizes((32, 32), 16), "exceed the large"),
        (lambda: VIEWS.build_pipeline((SimpleCrop((32, 32)),), (32, 32)), "RandomResizedCrop"),
        (lambda: VIEWS.build_pipeline((), (64, 64)), "use one size"),
    ],
)
def test_invalid_views_raise_one_line(make, message) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)
