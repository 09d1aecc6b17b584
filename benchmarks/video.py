"""Speed of models of clips against other libraries: MViT of torchvision, VideoMAE of transformers.

    python benchmarks/video.py                             about 10 minutes on two cores
    python benchmarks/video.py --models MViTv2-S --rounds 3
    python benchmarks/video.py --files                     from video files to logits, VideoMAE-S

Clips of 16 frames of 224×224. vitrail's model is read from a file of the other library's, so that both have the same
weights and the same logits, which is checked. Forward passes, and training steps (cross-entropy, AdamW) without dropout and
stochastic depth, interleaved in one process as in `models.py`: median of the rounds, in clips per second.

`--files` predicts the videos of a folder: `vitrail.predict` in fp32 and with the precision that it chooses, against a plain loop
of PyAV and transformers, which decodes each file from its start as in transformers' documentation, prepares the same 16
frames with its image processor and runs the same weights, one video at a time. Memory is the peak of a process of its own, with
its imports and the weights.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
from models import Logits, row, step
from torch import Tensor, nn

import vitrail
from vitrail.data.clip import Clip
from vitrail.models.base import Model
from vitrail.models.flops import count

FRAMES, SIZE, CLASSES = 16, 224, 400
TOLERANCE = 1e-4  # of the largest logit
FILES = Path(__file__).resolve().parents[2] / "shared" / "data" / "clips"
FILES_TARGET = 1.5  # times the videos per second of the plain loop
Predict = Callable[[list[Path]], np.ndarray]  # of videos to probabilities [N, K]


class FramesFirst(Logits):
    """Wrapper that returns the logits of a transformers model, which takes clips [B, T, C, H, W]."""

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image.transpose(1, 2))


def build_torchvision(name: str) -> nn.Module:
    """Build torchvision's model without dropout and stochastic depth."""
    import torchvision.models.video as video

    return getattr(video, name)(dropout=0.0, stochastic_depth_prob=0.0)


def build_videomae() -> nn.Module:
    """Build the classifier VideoMAE-S of transformers."""
    import transformers

    settings = transformers.VideoMAEConfig(hidden_size=384, num_hidden_layers=12, num_attention_heads=6)
    settings.intermediate_size, settings.num_labels = 1536, CLASSES
    return FramesFirst(transformers.VideoMAEForVideoClassification(settings))


MODELS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "MViTv1-B": ("torchvision", partial(build_torchvision, "mvit_v1_b")),
    "MViTv2-S": ("torchvision", partial(build_torchvision, "mvit_v2_s")),
    "VideoMAE-S": ("transformers", build_videomae),
}


def read_weights(peer: nn.Module) -> Model:
    """Return vitrail's model of another library's file."""
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(peer, Logits):
            peer.model.save_pretrained(folder)
            return vitrail.load(folder)
        torch.save(peer.state_dict(), Path(folder) / "model.pth")
        return vitrail.load(Path(folder) / "model.pth")


def compare(name: str, rounds: int, batch: int) -> list[dict[str, Any]]:
    """Measure clips per second of forward passes and whole training steps."""
    library, build = MODELS[name]
    theirs = build().eval()
    ours = read_weights(theirs).eval()
    clips = torch.randn(batch, 3, FRAMES, SIZE, SIZE)
    models = {"vitrail": ours, library: theirs}
    with torch.inference_mode():
        logits = {each: model(clips) for each, model in models.items()}
        difference = float((logits["vitrail"] - logits[library]).abs().max() / logits[library].abs().max())
        assert difference <= TOLERANCE, f"{name}: the logits differ by {difference:.2g} of the largest"
        runs: dict[str, Callable[[], Any]] = {each: partial(model, clips) for each, model in models.items()}
        macs = count(ours.config, batch).macs
        rows = [row(f"forward {name}, batch {batch}", runs, batch, macs, rounds, unit="clips")]
    labels = torch.zeros(batch, dtype=torch.long)
    runs = {each: step(model, clips, labels) for each, model in models.items()}
    rows.append(row(f"train {name}, batch {batch}", runs, batch, 3 * macs, rounds, unit="clips"))
    return rows


def read_frames(path: Path, clip: Clip) -> list[np.ndarray]:
    """Return the frames of the central clip, decoding the file from its start."""
    import av

    with av.open(str(path), metadata_errors="ignore") as container:  # the title of one clip is not UTF-8
        wanted = clip.spread(0, container.streams.video[0].frames)
        frames = {}
        for number, frame in enumerate(container.decode(video=0)):
            if number > wanted[-1]:
                break
            if number in wanted:
                frames[number] = frame.to_ndarray(format="rgb24")
    return [frames[min(number, max(frames))] for number in wanted]


def build_plain_loop(folder: str) -> Predict:
    """Return the plain loop: PyAV, transformers' image processor, transformers' model."""
    import transformers

    processor = transformers.VideoMAEImageProcessorPil.from_pretrained(folder)
    model = transformers.VideoMAEForVideoClassification.from_pretrained(folder).eval()

    @torch.inference_mode()
    def predict(paths: list[Path]) -> np.ndarray:
        rows = []
        for path in paths:
            inputs = processor(read_frames(path, Clip(FRAMES, 4)), return_tensors="pt")
            rows.append(model(**inputs).logits.softmax(-1)[0].numpy())
        return np.stack(rows)

    return predict


def build_vitrail(folder: str, precision: str) -> Predict:
    """Return vitrail's prediction; the model is read once."""
    model = vitrail.load(folder)

    def predict(paths: list[Path]) -> np.ndarray:
        rows = list(vitrail.predict(model, list(map(str, paths)), top=CLASSES, precision=precision))
        scores = [dict(row.predictions) for row in rows]
        return np.array([[score[name] for name in sorted(score)] for score in scores])

    return predict


CONTESTANTS: dict[str, Callable[[str], Predict]] = {
    "vitrail": lambda folder: build_vitrail(folder, "auto"),
    "vitrail, fp32": lambda folder: build_vitrail(folder, "fp32"),
    "PyAV and transformers": build_plain_loop,
}


def save_videomae(folder: str) -> None:
    """Write VideoMAE-S with random weights and its image processor, as transformers does."""
    import transformers

    model = build_videomae().model
    labels = {number: f"class {number:03d}" for number in range(CLASSES)}
    model.config.id2label, model.config.label2id = labels, {name: number for number, name in labels.items()}
    model.save_pretrained(folder)
    transformers.VideoMAEImageProcessorPil().save_pretrained(folder)


def compare_files(videos: Path, rounds: int) -> list[dict[str, Any]]:
    """Measure videos per second from files to probabilities, and the memory of each contestant."""
    paths = sorted(path for path in videos.iterdir() if path.is_file())
    with tempfile.TemporaryDirectory() as folder:
        save_videomae(folder)
        predictions = {name: build(folder) for name, build in CONTESTANTS.items()}
        found = {name: predict(paths) for name, predict in predictions.items()}
        difference = float(np.abs(found["vitrail, fp32"] - found["PyAV and transformers"]).max())
        print(f"{len(paths)} videos; largest difference of a probability in fp32 {difference:.2g}", flush=True)
        seconds = measure.interleave({name: partial(each, paths) for name, each in predictions.items()}, rounds)
        memory = {}
        for name in CONTESTANTS:
            command = [sys.executable, __file__, "--memory-of", name, "--folder", folder, "--videos", str(videos)]
            memory[name] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    plain, rows = measure.median(seconds["PyAV and transformers"]), []
    for name, taken in seconds.items():
        rate, ratio = len(paths) / measure.median(taken), plain / measure.median(taken)
        rows.append({"name": name, "videos_per_second": rate, "ratio": ratio, "mebibytes": memory[name]})
        print(f"{name:<24}{rate:7.2f} videos/s{ratio:7.2f} × plain{memory[name]:8.0f} MiB", flush=True)
    print(f"{'target':<24}{'':>16}{FILES_TARGET:7.2f}", flush=True)
    return rows


def print_memory(name: str, folder: str, videos: Path) -> None:
    """Print the largest resident memory of this process with one contestant, in MiB."""
    CONTESTANTS[name](folder)(sorted(path for path in videos.iterdir() if path.is_file()))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=1, help="clips per step [1]")
    parser.add_argument("--files", action="store_true", help="measure from video files to probabilities")
    parser.add_argument("--videos", type=Path, default=FILES, help="folder of the video files")
    parser.add_argument("--memory-of", choices=tuple(CONTESTANTS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.memory_of:
        print_memory(options.memory_of, options.folder, options.videos)
        return
    if options.files:
        print(f"written to {measure.save('video_files', compare_files(options.videos, options.rounds))}")
        return
    rows = [each for name in options.models for each in compare(name, options.rounds, options.batch)]
    print(f"written to {measure.save('video', rows)}")


if __name__ == "__main__":
    main()
