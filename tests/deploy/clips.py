"""Tiny models of clips, and videos for them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import vitrail
from vitrail.data.clip import Clip
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.base import Model

LABELS = ("jump", "run", "wave")
CLIP = Clip(frames=4, stride=2)


def clip_model(clip: Clip = CLIP, **slots: Any) -> Model:
    """Return a model of clips of 4 frames of 16×24 pixels, whose outputs depend on all of them."""
    torch.manual_seed(0)
    values = {"patch": 8, "width": 32, "depth": 2, "heads": 2, "image_size": (16, 24), "classes": 3, "frames": 4}
    model = vitrail.build(**(values | slots))
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.3 * torch.randn_like(tensor))
    model.labels = LABELS[: model.config.classes]
    model.preprocessing = Preprocessing((16, 24), (20, 30), clip=clip)
    return model.eval()


def save_model(path: Path, clip: Clip = CLIP, **slots: Any) -> Path:
    vitrail.save(clip_model(clip, **slots), path)
    return path


def frames(count: int = 12, seed: int = 0) -> np.ndarray:
    """Return a video of a moving square over noise, uint8 [T, 24, 36, 3]."""
    pixels = np.random.default_rng(seed).integers(0, 200, (count, 24, 36, 3), dtype=np.uint8)
    for number in range(count):
        left = (3 * number + 5 * seed) % 28
        pixels[number, 8:16, left : left + 8] = 255
    return pixels


def write_folder(folder: Path, pixels: np.ndarray) -> Path:
    """Write frames as a folder of images, numbered without zeros in front."""
    folder.mkdir(parents=True)
    for number, frame in enumerate(pixels):
        Image.fromarray(frame).save(folder / f"frame_{number}.png")
    return folder


def write_videos(root: Path, count: int = 3) -> list[np.ndarray]:
    """Write so many folders of frames; return their frames, in order."""
    videos = [frames(10 + number, number) for number in range(count)]
    for number, pixels in enumerate(videos):
        write_folder(root / f"video{number}", pixels)
    return videos


def write_mp4(path: Path, pixels: np.ndarray, rate: int = 10) -> Path:
    """Write frames of even sides as an MP4."""
    import av

    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=rate)
        stream.height, stream.width, stream.pix_fmt = *pixels.shape[1:3], "yuv420p"
        for frame in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
    return path
