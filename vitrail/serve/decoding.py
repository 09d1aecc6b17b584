"""Decoding of untrusted image, video and sound files to the model's input pixels.

The size in the header is checked before decoding, so a small file cannot allocate gigabytes. Only formats that Pillow
decodes itself are opened, none that starts another program. Small images are decoded in threads. Large ones and those of
complex formats are decoded in processes of low priority whose memory and CPU time are limited: they hold no lock of this
process, and a decoder that crashes or does not end takes only its process with it. Videos and sounds are always decoded there.
"""

import atexit
import io
import json
import logging
import math
import multiprocessing
import os
import queue
import resource
import signal
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from vitrail.data.decode import EXIF_ORIENTATION, IMAGE_ERRORS, name_image_errors, open_image
from vitrail.data.preprocessing import Preprocessing
from vitrail.serve.body import ImagePart
from vitrail.serve.limits import IMAGE_FORMATS, VIDEO_FRAMES, VIDEO_SECONDS, MemoryTrimmer, RequestRefused
from vitrail.serve.sounds import decode_sound
from vitrail.serve.videos import VideoLimits, decode_video

log = logging.getLogger("vitrail.serve")
MAX_JPEG_SCANS = 200  # of a progressive JPEG; usual files have about ten
USUAL_JPEG_SCANS = 10  # further ones cost as many more pixels
SCAN_MARKER = b"\xff\xda"  # start of a scan; cannot occur inside one
TILE_TAGS = (322, 323)  # TIFF tags of tile width and height; a tile is decoded whole
DEEP_MEMORY_FACTOR = 4  # memory of images with more than 8 bits relative to others
SMALL_BYTES, SMALL_PIXELS = 2**20, 2_000_000  # at most, to be decoded in a thread
FREE_READS, BYTES_PER_READ = 2000, 64  # of a file: reads of any size, mean size of all others
COMPLEX_STARTS = (b"II", b"MM", b"P", b"\xff\x4f", b"\0\0\0\x0cjP")  # TIFF, PPM, JPEG 2000; AVIF has "ftyp"
CPU_SECONDS = 10.0  # for one image in a process
PROCESS_BYTES, BYTES_PER_PIXEL = 2**28, 16  # memory of a decoding process, beyond what it has at its start
REPLY = "<qqq"  # cost, height and width, before the pixels
MAX_REPLY_BYTES = 4096  # of a decoding process, besides the pixels
LOWER_PRIORITY = 10  # niceness of decoding processes
MAX_LARGE_WAITING = 512  # images, including those whose clients have gone
TURN_STEP = 1 / 16  # turns that pass with each image


class LargeImage(Exception):
    """Raised for an image that must be decoded in a process."""


class DecodedImage(NamedTuple):
    """An image, resized for the model."""

    pixels: np.ndarray  # uint8 [C, H, W], of a video [V, C, T, H, W]; of a sound float32 [1, mel bins, frames]
    cost: int  # pixels decoded, or samples
    size: tuple[int, int]  # height and width of the whole image, or of the spectrogram of the whole sound


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return height and width of an image after its EXIF orientation is applied."""
    is_turned = image.getexif().get(EXIF_ORIENTATION) in (5, 6, 7, 8)
    return (image.width, image.height) if is_turned else (image.height, image.width)


class CountedFile(io.BytesIO):
    """A file in memory that ends after too many small reads: Pillow reads headers in loops of Python."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.reads_left = FREE_READS + len(data) // BYTES_PER_READ

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads_left -= 1
        if self.reads_left < 0:
            raise OSError("too many segments in the file")
        return super().read(size)


@dataclass(frozen=True)
class ImageDecoder:
    """Decodes clients' images of some formats up to a number of pixels, and the videos and sounds that models take."""

    max_pixels: int
    memory: MemoryTrimmer
    formats: tuple[str, ...] = IMAGE_FORMATS
    max_frames: int = VIDEO_FRAMES
    max_seconds: float = VIDEO_SECONDS

    @property
    def videos(self) -> VideoLimits:
        return VideoLimits(self.max_pixels, self.max_frames, self.max_seconds)

    def __call__(self, part: ImagePart, preprocessing: Preprocessing, large: bool = False) -> "DecodedImage":
        """Return the preprocessed pixels, the number of pixels decoded, and the size of the image.

        Raises RequestRefused for an invalid image, and LargeImage unless `large`.
        """
        data, media = part.data, preprocessing.media
        name = part.name or f"the {media}"
        if media != "image" and not large:
            raise LargeImage
        if not large and (len(data) > SMALL_BYTES or data.startswith(COMPLEX_STARTS) or data[4:8] == b"ftyp"):
            raise LargeImage
        scans = data.count(SCAN_MARKER) if data.startswith(b"\xff\xd8") else 1
        if scans > MAX_JPEG_SCANS:
            raise RequestRefused(422, f"{name}: more than {MAX_JPEG_SCANS} JPEG scans")
        try:
            if media == "sound":
                self.memory.record(len(data))
                return DecodedImage(*decode_sound(data, name, preprocessing, self.max_seconds))
            if media == "video":
                self.memory.record(len(data))
                return DecodedImage(*decode_video(data, name, preprocessing, self.videos))
            with open_image(CountedFile(data), name, self.formats) as image:
                pixels = count_pixels(image, name, self.max_pixels, scans)
                if pixels > SMALL_PIXELS and not large:
                    raise LargeImage
                self.memory.record(pixels)
                with name_image_errors(name):
                    size = upright_size(image) if preprocessing.turn else (image.height, image.width)
                    return DecodedImage(preprocessing.to_pixels(image).numpy(), pixels, size)
        except Image.DecompressionBombError:
            message = f"{name}: too many pixels, the limit is {self.max_pixels / 1e6:g} million"
            raise RequestRefused(413, message) from None
        except IMAGE_ERRORS as error:
            raise RequestRefused(422, format_error(error)) from None
        except (RequestRefused, LargeImage):
            raise
        except Exception:  # a bug in a decoder must not end the thread
            log.exception("unexpected error while decoding an image")
            raise RequestRefused(422, f"{name}: cannot be decoded") from None


def count_pixels(image: Image.Image, name: str, max_pixels: int, scans: int) -> int:
    """Return the pixels that decoding costs; refuse images that would take too much memory or time."""
    width, height = image.size
    deep = image.mode in ("I", "F") or image.mode.startswith("I;16")
    tags = getattr(image, "tag_v2", None) or {}
    across, down = (tags.get(tag, 0) for tag in TILE_TAGS)
    tile = across * down if isinstance(across, int) and isinstance(down, int) else 0
    factor = DEEP_MEMORY_FACTOR if deep else max(1, scans / USUAL_JPEG_SCANS)
    if max(width * height, tile) * factor > max_pixels:
        why = " of more than 8 bits" if deep else f" in {scans} scans" if scans > USUAL_JPEG_SCANS else ""
        limit = f"the limit is {max_pixels / factor / 1e6:g} million"
        raise RequestRefused(413, f"{name}: {width}×{height} pixels{why}, {limit}")
    return int(max(width * height, tile) * factor)


def format_error(error: BaseException) -> str:
    """Return an error as one short line."""
    return " ".join(str(error).split())[:300] or "the image is invalid"


def prepare_processes() -> ForkServerContext:
    """Start the process that decoding processes are forked from, unless it runs. It imports PyTorch for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    forkserver.ensure_running()
    return context


class DecodingProcess:
    """Decodes images in a process that is started when needed, and again after it ended."""

    def __init__(self, decoder: ImageDecoder) -> None:
        self.decoder = decoder
        self.pipe: Connection | None = None
        self.process: BaseProcess | None = None

    def start(self) -> Connection:
        """Start the process: not forked from this one, which has threads."""
        context = prepare_processes()
        self.pipe, theirs = context.Pipe()
        decoder = self.decoder
        rules = decoder.max_pixels, decoder.formats, decoder.max_frames, decoder.max_seconds
        self.process = context.Process(target=run_process, args=(theirs, *rules), name="decoding", daemon=True)
        self.process.start()
        theirs.close()
        atexit.register(self.close)  # before multiprocessing waits for it
        return self.pipe

    def __call__(self, part: ImagePart, preprocessing: Preprocessing) -> DecodedImage:
        """Return the decoded image; refuse one that ends the process."""
        clip, sound = preprocessing.clip, preprocessing.sound
        shape = preprocessing.shape if clip is None else (clip.views, *preprocessing.shape)
        dtype = np.dtype(np.uint8 if sound is None else np.float32)
        try:
            pipe = self.pipe or self.start()
            pipe.send((part, preprocessing))
            reply = pipe.recv_bytes(math.prod(shape) * dtype.itemsize + MAX_REPLY_BYTES)
            if reply[:1] != b"{":  # raw bytes or JSON, not a pickle: the process has read a stranger's file
                cost, *size = struct.unpack_from(REPLY, reply, 1)
                pixels = np.frombuffer(reply, dtype, offset=1 + struct.calcsize(REPLY)).reshape(shape).copy()
                return DecodedImage(pixels, cost, (size[0], size[1]))
            refused = json.loads(reply)
            status, message = int(refused["status"]), str(refused["message"])
        except (EOFError, OSError, ValueError, TypeError, KeyError, struct.error):
            self.close()
            name = part.name or f"the {preprocessing.media}"
            status, message = 422, f"{name}: decoding took too long, or the decoder failed"
        raise RequestRefused(status, message)

    def decode_any(self, part: ImagePart, preprocessing: Preprocessing) -> DecodedImage:
        """Decode a small image here, a large one in the process."""
        try:
            return self.decoder(part, preprocessing)
        except LargeImage:
            return self(part, preprocessing)

    def close(self) -> None:
        """End the process."""
        if self.pipe is not None and self.process is not None:
            self.pipe.close()
            self.process.kill()
            self.pipe = self.process = None
            atexit.unregister(self.close)


def run_process(
    pipe: Connection, max_pixels: int, formats: tuple[str, ...], max_frames: int, max_seconds: float
) -> None:
    """Decode the images that arrive, until the pipe is closed. Runs in a decoding process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service finishes its requests, then closes the pipe
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    os.nice(LOWER_PRIORITY)
    torch.set_num_threads(1)
    limit_memory(PROCESS_BYTES + BYTES_PER_PIXEL * max_pixels)
    memory = MemoryTrimmer()
    decode = ImageDecoder(max_pixels, memory, formats, max_frames, max_seconds)
    while True:
        try:
            part, preprocessing = pipe.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            decoded = decode(part, preprocessing, large=True)
            reply = b"p" + struct.pack(REPLY, decoded.cost, *decoded.size) + decoded.pixels.tobytes()
        except RequestRefused as error:
            reply = json.dumps({"status": error.status, "message": error.message}).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send_bytes(reply)
        del part, reply
        memory.trim()


def limit_memory(extra: int) -> None:
    """Limit the memory of this process to what it has now and `extra` bytes (Linux)."""
    if (statistics := Path("/proc/self/statm")).exists():
        data = int(statistics.read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (data + extra, data + extra))


Decode = Callable[[ImagePart, Preprocessing], DecodedImage]


class DecodingPool:
    """Threads that decode small images, and threads with a process each for large ones. Requests take turns.

    The n-th image of a request has a turn n later than its first, which has the present one. So a request with one image
    waits for one image of each other request, not for all of them.
    """

    def __init__(self, decoder: ImageDecoder, threads: int) -> None:
        self.decoder, self.turn, self.numbers = decoder, 0.0, count()
        self.small: queue.PriorityQueue[Any] = queue.PriorityQueue()
        self.large: queue.PriorityQueue[Any] = queue.PriorityQueue()
        self.threads = threads  # of each kind
        for _ in range(threads):
            for waiting, decode in ((self.small, decoder), (self.large, DecodingProcess(decoder))):
                threading.Thread(target=self.run, args=(waiting, decode), name="decoding", daemon=True).start()

    def pass_turn(self, turn: float) -> None:
        """Record that an image with this turn has left the queues."""
        self.turn = max(self.turn + TURN_STEP, turn)

    def submit(self, turn: float, work: Callable[[Decode], object], large: bool = False) -> None:
        """Call `work` with a decoding function when its turn comes; refuse a large image if too many wait."""
        if large and self.large.qsize() >= MAX_LARGE_WAITING:
            raise RequestRefused(503, f"busy: {MAX_LARGE_WAITING} large images wait for decoding, try again in 5 s", 5)
        (self.large if large else self.small).put((turn, next(self.numbers), work))

    def run(self, waiting: "queue.PriorityQueue[Any]", decode: Decode) -> None:
        while (work := waiting.get()[2]) is not None:
            work(decode)
            del work  # free the memory while waiting
        if isinstance(decode, DecodingProcess):
            decode.close()

    def close(self) -> None:
        """End the threads and processes after what is queued."""
        for waiting in (self.small, self.large):
            for _ in range(self.threads):
                waiting.put((float("inf"), next(self.numbers), None))
