"""Augmentations: pixels equal to Pillow, timm and torchvision; random parameters within their bounds."""

import json

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps

from vitrail.data.decode import DecodedImage, image_to_tensor
from vitrail.data.preprocessing import convert_image
from vitrail.data.rng import BatchRandom, SampleRandom
from vitrail.data.transforms import operations
from vitrail.data.transforms.augment import (
    AugmentSlot,
    ColourJitter,
    Flip,
    PadCrop,
    RandAugment,
    RandomErasing,
    Rotate,
    ThreeAugment,
    Warp,
)
from vitrail.data.transforms.crops import Fit, RandomResizedCrop, ScaleJitter, SimpleCrop
from vitrail.data.transforms.operations import apply_affine, rotation_matrix
from vitrail.data.transforms.pipeline import TrainPipeline, convert_channels
from vitrail.data.transforms.randaugment import OPERATIONS
from vitrail.utils.json import dataclass_from_json, to_json


def noisy(height: int = 90, width: int = 120) -> Image.Image:
    """Return an image with all values, smooth and sharp parts."""
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    planes = np.stack((255 * x, 255 * y, 127 + 127 * np.sin(20 * x * y)), -1)
    planes[height // 2 :] += np.random.default_rng(0).normal(0, 40, planes[height // 2 :].shape)
    return Image.fromarray(planes.clip(20, 230).astype(np.uint8))


def tensor(image: Image.Image) -> torch.Tensor:
    return image_to_tensor(image).permute(2, 0, 1).contiguous()


def same(found: torch.Tensor, expected: Image.Image, most: int = 0, share: float = 0.0) -> None:
    apart = (found.int() - tensor(expected).int()).abs()
    assert apart.max() <= most
    assert (apart > 0).float().mean() <= share


@pytest.fixture(scope="module")
def peers():
    return pytest.importorskip("timm.data.auto_augment")


@pytest.mark.parametrize("factor", [0.0, 0.1, 0.63, 1.0, 1.72, 2.8])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (operations.adjust_brightness, "brightness"),
        (operations.adjust_contrast, "contrast"),
        (operations.adjust_saturation, "color"),
        (operations.adjust_sharpness, "sharpness"),
    ],
)
def test_enhancements_equal_timm(peers, ours, theirs, factor):
    image = noisy()
    same(ours(tensor(image), factor), getattr(peers, theirs)(image, factor))
    alone = ours(tensor(image), factor)
    batch = ours(tensor(image)[None].repeat(2, 1, 1, 1), torch.full((2, 1, 1, 1), factor))
    assert (batch == alone).all()


@pytest.mark.parametrize("image", [noisy(), Image.new("RGB", (9, 8), (7, 7, 7)), noisy(3, 2)])
def test_autocontrast_and_equalise_equal_timm(peers, image):
    same(operations.autocontrast(tensor(image)), peers.auto_contrast(image))
    same(operations.equalise(tensor(image)), peers.equalize(image))
    same(operations.invert(tensor(image)), peers.invert(image))


@pytest.mark.parametrize("value", [0, 1, 26, 128, 200, 255, 256])
def test_solarise_equals_timm(peers, value):
    same(operations.solarise(tensor(noisy()), value), peers.solarize(noisy(), value))
    same(operations.solarise_add(tensor(noisy()), value), peers.solarize_add(noisy(), value))


@pytest.mark.parametrize("bits", [1, 3, 4, 8])
def test_posterise_equals_timm(peers, bits):
    same(operations.posterise(tensor(noisy()), bits), peers.posterize(noisy(), bits))


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("value", [-0.9, -0.13, 0.0, 0.27, 0.405, 2.0])
def test_shear_and_translate_equal_timm(peers, interpolation, value):
    image, (height, width) = noisy(), (90, 120)
    options = {"resample": getattr(Image.Resampling, interpolation.upper()), "fillcolor": (128, 128, 128)}
    for matrix, theirs in {
        (1, value, 0, 0, 1, 0): peers.shear_x,
        (1, 0, 0, value, 1, 0): peers.shear_y,
        (1, 0, value * width, 0, 1, 0): peers.translate_x_rel,
        (1, 0, 0, 0, 1, value * height): peers.translate_y_rel,
    }.items():
        # Pillow's double precision falls on the other side of a whole number now and then
        same(apply_affine(tensor(image), matrix, interpolation, 128), theirs(image, value, **options), 1, 0.1)


@pytest.mark.parametrize("degrees", [-27.0, 0.0, 13.0, 90.0])
def test_rotation_equals_timm(peers, degrees):
    image = noisy()
    found = apply_affine(tensor(image), rotation_matrix(degrees, 90, 120), "bicubic", 128)
    same(found, peers.rotate(image, degrees, resample=Image.Resampling.BICUBIC, fillcolor=(128, 128, 128)))


@pytest.mark.parametrize("shift", [-0.5, -0.21, 0.0, 0.1, 0.4])
def test_hue_equals_torchvision(shift):
    functional = pytest.importorskip("torchvision.transforms.functional")
    found = operations.change_colours(tensor(noisy()), lambda values: operations.rotate_hue(values, shift))
    expected = functional.adjust_hue(tensor(noisy()), shift)
    assert (found.int() - expected.int()).abs().max() <= 1


def test_grey_and_blur_equal_pillow():
    same(operations.convert_to_grey(tensor(noisy())), noisy().convert("L").convert("RGB"))
    same(operations.blur_image(tensor(noisy()), 1.3), noisy().filter(ImageFilter.GaussianBlur(1.3)))
    same(operations.solarise(tensor(noisy()), 128), ImageOps.solarize(noisy()))


@pytest.mark.parametrize("change", OPERATIONS)
@pytest.mark.parametrize("increasing", [False, True])
def test_randaugment_operations_equal_timm(peers, change, increasing, monkeypatch):
    theirs = "AutoContrast Equalize Invert Rotate Posterize Solarize SolarizeAdd Color Contrast Brightness Sharpness"
    theirs += " ShearX ShearY TranslateXRel TranslateYRel"
    names = dict(zip(OPERATIONS, theirs.split(), strict=True))
    name = names[change]
    if increasing and name in ("Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness"):
        name += "Increasing"
    for magnitude in (4.0, 9.0):
        for sign in (1, -1):
            monkeypatch.setattr(peers.random, "random", lambda sign=sign: 0.0 if sign > 0 else 1.0)
            options = {"img_mean": (128, 128, 128), "interpolation": Image.Resampling.BICUBIC}
            expected = peers.AugmentOp(name, prob=1.0, magnitude=magnitude, hparams=options)(noisy())
            ours = RandAugment(increasing=increasing).apply_operation(tensor(noisy()), change, magnitude / 10, sign)
            same(ours, expected, 1, 0.01)


def test_randaugment_samples_operations_uniformly(monkeypatch):
    seen = []
    monkeypatch.setattr(
        RandAugment, "apply_operation", lambda self, pixels, change, *rest: seen.append(change) or pixels
    )
    for index in range(3000):
        RandAugment(2, 9, rate=0.5).apply(torch.zeros(3, 4, 4, dtype=torch.uint8), SampleRandom(0, 0, index))
    assert abs(len(seen) - 3000) < 150
    counts = [seen.count(change) for change in OPERATIONS]
    assert min(counts) > 140
    assert max(counts) < 260


def test_spread_magnitudes_vary_around_their_mean(monkeypatch):
    seen = []
    monkeypatch.setattr(
        RandAugment, "apply_operation", lambda self, pixels, change, level, sign: seen.append(level) or pixels
    )
    for index in range(2000):
        RandAugment(1, 5, spread=0.5, rate=1.0).apply(
            torch.zeros(3, 4, 4, dtype=torch.uint8), SampleRandom(0, 0, index)
        )
    assert abs(np.mean(seen) - 0.5) < 0.01
    assert abs(np.std(seen) - 0.05) < 0.005


@pytest.mark.parametrize("size", [(1, 1), (5, 300), (300, 5), (64, 64), (480, 640)])
def test_random_crops_respect_area_and_ratio(size):
    height, width = size
    crop = RandomResizedCrop((32, 32), (0.1, 0.9), (3 / 4, 4 / 3))
    areas, corners = [], []
    for index in range(500):
        box = crop.sample_box(height, width, SampleRandom(0, 0, index))
        assert box.top >= 0
        assert box.left >= 0
        assert box.top + box.height <= height
        assert box.left + box.width <= width
        assert min(box.height, box.width) >= 1
        areas.append(box.height * box.width / height / width)
        corners.append((box.top / max(1, height - box.height), box.left / max(1, width - box.width)))
        if size == (480, 640):
            assert 0.73 < box.width / box.height < 1.36
    if size == (480, 640):
        assert 0.09 < min(areas) < 0.13
        assert 0.87 < max(areas) < 0.91
        assert abs(np.mean(corners) - 0.5) < 0.03


def test_simple_crop_covers_the_shorter_side():
    image = noisy(200, 100)
    crop = SimpleCrop((50, 50), padding=0)
    pixels = crop.apply(DecodedImage(image_to_tensor(image)), SampleRandom(0, 0, 3))
    top = int(SampleRandom(0, 0, 3).uniform_at(0) * 51)
    expected = tensor(image.resize((50, 100), Image.Resampling.BICUBIC))[:, top : top + 50]
    assert (pixels.float() - expected.float()).abs().mean() < 6
    shifted = [
        SimpleCrop((50, 50), padding=4).apply(DecodedImage(image_to_tensor(image)), SampleRandom(0, 0, i))
        for i in range(30)
    ]
    assert {tuple(each.shape) for each in shifted} == {(3, 50, 50)}


STEPS: list[AugmentSlot] = [
    Flip(),
    PadCrop(3),
    PadCrop(3, "reflect"),
    Warp(),
    Warp(180, 0.9, 1.0, 1.0),
    Rotate(),
    Rotate((-180, 180), 0.5, "bicubic"),
    ColourJitter(0.4, 0.4, 0.4, 0.2),
    RandomErasing(0.8),
    RandomErasing(0.8, mode="zeros"),
    RandAugment(2, 9, rate=1.0),
    RandAugment(2, 9, rate=0.5, increasing=True, interpolation="bilinear"),
    RandAugment(2, 9, spread=0.5),
]


@pytest.mark.parametrize("step", STEPS, ids=repr)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_batch_equals_single_images(step, channels):
    pixels = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (40, channels, 20, 24), dtype=np.uint8))
    before = pixels.clone()
    whole = step.apply_batch(pixels, BatchRandom(5, 1, np.arange(100, 140), 2))
    single = [step.apply(image, SampleRandom(5, 1, 100 + i, 2)) for i, image in enumerate(pixels)]
    assert (whole == torch.stack(single)).all()
    assert (pixels == before).all()
    assert (whole != pixels).any()
    halves = [
        step.apply_batch(pixels[part], BatchRandom(5, 1, np.arange(100, 140)[part], 2))
        for part in (slice(0, 7), slice(7, 40))
    ]
    assert (whole == torch.cat(halves)).all()


@pytest.mark.parametrize(
    "crop", [RandomResizedCrop((20, 22)), RandomResizedCrop((9, 7), interpolation="box"), Fit((9, 7))]
)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_batch_of_crops_equals_single_crops(crop, channels):
    pixels = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (40, 20, 24, channels), dtype=np.uint8))
    whole = crop.apply_batch(pixels, BatchRandom(5, 1, np.arange(100, 140)))
    single = [crop.apply(DecodedImage(image), SampleRandom(5, 1, 100 + i)) for i, image in enumerate(pixels)]
    assert (whole == torch.stack(single)).all()


def test_flip_rate():
    pixels = torch.arange(6, dtype=torch.uint8).view(1, 1, 2, 3).repeat(2000, 1, 1, 1)
    flipped = (Flip(0.3).apply_batch(pixels, BatchRandom(0, 0, np.arange(2000))) != pixels).flatten(1).any(1)
    assert abs(flipped.float().mean().item() - 0.3) < 0.04


def test_pad_crop_reaches_every_offset_and_pads_with_zeros():
    pixels = torch.full((400, 1, 6, 6), 9, dtype=torch.uint8)
    moved = PadCrop(2).apply_batch(pixels, BatchRandom(0, 0, np.arange(400)))
    assert len({tuple(each.flatten().tolist()) for each in moved}) == 25
    assert set(moved.flatten().tolist()) == {0, 9}


def test_erasing_area_and_noise_statistics():
    pixels = torch.full((400, 3, 64, 64), 255, dtype=torch.uint8)
    erased = RandomErasing(0.5, (0.1, 0.3)).apply_batch(pixels, BatchRandom(0, 0, np.arange(400)))
    share = (erased != 255).float().mean((1, 2, 3))
    assert abs((share > 0).float().mean().item() - 0.5) < 0.08
    assert 0.08 < share[share > 0].min() < share.max() < 0.32
    noise = erased[erased != 255].float()
    assert abs(noise.mean().item() - 0.45 * 255) < 1.5
    assert abs(noise.std().item() - 0.225 * 255) < 2.5  # cut off at both ends
    zeros = RandomErasing(1.0, mode="zeros").apply_batch(pixels, BatchRandom(0, 0, np.arange(400)))
    assert set(zeros.unique().tolist()) == {0, 255}


def test_three_augment_samples_each_operation(monkeypatch):
    seen = []
    for name in ("convert_to_grey", "solarise", "blur_image"):
        monkeypatch.setattr(operations, name, lambda pixels, *rest, name=name: seen.append(name) or pixels)
    for index in range(600):
        ThreeAugment().apply(tensor(noisy(9, 9)), SampleRandom(0, 0, index))
    assert all(150 < seen.count(name) < 250 for name in ("convert_to_grey", "solarise", "blur_image"))


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_pixels_depend_on_the_random_numbers_only(channels):
    steps = (RandomResizedCrop((40, 48)), Flip(), RandAugment(3, 9, rate=1.0), ThreeAugment(), RandomErasing(1.0))
    prepare = TrainPipeline(steps, (40, 48), channels)
    first, again, other = (prepare(noisy(), SampleRandom(0, 0, index)) for index in (1, 1, 2))
    assert first.shape == (channels, 40, 48)
    assert (first == again).all()
    assert (first != other).any()
    assert (prepare(noisy(), SampleRandom(0, 1, 1)) != first).any()
    assert (prepare(noisy(), SampleRandom(1, 0, 1)) != first).any()


def test_colour_operations_keep_alpha():
    pixels = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (4, 20, 24), dtype=np.uint8))
    for change in ("autocontrast", "equalise", "invert", "posterise", "solarise", "colour", "contrast", "sharpness"):
        assert (RandAugment().apply_operation(pixels, change, 0.4, 1)[3] == pixels[3]).all()


def test_a_pipeline_without_a_crop_fits_the_image():
    assert TrainPipeline((Flip(),), (32, 24))(noisy(), SampleRandom(0, 0, 0)).shape == (3, 32, 24)
    exact = noisy(24, 32)
    assert (TrainPipeline((), (24, 32))(exact, SampleRandom(0, 0, 0)) == tensor(exact)).all()


def test_convert_channels_equals_preprocessing():
    for image in (noisy(), noisy().convert("L"), noisy().convert("RGBA")):
        for channels in (1, 3, 4):
            assert (convert_channels(tensor(image), channels) == tensor(convert_image(image, channels))).all()


@pytest.mark.parametrize(
    "step",
    [
        *STEPS,
        RandomResizedCrop(),
        SimpleCrop(),
        ScaleJitter(),
        Fit(),
        RandAugment(2, 9, 0.5, 0.5, True),
        ThreeAugment(),
    ],
    ids=repr,
)
def test_slots_round_trip_through_json(step):
    data = json.loads(json.dumps(to_json(step)))
    assert dataclass_from_json(data, AugmentSlot, "augment") == step


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: RandomResizedCrop((0, 5)),
        lambda: RandomResizedCrop(scale=(0.5, 0.1)),
        lambda: RandomResizedCrop(scale=(0.5, 1.5)),
        lambda: RandomResizedCrop(ratio=(0, 1)),
        lambda: RandomResizedCrop(interpolation="best"),  # pyright: ignore[reportArgumentType]
        lambda: SimpleCrop((8, 8), 8),
        lambda: Flip(1.5),
        lambda: PadCrop(-1),
        lambda: Warp(turn=-1),
        lambda: Warp(zoom=1.0),
        lambda: PadCrop(1, "blue"),  # pyright: ignore[reportArgumentType]
        lambda: ColourJitter(hue=0.7),
        lambda: RandomErasing(-0.1),
        lambda: RandomErasing(mode="pink"),  # pyright: ignore[reportArgumentType]
        lambda: RandAugment(-1),
        lambda: RandAugment(magnitude=31),
        lambda: RandAugment(fill=256),
        lambda: ThreeAugment(-1),
        lambda: TrainPipeline((Flip(), RandomResizedCrop())),
        lambda: TrainPipeline((RandomResizedCrop((32, 32)),), (64, 64)),
        lambda: TrainPipeline((), channels=2),
    ],
)
def test_invalid_arguments_raise_one_line(wrong):
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        wrong()


def test_warp_of_zero_is_the_identity():
    pixels = torch.randint(0, 256, (4, 3, 9, 12), dtype=torch.uint8)
    assert torch.equal(Warp(0, 0, 0, 0).apply_batch(pixels, BatchRandom(0, 0, np.arange(4))), pixels)


def test_warp_shift_is_bounded():
    """Measure the shift by the position of a bright dot."""
    pixels = torch.zeros(300, 1, 33, 33, dtype=torch.uint8)
    pixels[:, 0, 16, 16] = 255
    moved = Warp(0, 0, 0, 0.25).apply_batch(pixels, BatchRandom(0, 0, np.arange(300))).float()
    places = torch.stack(
        ((moved.sum(3)[:, 0] * torch.arange(33)).sum(1), (moved.sum(2)[:, 0] * torch.arange(33)).sum(1)), 1
    )
    offsets = places / moved.sum((1, 2, 3))[:, None] - 16
    assert offsets.abs().max() <= 0.25 * 33 + 0.1
    assert offsets.abs().max() > 0.2 * 33
    assert offsets.mean().abs() < 1
