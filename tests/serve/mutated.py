"""Malformed uploads: damaged, inconsistent, endless or slow. Each is the bytes of one request."""

import io
import random
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
KINDS = (
    "image/png",
    "image/jpeg",
    "image/svg+xml",
    "application/octet-stream",
    "text/html",
    "application/json",
    "application/x-www-form-urlencoded",
    "multipart/form-data",
    "multipart/form-data; boundary=b",
    "multipart/mixed; boundary=b",
    "",
    "image/",
    "IMAGE/PNG; charset=\xff",
    "a" * 3000,
)
PATHS = ("/predict", "/predict?top=3", "/embed", "/attention", "/attention?layer=1&head=0&patch=1,1")


@dataclass(frozen=True)
class Upload:
    """One request and the pause before its last byte."""

    what: str
    request: bytes
    pause: float = 0.0


@cache
def files() -> dict[str, bytes]:
    """Return a valid image of every format that Pillow can write here."""
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    pixels[8:40, 8:56] = np.linspace(0, 255, 48, dtype=np.uint8)[None, :, None]
    found = {}
    Image.init()
    for kind in FORMATS:
        if kind in Image.SAVE:
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, kind)
            found[kind] = file.getvalue()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", progressive=True, exif=b"Exif\0\0II*\0\x08\0\0\0\0\0")
    found["progressive"] = file.getvalue()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "GIF", save_all=True, append_images=[Image.fromarray(255 - pixels)] * 3)
    found["animated"] = file.getvalue()
    return found


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


@cache
def bombs() -> dict[str, bytes]:
    """Return small files whose headers claim gigabytes."""
    side = 50_000
    row = zlib.compress(bytes(1 + 3 * side) * 4)
    jpeg = bytearray(files()["JPEG"])
    at = jpeg.index(b"\xff\xc0")
    jpeg[at + 5 : at + 9] = struct.pack(">HH", side, side)
    gif = bytearray(files()["GIF"])
    gif[6:10] = struct.pack("<HH", side, side)
    tags = {256: side, 257: side, 258: 8, 259: 1, 262: 1, 273: 8, 277: 1, 278: side, 279: 10}
    table = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    tiles = {256: 16, 257: 16, 258: 8, 259: 5, 262: 1, 277: 1, 322: side, 323: side, 324: 8, 325: 100}
    tiled = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tiles.items())
    start = b"II*\0" + struct.pack("<I", 108) + bytes(100)
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(30_000_000), 9))
    small = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    scans = files()["progressive"][:-2] + files()["progressive"][-40:-2] * 50 + b"\xff\xda" * 250 + b"\xff\xd9"
    head = b"\x89PNG\r\n\x1a\n"
    return {
        "PNG": head + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)) + chunk(b"IDAT", row),
        "interlaced": head + chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 16, 6, 0, 0, 1)) + chunk(b"IDAT", row),
        "text": head + chunk(b"IHDR", small) + text + chunk(b"IDAT", zlib.compress(bytes(25 * 8))),
        "JPEG": bytes(jpeg),
        "scans": scans,
        "GIF": bytes(gif),
        "BMP": b"BM"
        + struct.pack("<IIIIiiHHIIiiII", 1000, 0, 54, 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0)
        + bytes(900),
        "TIFF": start + struct.pack("<H", len(tags)) + table + bytes(4),
        "tiles": start + struct.pack("<H", len(tiles)) + tiled + bytes(4),
        "PPM": b"P6 50000 50000 255\n" + bytes(1000),
        "webp": b"RIFF"
        + struct.pack("<I", 40)
        + b"WEBPVP8X"
        + struct.pack("<II", 10, 0)
        + b"\xff\x3f\0\xff\x3f\0"
        + bytes(20),
    }


def request(path: str, body: bytes, kind: str = "image/png", **headers: str) -> bytes:
    """Return the bytes of a request."""
    given = {"Host": "localhost", "Content-Type": kind, "Content-Length": str(len(body)), "Connection": "close"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items() if value is not None)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def flipped(data: bytes, chance: random.Random, most: int = 20) -> bytes:
    """Return data with some bytes changed, half of the time near the start."""
    made = bytearray(data)
    for _ in range(chance.randint(1, most)):
        where = chance.randrange(min(len(made), 64) if chance.random() < 0.5 else len(made))
        made[where] = chance.choice((0, 255, 127, chance.randrange(256)))
    return bytes(made)


def broken_picture(chance: random.Random) -> Upload:
    kind = chance.choice(sorted(files()))
    return Upload(f"flipped {kind}", request(chance.choice(PATHS), flipped(files()[kind], chance)))


def cut_picture(chance: random.Random) -> Upload:
    kind = chance.choice(sorted(files()))
    data = files()[kind]
    return Upload(f"cut {kind}", request(chance.choice(PATHS), data[: chance.randrange(1, len(data))]))


def spliced(chance: random.Random) -> Upload:
    one, other = (files()[kind] for kind in chance.choices(sorted(files()), k=2))
    at = chance.randrange(min(len(one), len(other)))
    return Upload("spliced", request(chance.choice(PATHS), one[:at] + other[at:]))


def bomb(chance: random.Random) -> Upload:
    kind = chance.choice(sorted(bombs()))
    return Upload(f"bomb {kind}", request(chance.choice(PATHS), bombs()[kind]))


def noise(chance: random.Random) -> Upload:
    return Upload("noise", request(chance.choice(PATHS), chance.randbytes(chance.randrange(2000))))


def strange_kind(chance: random.Random) -> Upload:
    data = files()[chance.choice(sorted(files()))]
    return Upload("wrong kind", request(chance.choice(PATHS), data, chance.choice(KINDS)))


def broken_form(chance: random.Random) -> Upload:
    parts = [
        b'--b\r\nContent-Disposition: form-data; name="images"; filename="%d.png"\r\n\r\n%s\r\n'
        % (n, files()["PNG"] if chance.random() < 0.3 else chance.randbytes(50))
        for n in range(chance.randrange(4))
    ]
    body = b"".join(parts) + b"--b--\r\n"
    body = flipped(body, chance, 4) if chance.random() < 0.7 else body[: chance.randrange(len(body))]
    return Upload("broken form", request(chance.choice(PATHS), body, "multipart/form-data; boundary=b"))


def many_parts(chance: random.Random) -> Upload:
    part = b'--b\r\nContent-Disposition: form-data; name="images"\r\n\r\n\r\n'
    body = part * chance.choice((65, 1000, 5000)) + b"--b--"
    return Upload("many parts", request("/predict", body, "multipart/form-data; boundary=b"))


def strange_question(chance: random.Random) -> Upload:
    asked = chance.choice(
        ("top=0", "top=-1", "top=1e9", "top=%00", "model=../../x", "layer=99", "layer=1&head=-1", "patch=,", "x=" * 400)
    )
    return Upload(
        "strange question", request(f"{chance.choice(('/predict', '/attention', '/embed'))}?{asked}", files()["PNG"])
    )


def strange_head(chance: random.Random) -> Upload:
    whole = request("/predict", files()["PNG"])
    end = whole.index(b"\r\n\r\n")
    return Upload("broken head", flipped(whole[:end], chance, 5) + whole[end:])


def lying_length(chance: random.Random) -> Upload:
    lie = chance.choice(("-1", "0", "1", "5", "99999999999999999999", "abc", "1e3", "+5", ""))
    return Upload("lying length", request("/predict", files()["PNG"], Content_Length=lie))


def lying_chunks(chance: random.Random) -> Upload:
    size = chance.choice((b"0", b"5", b"fffffffff", b"-1", b"zz", b""))
    body = size + b"\r\n" + files()["PNG"][:200] + b"\r\n0\r\n\r\n"
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nConnection: close\r\n"
    return Upload("lying chunks", head + b"Transfer-Encoding: chunked\r\n\r\n" + body)


def compressed(chance: random.Random) -> Upload:
    body = zlib.compress(bytes(10_000_000), 9)
    return Upload("compressed", request("/predict", body, Content_Encoding=chance.choice(("gzip", "deflate", "br"))))


ANY: tuple[Callable[[random.Random], Upload], ...] = (
    *(broken_picture, broken_picture, broken_picture, cut_picture, cut_picture, spliced, bomb, noise, strange_kind),
    *(broken_form, broken_form, many_parts, strange_question, strange_head, lying_length, lying_chunks, compressed),
)


def uploads(count: int, seed: int = 0) -> Iterator[Upload]:
    """Yield uploads of all kinds, deterministic for a seed."""
    chance = random.Random(seed)
    for number in range(count):
        yield ANY[number % len(ANY)](chance)


def large(path: str = "/predict", size: int = 100 * 2**20, told: bool = True) -> Iterator[bytes]:
    """Yield a request of 100 MB in pieces, with or without Content-Length."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nConnection: close\r\n"
    piece = bytes(2**16)
    yield (head + (f"Content-Length: {size}\r\n\r\n" if told else "Transfer-Encoding: chunked\r\n\r\n")).encode()
    for _ in range(size // len(piece)):
        yield piece if told else b"10000\r\n" + piece + b"\r\n"


def status(port: int, pieces: Iterator[bytes], pause: float = 0.0, patience: float = 30.0) -> int | None:
    """Return the response status; None if the connection is closed without a response."""
    with socket.create_connection(("127.0.0.1", port), timeout=patience) as sent:
        try:
            for piece in pieces:
                sent.sendall(piece)
                if pause:
                    time.sleep(pause)
        except (BrokenPipeError, ConnectionResetError):  # the server stopped reading; a response may follow
            pass
        try:
            said = sent.recv(4096)
            while said and b"\r\n" not in said:
                said += sent.recv(4096)
        except ConnectionResetError:
            return None
    return int(said.split(b" ", 2)[1]) if said.startswith(b"HTTP/1.1 ") else None
