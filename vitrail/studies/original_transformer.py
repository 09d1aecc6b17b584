"""The Vision Transformer's encoder against the Transformer of 2017, and the effect of its three changes (section 3).

    vitrail paper run original-transformer --scale laptop

Pre-norm, GELU and learned positions against post-norm, ReLU and fixed sinusoids; and the Vision Transformer with one of the three
changes reverted. The learning rate of each encoder is tuned with the same number of runs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vitrail.nn.block import PostNorm, PreNorm
from vitrail.nn.mlp import GELU, ReLU
from vitrail.nn.position import Sinusoid1D
from vitrail.studies.base import build_recipe, configure_study_vit, find_missing, incomplete_answer, plan_tuned
from vitrail.studies.intervals import (
    Difference,
    build_series,
    count_test_images,
    estimate_difference,
    find_lr,
    format_accuracy,
    format_difference,
    format_points,
    group_values,
)
from vitrail.studies.study import Agreement, Answer, Cell, CellResult, Chart, GridPoint, Study, StudyScale, StudySetup
from vitrail.training.recipe import Recipe

VIT, ORIGINAL = "ViT", "Transformer of 2017"
ENCODERS: dict[str, dict[str, Any]] = {
    VIT: {},
    "ViT, norm after": {"block": PostNorm(mlp=GELU())},
    "ViT, ReLU": {"block": PreNorm(mlp=ReLU())},
    "ViT, sinusoid": {"position": Sinusoid1D()},
    ORIGINAL: {"block": PostNorm(mlp=ReLU()), "position": Sinusoid1D()},
}

LIMITS = (
    "A few layers, trained briefly, with a warm-up. Post-norm is known to be unstable in deep models and without warm-up, which "
    "this scale cannot show. The learning rate of every encoder is tuned."
)


def plan(setup: StudySetup, results: Sequence[CellResult]) -> list[Cell]:
    """Return the cells of every encoder, each with its own tuning."""

    def make_recipe(point: GridPoint, lr: float, seed: int) -> Recipe:
        return build_recipe(setup, configure_study_vit(setup, **ENCODERS[str(point["encoder"])]), lr, seed)

    points = [{"encoder": name} for name in setup.scale.sizes.get("encoders", tuple(ENCODERS))]
    return plan_tuned(setup, results, points, make_recipe)


def interpret_results(results: Sequence[CellResult], scale: StudyScale) -> Answer:
    tests = {str(name): values for (name,), values in group_values(results, "encoder").items()}
    tests = {name: tests[name] for name in ENCODERS if name in tests}
    if missing := find_missing([(name,) for name in tests], (VIT, ORIGINAL)):
        return incomplete_answer(missing, LIMITS)
    n_images = count_test_images(results)
    changes = {name: estimate_difference(v, tests[VIT], n_images) for name, v in tests.items() if name != VIT}
    finding, agreement = formulate_finding(changes)
    return Answer(
        finding=finding,
        agreement=agreement,
        columns=("encoder", "rate", "test", "against ViT"),
        rows=tuple(
            (
                name,
                find_lr(results, {"encoder": name}),
                format_accuracy(values, n_images),
                format_difference(changes.get(name)),
            )
            for name, values in tests.items()
        ),
        charts=(
            Chart("Test accuracy by encoder", "dots", (build_series("test", {**tests}, n_images),), y_name="top-1"),
        ),
        limits=LIMITS,
        notes=(
            "The paper publishes no comparison of the two: agreement is with the choice that its authors made.",
            *(
                f"One change reverted: {name.removeprefix('ViT, ')} {format_points(change)}, "
                + ("a clear difference." if change.is_clear else "no clear difference.")
                for name, change in changes.items()
                if name != ORIGINAL
            ),
        ),
    )


def formulate_finding(changes: Mapping[str, Difference]) -> tuple[str, Agreement]:
    """Compare the Transformer of 2017 with the Vision Transformer, and list the single changes that make a difference."""
    whole = changes[ORIGINAL]
    single = {name.removeprefix("ViT, "): change for name, change in changes.items() if name != ORIGINAL}
    clear = [f"{name} {format_points(change)}" for name, change in single.items() if change.is_clear]
    alone = f"; of single changes, these make a clear difference: {', '.join(clear)}" if clear else ""
    if single and not clear:
        alone = "; no single change makes a clear difference"
    if not whole.is_clear:
        return (
            f"No difference at this scale between the {ORIGINAL} and the ViT: {format_points(whole)}{alone}.",
            "no difference",
        )
    if whole.mean < 0:
        return f"The {ORIGINAL} is worse than the ViT: {format_points(whole)}{alone}.", "agrees"
    return f"The {ORIGINAL} is better than the ViT: {format_points(whole)}{alone}.", "disagrees"


STUDY = Study(
    name="original-transformer",
    question="What do the Vision Transformer's departures from the Transformer of 2017 change?",
    reference="section 3",
    paper_finding=(
        "The authors follow the Transformer of 2017 as closely as possible, but with norms before each branch, GELU in place of "
        "ReLU and learned positions in place of sinusoids; they publish no numbers for this choice."
    ),
    scales={
        "test": StudyScale(
            "digits", 0.2, "one core", seeds=2, steps=4, batch=32,
            sizes={"width": 16, "depth": 2, "heads": 2, "patch": 4, "encoders": (VIT, "ViT, norm after", ORIGINAL)},
        ),
        # 16 tokens, width 64, depth 8 (norms after each sum matter in depth): 450 images/s on an idle core, 1,300/s without
        # training. 800 steps × 64 = 51,200: 114 s. A tuning run: + 12,000 validation images 9 s + 8 s to start = 131 s. A
        # final run: + 10,000 test images = 139 s. 5 encoders × (4 × 131 + 3 × 139) = 4,705 s; two at a time 39 min.
        "laptop": StudyScale(
            "fashion-mnist", 39, "two cores", seeds=3, steps=800, batch=64, lrs=(3e-4, 1e-3, 2e-3, 4e-3),
            sizes={"width": 64, "depth": 8, "heads": 4, "patch": 7},
        ),
        # 64 tokens of CIFAR-10, Ti's width and depth, estimated with 10,000 images/s: 10,000 steps × 256 take 256 s, and 30
        # s more. 5 encoders × 7 runs × 286 s = 167 min.
        "gpu": StudyScale(
            "cifar-10", 167, "one GPU", seeds=3, steps=10_000, batch=256, lrs=(1e-4, 3e-4, 1e-3, 3e-3),
            sizes={"width": 192, "depth": 12, "heads": 3, "patch": 4, "precision": "bf16", "warmup": 1_000},
        ),
        # B/16 as in table 3 for ImageNet-21k, 30 epochs of 14 M: 102,500 steps, 19 h, estimated with 6,000 images/s. 5 × (2
        # + 1) runs.
        "cluster": StudyScale(
            "imagenet-21k", 17_500, "8 GPUs", seeds=1, steps=102_500, batch=4096, lrs=(3e-4, 1e-3),
            sizes={
                "width": 768, "depth": 12, "heads": 12, "patch": 16, "image": 224, "dropout": 0.1, "weight_decay": 0.03,
                "precision": "bf16", "warmup": 10_000,
            },
        ),
    },
    plan=plan,
    interpret=interpret_results,
)  # fmt: skip
