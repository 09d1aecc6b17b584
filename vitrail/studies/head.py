"""Class token against mean of the patches, at several learning rates (figure 9).

    vitrail paper run head --scale laptop

Both heads run with every learning rate and seed on validation images; the whole grid is reported. Each head then runs at its best
learning rate and is compared on test images. The loss of a head at the other's learning rate is known from validation images
only, which selected the learning rates; the finding says so.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from vitrail.studies.base import build_recipe, configure_study_vit, find_missing, incomplete_answer
from vitrail.studies.intervals import (
    build_series,
    count_test_images,
    estimate_difference,
    format_accuracy,
    format_points,
    group_values,
)
from vitrail.studies.study import Agreement, Answer, Cell, CellResult, Chart, Study, StudyScale, StudySetup

TOKEN, MEAN = "class token", "mean of patches"
POOLS = {TOKEN: "class", MEAN: "mean"}
LIMITS = (
    "A short training of a small model. The best learning rate is known only up to the distance between the learning "
    "rates that were tried, and "
    "depends on how long one trains; the paper compares the two over a whole pre-training."
)
MAX_SIMILAR_DIFFERENCE = 0.01  # one point: up to this heads count as similar
LRGrid = Mapping[str, Mapping[float, Sequence[float]]]  # head -> learning rate -> validation accuracy of each seed


def plan(setup: StudySetup, results: Sequence[CellResult]) -> list[Cell]:
    """Return both heads at every learning rate, and each at its best once its tuning runs are finished."""
    scale, grid = setup.scale, group_validation(results)
    models = {head: configure_study_vit(setup, pool=pool) for head, pool in POOLS.items()}
    points = [(head, lr, seed) for head in POOLS for lr in scale.lrs for seed in range(scale.seeds)]
    cells = [Cell(grid_point(*point), build_recipe(setup, models[point[0]], *point[1:]), "tune") for point in points]
    for head, model in models.items():
        tries = grid.get(head, {})
        if all(len(tries.get(lr, ())) == scale.seeds for lr in scale.lrs):
            lr = select_best_lr(tries)
            cells += [
                Cell(grid_point(head, lr, seed), build_recipe(setup, model, lr, seed)) for seed in range(scale.seeds)
            ]
    return cells


def grid_point(head: str, lr: float, seed: int) -> dict[str, str | float | int]:
    """Return a grid point with learning rate and seed."""
    return {"head": head, "rate": lr, "seed": seed}


def group_validation(results: Sequence[CellResult]) -> LRGrid:
    """Return validation accuracies by head and learning rate, in ascending order of the learning rate."""
    grid: dict[str, dict[float, list[float]]] = {}
    for (head, lr), values in group_values(results, "head", "rate", phase="tune", number="validation").items():
        grid.setdefault(str(head), {})[float(lr or 0)] = values
    return {head: dict(sorted(grid[head].items())) for head in POOLS if head in grid}


def select_best_lr(tries: Mapping[float, Sequence[float]]) -> float:
    """Return the learning rate with the best mean validation accuracy, the lowest of ties."""
    return max(tries, key=lambda lr: (fmean(tries[lr]), -lr))


def interpret_results(results: Sequence[CellResult], scale: StudyScale) -> Answer:
    grid, n_images = group_validation(results), count_test_images(results)
    tests = {str(head): values for (head,), values in group_values(results, "head").items()}
    both = [(head,) for head in grid if head in tests]
    if missing := find_missing(both, POOLS):
        return incomplete_answer(missing, LIMITS)
    finding, agreement = formulate_finding(grid, tests, n_images)
    lrs = sorted({lr for tries in grid.values() for lr in tries})
    rows = [(f"{lr:g}", *(format_accuracy(grid.get(head, {}).get(lr)) for head in POOLS)) for lr in lrs]
    rows.append(("best learning rate", *(f"{select_best_lr(grid[head]):g}" for head in POOLS)))
    rows.append(("test, at its best learning rate", *(format_accuracy(tests.get(head), n_images) for head in POOLS)))
    return Answer(
        finding=finding,
        agreement=agreement,
        columns=("rate", f"{TOKEN}, validation", f"{MEAN}, validation"),
        rows=tuple(rows),
        charts=(
            Chart(
                "Validation accuracy at every rate",
                "lines",
                tuple(build_series(head, {**tries}, None) for head, tries in grid.items()),
                x_name="learning rate",
                y_name="top-1",
                x_log=True,
            ),
        ),
        limits=LIMITS,
        notes=(
            "The grid is of validation images; test images were used once, at each head's best learning rate.",
            f"Heads count as similar where they differ by {100 * MAX_SIMILAR_DIFFERENCE:.0f} point or less; a clear "
            "difference beyond that would "
            "be a disagreement.",
        ),
    )


def formulate_finding(
    grid: LRGrid, tests: Mapping[str, Sequence[float]], n_images: int | None
) -> tuple[str, Agreement]:
    """Compare both heads at their best learning rates on test images, and each at the other's on validation images."""
    apart = estimate_difference(tests[TOKEN], tests[MEAN], n_images)
    lrs = {head: select_best_lr(grid[head]) for head in POOLS}
    where = f"{lrs[TOKEN]:g} for the {TOKEN}, {lrs[MEAN]:g} for the {MEAN}"
    if apart.is_clear and abs(apart.mean) > MAX_SIMILAR_DIFFERENCE:
        better, worse = (TOKEN, MEAN) if apart.mean > 0 else (MEAN, TOKEN)
        ahead = apart if apart.mean > 0 else apart.negated
        return (
            f"The {better} is better than the {worse} by {format_points(ahead)}, each at its best learning rate ({where}).",
            "disagrees",
        )
    if abs(apart.mean) > MAX_SIMILAR_DIFFERENCE:
        return (
            f"Whether the heads differ, each at its best learning rate ({where}), is unclear: {TOKEN} minus {MEAN} is "
            f"{format_points(apart)}.",
            "unclear",
        )
    differ = (
        f"differ by {100 * MAX_SIMILAR_DIFFERENCE:.0f} point at most" if apart.is_clear else "do not differ clearly"
    )
    alike = (
        f"The heads {differ}, each at its best learning rate ({where}): {TOKEN} minus {MEAN} is {format_points(apart)}"
    )
    if lrs[TOKEN] == lrs[MEAN]:
        return (
            f"{alike}; but one learning rate is the best for both, so there is no evidence that they need different ones.",
            "unclear",
        )
    losses = {
        head: estimate_difference(grid[head][lrs[other]], grid[head][lrs[head]])
        for head, other in ((TOKEN, MEAN), (MEAN, TOKEN))
        if lrs[other] in grid[head]
    }
    clear = [
        f"the {head} changes by {format_points(loss)}"
        for head, loss in losses.items()
        if loss.is_clear and loss.mean < 0
    ]
    if clear:
        chosen = "on the validation images that chose the learning rates, which makes it look more certain than it is"
        return f"{alike}; at the other's learning rate {' and '.join(clear)}, {chosen}.", "agrees"
    return (
        f"{alike}; but neither clearly loses at the other's learning rate, so there is no evidence that they need "
        "different ones.",
        "unclear",
    )


STUDY = Study(
    name="head",
    question="Does a class token work better than mean pooling, and do both need the same learning rate?",
    reference="figure 9, appendix D.3",
    paper_finding=(
        "A class token and global average pooling work similarly well, but require different learning rates: at first pooling "
        "“performed very poorly”, which the learning rate alone explains (in a figure; no number is given)."
    ),
    scales={
        "test": StudyScale(
            "digits", 0.2, "one core", seeds=1, steps=4, batch=32, lrs=(1e-3, 1e-2),
            sizes={"width": 16, "depth": 1, "heads": 2, "patch": 2},
        ),
        # 49 tokens, width 64, depth 4: 350 images/s on an idle core, 1,000/s without training. 800 steps × 64 = 51,200: 146
        # s. A tuning run: + 12,000 validation images 12 s + 8 s to start = 166 s; 2 heads × 5 rates × 3 seeds = 30 tuning
        # runs: 4,980 s. A final run: + 10,000 test images = 176 s; 6 of them: 1,056 s. 6,036 s, two at a time 50 min.
        "laptop": StudyScale(
            "fashion-mnist", 50, "two cores", seeds=3, steps=800, batch=64, lrs=(4e-4, 1e-3, 2.5e-3, 6e-3, 1.5e-2),
            sizes={"width": 64, "depth": 4, "heads": 4, "patch": 4},
        ),
        # 64 tokens of CIFAR-10, Ti's width and depth, estimated with 10,000 images/s: 10,000 steps × 256 take 256 s, and 30
        # s more. 36 runs × 286 s = 172 min.
        "gpu": StudyScale(
            "cifar-10", 172, "one GPU", seeds=3, steps=10_000, batch=256, lrs=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
            sizes={"width": 192, "depth": 12, "heads": 3, "patch": 4, "precision": "bf16", "warmup": 1_000},
        ),
        # B/16 as in table 3 for ImageNet-21k, 30 epochs of 14 M: 102,500 steps, 19 h, estimated with 6,000 images/s. 2 × (3
        # + 1) runs.
        "cluster": StudyScale(
            "imagenet-21k", 9_300, "8 GPUs", seeds=1, steps=102_500, batch=4096, lrs=(3e-4, 1e-3, 3e-3),
            sizes={
                "width": 768, "depth": 12, "heads": 12, "patch": 16, "image": 224, "dropout": 0.1, "weight_decay": 0.03,
                "precision": "bf16", "warmup": 10_000,
            },
        ),
    },
    plan=plan,
    interpret=interpret_results,
)  # fmt: skip
