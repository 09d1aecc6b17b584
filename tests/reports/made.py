"""Run directories with plausible contents, as `vitrail train` writes them, without training anything."""

import json
import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from vitrail.metrics import compute_metrics, find_confident_mistakes

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "clothing"
CLOTHING = ("dress", "hat", "longsleeve", "outwear", "pants", "shirt", "shoes", "shorts", "skirt", "t-shirt")


def made_run(
    directory: Path,
    *,
    classes: int | tuple[str, ...] = CLOTHING,
    images: int = 341,
    epochs: int = 12,
    steps: int = 25,
    several: bool = False,
    finished: bool = True,
    skill: float = 3.4,
    seed: int = 0,
    lr: float = 3e-4,
    init: str | None = "deit_tiny.safetensors",
    test: bool = False,
    skipped: tuple[tuple[str, str], ...] = (("train/hat/broken.jpg", "truncated: 812 of 40,211 bytes"),),
    photographs: bool = True,
    extra: dict | None = None,
    names: list[str] | None = None,
) -> Path:
    """Writes a run and gives its directory."""
    chance = np.random.default_rng(seed)
    directory.mkdir(parents=True, exist_ok=True)
    labels = tuple(f"class {k:04d}" for k in range(classes)) if isinstance(classes, int) else classes
    photos = photographs and SHARED.is_dir() and labels == CLOTHING and not several
    files, targets = _photographs(images) if photos else _names(len(labels), images, several)
    if names:
        files[: len(names)] = names
    logits = _logits(targets, len(labels), skill, chance, several)
    found = compute_metrics(logits, targets)
    counts = targets.sum(0) if several else np.bincount(targets, minlength=len(labels))
    _write(directory / "recipe.json", _recipe(epochs, lr, seed) | (extra or {}))
    splits = {
        "train": {
            "images": int(4 * counts.sum()),
            "classes": {label: int(4 * n + k % 7) for k, (label, n) in enumerate(zip(labels, counts, strict=True))},
        },
        "validation": {
            "images": images,
            "classes": {label: int(n) for label, n in zip(labels, counts, strict=True)},
        },
    }
    _write(
        directory / "run.json",
        {
            "vitrail": "0.1.0",
            "command": ["vitrail", "train", "/data/clothing", "--init", "deit_tiny.safetensors", "--seed", str(seed)],
            "started": "2026-10-03T14:05:11+02:00",
            "recipe_name": "finetune" if init else "scratch-small",
            "task": "multi" if several else "single",
            "labels": list(labels),
            "data": {
                "where": "/data/clothing",
                "kind": "folder",
                "splits": splits,
                "skipped": [{"path": path, "detail": detail} for path, detail in skipped],
                "notes": ["the folders train and validation are taken as the splits of that name"],
            },
            "model": {
                "name": "Ti/16",
                "parameters": 5_526_346,
                "init": init,
                "image_size": [224, 224],
                "channels": 3,
                "preprocessing": "smaller side to 256, bicubic; the middle 224×224; mean and deviation of ImageNet",
            },
            "environment": {
                "python": "3.13.5",
                "torch": "2.13.0+cpu",
                "platform": "Linux 6.12 x86_64",
                "processor": "AMD EPYC 7B13",
                "cores": 2,
                "threads": 2,
                "device": "cpu",
                "processes": 1,
                "precision": "float32",
            },
            "chosen": [
                "batch size 32: 800 training pictures give 25 steps an epoch",
                "12 epochs: small data with trained weights learns little more after that",
                "layer-wise decay 0.75: the first layers of trained weights are better left almost as they are",
                "2 workers: one for each core",
            ],
        },
    )
    reached = 0.5 if not finished else 1.0
    _logs(directory, found, epochs, steps, reached, lr, chance, several)
    if not finished:
        return directory
    folder = directory / "evaluation"
    _evaluation(folder, "validation", logits, targets, files, photos)
    summary = found | {
        "split": "validation",
        "seconds": 312.4,
        "steps": epochs * steps,
        "images_per_second": 96.3,
        "weights": "ema",
        "stopped": "end",
        "validation": found,
    }
    if test:
        other = _logits(targets, len(labels), skill * 0.95, chance, several)
        _evaluation(folder, "test", other, targets, files, photos)
        judged = compute_metrics(other, targets)
        summary |= judged | {"split": "test", "test": judged}
    _write(directory / "summary.json", summary)
    return directory


def _recipe(epochs: int, lr: float, seed: int) -> dict:
    return {
        "type": "Recipe",
        "model": {"type": "ViTConfig", "size": {"type": "Size", "depth": 12, "width": 192, "heads": 3}, "patch": 16},
        "augment": [
            {"type": "RandomResizedCrop", "size": [224, 224], "scale": [0.2, 1.0]},
            {"type": "Flip", "rate": 0.5},
        ],
        "objective": {"type": "Classification", "smoothing": 0.1, "mixup": 0.0},
        "optimizer": {"type": "AdamW", "lr": lr, "weight_decay": 0.05, "clip": 1.0},
        "schedule": {"type": "WarmupCosine", "warmup_steps": 30},
        "epochs": epochs,
        "batch_size": 32,
        "seed": seed,
    }


def _photographs(images: int) -> tuple[list[str], np.ndarray]:
    found = [
        (str(path), k) for k, label in enumerate(CLOTHING) for path in sorted((SHARED / "validation" / label).iterdir())
    ]
    found = (found * (images // len(found) + 1))[:images]
    return [path for path, _ in found], np.array([k for _, k in found])


def _names(classes: int, images: int, several: bool) -> tuple[list[str], np.ndarray]:
    chance = np.random.default_rng(7)
    if several:
        targets = (chance.random((images, classes)) < chance.uniform(0.05, 0.4, classes)).astype(np.uint8)
    else:
        targets = np.sort(chance.choice(classes, images, p=chance.dirichlet(np.full(classes, 4.0))))
    return [f"validation/{k:06d}.png" for k in range(images)], targets


def _logits(targets, classes, skill, chance, several):
    noise = chance.normal(size=(len(targets), classes))
    if several:
        return (1.2 * noise + 0.6 * skill * (2.0 * targets - 1.0)).astype(np.float32)
    # Neighbouring classes are alike, so that mistakes have a pattern.
    near = np.abs(np.arange(classes)[None] - targets[:, None])
    return (1.5 * noise + skill * 1.6 * np.exp(-near)).astype(np.float32) * 1.4


def _logs(directory, found, epochs, steps, reached, lr, chance, several):
    rows, timing = [], []
    total, goal = epochs * steps, found["map" if several else "top1"]
    for step in range(1, int(total * reached) + 1):
        done = step / total
        if step % max(1, total // 400) == 0 or step == total:
            warm = min(1.0, step / max(1, total // 10))
            rows.append(
                {
                    "kind": "train",
                    "step": step,
                    "epoch": step / steps,
                    "loss": 0.55 + 1.75 * math.exp(-4 * done) + 0.07 * float(chance.normal()),
                    "lr": lr * warm * 0.5 * (1 + math.cos(math.pi * done)),
                    "grad_norm": 0.8 + 0.5 * math.exp(-3 * done) + 0.15 * abs(float(chance.normal())),
                }
            )
            timing.append({"step": step, "seconds": step * 0.33, "images_per_second": 96 + 4 * float(chance.normal())})
        if step % steps == 0:
            score = goal - 0.55 * math.exp(-5 * done) + 0.008 * float(chance.normal())
            rows.append(
                {
                    "kind": "validation",
                    "step": step,
                    "epoch": step // steps,
                    "loss": found["loss"] + 1.2 * math.exp(-5 * done),
                    ("map" if several else "top1"): min(1.0, max(0.0, score)),
                }
            )
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (directory / "timing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in timing), encoding="utf-8")


def _evaluation(folder, split, logits, targets, files, photos):
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{split}.npz", logits=logits, targets=targets)
    shown = [str(Path(*Path(file).parts[-3:])) for file in files] if photos else files
    _write(folder / f"{split}.json", {"names": shown})
    for index in find_confident_mistakes(logits, targets, 24):
        picture = Image.open(files[index]).convert("RGB") if photos else _drawn(int(index))
        picture.thumbnail((192, 192))
        picture.save(folder / "pictures" / f"{split}-{index:06d}.jpg", quality=80)


def _drawn(index: int) -> Image.Image:
    picture = Image.new("RGB", (160, 120 + 20 * (index % 4)), (40 + index * 37 % 180, 90, 140))
    ImageDraw.Draw(picture).ellipse((30, 20, 120, 100), fill=(230, 190 - index * 13 % 120, 60))
    return picture


def _write(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=2), encoding="utf-8")
