"""Attention against the encoders of sequences that came before it, as the number of patches grows.

    vitrail paper run ancestors --scale laptop

The same patches are read by a Vision Transformer, a recurrent network, an LSTM and a Neural Turing Machine. For each number of
patches the width of the others is chosen so that an image costs as many multiply-adds as in the Vision Transformer. The learning
rate of every model is tuned with the same number of runs. Times are those of the machine that ran the study.
"""

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitrail.checkpoints.load import load
from vitrail.models.base import ModelConfig
from vitrail.models.recurrent import ENCODERS
from vitrail.models.registry import configure
from vitrail.studies import base
from vitrail.studies.base import VIT
from vitrail.studies.intervals import Scores, format_points
from vitrail.studies.study import Answer, Cell, Chart, Finding, Results, Series, Study, StudyScale, StudySetup

RECURRENT = {"RNN": "rnn", "LSTM": "lstm", "Neural Turing Machine": "ntm"}
MODELS = (VIT, *RECURRENT)
TIMED_BATCH, TIMED_ROUNDS = 32, 5
MAX_COST_DIFFERENCE = 0.1  # relative to the Vision Transformer's
LIMITS = (
    "Small models on small images, trained briefly. The recurrent networks have one layer and no attention between their "
    "outputs; deeper ones, or better ways to read an image, may do better. The Turing machine runs as a loop in Python. Times "
    "are of this implementation, on the machine of the study and beside whatever else it did."
)
NOTES = (
    "The paper publishes no comparison of the two: agreement is with the choice that its authors made.",
    "Multiply-adds per image are matched within 10 % for each number of patches; parameters are not.",
)


def plan(setup: StudySetup, results: Results) -> list[Cell]:
    """Return the cells of every model at every number of patches, each with its own tuning."""
    chosen = setup.scale.sizes.get("models", MODELS)
    models: list[tuple[dict[str, Any], ModelConfig]] = []
    for patch in setup.scale.sizes["patches"]:
        vit = base.configure_study_vit(setup, patch=patch)
        count = vit.shape.patches
        for name in chosen:
            model = vit if name == VIT else match_width(setup, RECURRENT[name], vit)
            models.append(({"encoder": name, "patches": count}, model))
    return base.plan_models(setup, results, models)


def match_width(setup: StudySetup, encoder: str, vit: ModelConfig) -> ModelConfig:
    """Return the recurrent network over the same patches whose cost is nearest to the Vision Transformer's."""

    def build(width: int) -> ModelConfig:
        return configure(
            family="recurrent",
            encoder=ENCODERS[encoder],
            width=width,
            patch=vit.stride,
            classes=setup.facts.classes,
            channels=setup.facts.channels,
            image_size=vit.image_size,
        )

    cost = base.count_macs(vit)
    model = base.find_nearest_width(cost, build, 2)
    if abs(base.count_macs(model) - cost) > MAX_COST_DIFFERENCE * cost:
        costs = f"{base.count_macs(model) / 1e6:.2f} M multiply-adds, the Vision Transformer {cost / 1e6:.2f} M"
        raise ValueError(f"no width of {encoder} costs as much: nearest {costs}; use larger models")
    return model


def measure(cell: Cell, run: Path) -> dict[str, Any]:
    """Return the milliseconds per image of inference and of a training step, without the optimiser."""
    if cell.phase != "final":
        return {}
    model = load(run / "model.safetensors")
    images = torch.zeros(TIMED_BATCH, model.config.channels, *model.config.image_size)
    times: dict[str, list[float]] = {"milliseconds": [], "training milliseconds": []}
    for _ in range(TIMED_ROUNDS + 1):
        start = time.perf_counter()
        with torch.inference_mode():
            model.eval()(images)
        middle = time.perf_counter()
        model.train()(images).sum().backward()
        end = time.perf_counter()
        for name, seconds in zip(times, (middle - start, end - middle), strict=True):
            times[name].append(1e3 * seconds / TIMED_BATCH)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def interpret_results(results: Results, scale: StudyScale) -> Answer:
    tests = Scores(results, "encoder", "patches")
    speeds = {
        name: Scores(results, "encoder", "patches", number=name) for name in ("milliseconds", "training milliseconds")
    }
    counts = sorted({count for _, count in tests})
    missing = [f"{VIT}, {count} patches" for count in counts if (VIT, count) not in tests] if counts else [VIT]
    if missing or not any((name, counts[-1]) in tests for name in RECURRENT):
        return base.incomplete_answer(missing or ["an encoder besides the ViT"], LIMITS)
    points = [(name, count) for count in counts for name in MODELS if (name, count) in tests]
    return Answer(
        *formulate_finding(tests, speeds["training milliseconds"], counts),
        columns=(
            "encoder",
            "patches",
            "learning rate",
            "test",
            "against ViT",
            "ms per image",
            "training",
            "of the ViT's",
        ),
        rows=tuple(
            (
                point[0],
                str(point[1]),
                *tests.format_row(point, (VIT, point[1])),
                *(f"{value:.2f}" if (value := mean_time(times, point)) else "–" for times in speeds.values()),
                format_ratio(speeds["training milliseconds"], point),
            )
            for point in points
        ),
        charts=(
            draw_lines("Test accuracy by the number of patches", "top-1", tests, counts),
            draw_lines("Time of a training step per image", "milliseconds", speeds["training milliseconds"], counts),
        ),
        limits=LIMITS,
        notes=NOTES,
    )


def mean_time(times: Scores, point: tuple[str, Any]) -> float | None:
    """Return the mean time at a grid point; None if it was not measured."""
    return statistics.fmean(times[point]) if times.get(point) else None


def format_ratio(times: Scores, point: tuple[str, Any]) -> str:
    """Return a time relative to the Vision Transformer's with as many patches: 3.1×."""
    own, vit = mean_time(times, point), mean_time(times, (VIT, point[1]))
    return f"{own / vit:.1f}×" if own and vit and point[0] != VIT else "–"


def draw_lines(title: str, y_name: str, scores: Scores, counts: list[Any]) -> Chart:
    """Return the chart of a number by the number of patches, a line for each encoder."""
    series: list[Series] = []
    for name in MODELS:
        points = {(name, count): float(count) for count in counts if (name, count) in scores}
        if points:
            series.append(scores.series(name, points))
    chart = Chart(title, "lines", tuple(series), "patches", y_name, x_log=True)
    return chart if y_name == "top-1" else replace(chart, percent=False)


def formulate_finding(tests: Scores, times: Scores, counts: list[Any]) -> Finding:
    """Compare attention with every other encoder at the largest number of patches, in accuracy and in time."""
    most = counts[-1]
    others = [name for name in RECURRENT if (name, most) in tests]
    apart = {name: tests.subtract((VIT, most), (name, most)) for name in others}
    listed = "; ".join(f"{name} {format_points(difference)}" for name, difference in apart.items())
    ratios = [f"{name} {format_ratio(times, (name, most))}" for name in others]
    took = f"; a training step takes, relative to the ViT's: {', '.join(ratios)}"
    took = "" if any(ratio.endswith("–") for ratio in ratios) else took
    if any(difference.is_loss for difference in apart.values()):
        return f"With {most} patches an older encoder is better than attention: ViT minus {listed}{took}.", "disagrees"
    if all(difference.is_clear for difference in apart.values()):
        return f"With {most} patches attention is better than every older encoder: ViT minus {listed}{took}.", "agrees"
    if not any(difference.is_clear for difference in apart.values()):
        return f"No clear difference with {most} patches: ViT minus {listed}{took}.", "no difference"
    return f"With {most} patches attention is better than some older encoders: ViT minus {listed}{took}.", "unclear"


STUDY = Study(
    name="ancestors",
    question="What does attention gain over the sequence encoders before it, as the number of patches grows?",
    reference="section 3 (the choice of the Transformer)",
    paper_finding=(
        "The authors use the Transformer of 2017, which replaced recurrence because its steps cannot run in parallel and because "
        "the path between distant tokens grows with their distance; they publish no comparison on images."
    ),
    scales={
        "test": base.on_one_core(sizes=base.vit_sizes(16, 2, 2, 4, patches=(4, 2))),
        # 4, 16 and 49 patches, width 64, depth 4. Estimated: a run of 800 steps × 64 images takes 60 s (4 patches) to 150 s (49)
        # for the ViT, RNN and LSTM, 60 to 500 s for the Turing machine. 3 sizes × 4 models × (2 + 3) runs.
        "laptop": base.on_two_cores(data="fashion-mnist", minutes=70, lrs=(1e-3, 3e-3),
            sizes=base.vit_sizes(64, 4, 4, 4, patches=(14, 7, 4))),
        # 16, 64 and 256 patches of CIFAR-10 at Ti's width and depth; the Turing machine takes most of the time.
        "gpu": base.on_gpu(minutes=1_500, lrs=(3e-4, 1e-3, 3e-3), sizes=base.vit_sizes(
            192, 12, 3, 4, patches=(8, 4, 2), precision="bf16", warmup=1_000)),
        # B with patches of 32, 16 and 8 pixels on ImageNet-21k; RNN and LSTM only, a Turing machine of this size is impractical.
        "cluster": base.on_cluster(minutes=60_000, lrs=(1e-3,), sizes={
            **base.B16, "patches": (32, 16, 8), "models": (VIT, "RNN", "LSTM")}),
    },
    plan=plan, interpret=interpret_results, measure=measure,
)  # fmt: skip
