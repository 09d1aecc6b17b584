"""Train a vitrail model with a training loop of your own: AdamW, warm-up and cosine decay, accuracy on held-out images.

    python examples/custom_training_loop.py
    python examples/custom_training_loop.py --steps 40 --out my-digits.safetensors

A vitrail model is a `torch.nn.Module`: any PyTorch training loop can train it. The data are the 1,797 handwritten
digits that come with the package. Expect a falling loss, a test accuracy above 90 % after ten seconds on one core, and
one file that `vitrail.load` and every command (`vitrail predict`, `vitrail inspect`, …) read.
"""

import argparse
import math
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail
from vitrail.data.sources import load_dataset

PREPROCESSING = vitrail.Preprocessing(size=(16, 16), resize=(16, 16), mean=(0.5,), std=(0.5,))


def load_digits(split: str) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Return the images [n, 1, 16, 16] and targets [n] of a split, and the names of the classes."""
    data = load_dataset("digits")[split]
    images = torch.stack([PREPROCESSING(data.open(index)) for index in range(len(data))])
    return images, torch.from_numpy(data.targets), data.classes


def learning_rate(step: int, steps: int, peak: float = 2e-3) -> float:
    """Return the learning rate of a step: linear warm-up over a tenth of the steps, then cosine decay to 0."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2


@torch.no_grad()
def compute_accuracy(model: nn.Module, images: Tensor, targets: Tensor) -> float:
    """Return the top-1 accuracy."""
    model.eval()
    return (model(images).argmax(1) == targets).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small ViT on digits with a plain PyTorch loop.")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps (default 120)")
    parser.add_argument("--out", type=Path, help="model file to write (default: in a new temporary directory)")
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="vitrail-")) / "model.safetensors"

    torch.manual_seed(0)
    images, targets, classes = load_digits("train")
    validation_images, validation_targets, _ = load_digits("validation")
    test_images, test_targets, _ = load_digits("test")

    model = vitrail.build(
        patch=4, width=64, depth=4, heads=4, image_size=16, channels=1, classes=len(classes), position="sincos2d"
    )
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        batch = torch.randint(len(images), (128,))
        model.train()
        loss = F.cross_entropy(model(images[batch]), targets[batch])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 20 == 0 or step + 1 == args.steps:
            accuracy = compute_accuracy(model, validation_images, validation_targets)
            print(f"step {step + 1:4d}  loss {loss.item():.3f}  validation accuracy {accuracy:.3f}", flush=True)

    accuracy = compute_accuracy(model, test_images, test_targets)
    print(f"test accuracy {accuracy:.3f}")

    # The file holds the labels and the preprocessing beside the weights.
    vitrail.save(model, out, labels=classes, preprocessing=PREPROCESSING, metrics={"top1": accuracy})
    loaded = vitrail.load(out)
    with torch.no_grad():
        difference = (loaded(test_images) - model(test_images)).abs().max().item()
    print(f"saved and loaded {out}: {len(loaded.labels or ())} labels, largest difference of logits {difference:.1e}")


if __name__ == "__main__":
    main()
