"""Variants of the training step of a small model (D=128, L=6, 49 patches, batch 128), against vit-pytorch with the same weights.

    python benchmarks/small_step.py                       all variants, ten rounds, interleaved in one process
    python benchmarks/small_step.py --variants onednn mkl bf16
    python benchmarks/small_step.py --processes           one process with two threads against two with one (DDP)

onednn and mkl: who multiplies float32 matrices. bf16: autocast. products: float32 tensors, products in bfloat16 inside oneDNN.
halves: two micro-batches. compiled: torch.compile, whose products are MKL's. flat: AdamW over one flat buffer of all parameters.
"""

import argparse
import copy
import os
import time
from collections.abc import Callable
from typing import Any

import measure
import models
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.nn import linear

BATCH = 128
Step = Callable[[], float]


def with_onednn(use: bool, step: Step, precision: str = "highest") -> Step:
    """Return a step whose float32 products are computed by oneDNN, or by MKL."""

    def run() -> float:
        before, linear.prefers_onednn = linear.prefers_onednn, lambda: use  # type: ignore[assignment]
        torch.set_float32_matmul_precision(precision)
        try:
            return step()
        finally:
            linear.prefers_onednn = before
            torch.set_float32_matmul_precision("highest")

    return run


def custom(model: nn.Module, image: Tensor, label: Tensor, parts: int = 1, bf16: bool = False) -> Step:
    """Return a step in micro-batches, or under autocast."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05, fused=True)

    def run() -> float:
        for x, y in zip(image.chunk(parts), label.chunk(parts), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = F.cross_entropy(model(x).float(), y) / parts
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return run


def flat(model: nn.Module, image: Tensor, label: Tensor) -> Step:
    """Return a step whose parameters and gradients are views of two flat buffers, which one AdamW call updates."""
    model.train()
    parameters = list(model.parameters())
    whole = torch.cat([p.detach().flatten() for p in parameters]).requires_grad_()
    whole.grad = torch.zeros_like(whole)
    start = 0
    for p in parameters:
        p.data = whole.data[start : start + p.numel()].view_as(p)
        p.grad = whole.grad[start : start + p.numel()].view_as(p)
        start += p.numel()
    optimizer = torch.optim.AdamW([whole], lr=3e-4, weight_decay=0.05, fused=True)

    def run() -> float:
        loss = F.cross_entropy(model(image), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.item()

    return run


def variants(names: list[str]) -> dict[str, Step]:
    torch.manual_seed(0)
    ours, theirs = models.small_pair()
    image, label = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))

    def again() -> nn.Module:
        return copy.deepcopy(ours)

    made: dict[str, Callable[[], Step]] = {
        "onednn": lambda: with_onednn(True, models.step(again(), image, label)),
        "mkl": lambda: with_onednn(False, models.step(again(), image, label)),
        "bf16": lambda: custom(again(), image, label, bf16=True),
        "products": lambda: with_onednn(False, models.step(again(), image, label), "medium"),
        "halves": lambda: with_onednn(True, custom(again(), image, label, parts=2)),
        "compiled": lambda: models.step(torch.compile(again(), dynamic=False), image, label),  # type: ignore[arg-type]
        "flat": lambda: with_onednn(True, flat(again(), image, label)),
        "vit-pytorch": lambda: models.step(theirs, image, label),
    }
    return {name: made[name]() for name in [*names, "vit-pytorch"]}


def run_process(rank: int, world: int, steps: int, seconds: Any) -> None:
    """Train on a share of the batch; the main process stores the seconds of a step."""
    torch.set_num_threads(2 // world)
    torch.manual_seed(0)
    model: nn.Module = models.small_pair()[0]
    if world > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
        dist.init_process_group("gloo", rank=rank, world_size=world)
        model = nn.parallel.DistributedDataParallel(model)
    share = BATCH // world
    step = models.step(model, torch.randn(share, 1, 28, 28), torch.randint(10, (share,)))
    for _ in range(3):
        step()
    taken = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begin)
    if rank == 0:
        seconds[world] = measure.median(taken)
    if world > 1:
        dist.destroy_process_group()


def compare_processes(rounds: int) -> list[dict[str, Any]]:
    rows = []
    with mp.Manager() as manager:
        for turn in range(rounds):
            seconds = manager.dict()
            for world in (1, 2) if turn % 2 else (2, 1):
                mp.spawn(run_process, (world, 10, seconds), nprocs=world)
            rows.append({"one": seconds[1], "two": seconds[2], "ratio": seconds[1] / seconds[2]})
            print(
                f"one process {BATCH / seconds[1]:.0f} images/s, two {BATCH / seconds[2]:.0f}: {rows[-1]['ratio']:.2f}×"
            )
    print(f"median ratio {measure.median([row['ratio'] for row in rows]):.2f}")
    return rows


def main() -> None:
    names = ["onednn", "mkl", "bf16", "products", "halves", "compiled", "flat"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=names, default=names)
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    if options.processes:
        print(f"written to {measure.save('small-step-processes', compare_processes(options.rounds))}")
        return
    runs = variants(options.variants)
    losses = {name: [run() for _ in range(3)][-1] for name, run in runs.items()}
    seconds = measure.interleave(runs, options.rounds)
    rows = []
    for name, taken in seconds.items():
        ratios = [theirs / ours for ours, theirs in zip(taken, seconds["vit-pytorch"], strict=True)]
        rows.append({"variant": name, "images_per_second": BATCH / measure.median(taken), "third_loss": losses[name]})
        rows[-1]["ratio"] = measure.median(ratios)
        print(f"{name:<14}{rows[-1]['images_per_second']:7.0f} images/s   {rows[-1]['ratio']:.2f}× vit-pytorch")
    print(f"written to {measure.save('small-step', rows)}")


if __name__ == "__main__":
    main()
