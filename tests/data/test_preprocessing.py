"""Preprocessing gives the same pixels as timm and transformers."""

import io
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data.preprocessing import CLIP_STATS, IMAGENET_STATS, INCEPTION_STATS, Preprocessing, convert_image
from vitrail.utils.json import dataclass_from_json, to_json

PHOTOGRAPHS = Path(__file__).parents[3] / "shared" / "data" / "imagenet-samples"
needs_photographs = pytest.mark.skipif(
    not PHOTOGRAPHS.exists(), reason="the 200 photographs are not beside this checkout (../shared/data)"
)


def photographs():
    for path in sorted(PHOTOGRAPHS.iterdir())[::4]:
        with Image.open(path) as image:
            yield path.name, image.convert("RGB")


def assert_same_pixels(contestants):
    """Assert that ours and theirs differ by at most 1/255 on every photograph."""
    count = 0
    for name, image in photographs():
        count += 1
        for (ours, theirs), label in zip(contestants.values(), contestants, strict=True):
            mine, other = ours(image), theirs(image)
            assert mine.shape == other.shape, (label, name)
            apart = ((mine - other).abs() * torch.tensor(ours.std).view(-1, 1, 1)).max()
            assert apart <= 1 / 255 + 1e-6, (label, name, float(apart * 255))
    assert count == 50


@pytest.mark.slow
@needs_photographs
def test_pixels_equal_timm():
    pytest.importorskip("timm", reason="timm is not installed: pip install 'vitrail[peers]'")
    from timm.data import create_transform

    def pair(size, filter, fraction, colours, squash=False):
        theirs = create_transform(
            (3, size, size),
            interpolation=filter,
            crop_pct=fraction,
            crop_mode="squash" if squash else "center",
            **colours,
        )
        side = math.floor(size / fraction)
        return Preprocessing((size, size), (side, side), "squash" if squash else "cover", filter, **colours), theirs

    assert_same_pixels(
        {
            "DeiT": pair(224, "bicubic", 0.9, IMAGENET_STATS),
            "bilinear": pair(224, "bilinear", 0.875, IMAGENET_STATS),
            "odd": pair(161, "bicubic", 0.95, INCEPTION_STATS),
            "no crop": pair(224, "bicubic", 1.0, CLIP_STATS),
            "SigLIP": pair(224, "bicubic", 1.0, INCEPTION_STATS, squash=True),
        }
    )


@pytest.mark.slow
@needs_photographs
def test_pixels_equal_transformers():
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install 'vitrail[peers]'"
    )
    from vitrail.checkpoints.formats.transformers import parse_preprocessing

    def pair(processor):
        settings = {"preprocessor_config.json": processor.to_dict()}
        ours = parse_preprocessing(settings, (224, 224))
        return ours, lambda image: processor(image, return_tensors="pt")["pixel_values"][0]

    assert_same_pixels(
        {
            "ViT": pair(transformers.ViTImageProcessor()),
            "DeiT": pair(transformers.DeiTImageProcessor()),
            "DINOv2": pair(
                transformers.BitImageProcessor(size={"shortest_edge": 256}, image_mean=[0.485, 0.456, 0.406])
            ),
            "odd crop": pair(transformers.BitImageProcessor(size={"shortest_edge": 171}, crop_size=160, resample=2)),
        }
    )


@needs_photographs
def test_older_transformers_processors_are_within_one_level():
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'vitrail[peers]'")
    pil = pytest.importorskip("transformers.models.vit.image_processing_pil_vit", reason="no PIL processor here")
    processor = pil.ViTImageProcessorPil()
    ours = Preprocessing((224, 224), (224, 224), "squash", "bilinear", engine="torch", centre="down", **INCEPTION_STATS)
    for _, image in list(photographs())[:20]:
        theirs = processor(image, return_tensors="pt")["pixel_values"][0]
        assert (ours(image) - theirs).abs().max() * 0.5 <= 1 / 255 + 1e-6


def test_without_antialias_only_neighbours_are_read():
    """TensorFlow's bilinear from 4 to 2 pixels: the mean of the two around each centre."""
    row = np.array([[0, 100, 200, 50]], dtype=np.uint8).repeat(4, 0)
    image = Image.fromarray(row)
    pipeline = Preprocessing((2, 2), (2, 2), "squash", "bilinear", False, "torch", mean=(0.0,), std=(1.0,))
    assert pipeline.to_pixels(image)[0].tolist() == [[50, 125], [50, 125]]
    row8 = np.array([[0, 0, 0, 80, 160, 0, 0, 0]], dtype=np.uint8).repeat(8, 0)
    assert pipeline.to_pixels(Image.fromarray(row8))[0, 0].tolist() == [0, 0]  # what lies between is not seen
    averaged = replace(pipeline, antialias=True).to_pixels(Image.fromarray(row8))[0, 0]
    assert min(averaged.tolist()) > 0


@pytest.mark.parametrize(
    ("height", "width", "expected"), [(300, 400, (248, 330)), (401, 300, (331, 248)), (5, 5, (248, 248))]
)
def test_resized_size(height, width, expected):
    assert Preprocessing((224, 224), (248, 248)).resized_size(height, width) == expected


def test_centre_crop_rounding():
    pixels = np.arange(9, dtype=np.uint8).reshape(1, 1, 9).repeat(2, 1)
    even = Preprocessing((2, 2), (2, 9), "squash", mean=(0.0,), std=(1.0,))
    assert even.crop_centre(pixels)[0, 0].tolist() == [4, 5]  # 3.5 to the even 4
    assert replace(even, centre="down").crop_centre(pixels)[0, 0].tolist() == [3, 4]


def test_smaller_images_are_padded_with_zeros():
    pipeline = Preprocessing((4, 4), (2, 2), "squash", mean=(0.0,), std=(1.0,))
    pixels = pipeline.to_pixels(Image.new("L", (2, 2), 255))
    assert pixels[0].tolist() == [[0, 0, 0, 0], [0, 255, 255, 0], [0, 255, 255, 0], [0, 0, 0, 0]]


def test_exif_orientation_is_applied_only_with_turn():
    image = Image.new("L", (16, 16))
    image.paste(255, (0, 0, 8, 16))  # white on the left
    exif = image.getexif()
    exif[0x0112] = 6  # the camera lay on its side: to be turned by a quarter to the right
    buffer = io.BytesIO()
    image.save(buffer, "PNG", exif=exif)
    left = Preprocessing((16, 16), (16, 16), mean=(0.0,), std=(1.0,))
    with Image.open(buffer) as opened:
        assert left(opened)[0, 8].tolist() == [1.0] * 8 + [0.0] * 8
        assert replace(left, turn=True)(opened)[0, :, 8].tolist() == [1.0] * 8 + [0.0] * 8


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F", "I;16"])
def test_every_mode_converts_to_rgb(mode):
    pipeline = Preprocessing((8, 8), (8, 8))
    image = (
        Image.new("I;16", (10, 12), 30_000)
        if mode == "I;16"
        else Image.new("RGB", (10, 12), (200, 10, 10)).convert(mode)
    )
    assert pipeline(image).shape == (3, 8, 8)


def test_16_bit_values_are_scaled():
    image = Image.fromarray(np.array([[0, 32_768, 65_535]], dtype=np.uint16))
    assert np.asarray(convert_image(image, 1)).tolist() == [[0, 128, 255]]


def test_preprocessing_round_trips_through_json():
    pipeline = Preprocessing((224, 160), (256, 256), "squash", "bilinear", False, "torch", "down", (0.1,), (0.2,), True)
    assert dataclass_from_json(to_json(pipeline), Preprocessing, "preprocessing") == pipeline


def test_with_size_keeps_the_crop_share():
    assert Preprocessing((224, 224), (256, 256)).with_size((448, 448)).resize == (512, 512)
    assert Preprocessing((224, 224), (224, 224)).with_channels(1).channels == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": (0, 8)}, "each side must be 1 to 65,536 pixels"),
        ({"interpolation": "cubist"}, "unknown interpolation 'cubist'"),
        ({"antialias": False}, "engine 'pillow' always antialiases"),
        ({"engine": "torch", "interpolation": "lanczos"}, "engine 'torch' has no lanczos interpolation"),
        ({"mean": (0.5,)}, "one value per channel, got 1 and 3"),
        ({"std": (0.5, 0.0, 0.5)}, "std must be finite and > 0"),
    ],
)
def test_invalid_preprocessing_raises(wrong, message):
    with pytest.raises(ValueError, match=message):
        Preprocessing(**wrong)


def test_five_channels_raise():
    with pytest.raises(ValueError, match="images have 1, 3 or 4 channels, the model takes 5"):
        Preprocessing(mean=(0.5,) * 5, std=(0.5,) * 5)(Image.new("RGB", (8, 8)))
