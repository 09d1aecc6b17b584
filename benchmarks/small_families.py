"""Swin and MViT of about a million parameters beside a ViT with as many multiply-adds, on CIFAR-10.

    python benchmarks/small_families.py cifar-10-batches-bin --minutes 20 --seeds 0 1 2
    python benchmarks/small_families.py cifar-10-batches-bin --steps 6300 4200 2500 --only Swin --seeds 1 --runs DIR

All three are trained from scratch with the recipe `scratch-small` (Muon, crops and flips), for as many steps as fit into the
minutes: a few steps of each model are timed first, which needs free cores. `--steps` gives these numbers instead: accuracy
depends on them and not on what else the machine does, so runs of different models and seeds may share the cores, and a run
that was stopped is resumed from its directory. Patches have two pixels for Swin and MViT, whose grids shrink, and four for the
ViT. Nothing was tuned for any of them. OMP_NUM_THREADS sets the threads.
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

TIMED_STEPS = 120


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
    return {"ViT": vit, "Swin": swin, "MViT": mvit}


def read_base_recipe(data: str, precision: str) -> Recipe:
    """Return `scratch-small` for CIFAR-10 in a precision, with the augmentation of runs of many epochs."""
    with tempfile.TemporaryDirectory() as folder:
        run, _ = vitrail.train(data, recipe="scratch-small", steps=1, out=Path(folder) / "run")
        base = read_recipe(run / "recipe.json")
    augment = (Fit((32, 32), interpolation="bilinear"), PadCrop(4, "reflect"), Flip())
    return replace(base, precision=precision, validate_every=1000.0, augment=augment, epochs=None)


def time_step(data: str, recipe: Recipe) -> float:
    """Return the median seconds of a training step, between the log lines of a short run."""
    with tempfile.TemporaryDirectory() as folder:
        run, _ = vitrail.train(data, recipe=replace(recipe, steps=TIMED_STEPS), out=Path(folder) / "run")
        timing = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
    return recipe.batch_size / statistics.median(line["images_per_second"] for line in timing)


def train(data: str, recipe: Recipe, steps: int, seed: int, run: Path) -> dict[str, float]:
    """Run or resume the recipe for a number of steps; return its accuracies."""
    schedule = replace(recipe.schedule, warmup=max(1, steps // 10))
    recipe = replace(recipe, steps=steps, schedule=schedule, seed=seed)
    if (run / "recipe.json").is_file():
        _, summary = vitrail.resume(run)
    else:
        _, summary = vitrail.train(data, recipe=recipe, out=run)
    return {split: summary[split]["top1"] for split in ("validation", "test")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default="cifar-10", help="name, or folder of its binary files")
    parser.add_argument("--minutes", type=float, default=20.0, help="training time of each run [20]")
    parser.add_argument("--steps", type=int, nargs=3, metavar="N", help="steps of ViT, Swin, MViT, in place of timing")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=tuple(list_models()), default=list(list_models()))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs, to resume them [temporary]")
    parser.add_argument("--count", action="store_true", help="print parameters and multiply-adds only")
    parser.add_argument("--time", action="store_true", help="print the steps that fit into the minutes only")
    options = parser.parse_args()
    models = list_models()
    for name, config in models.items():
        cost = count(config)
        print(f"{name}: {cost.params:,} parameters, {cost.macs / 1e6:.1f} M multiply-adds", flush=True)
    if options.count:
        return
    base = read_base_recipe(options.data, options.precision)
    if options.steps:
        lengths = dict(zip(models, options.steps, strict=True))
    else:
        seconds = {name: time_step(options.data, replace(base, model=config)) for name, config in models.items()}
        lengths = {name: int(60 * options.minutes / step) for name, step in seconds.items()}
        print(f"steps in {options.minutes:g} minutes: {lengths}", flush=True)
    if options.time:
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        runs = options.runs or Path(temporary)
        for seed in options.seeds:
            for name in options.only:
                recipe, run = replace(base, model=models[name]), runs / f"{name}-{seed}"
                found = train(options.data, recipe, lengths[name], seed, run)
                rows.append({"model": name, "seed": seed, "steps": lengths[name], **found})
                print(f"{name}, seed {seed}: {lengths[name]:,} steps, {found}", flush=True)
                measure.save("small_families", rows)
    for name in options.only:
        tests = [100 * row["test"] for row in rows if row["model"] == name]
        spread = f" ± {statistics.stdev(tests):.2f}" if len(tests) > 1 else ""
        print(f"{name}: {statistics.mean(tests):.2f}{spread} % test accuracy, {len(tests)} seeds")


if __name__ == "__main__":
    main()
