"""Speed of models of clips against other libraries: MViT of torchvision, VideoMAE of transformers.

    python benchmarks/video.py                             about 10 minutes on two cores
    python benchmarks/video.py --models MViTv2-S --rounds 3

Clips of 16 frames of 224×224. vitrail's model is read from a file of the other library's, so that both have the same
weights and the same logits, which is checked. Forward passes, and training steps (cross-entropy, AdamW) without dropout and
stochastic depth, interleaved in one process as in `models.py`: median of the rounds, in clips per second.
"""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import measure
import torch
from models import Logits, row, step
from torch import Tensor, nn

import vitrail
from vitrail.models.base import Model
from vitrail.models.flops import count

FRAMES, SIZE, CLASSES = 16, 224, 400
TOLERANCE = 1e-4  # of the largest logit


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=1, help="clips per step [1]")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = [each for name in options.models for each in compare(name, options.rounds, options.batch)]
    print(f"written to {measure.save('video', rows)}")


if __name__ == "__main__":
    main()
