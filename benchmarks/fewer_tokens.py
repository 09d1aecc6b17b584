"""Accuracy of training with fewer tokens: the same recipe for the same minutes, with each slot of `objective.tokens`.

    python benchmarks/fewer_tokens.py --minutes 10 --seeds 0 1 2
    python benchmarks/fewer_tokens.py --data cifar10 --minutes 20
    python benchmarks/fewer_tokens.py --minutes 10 --only none PatchDropout

The recipe is scratch-small with linear patches of 4×4 pixels, 64 for the images of 32×32 that it makes, and AdamW. Every run
gets as many steps as fit into the minutes, so a slot wins if its further steps are worth more than its missing tokens. All are
evaluated at the full size with all tokens. `none` is the same recipe without a slot. Runs follow each other, seed by seed;
images per second depend on what else the machine does, accuracy after the same minutes too: use free cores.
"""

import argparse
import tempfile
from typing import Any

import measure

from vitrail.training.train import train

SLOTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "PatchDropout": ("objective.tokens=PatchDropout",),
    "PatchDropout to 0": ("objective.tokens=PatchDropout", "objective.tokens.start=0.75", "objective.tokens.end=0"),
    "ProgressiveResolution": ("objective.tokens=ProgressiveResolution",),
    "TokenMerging": ("objective.tokens=TokenMerging", "objective.tokens.r=8"),
    "FlexiblePatches": ("objective.tokens=FlexiblePatches", "objective.tokens.sizes=[4,8]"),
}
RECIPE = ("model.embed=Patches", "model.embed.patch=4", "optimizer=AdamW", "optimizer.lr=1e-3", "calibrate=none")


def run(data: str, name: str, minutes: float, seed: int, model: list[str]) -> dict[str, Any]:
    settings = [*RECIPE, *model, *SLOTS[name]]
    with tempfile.TemporaryDirectory() as folder:
        _, summary = train(
            data, recipe="scratch-small", minutes=minutes, seed=seed, settings=settings, out=f"{folder}/run"
        )
    kept = ("top1", "steps", "seconds", "images_per_second")
    return {"slot": name, "seed": seed, "minutes": minutes} | {key: summary[key] for key in kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--minutes", type=float, default=10.0, help="of each run, evaluation included [10]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", choices=tuple(SLOTS), default=list(SLOTS))
    parser.add_argument(
        "--set", nargs="+", default=[], help="further settings of the recipe, such as model.size.depth=6"
    )
    options = parser.parse_args()
    rows = []
    for seed in options.seeds:
        for name in options.only:
            rows.append(run(options.data, name, options.minutes, seed, options.set))
            row = rows[-1]
            print(
                f"{name:<24}seed {seed}   test top-1 {row['top1']:.2%}   {row['steps']:>6,} steps   "
                f"{row['images_per_second']:6.0f} images/s   {row['seconds']:.0f} s",
                flush=True,
            )
    print("\n| slot | top-1 | difference to none | steps | images/s |\n|---|---|---|---|---|")
    base = {row["seed"]: row["top1"] for row in rows if row["slot"] == "none"}
    for name in options.only:
        mine = [row for row in rows if row["slot"] == name]
        top1, steps, speed = (
            sum(row[key] for row in mine) / len(mine) for key in ("top1", "steps", "images_per_second")
        )
        pairs = [row["top1"] - base[row["seed"]] for row in mine if row["seed"] in base]
        points = f"{100 * sum(pairs) / len(pairs):+.2f} points" if pairs else ""
        print(f"| {name} | {top1:.2%} | {points} | {steps:,.0f} | {speed:,.0f} |")
    print(f"written to {measure.save('fewer-tokens', rows)}")


if __name__ == "__main__":
    main()
