"""Image folders with every kind of problem."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image


def photograph(seed: int, size: tuple[int, int] = (160, 120)) -> Image.Image:
    """Return a random image of soft shapes and a little noise."""
    random = np.random.default_rng(seed)
    shapes = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    pixels = np.asarray(shapes).astype(int) + random.integers(-8, 9, (size[1], size[0], 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, form: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb(width: int = 60_000, height: int = 60_000) -> bytes:
    """Return a tiny PNG whose header states an enormous size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def good(root: Path, classes: tuple[str, ...] = ("cat", "dog"), each: int = 4, seed: int = 0) -> Path:
    """Write two splits without problems."""
    for split in ("train", "validation"):
        for label in classes:
            for number in range(each):
                seed += 1
                put(root / split / label / f"{number}.jpg", encoded(photograph(seed)))
    return root


def spoilt(root: Path) -> Path:
    """Write two splits with a file of each kind of problem."""
    good(root)
    train, validation = root / "train", root / "validation"
    image = photograph(100)
    jpeg, png = encoded(image), encoded(image, "PNG")
    put(train / "cat" / "zero.jpg", b"")
    put(train / "cat" / "short.jpg", encoded(photograph(101))[:-2000])
    put(train / "cat" / "short.png", png[: len(png) // 2])
    put(train / "cat" / "words.jpg", b"404: there was no such image\n")
    put(train / "cat" / "bomb.png", bomb())
    put(train / "cat" / "dot.png", encoded(photograph(102).resize((1, 1)), "PNG"))
    put(train / "cat" / "print.jpg", encoded(photograph(103).convert("CMYK")))
    deep = np.random.default_rng(0).integers(0, 65_536, (40, 40), dtype=np.uint16)
    put(train / "cat" / "deep.png", encoded(Image.fromarray(deep), "PNG"))
    palette = photograph(104).convert("P", palette=Image.Palette.ADAPTIVE)
    put(train / "cat" / "palette.png", encoded(palette, "PNG", transparency=3))
    frames = [photograph(105 + n) for n in range(3)]
    put(train / "cat" / "moves.gif", encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    put(train / "cat" / "moves.webp", encoded(frames[1], "WEBP", save_all=True, append_images=frames[2:]))
    exif = Image.Exif()
    exif[0x0112] = 6
    put(train / "cat" / "turned.jpg", encoded(photograph(110), exif=exif))
    put(train / "cat" / "really.png", encoded(photograph(111)))
    put(train / "dog" / "copy.jpg", (train / "dog" / "0.jpg").read_bytes())
    put(train / "dog" / "nearly.jpg", encoded(Image.open(train / "dog" / "1.jpg"), quality=40))
    put(train / "dog" / "leak.jpg", (validation / "dog" / "0.jpg").read_bytes())
    put(train / "dog" / "near leak.jpg", encoded(Image.open(validation / "dog" / "1.jpg").resize((80, 60)), quality=80))
    put(train / "dog" / "no cat.jpg", jpeg)
    put(train / "cat" / "no dog.jpg", jpeg)
    put(train / "dog" / "notes.txt", b"look here")
    put(train / ".ipynb_checkpoints" / "a.jpg", jpeg)
    put(validation / "fox" / "new.jpg", encoded(photograph(112)))
    (train / "owl").mkdir()
    (validation / "owl").mkdir()
    return root


def odd_names(root: Path) -> Path:
    """Write unusual file names, and entries that are not files."""
    good(root, ("катя", "犬"))
    put(root / "train" / "犬" / "two\nlines\tand a tab.jpg", b"")
    put(root / "train" / "犬" / "\x1b[31mred.jpg", b"")
    put(root / "train" / "犬" / 'quote".jpg', b"")
    put(root / "train" / "犬" / "back\\slash.jpg", b"")
    os.mkfifo(root / "train" / "犬" / "pipe.jpg")
    (root / "train" / "犬" / "nowhere.jpg").symlink_to(root / "gone.jpg")
    return root
