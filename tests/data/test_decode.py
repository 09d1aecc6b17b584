"""Pixels of a crop: at the scale that it needs, turned as the camera was held, from any kind of picture."""

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from vitrail.data.chance import Chance
from vitrail.data.crops import Fit, RandomResizedCrop, SimpleCrop
from vitrail.data.decode import Box, Decoded, as_tensor, cut, opened, orientation, stored_box, turn


def scene(height: int, width: int) -> Image.Image:
    """Smooth, coloured, and different in every corner."""
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    planes = (255 * x, 255 * y, 127 + 120 * np.sin(9 * x) * np.cos(5 * y))
    return Image.fromarray(np.stack(planes, -1).astype(np.uint8))


def written(image: Image.Image, kind: str = "JPEG", **options) -> Image.Image:
    """The picture from a file's bytes."""
    data = io.BytesIO()
    image.save(data, kind, **options)
    return Image.open(io.BytesIO(data.getvalue()))


def difference(first: torch.Tensor, second: torch.Tensor) -> float:
    return (first.float() - second.float()).abs().mean().item()


@pytest.mark.parametrize(
    ("box", "reduction"),
    [
        (Box(0, 0, 900, 1200), 4),
        (Box(0, 0, 448, 448), 2),
        (Box(0, 0, 447, 900), 1),
        (Box(10, 10, 1792, 1792), 8),
        (Box(10, 10, 100, 100), 1),
    ],
)
def test_jpeg_is_decoded_at_the_smallest_scale_with_enough_pixels(box, reduction):
    source = opened(written(scene(1900, 2000)), 3, True)
    assert source.reduction(box, (224, 224)) == reduction
    pixels, inside = source.part(box, (224, 224))
    assert min(inside.height, 224) == min(224, box.height)
    assert source.image.size == (-(-2000 // reduction), -(-1900 // reduction))
    assert pixels.shape[:2] == (inside.height, inside.width)


@pytest.mark.parametrize("box", [Box(0, 0, 1200, 1600), Box(301, 417, 777, 901), Box(600, 800, 600, 800)])
def test_reduced_scale_gives_the_same_picture(box):
    whole = scene(1200, 1600)
    reduced = cut(opened(written(whole, quality=95), 3, True), box, (160, 160), "bicubic")
    plainly = cut(Decoded(as_tensor(whole)), box, (160, 160), "bicubic")
    assert reduced.shape == plainly.shape == (3, 160, 160)
    assert difference(reduced, plainly) < 1.5


def test_what_is_no_jpeg_or_is_decoded_already_is_not_reduced():
    assert opened(written(scene(800, 800), "PNG"), 3, True).reduction(Box(0, 0, 800, 800), (50, 50)) == 1
    image = written(scene(800, 800))
    image.load()
    assert opened(image, 3, True).reduction(Box(0, 0, 800, 800), (50, 50)) == 1


@pytest.mark.parametrize("held", range(1, 9))
@pytest.mark.parametrize("large", [False, True])
def test_orientation_is_honoured_with_the_crop_in_the_turned_frame(held, large):
    stored = scene(480, 640) if large else scene(60, 80)
    exif = Image.Exif()
    exif[0x0112] = held
    kind, options = ("JPEG", {"quality": 95}) if large else ("PNG", {})
    source = opened(written(stored, kind, exif=exif, **options), 3, True)
    seen = ImageOps.exif_transpose(written(stored, kind, exif=exif, **options))
    assert source.size == (seen.height, seen.width)
    box = Box(seen.height // 8, seen.width // 4, seen.height // 2, seen.width // 3)
    found = cut(source, box, (25, 35), "bilinear")
    expected = cut(Decoded(as_tensor(seen)), box, (25, 35), "bilinear")
    assert found.shape == (3, 25, 35)
    assert difference(found, expected) < (2.0 if large else 0.05)


@pytest.mark.parametrize("held", range(1, 9))
def test_turning_is_what_pillow_does(held):
    image = scene(7, 11)
    exif = Image.Exif()
    exif[0x0112] = held
    expected = as_tensor(ImageOps.exif_transpose(written(image, "PNG", exif=exif))).permute(2, 0, 1)
    assert (turn(as_tensor(image).permute(2, 0, 1), held) == expected).all()
    box = stored_box(Box(0, 0, *expected.shape[1:]), (7, 11), held)
    assert box == Box(0, 0, 7, 11)


def test_orientation_that_makes_no_sense_or_is_not_wanted_is_upright():
    exif = Image.Exif()
    exif[0x0112] = 77
    assert orientation(written(scene(8, 8), exif=exif)) == 1
    exif[0x0112] = 6
    assert orientation(written(scene(8, 8), exif=exif)) == 6
    assert opened(written(scene(8, 9), exif=exif), 3, turn=False).size == (8, 9)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F", "YCbCr"])
def test_every_kind_of_picture_becomes_bytes_of_the_channels_wanted(mode, channels):
    if mode == "I;16":
        image = Image.fromarray((np.arange(600).reshape(20, 30) * 100).astype(np.uint16))
    elif mode == "LA":
        image = scene(20, 30).convert("L").convert("LA")
    else:
        image = scene(20, 30).convert(mode)
    found = cut(opened(image, channels, True), Box(0, 0, 20, 30), (16, 16), "bicubic")
    assert found.shape == (channels, 16, 16)
    assert found.dtype == torch.uint8
    assert found.float().std() > 5


def test_cmyk_jpeg_is_reduced_too():
    found = cut(opened(written(scene(400, 400).convert("CMYK")), 3, True), Box(0, 0, 400, 400), (50, 50), "bicubic")
    assert difference(found, cut(Decoded(as_tensor(scene(400, 400))), Box(0, 0, 400, 400), (50, 50), "bicubic")) < 12


def test_of_an_animation_the_first_picture_is_taken():
    frames = [Image.new("RGB", (9, 9), (200, 0, 0)), Image.new("RGB", (9, 9), (0, 200, 0))]
    image = written(frames[0], "GIF", save_all=True, append_images=frames[1:])
    found = cut(opened(image, 3, True), Box(0, 0, 9, 9), (4, 4), "bicubic")
    assert found[0].min() > 190
    assert found[1].max() < 10


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (50, 1), (2, 3)])
@pytest.mark.parametrize("crop", [RandomResizedCrop((16, 16)), SimpleCrop((16, 16)), Fit((16, 16))])
def test_tiny_and_thin_pictures_can_be_cropped(size, crop):
    for index in range(20):
        found = crop.picture(opened(scene(*size), 3, True), Chance(0, 0, index))
        assert found.shape == (3, 16, 16)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resizing_is_what_pillow_does(interpolation):
    image = scene(300, 210)
    found = cut(Decoded(as_tensor(image)), Box(20, 30, 200, 170), (64, 96), interpolation)
    filter = getattr(Image.Resampling, interpolation.upper())
    expected = as_tensor(image.resize((96, 64), filter, box=(30, 20, 200, 220))).permute(2, 0, 1)
    assert (found.int() - expected.int()).abs().max() <= 2
    assert difference(found, expected) < 0.05


def test_truncated_jpeg_cannot_be_read():
    data = io.BytesIO()
    scene(200, 200).save(data, "JPEG")
    image = Image.open(io.BytesIO(data.getvalue()[: len(data.getvalue()) // 2]))
    with pytest.raises(OSError, match="truncated"):
        cut(opened(image, 3, True), Box(0, 0, 200, 200), (32, 32), "bicubic")
