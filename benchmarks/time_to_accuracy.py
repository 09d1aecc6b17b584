"""Minutes of training from scratch until the top-1 accuracy on Fashion-MNIST's test split reaches 89 %.

    python benchmarks/time_to_accuracy.py

vitrail's `scratch-small` recipe, shortened to the goal, against vit-pytorch's and timm's ViT of the same width and depth in a
plain loop: AdamW, weight decay 0.05, batch 128, five epochs, cosine after 200 steps of warm-up. The learning rate of the others
is the best of three on held-out training images after one epoch of the same schedule; then three seeds for each contestant.
Evaluation time is not counted; shuffling and augmentation are. A run ends when it reaches the goal. Contestants are
interleaved; OMP_NUM_THREADS sets their threads. On a busy machine, `--clock cpu` with one thread counts processor seconds
instead; for vitrail these include reading, validation and testing.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.sources import load_dataset

GOAL, RATES, EPOCHS, BATCH = 0.89, (1e-3, 2e-3, 4e-3), 5, 128
WIDTH, DEPTH, HEADS, PATCH = 64, 4, 2, 4
PEERS = ("vit-pytorch", "timm")
Clock = Callable[[], float]


def model(name: str) -> nn.Module:
    """Build a ViT of the same width and depth in another library, for 28×28 images in patches of 4."""
    if name == "vit-pytorch":
        from vit_pytorch import ViT

        return ViT(
            image_size=28,
            patch_size=PATCH,
            num_classes=10,
            dim=WIDTH,
            depth=DEPTH,
            heads=HEADS,
            dim_head=WIDTH // HEADS,
            mlp_dim=4 * WIDTH,
            channels=1,
        )
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=28, patch_size=PATCH, in_chans=1, num_classes=10, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS
    )


def pixels(split: str) -> tuple[Tensor, Tensor]:
    """Return all images of a split, normalised, and their labels."""
    pictures = load_dataset("fashion-mnist")[split]
    store: Any = pictures.store
    values = torch.from_numpy(np.ascontiguousarray(store.pixels[pictures.items])).float().view(-1, 1, 28, 28)
    return (values / 255 - 0.286) / 0.353, torch.from_numpy(pictures.targets)


@torch.no_grad()
def accuracy(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    network.eval()
    right = sum(
        (network(x).argmax(1) == y).sum().item() for x, y in zip(images.split(500), labels.split(500), strict=True)
    )
    network.train()
    return right / len(labels)


def plain(
    name: str, rate: float, seed: int, data: dict[str, tuple[Tensor, Tensor]], clock: Clock, epochs: int = EPOCHS
) -> dict[str, Any]:
    """Train in a plain loop; return the seconds until each held-out split reached the goal, and the last accuracy."""
    torch.manual_seed(seed)
    network = model(name)
    images, labels = data["train"]
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=0.05, fused=True)
    per_epoch = len(images) // BATCH
    total, warmup, seconds, step = epochs * per_epoch, 200, 0.0, 0
    reached: dict[str, float | None] = {"validation": None, "test": None}
    last: dict[str, float] = {}
    for _ in range(epochs):
        begin = clock()
        order = torch.randperm(len(images))
        for place in range(per_epoch):
            chosen = order[place * BATCH : (place + 1) * BATCH]
            passed = (step - warmup) / (total - warmup)
            factor = (step + 1) / warmup if step < warmup else (1 + math.cos(math.pi * passed)) / 2
            optimizer.param_groups[0]["lr"] = rate * factor
            F.cross_entropy(network(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % (per_epoch // 4) == 0:
                seconds += clock() - begin
                for split in reached:
                    last[split] = accuracy(network, *data[split])
                    if last[split] >= GOAL and reached[split] is None:
                        reached[split] = seconds
                if reached["test"] is not None:
                    return {"reached": reached, "last": last, "seconds": seconds, "images": step * BATCH}
                begin = clock()
        seconds += clock() - begin
    return {"reached": reached, "last": last, "seconds": seconds, "images": step * BATCH}


def ours(seed: int, epochs: float, clock: Clock) -> dict[str, Any]:
    """Run `vitrail train fashion-mnist`; return the time to its end, with one evaluation of the test split."""
    from vitrail.training.recipe import Machine
    from vitrail.training.train import train

    begin = clock()
    with tempfile.TemporaryDirectory() as folder:
        run, summary = train(
            "fashion-mnist",
            out=Path(folder) / "run",
            epochs=epochs,
            seed=seed,
            width=WIDTH,
            depth=DEPTH,
            settings=["validate_every=100"],
            machine=Machine(device="cpu"),
        )
        rows = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
    seconds = rows[-1]["seconds"] if clock is time.perf_counter else clock() - begin
    results = {split: summary[split]["top1"] for split in ("validation", "test")}
    return {
        "reached": {"test": seconds if results["test"] >= GOAL else None},
        "last": results,
        "seconds": seconds,
        "images": summary["images_per_second"] * seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=4.0, help="epochs of the vitrail run")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--ours", action="store_true", help="run vitrail only")
    parser.add_argument(
        "--rates", nargs=2, type=float, metavar="LR", help=f"of {' and '.join(PEERS)}, if these are known already"
    )
    options = parser.parse_args()
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    data = {split: pixels(split) for split in ("train", "validation", "test")}
    rows: list[dict[str, Any]] = []

    def note(contestant: str, seed: int, found: dict[str, Any], **more: Any) -> None:
        rows.append({"contestant": contestant, "seed": seed, **more, **found})
        when = found["reached"]["test"]
        at = "not reached" if when is None else f"{when / 60:.2f} min"
        rate = f" lr {more['rate']:g}" if "rate" in more else ""
        last = ", ".join(f"{split} {100 * value:.2f} %" for split, value in found["last"].items())
        print(f"{contestant}{rate} seed {seed}: {at}; {last}; {found['seconds']:.0f} s in all", flush=True)
        measure.save("time_to_accuracy", rows)

    best: dict[str, float] = dict(zip(PEERS, options.rates or (), strict=False))
    for name in () if options.ours or options.rates else PEERS:
        for rate in RATES:
            note(f"{name}, one epoch", 0, plain(name, rate, 0, data, clock, epochs=1), rate=rate)
        tried = [row for row in rows if row["contestant"] == f"{name}, one epoch"]
        best[name] = max(tried, key=lambda row: row["last"]["validation"])["rate"]
    for seed in range(options.seeds):
        note("vitrail", seed, ours(seed, options.epochs, clock))
        for name, rate in best.items():
            note(name, seed, plain(name, rate, seed, data, clock), rate=rate)

    def times(name: str) -> list[float]:
        # A run that never got there counts with all of its time, which flatters it.
        return [row["reached"]["test"] or row["seconds"] for row in rows if row["contestant"] == name]

    mine = statistics.median(times("vitrail"))
    print(f"vitrail: {mine / 60:.2f} min (median of {len(times('vitrail'))} seeds)")
    for name, rate in best.items():
        theirs = statistics.median(times(name))
        print(f"{name} (lr {rate:g}): {theirs / 60:.2f} min, {theirs / mine:.2f}× as long")


if __name__ == "__main__":
    main()
