"""Accuracy and calibration of short fine-tunes of DeiT-Ti: `vitrail train --init` against a plain timm loop at equal steps.

    python benchmarks/short_finetune.py
    python benchmarks/short_finetune.py photos --tuning --steps 60 --set optimizer.layer_decay=0.75

Both sides train on the same copies of the images (shorter side 256), with the same batch size, number of steps and precision, and
are evaluated once, after the last step, on the same held-out images. The plain loop is what a user of timm writes: a new head,
AdamW with one learning rate for all parameters, weight decay 0.05, a cosine without warm-up, random resized crops (of vitrail's
scale) and flips, the cross-entropy of the labels; no EMA, mixup or label smoothing. vitrail has its defaults, or those changed by
--set; its temperature is not fitted, because that would use the held-out images.

A data folder has train/CLASS and validation/CLASS, or train/images and validation/images with files named CLASS_NUMBER, as
Oxford-IIIT Pets. With --tuning a third of the training images is held out instead, by content, and the validation images are not
read: use it to choose settings. Both sides take turns; OMP_NUM_THREADS sets their threads.
"""

import argparse
import hashlib
import math
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from vitrail.metrics.calibration import calibration_error, softmax

SHARED = Path(__file__).resolve().parents[2] / "shared"
WEIGHTS = SHARED / "weights" / "deit_tiny_patch16_224.safetensors"
SIDE, HELD_OUT, CROP_SCALE = 256, 1 / 3, (0.35, 1.0)
Named = list[tuple[Path, str]]  # image, class


def list_images(data: Path, split: str) -> Named:
    """Return the images of a split and their classes: the folder's name, or the file's up to its last underscore."""
    flat = data / split / "images"
    if flat.is_dir():
        return [(path, path.stem.rpartition("_")[0]) for path in sorted(flat.iterdir())]
    return [(path, path.parent.name) for path in sorted((data / split).glob("*/*"))]


def copy_images(data: Path, folder: Path, tuning: bool) -> None:
    """Write small copies as folder/train/CLASS and folder/validation/CLASS."""
    splits = {"train": list_images(data, "train")}
    if tuning:
        classes: dict[str, Named] = defaultdict(list)
        for path, name in splits["train"]:
            classes[name].append((path, name))
        splits = {"train": [], "validation": []}
        for images in classes.values():
            images.sort(key=lambda image: hashlib.sha256(image[0].read_bytes()).digest())
            held_out = max(1, round(len(images) * HELD_OUT))
            splits["validation"] += images[:held_out]
            splits["train"] += images[held_out:]
    else:
        splits["validation"] = list_images(data, "validation")
    for split, images in splits.items():
        for path, name in images:
            with Image.open(path) as opened:
                image = ImageOps.exif_transpose(opened).convert("RGB")
            scale = min(1.0, SIDE / min(image.size))
            image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            image.save(folder / split / name / f"{path.stem}.png", compress_level=1)


def train_timm(folder: Path, steps: int, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Fine-tune timm's model in a plain loop; return its seconds and its scores."""
    import timm
    from safetensors.torch import load_file
    from timm.data import create_transform, resolve_model_data_config
    from timm.models.vision_transformer import checkpoint_filter_fn
    from torchvision.datasets import ImageFolder

    torch.manual_seed(seed)
    size = (3, options.size, options.size)
    trained = ImageFolder(str(folder / "train"))
    model = timm.create_model("deit_tiny_patch16_224", num_classes=len(trained.classes), img_size=options.size)
    state = {name: tensor for name, tensor in load_file(WEIGHTS).items() if not name.startswith("head.")}
    model.load_state_dict(checkpoint_filter_fn(state, model), strict=False)
    config = resolve_model_data_config(model) | {"input_size": size}
    plain = {"auto_augment": None, "color_jitter": 0.0, "re_prob": 0.0, "scale": CROP_SCALE}
    trained.transform = create_transform(**config, is_training=True, **plain)
    loader = torch.utils.data.DataLoader(trained, options.batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.05, fused=True)
    step, begin = 0, time.perf_counter()
    while step < steps:
        for images, targets in loader:
            optimizer.param_groups[0]["lr"] = options.rate * (1 + math.cos(math.pi * step / steps)) / 2
            with cast(options):
                loss = F.cross_entropy(model(images).float(), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == steps:
                break
    seconds = time.perf_counter() - begin
    model.eval()
    held_out = ImageFolder(str(folder / "validation"), create_transform(**config))
    logits, labels = [], []
    with torch.inference_mode(), cast(options):
        for images, targets in torch.utils.data.DataLoader(held_out, 50):
            logits.append(model(images).float())
            labels.append(targets)
    return {"seconds": seconds, **score(torch.cat(logits), torch.cat(labels))}


def train_vitrail(folder: Path, steps: int, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run `vitrail train --init`; return its seconds of training and its scores."""
    from vitrail.training.train import train

    with tempfile.TemporaryDirectory() as out:
        run, summary = train(
            str(folder),
            init=str(WEIGHTS),
            out=Path(out) / "run",
            steps=steps,
            seed=seed,
            batch_size=options.batch_size,
            size=options.size,
            precision=options.precision,
            settings=["validate_every=1000", "calibrate=none", *options.settings],
            device="cpu",
            workers=0,
        )
        stored = np.load(run / "evaluation" / "validation.npz")
        scores = score(torch.from_numpy(stored["logits"]), torch.from_numpy(stored["targets"]))
    return {"seconds": summary["seconds"], **scores}


def cast(options: argparse.Namespace) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16")


def score(logits: Tensor, targets: Tensor) -> dict[str, float]:
    """Return the accuracy, the expected calibration error and the mean confidence."""
    probabilities = softmax(logits.numpy())
    confidence, correct = probabilities.max(1), probabilities.argmax(1) == targets.numpy()
    return {
        "top1": float(correct.mean()),
        "calibration_error": calibration_error(confidence, correct),
        "confidence": float(confidence.mean()),
        "images": len(targets),
    }


CONTESTANTS = {"vitrail": train_vitrail, "timm": train_timm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="*", type=Path, default=[SHARED / "data" / name for name in ("clothing", "pets")])
    parser.add_argument("--steps", nargs="+", type=int, default=[30, 60, 120])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate of the plain loop")
    parser.add_argument("--tuning", action="store_true", help="hold out training images; do not read validation")
    parser.add_argument("--only", choices=CONTESTANTS)
    parser.add_argument("--set", action="append", default=[], dest="settings", help="change of vitrail's recipe")
    parser.add_argument("--name", default="short_finetune", help="of the file in results")
    options = parser.parse_args()
    contestants = {name: run for name, run in CONTESTANTS.items() if options.only in (None, name)}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root:
        for data in options.data:
            name = data.resolve().name
            folder = Path(root) / name
            copy_images(data, folder, options.tuning)
            for steps in options.steps:
                for seed in range(options.seeds):
                    for contestant, run in contestants.items():
                        found = run(folder, steps, seed, options)
                        rows.append({"data": name, "steps": steps, "seed": seed, "contestant": contestant, **found})
                        print(
                            f"{name}, {steps} steps, seed {seed}, {contestant}: {format_scores([rows[-1]])}", flush=True
                        )
                        measure.save(options.name, rows)
                print_means(rows, name, steps)


def format_scores(rows: list[dict[str, Any]]) -> str:
    """Return the means of some runs as text."""
    mean = {key: statistics.mean(row[key] for row in rows) for key in rows[0] if isinstance(rows[0][key], float)}
    percent = " ".join(
        f"{label} {100 * mean[key]:.1f} %"
        for key, label in {"top1": "top-1", "calibration_error": "ECE", "confidence": "confidence"}.items()
    )
    return f"{percent} in {mean['seconds']:.0f} s"


def print_means(rows: list[dict[str, Any]], data: str, steps: int) -> None:
    """Print the mean over the seeds for each contestant, and the ratio of their errors and times."""
    found = {
        name: [row for row in rows if (row["data"], row["steps"], row["contestant"]) == (data, steps, name)]
        for name in CONTESTANTS
    }
    for name, runs in found.items():
        if runs:
            print(f"{data}, {steps} steps, mean of {len(runs)} seeds, {name}: {format_scores(runs)}")
    if all(found.values()):
        errors, seconds = (
            [statistics.mean(value(row) for row in runs) for runs in found.values()]
            for value in (lambda row: 1 - row["top1"], lambda row: row["seconds"])
        )
        print(f"vitrail / timm: errors {errors[0] / max(errors[1], 1e-9):.2f}×, seconds {seconds[0] / seconds[1]:.2f}×")


if __name__ == "__main__":
    main()
