"""Views of a picture: the crops that each augmentation gives by itself, whatever the source, the workers and the memory."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.test_loader import Files
from vitrail.data import decode
from vitrail.data.augment import ColourJitter, Flip
from vitrail.data.chance import Chance, Chances
from vitrail.data.crops import RandomResizedCrop, SimpleCrop
from vitrail.data.decode import Box, Decoded, Opened, opened
from vitrail.data.loader import Loader
from vitrail.data.photometric import Blur, Grey, Solarise
from vitrail.data.pictures import Pictures
from vitrail.data.pipeline import VIEW, MultiCrop, Training
from vitrail.data.sources.pixels import Pixels
from vitrail.data.views import Views
from vitrail.models.written import read_value, to_json

COUNT = 21
JITTER = ColourJitter(0.4, 0.4, 0.2, 0.1, rate=0.8)
FIRST = (RandomResizedCrop((32, 32), (0.4, 1.0)), Flip(), JITTER, Grey(), Blur(0.5, (0.1, 1.0)))
VIEWS = Views(
    second=(RandomResizedCrop((32, 32), (0.4, 1.0)), Flip(), JITTER, Grey(), Solarise()),
    local=(RandomResizedCrop((16, 16), (0.05, 0.4)), Flip(), JITTER, Grey(), Blur(0.5, (0.1, 1.0))),
    count=3,
    size=(16, 16),
)
PREPARE = VIEWS.prepare(FIRST, (32, 32))
LARGE = replace(VIEWS, second=(RandomResizedCrop((80, 80), (0.4, 1.0)), Flip())).prepare(
    (RandomResizedCrop((80, 80), (0.4, 1.0)),), (80, 80)
)


@pytest.fixture
def photographs(tmp_path) -> Pictures:
    """JPEGs, of which some can be decoded at a smaller scale and some are turned, and PNGs."""
    random = np.random.default_rng(0)
    paths = []
    for index in range(COUNT):
        height, width = (400, 360) if index % 5 == 0 else (40 + index, 50)
        image = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((width, height))
        exif = Image.Exif()
        exif[0x0112] = 1 + index % 8
        paths.append(tmp_path / f"{index}.{'png' if index % 3 == 2 else 'jpg'}")
        image.save(paths[-1], exif=exif)
    return Pictures(Files(paths), np.arange(COUNT), np.zeros(COUNT, dtype=np.int64), ("all",))


@pytest.fixture
def pixels() -> Pictures:
    array = np.random.default_rng(0).integers(0, 256, (COUNT, 32, 32, 3), dtype=np.uint8)
    return Pictures(Pixels(array, ((0, "array"),)), np.arange(COUNT), np.zeros(COUNT, dtype=np.int64), ("all",))


def rows(pictures: Pictures, prepare: MultiCrop, **options) -> torch.Tensor:
    loader = Loader(pictures, None, prepare, batch_size=5, seed=3, **options)
    made = torch.cat([batch.pixels for epoch in (0, 1) for batch in loader.epoch(epoch)])
    loader.close()
    return made


@pytest.mark.parametrize("first", [FIRST, (RandomResizedCrop((32, 32), (0.2, 0.3)), Solarise(0.5)), ()])
def test_every_crop_is_what_its_augmentation_gives_with_the_chance_of_its_view(pixels, first) -> None:
    batch = next(iter(Loader(pixels, None, VIEWS.prepare(first, (32, 32)), batch_size=5, seed=3).epoch(1)))
    large, small = VIEWS.apart(batch.pixels, (32, 32))
    assert large.shape == (5, 2, 3, 32, 32)
    assert small.shape == (5, 3, 3, 16, 16)
    steps = [first, VIEWS.second, VIEWS.local, VIEWS.local, VIEWS.local]
    for row, index in enumerate(batch.indices.tolist()):
        source = Decoded(torch.from_numpy(pixels.store.pixels[index]))  # pyright: ignore[reportAttributeAccessIssue]
        for view, found in enumerate([*large[row], *small[row]]):
            alone = Training(steps[view], (32, 32) if view < 2 else (16, 16))
            assert torch.equal(found, alone.picture(source, Chance(3, 1, index + view * VIEW)))


def test_boxes_of_a_batch_are_those_of_its_pictures() -> None:
    for crop in (
        RandomResizedCrop((8, 8)),
        RandomResizedCrop((8, 8), (0.9, 1.0), (1.5, 2.0)),
    ):  # the last fits at times
        for size in ((32, 32), (20, 90), (1, 1)):
            boxes = crop.boxes(*size, Chances(4, 2, np.arange(500), 3)).tolist()
            assert [Box(*box) for box in boxes] == [crop.box(*size, Chance(4, 2, index, 3)) for index in range(500)]


def test_no_two_crops_of_a_picture_are_drawn_alike(pixels) -> None:
    steps = (RandomResizedCrop((32, 32), (0.2, 1.0)),)
    same = Views(steps, steps, 4, (32, 32)).prepare(steps, (32, 32))
    for row in rows(pixels, same):
        crops = row.view(6, -1)
        assert len({bytes(crop.numpy()) for crop in crops}) == 6


@pytest.mark.parametrize(("which", "prepare"), [("pixels", PREPARE), ("photographs", PREPARE), ("photographs", LARGE)])
def test_rows_are_the_same_with_any_number_of_workers_and_any_memory(which, prepare, request) -> None:
    pictures = request.getfixturevalue(which)
    alone = rows(pictures, prepare)
    assert alone.shape == (40, *prepare.shape)
    assert torch.equal(alone, rows(pictures, prepare, workers=2))
    assert torch.equal(alone, rows(pictures, prepare, memory=0))


def test_processes_share_the_rows_of_one(pixels) -> None:
    options = {"batch_size": 8, "seed": 3}
    whole = [b.pixels for b in Loader(pixels, None, PREPARE, **options).epoch(0)]
    parts = [[b.pixels for b in Loader(pixels, None, PREPARE, rank=r, world=2, **options).epoch(0)] for r in (0, 1)]
    for step, batch in enumerate(whole):
        assert torch.equal(batch, torch.cat([part[step] for part in parts]))


def test_a_file_is_decoded_once_and_no_larger_than_the_most_demanding_crop_needs(photographs, monkeypatch) -> None:
    decoded = []
    plain = decode.plain
    monkeypatch.setattr(decode, "plain", lambda image, channels: decoded.append(image.size) or plain(image, channels))
    with photographs.open(0) as image:
        row = PREPARE.cropped(opened(image, 3, True), Chance(0, 0, 0))
    assert len(row) == PREPARE.shape[0]
    assert len(decoded) == 1
    assert decoded[0] in ((90, 100), (180, 200))  # of 360×400, for crops of 32 pixels
    decoded.clear()
    with photographs.open(0) as image:
        LARGE.cropped(opened(image, 3, True), Chance(0, 0, 0))
    assert len(decoded) == 1
    boxes = [each.crop.box(400, 360, Chance(0, 0, view * VIEW)) for view, each in enumerate(LARGE.views)]
    narrowest = min(min(b.height // e.size[0], b.width // e.size[1]) for b, e in zip(boxes, LARGE.views, strict=True))
    assert decoded[0] == ((180, 200) if narrowest >= 2 else (360, 400))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_crops_of_a_reduced_picture_show_what_those_of_the_whole_show(tmp_path, orientation) -> None:
    y, x = np.mgrid[0:1:480j, 0:1:640j]
    image = Image.fromarray(np.stack((255 * x, 255 * y, 127 + 127 * np.sin(9 * x * y)), -1).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "a.jpg", exif=exif, quality=95)
    steps = (RandomResizedCrop((32, 32), (0.4, 1.0)),)
    prepare = Views(steps, (RandomResizedCrop((16, 16), (0.3, 0.4)),), 2, (16, 16)).prepare(steps, (32, 32))
    for index in range(3):
        with Image.open(tmp_path / "a.jpg") as found:
            source = opened(found, 3, True)
            assert isinstance(source, Opened)
            reduced = prepare.cropped(source, Chance(0, 0, index))
        with Image.open(tmp_path / "a.jpg") as found:
            whole = prepare.cropped(opened(found, 3, True).decoded(), Chance(0, 0, index))
        assert (reduced.float() - whole.float()).abs().mean() < 4


def test_without_small_crops_there_are_two_large_ones(pixels) -> None:
    none = replace(VIEWS, count=0)
    none.check((32, 32), 12)
    large, small = none.apart(rows(pixels, none.prepare(FIRST, (32, 32))), (32, 32))
    assert large.shape == (40, 2, 3, 32, 32)
    assert small.shape == (40, 0, 3, 16, 16)


def test_an_unreadable_picture_is_replaced_and_named(photographs) -> None:
    photographs.store.paths[7].write_bytes(b"")  # pyright: ignore[reportAttributeAccessIssue]
    loader = Loader(photographs, None, PREPARE, batch_size=7, seed=3)
    batches = list(loader.epoch(0))
    assert [name.split(".")[0] for name in loader.unreadable] == ["7"]
    assert [len(batch.pixels) for batch in batches] == [7, 7, 7]


def test_grey_pictures_have_grey_views() -> None:
    array = np.random.default_rng(0).integers(0, 256, (8, 28, 28), dtype=np.uint8)
    pictures = Pictures(Pixels(array, ((0, "array"),)), np.arange(8), np.zeros(8, dtype=np.int64), ("all",))
    large, small = VIEWS.apart(rows(pictures, VIEWS.prepare(FIRST, (32, 32), channels=1)), (32, 32), 1)
    assert large.shape[2:] == (1, 32, 32)
    assert small.shape[2:] == (1, 16, 16)


def test_views_can_be_written_down() -> None:
    for views in (Views(), VIEWS):
        assert read_value(to_json(views), Views, "views") == views
    Views().check((224, 224), 16)
    assert Views().prepare((), (224, 224)).shape == (3 * (2 * 224**2 + 8 * 96**2),)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Views(count=-1), "-1 small crops"),
        (lambda: Views(size=(48, 48)).check((224, 224), 16), r"set views\.local\.0\.size=\[48,48\] too"),
        (lambda: Views(size=(48, 48)).prepare((), (224, 224)), "gives 96×96"),
        (lambda: VIEWS.check((32, 32), 32), "hold no patch of 32×32"),
        (lambda: Views().check((224, 224), 14), "use 98×98"),
        (lambda: Views().check((32, 32), 16), "larger than the large"),
        (lambda: VIEWS.prepare((SimpleCrop((32, 32)),), (32, 32)), "RandomResizedCrop"),
        (lambda: VIEWS.prepare((), (64, 64)), "use one size"),
    ],
)
def test_views_that_cannot_be_are_refused_in_one_line(wrong, words) -> None:
    with pytest.raises(ValueError, match=words) as error:
        wrong()
    assert "\n" not in str(error.value)
