"""Crop transforms, checked with images whose colours encode positions."""

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data.cache import MapShape, ScoreMapFile, compute_image_key
from vitrail.data.dataset import Images
from vitrail.data.decode import DecodedImage
from vitrail.data.loader import Loader
from vitrail.data.rng import BatchRandom, SampleRandom
from vitrail.data.sources.arrays import ArrayStore
from vitrail.data.sources.files import FileStore
from vitrail.data.transforms import randaugment
from vitrail.data.transforms.augment import AugmentSlot, ColourJitter, Flip, PadCrop, RandomErasing, Rotate, Warp
from vitrail.data.transforms.crops import Fit, RandomResizedCrop, ScaleJitter, SimpleCrop
from vitrail.data.transforms.pipeline import IDENTITY_TRANSFORM, TrainPipeline, compute_crop_transforms, read_image_size
from vitrail.data.transforms.randaugment import RandAugment

COUNT = 11
SIZES = ((96, 128), (128, 80), (100, 100))
CROPS = (
    RandomResizedCrop((32, 32), (0.2, 1.0)),
    SimpleCrop((32, 32), 4),
    ScaleJitter((32, 32), (1.0, 1.6)),
    Fit((32, 32)),
)
MOVES = (Flip(), PadCrop(3), Warp(), Rotate((-40, 40)), RandAugment(2, 9, rate=1.0, interpolation="bilinear"))


def make_position_image(height: int, width: int) -> np.ndarray:
    """Return an image whose red and green encode x and y."""
    y, x = np.meshgrid((np.arange(height) + 0.5) / height, (np.arange(width) + 0.5) / width, indexing="ij")
    return (np.stack((x, y, np.ones_like(x)), -1) * 255).round().astype(np.uint8)


def positions_by_colours(
    pipeline: TrainPipeline, size: tuple[int, int], sample_rng: SampleRandom
) -> tuple[np.ndarray, np.ndarray]:
    """Return the encoded position of each pixel, [H, W, 2], and its blue, 1 inside the image."""
    sample = (
        pipeline.apply(DecodedImage(torch.from_numpy(make_position_image(*size))), sample_rng).permute(1, 2, 0).numpy()
        / 255
    )
    return sample[..., :2], sample[..., 2]


def positions_by_transform(pipeline: TrainPipeline, size: tuple[int, int], sample_rng: SampleRandom) -> np.ndarray:
    """Return the position of each pixel by the transform."""
    transform = compute_crop_transforms(pipeline, np.array([size]), BatchRandom.from_sample(sample_rng))[0]
    height, width = pipeline.size
    y, x = np.meshgrid((np.arange(height) + 0.5) / height, (np.arange(width) + 0.5) / width, indexing="ij")
    return np.stack((x, y, np.ones_like(x)), -1) @ transform.T


@pytest.mark.parametrize("crop", CROPS, ids=lambda crop: type(crop).__name__)
@pytest.mark.parametrize("step", [None, *MOVES], ids=lambda step: type(step).__name__)
def test_transforms_match_encoded_positions(crop: AugmentSlot, step: AugmentSlot | None, monkeypatch) -> None:
    moving = ("rotate", "shear-x", "shear-y", "translate-x", "translate-y")
    monkeypatch.setattr(randaugment, "OPERATIONS", moving)  # the other ten change colours and move nothing
    pipeline = TrainPipeline((crop, *([step] if step else [])), (32, 32))
    for index, size in enumerate(SIZES * 2):
        sample_rng = SampleRandom(3, 1, index)
        (colours, blue), matrix = (
            positions_by_colours(pipeline, size, sample_rng),
            positions_by_transform(pipeline, size, sample_rng),
        )
        # What comes in from outside is black or grey, or mirrored at the image's edge.
        inside = (blue == 1) & ((matrix > 0.04) & (matrix < 0.96)).all(-1)
        assert inside.mean() > 0.1
        np.testing.assert_allclose(colours[inside], matrix[inside], rtol=0, atol=1 / 32)  # a pixel of the sample


def test_transforms_compose_last_step_first(monkeypatch) -> None:
    monkeypatch.setattr(randaugment, "OPERATIONS", ("rotate", "shear-x", "translate-y"))
    steps = (RandomResizedCrop((32, 32), (0.3, 1.0)), RandAugment(2, 6, rate=1.0), Flip(1.0), PadCrop(2, "reflect"))
    pipeline = TrainPipeline(steps, (32, 32))
    for index in range(8):
        sample_rng = SampleRandom(0, 2, index)
        (colours, _), matrix = (
            positions_by_colours(pipeline, (96, 128), sample_rng),
            positions_by_transform(pipeline, (96, 128), sample_rng),
        )
        middle = slice(14, 18)
        np.testing.assert_allclose(colours[middle, middle], matrix[middle, middle], rtol=0, atol=0.02)


def test_the_whole_image_has_the_identity_transform() -> None:
    batch_rng = BatchRandom(0, 0, np.arange(2))
    whole = compute_crop_transforms(TrainPipeline((), (32, 32)), np.array([[64, 64], [32, 32]]), batch_rng)
    np.testing.assert_array_equal(whole, np.array([IDENTITY_TRANSFORM, IDENTITY_TRANSFORM]))
    flipped = compute_crop_transforms(TrainPipeline((Flip(1.0),), (32, 32)), np.array([[64, 64], [32, 32]]), batch_rng)
    np.testing.assert_array_equal(flipped, np.array([((-1, 0, 1), (0, 1, 0))] * 2))


def test_colour_steps_have_the_identity_transform() -> None:
    sizes, batch_rng = np.array([[40, 60]] * 4), BatchRandom(0, 0, np.arange(4))
    plain = TrainPipeline((RandomResizedCrop((16, 16)),), (16, 16))
    coloured = TrainPipeline((RandomResizedCrop((16, 16)), ColourJitter(), RandomErasing(1.0)), (16, 16))
    np.testing.assert_array_equal(
        compute_crop_transforms(plain, sizes, batch_rng), compute_crop_transforms(coloured, sizes, batch_rng)
    )


SHAPE = MapShape((3, 4), 2, 7)


def with_maps(images: Images, path) -> ScoreMapFile:
    """Write random score maps for each image."""
    random, count = np.random.default_rng(0), len(images)
    file = ScoreMapFile(path, SHAPE)
    file.append(
        [compute_image_key(images, index) for index in range(count)],
        size=[read_image_size(images, index, True) for index in range(count)],
        classes=random.integers(0, 7, (count, 3, 4, 2)),
        scores=random.random((count, 3, 4, 2)),
    )
    return file


@pytest.fixture
def photographs(tmp_path) -> Images:
    """Return files of several sizes, some with an EXIF orientation."""
    paths = []
    for index in range(COUNT):
        height, width = SIZES[index % 3]
        exif = Image.Exif()
        if index % 4 == 1:
            exif[0x0112] = 6
        paths.append(str(tmp_path / f"{index}.jpg"))
        Image.fromarray(make_position_image(height, width)).save(paths[-1], exif=exif, quality=95)
    return Images(FileStore.from_paths(paths), np.arange(COUNT), np.arange(COUNT) % 3, ("a", "b", "c"))


@pytest.fixture
def pixels() -> Images:
    array = np.random.default_rng(0).integers(0, 256, (COUNT + 3, 16, 24, 3), dtype=np.uint8)
    return Images(ArrayStore(array, ((0, "array"),)), np.arange(COUNT)[::-1].copy(), np.arange(COUNT) % 3, tuple("abc"))


TRAINING = TrainPipeline((RandomResizedCrop((16, 16), (0.3, 1.0)), Flip(), PadCrop(2)), (16, 16))


def collected(images: Images, file: ScoreMapFile, batch: int = 4, **options) -> tuple[torch.Tensor, torch.Tensor]:
    loader = Loader(images, None, TRAINING, batch_size=batch, seed=5, epochs=2, maps=file.load_maps(images), **options)
    batches = [*loader.iter_epoch(0), *loader.iter_epoch(1)]
    loader.close()
    return torch.cat([b.targets for b in batches]), torch.cat([b.indices for b in batches])


@pytest.mark.parametrize("source", ["photographs", "pixels"])
def test_targets_do_not_depend_on_workers_or_processes(source: str, request, tmp_path) -> None:
    images: Images = request.getfixturevalue(source)
    file = with_maps(images, tmp_path / "some.maps")
    alone, indices = collected(images, file)
    helped, _ = collected(images, file, workers=2)
    uncached, _ = collected(images, file, cache_bytes=0)
    assert torch.equal(alone, helped)
    assert torch.equal(alone, uncached)
    halves = [collected(images, file, rank=rank, world_size=2)[0] for rank in (0, 1)]
    together = torch.stack([half.unflatten(0, (-1, 2)) for half in halves], 1).flatten(0, 2)
    assert torch.equal(alone, together)
    assert torch.equal(alone[:, 0].long(), torch.from_numpy(images.targets)[indices])


def test_targets_hold_transform_and_map(photographs, tmp_path) -> None:
    file = with_maps(photographs, tmp_path / "some.maps")
    targets, indices = collected(photographs, file)
    transforms, classes, scores = SHAPE.split_columns(targets[:, 1:])
    records = file.open_records()
    for row, index in enumerate(indices.tolist()):
        epoch = row // (COUNT // 4 * 4)
        size = np.array([read_image_size(photographs, index, True)])
        expected = compute_crop_transforms(TRAINING, size, BatchRandom(5, epoch, np.array([index])))[0]
        np.testing.assert_allclose(transforms[row].numpy(), expected, rtol=0, atol=1e-6)
        np.testing.assert_array_equal(classes[row].numpy(), records["classes"][index])
        np.testing.assert_array_equal(scores[row].numpy(), records["scores"][index].astype(np.float32))


def test_repeated_draws_have_different_transforms(pixels, tmp_path) -> None:
    file = with_maps(pixels, tmp_path / "some.maps")
    weights = np.array([1.0] + [0.0] * (COUNT - 1))
    targets, indices = collected(pixels, file, weights=weights)
    assert set(indices.tolist()) == {0}
    assert len({tuple(row) for row in targets[:, 1:7].tolist()}) == len(targets)


def test_image_size_honours_exif_orientation(photographs) -> None:
    assert read_image_size(photographs, 1, True) == (80, 128)
    assert read_image_size(photographs, 1, False) == (128, 80)


def test_mismatched_maps_or_multi_label_targets_raise(pixels, tmp_path) -> None:
    file = with_maps(pixels, tmp_path / "some.maps")
    with pytest.raises(ValueError, match="11 score maps for 5 images"):
        Loader(pixels.select(range(5)), None, TRAINING, batch_size=2, maps=file.load_maps(pixels))
    several = np.zeros((COUNT, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match="one label per image"):
        Loader(pixels, several, TRAINING, batch_size=2, maps=file.load_maps(pixels))
