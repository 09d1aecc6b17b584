"""Places: where in its picture a sample comes from, proven by pictures whose colours say where they are."""

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data import randaugment
from vitrail.data.augment import AugmentSlot, ColourJitter, Flip, PadCrop, RandomErasing, Warp
from vitrail.data.chance import Chance, Chances
from vitrail.data.crops import Fit, RandomResizedCrop, SimpleCrop
from vitrail.data.decode import Decoded
from vitrail.data.loader import Loader
from vitrail.data.maps import MapFile, MapShape
from vitrail.data.pictures import Pictures
from vitrail.data.pipeline import Training
from vitrail.data.places import WHOLE, places, size_of
from vitrail.data.randaugment import RandAugment
from vitrail.data.records import key_of
from vitrail.data.sources.files import Files
from vitrail.data.sources.pixels import Pixels

COUNT = 11
SIZES = ((96, 128), (128, 80), (100, 100))
CROPS = (RandomResizedCrop((32, 32), (0.2, 1.0)), SimpleCrop((32, 32), 4), Fit((32, 32)))
MOVES = (Flip(), PadCrop(3), Warp(), RandAugment(2, 9, rate=1.0, interpolation="bilinear"))


def map_of_itself(height: int, width: int) -> np.ndarray:
    """A picture whose red says how far to the right a pixel is, and whose green how far down."""
    y, x = np.meshgrid((np.arange(height) + 0.5) / height, (np.arange(width) + 0.5) / width, indexing="ij")
    return (np.stack((x, y, np.ones_like(x)), -1) * 255).round().astype(np.uint8)


def said_by_colours(prepare: Training, size: tuple[int, int], chance: Chance) -> tuple[np.ndarray, np.ndarray]:
    """Where each pixel of the sample says that it comes from, [H, W, 2]; and its blue, 1 where it is of the picture."""
    sample = prepare.picture(Decoded(torch.from_numpy(map_of_itself(*size))), chance).permute(1, 2, 0).numpy() / 255
    return sample[..., :2], sample[..., 2]


def said_by_place(prepare: Training, size: tuple[int, int], chance: Chance) -> np.ndarray:
    """The same by the matrix."""
    place = places(prepare, np.array([size]), Chances.single(chance))[0]
    height, width = prepare.size
    y, x = np.meshgrid((np.arange(height) + 0.5) / height, (np.arange(width) + 0.5) / width, indexing="ij")
    return np.stack((x, y, np.ones_like(x)), -1) @ place.T


@pytest.mark.parametrize("crop", CROPS, ids=lambda crop: type(crop).__name__)
@pytest.mark.parametrize("step", [None, *MOVES], ids=lambda step: type(step).__name__)
def test_colours_and_places_agree(crop: AugmentSlot, step: AugmentSlot | None, monkeypatch) -> None:
    moving = ("rotate", "shear-x", "shear-y", "translate-x", "translate-y")
    monkeypatch.setattr(randaugment, "CHANGES", moving)  # the other ten change colours and move nothing
    prepare = Training((crop, *([step] if step else [])), (32, 32))
    for index, size in enumerate(SIZES * 2):
        chance = Chance(3, 1, index)
        (colours, blue), matrix = said_by_colours(prepare, size, chance), said_by_place(prepare, size, chance)
        # What comes in from outside is black or grey, or mirrored at the picture's edge.
        inside = (blue == 1) & ((matrix > 0.04) & (matrix < 0.96)).all(-1)
        assert inside.mean() > 0.1
        np.testing.assert_allclose(colours[inside], matrix[inside], rtol=0, atol=0.02)


def test_several_moves_are_undone_last_first(monkeypatch) -> None:
    monkeypatch.setattr(randaugment, "CHANGES", ("rotate", "shear-x", "translate-y"))
    steps = (RandomResizedCrop((32, 32), (0.3, 1.0)), RandAugment(2, 6, rate=1.0), Flip(1.0), PadCrop(2, "reflect"))
    prepare = Training(steps, (32, 32))
    for index in range(8):
        chance = Chance(0, 2, index)
        (colours, _), matrix = said_by_colours(prepare, (96, 128), chance), said_by_place(prepare, (96, 128), chance)
        middle = slice(14, 18)
        np.testing.assert_allclose(colours[middle, middle], matrix[middle, middle], rtol=0, atol=0.02)


def test_a_whole_picture_is_at_its_own_place() -> None:
    chances = Chances(0, 0, np.arange(2))
    whole = places(Training((), (32, 32)), np.array([[64, 64], [32, 32]]), chances)
    np.testing.assert_array_equal(whole, np.array([WHOLE, WHOLE]))
    flipped = places(Training((Flip(1.0),), (32, 32)), np.array([[64, 64], [32, 32]]), chances)
    np.testing.assert_array_equal(flipped, np.array([((-1, 0, 1), (0, 1, 0))] * 2))


def test_what_changes_colours_moves_nothing() -> None:
    sizes, chances = np.array([[40, 60]] * 4), Chances(0, 0, np.arange(4))
    plain = Training((RandomResizedCrop((16, 16)),), (16, 16))
    coloured = Training((RandomResizedCrop((16, 16)), ColourJitter(), RandomErasing(1.0)), (16, 16))
    np.testing.assert_array_equal(places(plain, sizes, chances), places(coloured, sizes, chances))


SHAPE = MapShape((3, 4), 2, 7)


def with_maps(pictures: Pictures, path) -> MapFile:
    """Maps of random scores for each picture."""
    random, count = np.random.default_rng(0), len(pictures)
    file = MapFile(path, SHAPE)
    file.add(
        [key_of(pictures, index) for index in range(count)],
        size=[size_of(pictures, index, True) for index in range(count)],
        classes=random.integers(0, 7, (count, 3, 4, 2)),
        scores=random.random((count, 3, 4, 2)),
    )
    return file


@pytest.fixture
def photographs(tmp_path) -> Pictures:
    """Files of several sizes, some lying on their side."""
    paths = []
    for index in range(COUNT):
        height, width = SIZES[index % 3]
        exif = Image.Exif()
        if index % 4 == 1:
            exif[0x0112] = 6
        paths.append(str(tmp_path / f"{index}.jpg"))
        Image.fromarray(map_of_itself(height, width)).save(paths[-1], exif=exif, quality=95)
    return Pictures(Files.of(paths), np.arange(COUNT), np.arange(COUNT) % 3, ("a", "b", "c"))


@pytest.fixture
def pixels() -> Pictures:
    array = np.random.default_rng(0).integers(0, 256, (COUNT + 3, 16, 24, 3), dtype=np.uint8)
    return Pictures(Pixels(array, ((0, "array"),)), np.arange(COUNT)[::-1].copy(), np.arange(COUNT) % 3, tuple("abc"))


TRAINING = Training((RandomResizedCrop((16, 16), (0.3, 1.0)), Flip(), PadCrop(2)), (16, 16))


def collected(pictures: Pictures, file: MapFile, batch: int = 4, **options) -> tuple[torch.Tensor, torch.Tensor]:
    loader = Loader(pictures, None, TRAINING, batch_size=batch, seed=5, epochs=2, maps=file.maps(pictures), **options)
    batches = [*loader.epoch(0), *loader.epoch(1)]
    loader.close()
    return torch.cat([b.targets for b in batches]), torch.cat([b.indices for b in batches])


@pytest.mark.parametrize("source", ["photographs", "pixels"])
def test_targets_are_the_same_with_any_workers_and_processes(source: str, request, tmp_path) -> None:
    pictures: Pictures = request.getfixturevalue(source)
    file = with_maps(pictures, tmp_path / "some.maps")
    alone, indices = collected(pictures, file)
    helped, _ = collected(pictures, file, workers=2)
    unheld, _ = collected(pictures, file, memory=0)
    assert torch.equal(alone, helped)
    assert torch.equal(alone, unheld)
    halves = [collected(pictures, file, rank=rank, world=2)[0] for rank in (0, 1)]
    together = torch.stack([half.unflatten(0, (-1, 2)) for half in halves], 1).flatten(0, 2)
    assert torch.equal(alone, together)
    assert torch.equal(alone[:, 0].long(), torch.from_numpy(pictures.targets)[indices])


def test_targets_hold_the_place_and_the_map_of_their_own_picture(photographs, tmp_path) -> None:
    file = with_maps(photographs, tmp_path / "some.maps")
    targets, indices = collected(photographs, file)
    where, classes, scores = SHAPE.apart(targets[:, 1:])
    records = file.records()
    for row, index in enumerate(indices.tolist()):
        epoch = row // (COUNT // 4 * 4)
        size = np.array([size_of(photographs, index, True)])
        expected = places(TRAINING, size, Chances(5, epoch, np.array([index])))[0]
        np.testing.assert_allclose(where[row].numpy(), expected, rtol=0, atol=1e-6)
        np.testing.assert_array_equal(classes[row].numpy(), records["classes"][index])
        np.testing.assert_array_equal(scores[row].numpy(), records["scores"][index].astype(np.float32))


def test_a_picture_drawn_twice_has_two_places(pixels, tmp_path) -> None:
    file = with_maps(pixels, tmp_path / "some.maps")
    weights = np.array([1.0] + [0.0] * (COUNT - 1))
    targets, indices = collected(pixels, file, weights=weights)
    assert set(indices.tolist()) == {0}
    assert len({tuple(row) for row in targets[:, 1:7].tolist()}) == len(targets)


def test_a_lying_photograph_is_measured_as_it_is_seen(photographs) -> None:
    assert size_of(photographs, 1, True) == (80, 128)
    assert size_of(photographs, 1, False) == (128, 80)


def test_maps_for_other_pictures_or_several_labels_are_refused(pixels, tmp_path) -> None:
    file = with_maps(pixels, tmp_path / "some.maps")
    with pytest.raises(ValueError, match="11 score maps for 5 pictures"):
        Loader(pixels.only(range(5)), None, TRAINING, batch_size=2, maps=file.maps(pixels))
    several = np.zeros((COUNT, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match="one label for each"):
        Loader(pixels, several, TRAINING, batch_size=2, maps=file.maps(pixels))
