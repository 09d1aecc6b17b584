"""Minutes of training from scratch to an accuracy on CIFAR-10's test split, beside CCT-2/3×2 of vit-pytorch.

    python benchmarks/cifar10_minutes.py cifar-10-batches-bin --epochs 3 6 16 --seeds 3

vitrail's `scratch-small` recipe runs once for each number of epochs and each seed; choose the numbers on validation images.
CCT-2/3×2 (kernel 3, two convolutions, two layers) runs in a plain loop for as long as vitrail's runs of the same number of
epochs took: AdamW, weight decay 0.06, batch 128, cosine after a warm-up of a tenth, crops and flips, label smoothing 0.1, in
the same precision. Its learning rate is the best of three on held-out training images after two epochs. Training time is
counted, evaluation is not. OMP_NUM_THREADS sets the threads of both.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail
from vitrail.data.sources import load_dataset

LRS, BATCH = (5e-4, 1e-3, 2e-3), 128
MEAN, STD = torch.tensor([0.491, 0.482, 0.447]), torch.tensor([0.247, 0.243, 0.262])
Split = tuple[Tensor, Tensor]


def read_split(data: str, split: str) -> Split:
    """Return the pixels of a split, uint8 [n, 3, 32, 32], and its labels."""
    images = load_dataset(data)[split]
    store: Any = images.store
    pixels = torch.from_numpy(np.ascontiguousarray(store.pixels[images.items]))
    return pixels.permute(0, 3, 1, 2) if pixels.shape[-1] == 3 else pixels, torch.from_numpy(images.targets)


def normalise(pixels: Tensor) -> Tensor:
    return (pixels.float() / 255 - MEAN[:, None, None]) / STD[:, None, None]


def augment(pixels: Tensor) -> Tensor:
    """Return crops of padded images, half of them flipped."""
    padded, n = F.pad(normalise(pixels), (4, 4, 4, 4)), len(pixels)
    rows, columns = (torch.randint(0, 9, (n, 1)) + torch.arange(32) for _ in range(2))
    crops = padded[torch.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    return torch.where(torch.rand(n, 1, 1, 1) < 0.5, crops.flip(-1), crops)


def build_cct() -> nn.Module:
    from vit_pytorch.cct import cct_2

    return cct_2(img_size=32, n_conv_layers=2, kernel_size=3, num_classes=10, positional_embedding="learnable")


@torch.no_grad()
def measure_accuracy(network: nn.Module, split: Split) -> float:
    network.eval()
    batches = zip(split[0].split(500), split[1].split(500), strict=True)
    right = sum((network(normalise(x)).argmax(1) == y).sum().item() for x, y in batches)
    network.train()
    return right / len(split[1])


def train_cct(
    train: Split, lr: float, seed: int, bf16: bool, epochs: float = math.inf, seconds: float = math.inf
) -> Any:
    """Train CCT for a number of epochs or of seconds, whichever ends first; return the model and the seconds."""
    torch.manual_seed(seed)
    network, (images, labels) = build_cct(), train
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=0.06, fused=True)
    step, begin, per_epoch, order = 0, time.perf_counter(), len(images) // BATCH, torch.empty(0, dtype=torch.long)
    while (done := max(step / per_epoch / epochs, (time.perf_counter() - begin) / seconds)) < 1:
        if step % per_epoch == 0:
            order = torch.randperm(len(images))
        chosen = order[step % per_epoch * BATCH :][:BATCH]
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (done + 1e-3) * 10) * (1 + math.cos(math.pi * done)) / 2
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = network(augment(images[chosen]))
        F.cross_entropy(logits.float(), labels[chosen], label_smoothing=0.1).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    return network, time.perf_counter() - begin


def train_ours(data: str, epochs: float, seed: int) -> dict[str, Any]:
    """Run the recipe; return its accuracies, precision and training time."""
    with tempfile.TemporaryDirectory() as folder:
        run, summary = vitrail.train(data, out=Path(folder) / "run", epochs=epochs, seed=seed)
        rows = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
        recipe = json.loads((run / "recipe.json").read_text())
    top1 = {split: summary[split]["top1"] for split in ("validation", "test")}
    return {"seconds": rows[-1]["seconds"], **top1, "precision": recipe.get("precision")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="cifar-10", help="name, or folder of its binary files")
    parser.add_argument("--epochs", nargs="+", type=float, default=[3.0, 6.0, 16.0], help="of vitrail's runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ours", action="store_true", help="run vitrail only")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def note(**row: Any) -> None:
        rows.append(row)
        print(", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
        measure.save("cifar10_minutes", rows)

    for epochs in options.epochs:
        for seed in range(options.seeds):
            note(contestant="vitrail", epochs=epochs, seed=seed, **train_ours(options.data, epochs, seed))
    if not options.ours:
        data = {split: read_split(options.data, split) for split in ("train", "validation", "test")}
        bf16 = rows[0]["precision"] == "bf16"
        scores = {}
        for lr in LRS:
            scores[lr] = measure_accuracy(train_cct(data["train"], lr, 0, bf16, epochs=2)[0], data["validation"])
        best = max(scores, key=lambda lr: scores[lr])
        print(f"CCT-2/3×2 after two epochs: {scores}; lr {best:g}")
        for epochs in options.epochs:
            limit = statistics.median(row["seconds"] for row in rows if row.get("epochs") == epochs)
            for seed in range(options.seeds):
                network, seconds = train_cct(data["train"], best, seed, bf16, seconds=limit)
                note(contestant="CCT-2/3×2", seed=seed, seconds=seconds, test=measure_accuracy(network, data["test"]))


if __name__ == "__main__":
    main()
