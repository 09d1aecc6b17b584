"""One definition of resize, crop, normalise; the same pixels as timm's and transformers' pipelines."""

import io
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data.preprocessing import CLIP, HALF, IMAGENET, Preprocessing, plain
from vitrail.models.written import dataclass_from_json, to_json

PHOTOGRAPHS = Path(__file__).parents[3] / "shared" / "data" / "imagenet-samples"
needs_photographs = pytest.mark.skipif(
    not PHOTOGRAPHS.exists(), reason="the 200 photographs are not beside this checkout (../shared/data)"
)


def photographs():
    for path in sorted(PHOTOGRAPHS.iterdir()):
        with Image.open(path) as image:
            yield path.name, image.convert("RGB")


def assert_same_pixels(contestants):
    """On every photograph, at most 1/255 of the range anywhere between each of ours and theirs."""
    count = 0
    for name, image in photographs():
        count += 1
        for (ours, theirs), label in zip(contestants.values(), contestants, strict=True):
            mine, other = ours(image), theirs(image)
            assert mine.shape == other.shape, (label, name)
            apart = ((mine - other).abs() * torch.tensor(ours.std).view(-1, 1, 1)).max()
            assert apart <= 1 / 255 + 1e-6, (label, name, float(apart * 255))
    assert count == 200


@pytest.mark.slow
@needs_photographs
def test_pixels_are_those_of_timm():
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
            "DeiT": pair(224, "bicubic", 0.9, IMAGENET),
            "bilinear": pair(224, "bilinear", 0.875, IMAGENET),
            "odd": pair(161, "bicubic", 0.95, HALF),
            "no crop": pair(224, "bicubic", 1.0, CLIP),
            "SigLIP": pair(224, "bicubic", 1.0, HALF, squash=True),
        }
    )


@pytest.mark.slow
@needs_photographs
def test_pixels_are_those_of_transformers():
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install 'vitrail[peers]'"
    )
    from vitrail.checkpoints.transformers import pipeline

    def pair(processor):
        settings = {"preprocessor_config.json": processor.to_dict()}
        ours = pipeline(settings, (224, 224))
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
def test_the_older_processors_of_transformers_are_within_one_level_too():
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'vitrail[peers]'")
    pil = pytest.importorskip("transformers.models.vit.image_processing_pil_vit", reason="no PIL processor here")
    processor = pil.ViTImageProcessorPil()
    ours = Preprocessing((224, 224), (224, 224), "squash", "bilinear", engine="torch", centre="down", **HALF)
    for _, image in list(photographs())[:20]:
        theirs = processor(image, return_tensors="pt")["pixel_values"][0]
        assert (ours(image) - theirs).abs().max() * 0.5 <= 1 / 255 + 1e-6


def test_without_antialias_only_neighbours_are_read():
    """TensorFlow's bilinear: from 4 to 2 pixels, each is the mean of the two around its centre."""
    row = np.array([[0, 100, 200, 50]], dtype=np.uint8).repeat(4, 0)
    image = Image.fromarray(row)
    pipeline = Preprocessing((2, 2), (2, 2), "squash", "bilinear", False, "torch", mean=(0.0,), std=(1.0,))
    assert pipeline.pixels(image)[0].tolist() == [[50, 125], [50, 125]]
    row8 = np.array([[0, 0, 0, 80, 160, 0, 0, 0]], dtype=np.uint8).repeat(8, 0)
    assert pipeline.pixels(Image.fromarray(row8))[0, 0].tolist() == [0, 0]  # what lies between is not seen
    averaged = replace(pipeline, antialias=True).pixels(Image.fromarray(row8))[0, 0]
    assert min(averaged.tolist()) > 0


@pytest.mark.parametrize(
    ("height", "width", "expected"), [(300, 400, (248, 330)), (401, 300, (331, 248)), (5, 5, (248, 248))]
)
def test_the_smaller_side_gets_the_length_and_the_other_is_rounded_down(height, width, expected):
    assert Preprocessing((224, 224), (248, 248)).resized(height, width) == expected


def test_half_a_pixel_goes_where_each_library_puts_it():
    pixels = np.arange(9, dtype=np.uint8).reshape(1, 1, 9).repeat(2, 1)
    even = Preprocessing((2, 2), (2, 9), "squash", mean=(0.0,), std=(1.0,))
    assert even.cropped(pixels)[0, 0].tolist() == [4, 5]  # 3.5 to the even 4
    assert replace(even, centre="down").cropped(pixels)[0, 0].tolist() == [3, 4]


def test_smaller_images_stand_on_black():
    pipeline = Preprocessing((4, 4), (2, 2), "squash", mean=(0.0,), std=(1.0,))
    pixels = pipeline.pixels(Image.new("L", (2, 2), 255))
    assert pixels[0].tolist() == [[0, 0, 0, 0], [0, 255, 255, 0], [0, 255, 255, 0], [0, 0, 0, 0]]


def test_exif_rotation_is_left_alone_unless_asked_for():
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
def test_every_kind_of_picture_becomes_rgb(mode):
    pipeline = Preprocessing((8, 8), (8, 8))
    image = (
        Image.new("I;16", (10, 12), 30_000)
        if mode == "I;16"
        else Image.new("RGB", (10, 12), (200, 10, 10)).convert(mode)
    )
    assert pipeline(image).shape == (3, 8, 8)


def test_sixteen_bits_are_scaled_and_not_cut_off():
    image = Image.fromarray(np.array([[0, 32_768, 65_535]], dtype=np.uint16))
    assert np.asarray(plain(image, 1)).tolist() == [[0, 128, 255]]


def test_a_pipeline_is_json_and_back():
    pipeline = Preprocessing((224, 160), (256, 256), "squash", "bilinear", False, "torch", "down", (0.1,), (0.2,), True)
    assert dataclass_from_json(to_json(pipeline), Preprocessing, "preprocessing") == pipeline


def test_another_size_sees_as_much_of_the_image():
    assert Preprocessing((224, 224), (256, 256)).at((448, 448)).resize == (512, 512)
    assert Preprocessing((224, 224), (224, 224)).with_channels(1).channels == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": (0, 8)}, "each side is 1 to 65,536 pixels"),
        ({"interpolation": "cubist"}, "unknown interpolation 'cubist'"),
        ({"antialias": False}, "Pillow always averages"),
        ({"engine": "torch", "interpolation": "lanczos"}, "torch cannot resize by lanczos"),
        ({"mean": (0.5,)}, "1 means and 3 deviations"),
        ({"std": (0.5, 0.0, 0.5)}, "every deviation must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Preprocessing(**wrong)


def test_a_picture_for_five_channels_is_refused():
    with pytest.raises(ValueError, match="a picture has 1, 3 or 4 channels and the model takes 5"):
        Preprocessing(mean=(0.5,) * 5, std=(0.5,) * 5)(Image.new("RGB", (8, 8)))
