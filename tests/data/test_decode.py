"""Decoding of crops: reduced scale, EXIF orientation, every image mode."""

import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from vitrail.data import decode
from vitrail.data.decode import (
    DECODER_ERRORS,
    IMAGE_ERRORS,
    Box,
    DecodedImage,
    crop_and_resize,
    image_to_tensor,
    orient_pixels,
    read_orientation,
    start_decoding,
    to_stored_box,
)
from vitrail.data.rng import SampleRandom
from vitrail.data.transforms.crops import Fit, RandomResizedCrop, ScaleJitter, SimpleCrop


def scene(height: int, width: int) -> Image.Image:
    """Return a smooth, coloured image with four different corners."""
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    planes = (255 * x, 255 * y, 127 + 120 * np.sin(9 * x) * np.cos(5 * y))
    return Image.fromarray(np.stack(planes, -1).astype(np.uint8))


def written(image: Image.Image, kind: str = "JPEG", **options) -> Image.Image:
    """Return the image encoded and opened again."""
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
    source = start_decoding(written(scene(1900, 2000)), 3, True)
    assert source.find_draft_scale(box, (224, 224)) == reduction
    pixels, shown = source.read_region(box, (224, 224))
    assert min(pixels.shape[0], 224) == min(224, box.height)
    assert source.image.size == (-(-2000 // reduction), -(-1900 // reduction))
    assert (pixels.shape[0] * reduction, pixels.shape[1] * reduction) == (shown.height, shown.width)
    for side in ("top", "left", "height", "width"):
        assert abs(getattr(shown, side) - getattr(box, side)) <= reduction / 2


@pytest.mark.parametrize("box", [Box(0, 0, 1200, 1600), Box(301, 417, 777, 901), Box(600, 800, 600, 800)])
def test_reduced_scale_gives_the_same_image(box):
    whole = scene(1200, 1600)
    reduced = crop_and_resize(start_decoding(written(whole, quality=95), 3, True), box, (160, 160), "bicubic")
    plainly = crop_and_resize(DecodedImage(image_to_tensor(whole)), box, (160, 160), "bicubic")
    assert reduced.shape == plainly.shape == (3, 160, 160)
    assert difference(reduced, plainly) < 1.5


def test_only_undecoded_jpegs_are_reduced():
    assert start_decoding(written(scene(800, 800), "PNG"), 3, True).find_draft_scale(Box(0, 0, 800, 800), (50, 50)) == 1
    image = written(scene(800, 800))
    image.load()
    assert start_decoding(image, 3, True).find_draft_scale(Box(0, 0, 800, 800), (50, 50)) == 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("large", [False, True])
def test_crops_refer_to_the_upright_image(orientation, large):
    stored = scene(480, 640) if large else scene(60, 80)
    exif = Image.Exif()
    exif[0x0112] = orientation
    kind, options = ("JPEG", {"quality": 95}) if large else ("PNG", {})
    source = start_decoding(written(stored, kind, exif=exif, **options), 3, True)
    seen = ImageOps.exif_transpose(written(stored, kind, exif=exif, **options))
    assert source.size == (seen.height, seen.width)
    box = Box(seen.height // 8, seen.width // 4, seen.height // 2, seen.width // 3)
    found = crop_and_resize(source, box, (25, 35), "bilinear")
    expected = crop_and_resize(DecodedImage(image_to_tensor(seen)), box, (25, 35), "bilinear")
    assert found.shape == (3, 25, 35)
    assert difference(found, expected) < (2.0 if large else 0.05)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_equals_pillow(orientation):
    image = scene(7, 11)
    exif = Image.Exif()
    exif[0x0112] = orientation
    expected = image_to_tensor(ImageOps.exif_transpose(written(image, "PNG", exif=exif))).permute(2, 0, 1)
    assert (orient_pixels(image_to_tensor(image).permute(2, 0, 1), orientation) == expected).all()
    box = to_stored_box(Box(0, 0, *expected.shape[1:]), (7, 11), orientation)
    assert box == Box(0, 0, 7, 11)


def test_invalid_or_unwanted_orientation_is_upright():
    exif = Image.Exif()
    exif[0x0112] = 77
    assert read_orientation(written(scene(8, 8), exif=exif)) == 1
    exif[0x0112] = 6
    assert read_orientation(written(scene(8, 8), exif=exif)) == 6
    assert start_decoding(written(scene(8, 9), exif=exif), 3, turn=False).size == (8, 9)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F", "YCbCr"])
def test_every_mode_converts_to_every_channel_count(mode, channels):
    if mode == "I;16":
        image = Image.fromarray((np.arange(600).reshape(20, 30) * 100).astype(np.uint16))
    elif mode == "LA":
        image = scene(20, 30).convert("L").convert("LA")
    else:
        image = scene(20, 30).convert(mode)
    found = crop_and_resize(start_decoding(image, channels, True), Box(0, 0, 20, 30), (16, 16), "bicubic")
    assert found.shape == (channels, 16, 16)
    assert found.dtype == torch.uint8
    assert found.float().std() > 5


def test_cmyk_jpegs_are_reduced():
    found = crop_and_resize(
        start_decoding(written(scene(400, 400).convert("CMYK")), 3, True), Box(0, 0, 400, 400), (50, 50), "bicubic"
    )
    assert (
        difference(
            found,
            crop_and_resize(DecodedImage(image_to_tensor(scene(400, 400))), Box(0, 0, 400, 400), (50, 50), "bicubic"),
        )
        < 12
    )


def test_the_first_frame_of_an_animation_is_used():
    frames = [Image.new("RGB", (9, 9), (200, 0, 0)), Image.new("RGB", (9, 9), (0, 200, 0))]
    image = written(frames[0], "GIF", save_all=True, append_images=frames[1:])
    found = crop_and_resize(start_decoding(image, 3, True), Box(0, 0, 9, 9), (4, 4), "bicubic")
    assert found[0].min() > 190
    assert found[1].max() < 10


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (50, 1), (2, 3)])
@pytest.mark.parametrize(
    "crop", [RandomResizedCrop((16, 16)), SimpleCrop((16, 16)), ScaleJitter((16, 16)), Fit((16, 16))]
)
def test_tiny_and_thin_images_can_be_cropped(size, crop):
    for index in range(20):
        found = crop.apply(start_decoding(scene(*size), 3, True), SampleRandom(0, 0, index))
        assert found.shape == (3, 16, 16)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resize_matches_pillow(interpolation):
    image = scene(300, 210)
    found = crop_and_resize(DecodedImage(image_to_tensor(image)), Box(20, 30, 200, 170), (64, 96), interpolation)
    filter = getattr(Image.Resampling, interpolation.upper())
    expected = image_to_tensor(image.resize((96, 64), filter, box=(30, 20, 200, 220))).permute(2, 0, 1)
    assert (found.int() - expected.int()).abs().max() <= 2
    assert difference(found, expected) < 0.05


def test_a_truncated_jpeg_raises():
    data = io.BytesIO()
    scene(200, 200).save(data, "JPEG")
    image = Image.open(io.BytesIO(data.getvalue()[: len(data.getvalue()) // 2]))
    with pytest.raises(OSError, match="truncated"):
        crop_and_resize(start_decoding(image, 3, True), Box(0, 0, 200, 200), (32, 32), "bicubic")


JPEG_KINDS = {
    "4:2:0": {},
    "4:2:2": {"subsampling": "4:2:2"},
    "4:4:4": {"subsampling": "4:4:4"},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_blocks": 3},
    "stored as RGB": {"keep_rgb": True},
    "turned": {"exif": b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"},
}


def decode_both_ways(data: bytes, channels: int, monkeypatch) -> list[torch.Tensor | str]:
    """Return the pixels of a file, or the error, with simplejpeg and without."""
    outcomes: list[torch.Tensor | str] = []
    for module in (pytest.importorskip("simplejpeg"), None):
        monkeypatch.setattr(decode, "find_simplejpeg", lambda module=module: module)
        try:
            outcomes.append(start_decoding(Image.open(io.BytesIO(data)), channels, True).decode().pixels)
        except (*IMAGE_ERRORS, *DECODER_ERRORS) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


def is_same(first: torch.Tensor | str, second: torch.Tensor | str) -> bool:
    if isinstance(first, str) or isinstance(second, str):
        return first == second
    return torch.equal(first, second)


@pytest.mark.parametrize("kind", JPEG_KINDS)
@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_simplejpeg_gives_the_pixels_of_pillow(kind, mode, channels, monkeypatch):
    data = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 60, (53, 71, 3), dtype=np.uint8)
    image = Image.fromarray(np.asarray(scene(53, 71)) // 255 * 190 + noise)
    image.convert(mode).save(data, "JPEG", quality=83, **JPEG_KINDS[kind])
    fast, plain = decode_both_ways(data.getvalue(), channels, monkeypatch)
    assert isinstance(plain, torch.Tensor)
    assert is_same(fast, plain)


def test_simplejpeg_decodes_plain_jpegs_only(monkeypatch):
    pytest.importorskip("simplejpeg")
    plain = written(scene(40, 50))
    assert decode.decode_plain_jpeg(plain, 3) is not None
    assert decode.decode_plain_jpeg(plain, 1) is None  # a colour image, converted to grey by Pillow
    plain.load()
    assert decode.decode_plain_jpeg(plain, 3) is None
    reduced = written(scene(400, 500))
    reduced.draft(None, (250, 200))
    assert decode.decode_plain_jpeg(reduced, 3) is None
    assert decode.decode_plain_jpeg(written(scene(40, 50), "PNG"), 3) is None
    assert decode.decode_plain_jpeg(written(scene(40, 50).convert("CMYK")), 3) is None
    monkeypatch.setattr(decode.features, "check_feature", lambda name: False)
    decode.find_simplejpeg.cache_clear()
    assert decode.decode_plain_jpeg(written(scene(40, 50)), 3) is None
    decode.find_simplejpeg.cache_clear()


def test_damaged_jpegs_end_as_in_pillow(monkeypatch):
    data, rng = io.BytesIO(), np.random.default_rng(0)
    scene(60, 80).save(data, "JPEG", quality=90)
    intact, readable = data.getvalue(), 0
    for case in range(200):
        damaged = bytearray(intact)
        if case < 40:
            damaged = damaged[: rng.integers(2, len(damaged))]
        for position in rng.integers(2, len(damaged), 1 + case % 3):
            damaged[position] = rng.integers(256)
        try:
            Image.open(io.BytesIO(damaged)).close()
        except IMAGE_ERRORS + DECODER_ERRORS:
            continue  # not opened at all
        fast, plain = decode_both_ways(bytes(damaged), 3, monkeypatch)
        assert is_same(fast, plain)
        readable += isinstance(plain, torch.Tensor)
    assert readable > 20
