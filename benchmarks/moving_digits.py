"""Accuracy on moving-digits: a ViT and an MViT of clips, the ViT on one frame, and both with the frames in another order.

    python benchmarks/moving_digits.py --epochs 4 --seeds 0 1 2
    python benchmarks/moving_digits.py --epochs 4 --seeds 1 --only ViT --runs DIR

All are trained from scratch with the recipe `video` and its augmentation. `one frame` is the ViT with clips of one frame. For
`shuffled`, the trained models get each test clip with its frames in a random order. Chance is 12.5 %, one of eight classes.
Nothing was tuned on the test split. OMP_NUM_THREADS sets the threads; a run that was stopped is resumed from its directory.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import measure
import numpy as np

import vitrail
from vitrail.data.sources import load_dataset
from vitrail.inference import TorchRuntime, run_batches
from vitrail.models.base import Model, ModelConfig
from vitrail.models.flops import count
from vitrail.models.mvit_config import configure_mvit
from vitrail.training.recipe import Recipe, read_recipe

DATA = "moving-digits"


def read_base_recipe() -> Recipe:
    """Return the recipe `video` for moving digits."""
    with tempfile.TemporaryDirectory() as folder:
        run, _ = vitrail.train(DATA, recipe="video", steps=1, out=Path(folder) / "run")
        return replace(read_recipe(run / "recipe.json"), steps=None, epochs=1.0, validate_every=1000.0)


def list_models(base: Recipe) -> dict[str, ModelConfig]:
    """Return the models by name: that of the recipe, an MViT, and that of the recipe for one frame."""
    vit: Any = base.model
    mvit = configure_mvit(
        width=48,
        depths=(1, 1, 2),
        heads=(1, 2, 4),
        frames=vit.frames,
        image_size=vit.image_size,
        channels=vit.channels,
        classes=vit.classes,
        kv_stride=(1, 4, 4),
    )
    return {"ViT": vit, "MViT": mvit, "one frame": replace(vit, frames=1, embed=replace(vit.embed, frames=1))}


def train(base: Recipe, model: ModelConfig, epochs: float, seed: int, run: Path) -> dict[str, Any]:
    """Run or resume the recipe with this model; return its summary."""
    if (run / "recipe.json").is_file():
        return vitrail.resume(run)[1]
    clip = base.preprocessing.clip
    assert clip is not None
    assert model.frames is not None
    pipeline = replace(base.preprocessing, clip=replace(clip, frames=model.frames))
    steps = epochs * load_dataset(DATA)["train"].count_classes().sum() / base.batch_size
    schedule = replace(base.schedule, warmup=max(1, round(steps / 10)))
    recipe = replace(base, model=model, preprocessing=pipeline, epochs=epochs, schedule=schedule, seed=seed)
    return vitrail.train(DATA, recipe=recipe, out=run)[1]


def measure_shuffled(model: Model) -> float:
    """Return the accuracy on test clips whose frames are in a random order, another one for each clip."""
    images, rng, pipeline = load_dataset(DATA)["test"], np.random.default_rng(0), model.preprocessing
    runtime = TorchRuntime(model, pipeline)  # pyright: ignore[reportArgumentType]

    def forward(pixels: np.ndarray) -> np.ndarray:
        return runtime(np.stack([clip[:, rng.permutation(clip.shape[1])] for clip in pixels]))

    batches = run_batches(forward, images, pipeline, {})  # pyright: ignore[reportArgumentType]
    hits = [(batch.outputs.argmax(1) == images.targets[batch.indices]).sum() for batch in batches]
    return float(sum(hits)) / len(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=float, default=4.0, help="training epochs of each run [4]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=("ViT", "MViT", "one frame"), help="models to train [all]")
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs, to resume them [temporary]")
    options = parser.parse_args()
    base = read_base_recipe()
    models = {name: model for name, model in list_models(base).items() if not options.only or name in options.only}
    for name, model in models.items():
        cost = count(model)
        print(f"{name}: {cost.params:,} parameters, {cost.macs / 1e6:.1f} M multiply-adds", flush=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for seed in options.seeds:
            for name, model in models.items():
                run = (options.runs or Path(temporary)) / f"{name.replace(' ', '-')}-{seed}"
                summary = train(base, model, options.epochs, seed, run)
                row = {"model": name, "seed": seed, "seconds": summary["seconds"], "test": summary["test"]["top1"]}
                if name != "one frame":
                    row["shuffled"] = measure_shuffled(vitrail.load(str(run / "model.safetensors")))
                rows.append(row)
                print(json.dumps(row), flush=True)
                measure.save("moving_digits", rows)
    for name in models:
        for what in ("test", "shuffled"):
            values = [100 * row[what] for row in rows if row["model"] == name and what in row]
            if values:
                spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
                print(f"{name:<10} {what:<9}{statistics.mean(values):6.1f}{spread} %, {len(values)} seeds")


if __name__ == "__main__":
    main()
