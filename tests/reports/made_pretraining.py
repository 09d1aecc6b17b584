"""Directories of runs that learnt without labels, as `vitrail pretrain` writes them, without training anything."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.objectives.registry import PRETRAINING

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
OBJECTIVES = {
    "mpp": {"type": "MaskedPatches", "target": "colour", "corrupt": 0.5},
    "mae": {"type": "MAE", "mask": 0.75, "norm_pix": True},
    "dino": {"type": "DINO", "out": 4096, "centre": 0.9, "teacher_temperature": 0.07},
    "features": {"type": "FeatureDistillation", "mixup": 0.5},
}
COLLAPSE = {
    "cause": "all pictures get the same answer, as nothing takes away what their answers have in common",
    "advice": "centre the teacher’s answers, --set objective.centre=0.9",
    "step": 600,
}


def made_pretraining(
    directory: Path,
    *,
    method: str = "dino",
    labels: tuple[str, ...] = CLASSES,
    epochs: int = 10,
    steps: int = 100,
    lr: float = 5e-4,
    finished: bool = True,
    collapsed: bool = False,
    photographs: int = 6,
    where: str = "/data/cifar-10",
    seed: int = 0,
) -> Path:
    """Writes a run and gives its directory."""
    chance = np.random.default_rng(seed)
    directory.mkdir(parents=True, exist_ok=True)
    objective = OBJECTIVES[method] | ({"centre": None} if collapsed else {})
    _write(
        directory / "recipe.json", {"type": "Recipe", "objective": objective, "optimizer": {"type": "AdamW", "lr": lr}}
    )
    counts = dict.fromkeys(labels, 500)
    _write(
        directory / "run.json",
        {
            "vitrail": "0.1.0",
            "command": ["vitrail", "pretrain", where, "--method", method, "--out", str(directory)]
            + (["--set", "objective.centre=none"] if collapsed else []),
            "started": "2026-11-16T09:12:40+00:00",
            "recipe_name": f"{method}-small",
            "task": "pretraining",
            "method": method,
            "method_text": asdict(PRETRAINING[method].report),
            "labels": list(labels),
            "data": {
                "where": where,
                "kind": "cifar" if labels else "folder",
                "splits": {
                    "train": {"images": 45_000, "classes": {label: 9 * n for label, n in counts.items()}},
                    "validation": {"images": 5_000, "classes": counts},
                },
                "skipped": [],
                "notes": [],
            },
            "model": {
                "name": "ViT of width 192, depth 9, patch 4",
                "parameters": 4_012_416,
                "init": None,
                "image_size": [32, 32],
                "channels": 3,
                "preprocessing": "32×32; mean and deviation of these pictures",
            },
            "environment": {"python": "3.13.5", "torch": "2.13.0+cpu", "processor": "AMD EPYC 7B13", "device": "cpu"},
            **({"teacher": {"where": "big.safetensors", "parameters": 5_717_416}} if method == "features" else {}),
            "chosen": ["batch size 128: 45,000 training pictures give 351 steps an epoch"],
        },
    )
    last = _logs(directory, method, bool(labels), epochs, steps, finished, collapsed, lr, chance)
    if method in ("mae", "mpp") and photographs:
        _pictures(directory / "evaluation" / "reconstructions", photographs, method)
    if not finished:
        return directory
    summary = {
        key: last[key] for key in ("loss", "spread", "rank", "teacher_entropy", "teacher_diversity") if key in last
    }
    summary |= {"method": method, "split": "validation", "images": 5_000, "seconds": 2611.0, "steps": last["step"]}
    summary |= {"images_per_second": 172.0, "stopped": "collapse" if collapsed else "end"}
    if labels:
        summary |= {"knn": last["knn"], "knn_pixels": 0.3394, "knn_random": 0.3126}
        summary["knn_interval"] = [last["knn"] - 0.0138, last["knn"] + 0.0138]
    if collapsed:
        summary["collapse"] = COLLAPSE
    _write(directory / "summary.json", summary)
    return directory


def _logs(directory, method, judged, epochs, steps, finished, collapsed, lr, chance):
    rows, timing, total = [], [], epochs * steps
    until = COLLAPSE["step"] if collapsed else total if finished else total // 2
    begin, end = {"mae": (1.12, 0.64), "mpp": (6.2, 3.4), "dino": (8.2, 5.1), "features": (1.0, 0.2)}[method]
    row = {}
    for step in range(until + 1):
        done = step / total
        fall = math.exp(-9 * max(0.0, done - 0.3)) if collapsed else 1.0
        loss = (end + (begin - end) * math.exp(-5 * done)) * (fall if method == "dino" else 1)
        if step and step % 5 == 0:
            rate = lr * min(1.0, 10 * done) * 0.5 * (1 + math.cos(math.pi * done))
            noisy = loss + 0.02 * begin * float(chance.normal())
            rows.append(
                {"kind": "train", "step": step, "epoch": step / steps, "loss": noisy, "lr": rate, "grad_norm": 1.2}
            )
            timing.append({"step": step, "seconds": 2.6 * step, "images_per_second": 172 + 5 * float(chance.normal())})
        if step % (steps // 2) == 0:
            row = {"kind": "validation", "step": step, "epoch": step / steps, "loss": loss}
            row |= {
                "spread": (0.32 + 0.4 * (1 - math.exp(-6 * done))) * fall,
                "rank": 1 + 60 * (1 - math.exp(-4 * done)) * fall,
            }
            if judged:
                row["knn"] = 0.31 + 0.17 * (1 - math.exp(-4 * done)) * fall + 0.004 * float(chance.normal())
            if method == "dino":
                diversity = 0.97 * fall
                row |= {
                    "teacher_entropy": diversity * (0.6 + 0.39 * math.exp(-5 * done)),
                    "teacher_diversity": diversity,
                }
            rows.append(row | {"best": True})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (directory / "timing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in timing), encoding="utf-8")
    return row


def _pictures(folder, count, method):
    folder.mkdir(parents=True)
    y, x = np.mgrid[:32, :32]
    for number in range(count):
        chance = np.random.default_rng(number)
        sky, ground, thing = chance.integers(40, 220, (3, 3))
        picture = np.where((y > 20)[..., None], ground, sky)
        picture = np.where(((x - 10 - number) ** 2 + (y - 15) ** 2 < 50)[..., None], thing, picture)
        patches = picture.reshape(8, 4, 8, 4, 3)
        hidden = chance.random((8, 1, 8, 1, 1)) < (0.75 if method == "mae" else 0.5)
        means = np.broadcast_to(patches.mean((1, 3), keepdims=True), patches.shape)
        guess = np.where(hidden, means + chance.normal(0, 6, patches.shape), patches if method == "mae" else means)
        parts = {"original": patches, "masked": np.where(hidden, 128, patches), "reconstructed": guess}
        for part, values in parts.items():
            shown = values.reshape(32, 32, 3).clip(0, 255).astype(np.uint8)
            Image.fromarray(shown).save(folder / f"{number:02d}-{part}.png")


def _write(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False), encoding="utf-8")
