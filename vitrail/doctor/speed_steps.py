"""Steps of the self-test that measure speed: loading, matrix products, a model."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import vitrail
from vitrail.data.loader import Loader
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources import load_dataset
from vitrail.data.transforms.augment import Flip
from vitrail.data.transforms.crops import RandomResizedCrop
from vitrail.data.transforms.pipeline import TrainPipeline
from vitrail.deploy.runtimes.base import random_pixels
from vitrail.deploy.runtimes.precision import copy_runtime, list_candidates
from vitrail.doctor.worker import Context
from vitrail.inference import TorchRuntime
from vitrail.training.precision import compute_gradients
from vitrail.utils.devices import available_cores, device_name, synchronise
from vitrail.utils.precision import choose_cuda, choose_measured, measure_interleaved, multiplies_bf16, torch_dtype

N_IMAGES, IMAGE_SIZE = 48, (640, 480)  # generated JPEG files, width and height
LOADED_BATCH = 16
MAX_WORKERS = 16
MODEL = "S/16"
MIN_AGREEMENT = 0.02  # largest difference of features on two devices, of their norm: TF32 keeps 10 bits


def measure_loader(context: Context) -> tuple[str, dict[str, Any]]:
    """Return images per second from generated JPEG files to training batches, by the number of worker processes."""
    folder = context.folder / "photos"
    if not folder.exists():
        context.report(f"generating {N_IMAGES} JPEG files")
        write_photos(folder)
    images = next(iter(load_dataset(str(folder), fractions=(1.0, 0.0, 0.0)).splits.values()))
    pipeline = TrainPipeline((RandomResizedCrop(), Flip()))
    speeds: dict[str, float] = {}
    for workers in list_worker_counts(available_cores()):
        context.report(f"{workers} worker{'' if workers == 1 else 's'}")
        loader = Loader(images, None, pipeline, batch_size=LOADED_BATCH, workers=workers, cache_bytes=0)
        try:
            speeds[str(workers)] = time_batches(loader, context.seconds)
        finally:
            loader.close()
    best = max(speeds, key=lambda workers: speeds[workers])
    detail = f"{speeds[best]:,.0f} images/s with {best} worker{'' if best == '1' else 's'}"
    if best != "0":
        detail += f", {speeds['0']:,.0f} without"
    size = f"{IMAGE_SIZE[0]}×{IMAGE_SIZE[1]}"
    return f"{detail} ({size} JPEG, random crop to 224)", {"images_per_second": speeds, "image_size": list(IMAGE_SIZE)}


def list_worker_counts(cores: int) -> list[int]:
    """Return 0, 1, 2, 4 … up to the number of cores."""
    powers = [2**k for k in range(10) if 2**k <= min(cores, MAX_WORKERS)]
    return sorted({0, *powers, min(cores, MAX_WORKERS)})


def write_photos(folder: Path) -> None:
    """Write JPEG files of two classes that compress like photographs: smooth noise with some detail."""
    rng = np.random.default_rng(0)
    for index in range(N_IMAGES):
        path = folder / f"class-{index % 2}" / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (15, 20, 3), dtype=np.uint8)).resize(IMAGE_SIZE)
        detail = rng.normal(0, 8, (IMAGE_SIZE[1], IMAGE_SIZE[0], 1))
        pixels = (np.asarray(coarse) + detail).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(path, quality=90)


def time_batches(loader: Loader, seconds: float) -> float:
    """Return the images per second of a loader, without the batches that were prepared while it started."""
    batches = (batch for epoch in itertools.count() for batch in loader.iter_epoch(epoch))
    for _ in range(1 + 2 * loader.workers):
        next(batches)
    start, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds or not count:
        count += len(next(batches).pixels)
    return count / elapsed


def measure_products(context: Context) -> tuple[str, dict[str, Any]]:
    """Return the speed of square matrix products by precision, in GFLOP/s."""
    device = torch.device(context.device)
    size = 4096 if device.type == "cuda" else 1024
    names = ["fp32", "bf16"] if device.type != "mps" else ["fp32", "fp16"]
    names += ["fp16"] if device.type == "cuda" else []
    factors = torch.randn(2, size, size, device=device)
    pairs = {name: factors.to(torch_dtype(name)) for name in names}

    def multiply(name: str) -> Tensor:
        product = pairs[name][0] @ pairs[name][1]
        synchronise(device)
        return product

    runs: dict[str, Callable[[], Tensor]] = {name: (lambda name=name: multiply(name)) for name in names}
    taken = measure_interleaved(runs, context.seconds)
    reference = multiply("fp32").cpu()
    for name in names[1:]:
        error = float((multiply(name).float().cpu() - reference).norm() / reference.norm())
        if not error < MIN_AGREEMENT:
            raise AssertionError(f"{name} products differ from fp32 by {error:.2g} of their norm")
    speeds = {name: 2e-9 * size**3 / seconds for name, seconds in taken.items()}
    shown = ", ".join(f"{name} {format_speed(speed)}" for name, speed in speeds.items())
    native = "" if device.type != "cpu" or multiplies_bf16(device) else "; bf16 is emulated"
    return f"{shown} ({size}×{size}{native})", {"gflops": speeds, "size": size, "device": str(device)}


def format_speed(gflops: float) -> str:
    """Return "142 GFLOP/s" or "21.3 TFLOP/s"."""
    return f"{gflops:,.0f} GFLOP/s" if gflops < 1000 else f"{gflops / 1000:,.1f} TFLOP/s"


def measure_model(context: Context) -> tuple[str, dict[str, Any]]:
    """Return images per second of ViT-S/16 in prediction and training by precision, and what --precision auto would use."""
    device = torch.device(context.device)
    torch.manual_seed(0)
    model = vitrail.build(MODEL).to(device).eval()
    if device.type != "cpu":
        compare_devices(model, device)
    context.report("prediction")
    runtime = TorchRuntime(model, Preprocessing(), device=device)
    runtimes = list_candidates(runtime)
    lower = choose_cuda(device, device_name(device)).precision if device.type == "cuda" else "bf16"
    if device.type == "cuda":
        runtimes[lower] = copy_runtime(runtime, lower)
    batch = 64 if device.type == "cuda" else 4
    pixels = random_pixels(Preprocessing(), batch)
    taken = measure_interleaved(
        {name: lambda run=run: run(pixels) for name, run in runtimes.items()}, 2 * context.seconds
    )
    context.report("training steps")
    images, optimizer = torch.randn(batch, 3, 224, 224, device=device), torch.optim.AdamW(model.parameters(), 1e-5)
    model.train()

    def step(precision: str) -> None:
        compute_gradients(model, images, precision)
        optimizer.step()
        synchronise(device)

    precisions = ["fp32", lower] if lower in runtimes else ["fp32"]
    steps = {name: (lambda name=name: step(name)) for name in precisions}
    trained = measure_interleaved(steps, 2 * context.seconds)
    if not all(bool(parameter.isfinite().all()) for parameter in model.parameters()):
        raise AssertionError(f"the weights are not finite after training steps on {device}")
    values: dict[str, Any] = {
        "prediction_images_per_second": {name: batch / seconds for name, seconds in taken.items()},
        "training_images_per_second": {name: batch / seconds for name, seconds in trained.items()},
        "batch_size": batch,
        "device": str(device),
    }
    if device.type == "cpu":
        for purpose, measured in (("prediction", taken), ("training", trained)):
            choice = choose_measured(measured, device_name(device))
            values[f"{purpose}_precision"] = {"precision": choice.precision, "reason": choice.why}
    parts = [
        f"{purpose} {', '.join(f'{name} {speed:,.1f}' for name, speed in values[f'{purpose}_images_per_second'].items())}"
        for purpose in ("prediction", "training")
    ]
    return f"images/s: {'; '.join(parts)}", values


@torch.inference_mode()
def compare_devices(model: Any, device: torch.device) -> None:
    """Raise AssertionError if a device computes other features than the CPU."""
    images = torch.randn(2, 3, 224, 224)
    there = model.forward_features(images.to(device)).float().cpu()
    here = model.cpu().forward_features(images)
    model.to(device)
    error = float((there - here).norm() / here.norm())
    if not error < MIN_AGREEMENT:
        raise AssertionError(f"{device} computes other features than the CPU: they differ by {error:.2g} of their norm")
