"""From the bytes of a stranger's file to the pixels that a model takes.

What a header promises is held against the limit before a pixel is decoded, so that a file of a few kilobytes cannot claim
gigabytes. Only formats that Pillow reads by itself are opened, none that starts another program.
"""

import io
import logging

import numpy as np
from PIL import Image

from vitrail.data.decode import UNREADABLE
from vitrail.data.opening import named, opened
from vitrail.data.preprocessing import Preprocessing
from vitrail.serve.limits import Refused
from vitrail.serve.memory import Memory
from vitrail.serve.multipart import Part

log = logging.getLogger("vitrail.serve")
SCANS = 200  # of a progressive JPEG; cameras and programs write about ten
SCAN = b"\xff\xda"  # what one begins with; inside of one this cannot occur
TILE = (322, 323)  # TIFF's tags for the width and height of a tile, which is decoded whole
DEEP = 4  # how many times more memory than others a picture of more than 8 bits takes on its way


class Decoder:
    """Opens what clients send, up to a number of pixels."""

    def __init__(self, most: int, memory: Memory) -> None:
        self.most, self.memory = most, memory

    def __call__(self, part: Part, preprocessing: Preprocessing) -> np.ndarray:
        """A picture as the model takes it, uint8 [C, H, W]; or a refusal that says what is wrong with it."""
        name, data = part.name or "the picture", part.data
        self.memory.saw(len(data))
        if data.startswith(b"\xff\xd8") and data.count(SCAN) > SCANS:
            raise Refused(422, f"{name}: a JPEG of more than {SCANS} scans")
        try:
            with opened(io.BytesIO(data), name) as image:
                check(image, name, self.most)
                self.memory.saw(image.width * image.height)
                with named(name):
                    return preprocessing.pixels(image).numpy()
        except Image.DecompressionBombError:
            raise Refused(413, f"{name}: too many pixels, at most {self.most / 1e6:g} million are taken") from None
        except UNREADABLE as error:
            raise Refused(422, one_line(error)) from None
        except Refused:
            raise
        except (
            Exception
        ):  # a reader's own mistake, which a stranger's file found: not the end of a thread, nor a fault of ours
            log.exception("a picture could not be decoded, for a reason that is not known")
            raise Refused(422, f"{name}: it cannot be decoded") from None


def check(image: Image.Image, name: str, most: int) -> None:
    """Refuses what would take too much memory."""
    width, height = image.size
    deep = image.mode in ("I", "F") or image.mode.startswith("I;16")
    tags = getattr(image, "tag_v2", None) or {}
    across, down = (tags.get(tag, 0) for tag in TILE)
    tile = across * down if isinstance(across, int) and isinstance(down, int) else 0
    if max(width * height, tile) * (DEEP if deep else 1) > most:
        raise Refused(
            413,
            f"{name}: {width}×{height} pixels{' of more than 8 bits' if deep else ''}, "
            f"and at most {most / (DEEP if deep else 1) / 1e6:g} million are taken",
        )


def one_line(error: BaseException) -> str:
    """What is wrong, for a client: one line, and not a long one."""
    return " ".join(str(error).split())[:300] or "the picture is broken"
