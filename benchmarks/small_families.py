"""Swin and MViT of about a million parameters beside a ViT with as many multiply-adds, on CIFAR-10.

    python benchmarks/small_families.py cifar-10-batches-bin --minutes 20 --seeds 0 1 2

All three are trained from scratch with the recipe `scratch-small` (Muon, crops and flips), for as many steps as fit into the
minutes: a few steps of each model are timed first. Patches have two pixels for Swin and MViT, whose grids shrink, and four
for the ViT. Nothing was tuned for any of them. OMP_NUM_THREADS sets the threads.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import measure

import vitrail
from vitrail.data.transforms.augment import Fit, Flip, PadCrop
from vitrail.models.base import ModelConfig
from vitrail.models.flops import count
from vitrail.models.mvit_config import configure_mvit
from vitrail.models.registry import configure
from vitrail.models.swin import configure_swin
from vitrail.training.recipe import Recipe, read_recipe

TIMED_STEPS = 40


def list_models() -> dict[str, ModelConfig]:
    """Return the three configurations: 0.7 to 1.3 million parameters, about 48 million multiply-adds."""
    shape: dict[str, Any] = {"classes": 10, "image_size": 32}
    swin = configure_swin(width=48, depths=(2, 2, 2), heads=(2, 4, 8), window=4, patch=2, **shape)
    mvit = configure_mvit(
        width=48,
        depths=(1, 2, 2),
        heads=(1, 2, 4),
        patch_kernel=(3, 3),
        patch_stride=(2, 2),
        kv_stride=(2, 2),
        **shape,
    )
    vit = configure(patch=4, width=120, depth=4, heads=4, position="sincos2d", pool="mean", **shape)
    return {"ViT": vit, "Swin": swin, "MViT v2": mvit}


def train(data: str, recipe: Recipe, seed: int, folder: Path) -> dict[str, Any]:
    """Run the recipe; return its accuracies and training time."""
    run, summary = vitrail.train(data, recipe=replace(recipe, seed=seed), out=folder / "run")
    timing = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
    rows = {split: summary[split]["top1"] for split in ("validation", "test")}
    return {"seconds": timing[-1]["seconds"], **rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="cifar-10", help="name, or folder of its binary files")
    parser.add_argument("--minutes", type=float, default=20.0, help="training time of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--count", action="store_true", help="print parameters and multiply-adds only")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, config in list_models().items():
        cost = count(config)
        print(f"{name}: {cost.params:,} parameters, {cost.macs / 1e6:.1f} M multiply-adds", flush=True)
    if options.count:
        return
    with tempfile.TemporaryDirectory() as folder:
        run, _ = vitrail.train(options.data, steps=1, out=Path(folder) / "run")
        base = replace(read_recipe(run / "recipe.json"), precision=options.precision, validate_every=1000.0)
    augment = (Fit((32, 32), interpolation="bilinear"), PadCrop(4, "reflect"), Flip())  # as in runs of more epochs
    lengths: dict[str, int] = {}
    for seed in options.seeds:
        for name, config in list_models().items():
            recipe = replace(base, model=config, augment=augment, epochs=None, steps=TIMED_STEPS)
            with tempfile.TemporaryDirectory() as folder:
                if name not in lengths:
                    step = train(options.data, recipe, 0, Path(folder) / "timed")["seconds"] / TIMED_STEPS
                    lengths[name] = int(60 * options.minutes / step)
                steps = lengths[name]
                schedule = replace(recipe.schedule, warmup=max(1, steps // 10))
                found = train(options.data, replace(recipe, steps=steps, schedule=schedule), seed, Path(folder))
            rows.append({"model": name, "seed": seed, "steps": steps, **found})
            print(f"{name}, seed {seed}: {steps:,} steps, {found}", flush=True)
            measure.save("small_families", rows)
    for name in list_models():
        tests = [100 * row["test"] for row in rows if row["model"] == name]
        spread = f" ± {statistics.stdev(tests):.2f}" if len(tests) > 1 else ""
        print(f"{name}: {statistics.mean(tests):.2f}{spread} % test accuracy, {len(tests)} seeds")


if __name__ == "__main__":
    main()
