"""Accuracy on moving-digits: a ViT and an MViT of clips, the ViT on one frame, and both with the frames in another order.

    python benchmarks/moving_digits.py --epochs 4 --seeds 0 1 2
    python benchmarks/moving_digits.py --epochs 4 --seeds 1 --only ViT --runs DIR
    python benchmarks/moving_digits.py --epochs 4 --seeds 0 1 2 --runs DIR --figure docs/moving-digits.svg
    python benchmarks/moving_digits.py --labels 10 --pretraining-epochs 100 --seeds 0 1 2 --runs DIR

All are trained from scratch with the recipe `video` and its augmentation. `one frame` is the ViT with clips of one frame. For
`shuffled`, the trained models get each test clip with its frames in a random order. Chance is 12.5 %, one of eight classes.

With `--labels N`, VideoMAE pretrains on the training videos without their labels, once; then, for each seed, it is
fine-tuned with N labels per class, drawn by the seed, and so is the same model from scratch, once with the recipe of the
fine-tuning and once with the recipe `video`. The difference has a 95 % interval of Student's t over the seeds.

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
from scipy.special import stdtrit

import vitrail
from vitrail.data.sources import load_dataset
from vitrail.inference import TorchRuntime, run_batches
from vitrail.models.base import Model, ModelConfig
from vitrail.models.flops import count
from vitrail.models.mvit_config import configure_mvit
from vitrail.reports.charts.canvas import Chart, Series
from vitrail.reports.charts.figure import render_svg
from vitrail.training.recipe import Data, Recipe, read_recipe
from vitrail.training.recipes import build_recipe
from vitrail.training.runs.prepare import prepare_data

DATA, CLASSES = "moving-digits", 8


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


def draw(rows: list[dict[str, Any]]) -> str:
    """Return the mean accuracies over the seeds as bars, with the lowest and the highest, and a bar of chance."""
    bars = {"ViT": ("ViT", "test"), "MViT": ("MViT", "test"), "ViT, frames shuffled": ("ViT", "shuffled")}
    bars |= {"MViT, frames shuffled": ("MViT", "shuffled"), "ViT, one frame": ("one frame", "test")}
    values = {label: [row[part] for row in rows if row["model"] == model] for label, (model, part) in bars.items()}
    values = {label: found for label, found in values.items() if found} | {"chance": [1 / CLASSES]}
    columns = (map(statistics.mean, values.values()), map(min, values.values()), map(max, values.values()))
    mean, low, high = (tuple(column) for column in columns)
    series = Series("test accuracy", tuple(values), mean, low, high)
    return render_svg(Chart("Accuracy on moving-digits", "bars", (series,), "", "test videos", from_zero=True))


def measure_shuffled(model: Model) -> float:
    """Return the accuracy on test clips whose frames are in a random order, another one for each clip."""
    images, rng, pipeline = load_dataset(DATA)["test"], np.random.default_rng(0), model.preprocessing
    runtime = TorchRuntime(model, pipeline)  # pyright: ignore[reportArgumentType]

    def forward(pixels: np.ndarray) -> np.ndarray:
        return runtime(np.stack([clip[:, rng.permutation(clip.shape[1])] for clip in pixels]))

    batches = run_batches(forward, images, pipeline, {})  # pyright: ignore[reportArgumentType]
    hits = [(batch.outputs.argmax(1) == images.targets[batch.indices]).sum() for batch in batches]
    return float(sum(hits)) / len(images)


def train_few_labels(options: argparse.Namespace, folder: Path) -> None:
    """Pretrain once, then train with few labels: fine-tuned, and from scratch with two recipes."""
    pretrained, arms = folder / "videomae", ("fine-tuned", "same recipe", "recipe video")
    if (pretrained / "recipe.json").is_file():
        vitrail.resume(pretrained)
    else:
        vitrail.pretrain(DATA, method="videomae", epochs=options.pretraining_epochs, out=pretrained)
    rows: list[dict[str, Any]] = []
    length: dict[str, Any] = {} if options.steps is None else {"steps": options.steps}
    for seed in options.seeds:
        data: Any = Data(DATA, per_class=options.labels, drawn=seed)
        scores: dict[str, float] = {}
        for arm in arms:
            run = folder / f"{arm.replace(' ', '-')}-{options.labels}-{seed}"
            if (run / "recipe.json").is_file():
                summary = vitrail.resume(run)[1]
            elif arm == "fine-tuned":
                summary = vitrail.train(data, init=pretrained, seed=seed, out=run, **length)[1]
            else:
                tuned = read_recipe(folder / f"fine-tuned-{options.labels}-{seed}" / "recipe.json")
                recipe = replace(tuned, init=None)
                if arm == "recipe video":
                    recipe = replace(
                        read_video_recipe(data, length), model=tuned.model, preprocessing=tuned.preprocessing
                    )
                summary = vitrail.train(recipe=replace(recipe, data=data, seed=seed), out=run)[1]
            scores[arm] = summary["test"]["top1"]
            rows.append({"arm": arm, "labels": options.labels, "seed": seed, "test": scores[arm]})
            print(json.dumps(rows[-1] | {"seconds": summary["seconds"]}), flush=True)
            measure.save("moving_digits_few_labels", rows)
    for arm in arms:
        values = [100 * row["test"] for row in rows if row["arm"] == arm]
        print(f"{arm:<14}{statistics.mean(values):6.1f} %, {len(values)} seeds")
    for arm in arms[1:]:
        by_arm = [[100 * row["test"] for row in rows if row["arm"] == name] for name in (arms[0], arm)]
        gains = [ours - theirs for ours, theirs in zip(*by_arm, strict=True)]
        if len(gains) > 1:
            half = float(stdtrit(len(gains) - 1, 0.975)) * statistics.stdev(gains) / len(gains) ** 0.5
            mean = statistics.mean(gains)
            print(f"fine-tuned is {mean:+.1f} points from {arm} ({mean - half:.1f} to {mean + half:.1f})")


def read_video_recipe(data: Data, length: dict[str, Any]) -> Recipe:
    """Return the recipe `video` for this data, of this length if one is given."""
    facts = prepare_data(data).measure_facts()
    facts.overrides = length
    return build_recipe("video", facts, data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=float, default=4.0, help="training epochs of each run [4]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=("ViT", "MViT", "one frame"), help="models to train [all]")
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs, to resume them [temporary]")
    parser.add_argument("--figure", type=Path, help="chart of the accuracies, an SVG file")
    parser.add_argument("--labels", type=int, help="pretrain with VideoMAE, then train with so many labels per class")
    parser.add_argument("--pretraining-epochs", type=float, default=100.0, help="with --labels [100]")
    parser.add_argument(
        "--steps", type=int, help="with --labels: steps of the trainings with labels [as their recipes]"
    )
    options = parser.parse_args()
    if options.labels is not None:
        with tempfile.TemporaryDirectory() as temporary:
            train_few_labels(options, options.runs or Path(temporary))
        return
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
    if options.figure is not None:
        options.figure.write_text(draw(rows))
    for name in models:
        for what in ("test", "shuffled"):
            values = [100 * row[what] for row in rows if row["model"] == name and what in row]
            if values:
                spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
                print(f"{name:<10} {what:<9}{statistics.mean(values):6.1f}{spread} %, {len(values)} seeds")


if __name__ == "__main__":
    main()
