"""Corrupt images raise errors that name them."""

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.making import encoded, tree
from vitrail.data.decode import DECODER_ERRORS, name_image_errors, open_image
from vitrail.data.sources import load_dataset

FINE = (OSError, ValueError, Image.DecompressionBombError)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_a_decompression_bomb_is_named():
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    data = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    with pytest.raises(Image.DecompressionBombError, match=r"bomb\.png: too large to decode safely"):
        open_image(io.BytesIO(data), "bomb.png")


def test_no_format_starts_other_programs():
    with pytest.raises(OSError, match=r"trick\.jpg: not an image"):
        open_image(io.BytesIO(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n"), "trick.jpg")


def test_missing_and_empty_and_foreign_files_are_named(tmp_path):
    tree(tmp_path, {"train/a/0.png": b"", "train/a/1.png": b"<html></html>", "train/a/2.png": 1, "val/a/3.png": 2})
    images = load_dataset(tmp_path)["train"]
    for index in (0, 1):
        with pytest.raises(OSError, match=rf"a/{index}\.png: not an image"):
            images.open(index)
    (tmp_path / "train/a/2.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"2\.png"):
        images.open(2)


def test_modes_are_not_changed(tmp_path):
    (tmp_path / "train/a").mkdir(parents=True)
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(tmp_path / "train/a/1.png")
    Image.new("CMYK", (4, 4)).save(tmp_path / "train/a/2.jpg")
    Image.new("P", (4, 4)).save(tmp_path / "train/a/3.gif")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (8, 4)).save(tmp_path / "train/a/4.jpg", exif=turned)
    tree(tmp_path, {"val/a/1.png": 1})
    images = load_dataset(tmp_path)["train"]
    assert [images.open(i).mode for i in range(4)] == ["I;16", "CMYK", "P", "RGB"]
    assert images.open(3).size == (8, 4)


@pytest.mark.parametrize("kind", DECODER_ERRORS)
def test_decoder_exceptions_become_named_errors(kind):
    with pytest.raises(OSError, match=r"x\.png: broken"), name_image_errors("x.png"):
        raise kind("odd")


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow says what it skips
@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"]), st.data())
def test_damaged_images_raise_expected_errors(kind, data):
    whole = bytearray(encoded(1, kind))
    for _ in range(data.draw(st.integers(0, 6))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    message = ""
    try:
        image = open_image(io.BytesIO(bytes(cut)), "x.bin")
        with name_image_errors("x.bin"):
            image.load()
    except FINE as error:
        message = str(error)
    assert not message or "x.bin" in message
