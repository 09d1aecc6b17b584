"""Class token against mean of the patches, at several learning rates (figure 9).

    vitrail paper run head --scale laptop

Both heads run with every learning rate and seed on validation images; the whole grid is reported. Each head then runs at its best
learning rate and is compared on test images. The loss of a head at the other's learning rate is known from validation images
only, which selected the learning rates; the finding says so.
"""

from statistics import fmean
from typing import Literal

from vitrail.studies import base
from vitrail.studies.intervals import Scores, format_points
from vitrail.studies.study import Answer, Cell, Finding, Results, Study, StudyScale, StudySetup

TOKEN, MEAN = "class token", "mean of patches"
POOLS = {TOKEN: "class", MEAN: "mean"}
LIMITS = (
    "A short training of a small model. The best learning rate is known only up to the distance between the learning rates that "
    "were tried, and depends on how long one trains; the paper compares the two over a whole pre-training."
)
MAX_SIMILAR_DIFFERENCE = 0.01  # one point: up to this heads count as similar
NOTES = (
    "The grid is of validation images; test images were used once, at each head's best learning rate.",
    f"Heads count as similar where they differ by {100 * MAX_SIMILAR_DIFFERENCE:.0f} point or less; a clear difference beyond "
    "that would be a disagreement.",
)


def plan(setup: StudySetup, results: Results) -> list[Cell]:
    """Return both heads at every learning rate, and each at its best once its tuning runs are finished."""
    scale, grid = setup.scale, group_validation(results)
    models = {head: base.configure_study_vit(setup, pool=pool) for head, pool in POOLS.items()}
    tuned = [head for head in POOLS if all(len(grid.get((head, lr), ())) == scale.seeds for lr in scale.lrs)]
    best = {head: select_best_lr(grid, head) for head in tuned}

    def make_cell(head: str, lr: float, seed: int, phase: Literal["tune", "final"]) -> Cell:
        return Cell({"head": head, "rate": lr, "seed": seed}, base.build_recipe(setup, models[head], lr, seed), phase)

    seeds = range(scale.seeds)
    cells = [make_cell(head, lr, seed, "tune") for head in POOLS for lr in scale.lrs for seed in seeds]
    return cells + [make_cell(head, lr, seed, "final") for head, lr in best.items() for seed in seeds]


def group_validation(results: Results) -> Scores:
    """Return validation accuracies by head and learning rate, in ascending order of the learning rate."""
    lrs = sorted({float(str(result.at["rate"])) for result in results if result.phase == "tune"})
    order = [(head, lr) for head in POOLS for lr in lrs]
    return Scores(results, "head", "rate", phase="tune", number="validation", order=order)


def select_best_lr(grid: Scores, head: str) -> float:
    """Return the learning rate with the best mean validation accuracy, the lowest of ties."""
    return max((lr for name, lr in grid if name == head), key=lambda lr: (fmean(grid[head, lr]), -lr))


def interpret_results(results: Results, scale: StudyScale) -> Answer:
    grid, tests = group_validation(results), Scores(results, "head")
    lrs = {head: [lr for name, lr in grid if name == head] for head in POOLS}
    if missing := [head for head in POOLS if not lrs[head] or head not in tests]:
        return base.incomplete_answer(missing, LIMITS)
    lines = {head: {(head, lr): lr for lr in lrs[head]} for head in POOLS}
    return Answer(
        *formulate_finding(grid, tests),
        columns=("learning rate", f"{TOKEN}, validation", f"{MEAN}, validation"),
        rows=(
            *((f"{lr:g}", *(grid.format((head, lr)) for head in POOLS)) for lr in sorted({*lrs[TOKEN], *lrs[MEAN]})),
            ("best learning rate", *(f"{select_best_lr(grid, head):g}" for head in POOLS)),
            ("test, at its best learning rate", *(tests.format(head) for head in POOLS)),
        ),
        charts=(grid.lines("Validation accuracy at every rate", lines, "learning rate"),),
        limits=LIMITS,
        notes=NOTES,
    )


def formulate_finding(grid: Scores, tests: Scores) -> Finding:
    """Compare both heads at their best learning rates on test images, and each at the other's on validation images."""
    apart = tests.subtract(TOKEN, MEAN)
    lrs = {head: select_best_lr(grid, head) for head in POOLS}
    each = f"each at its best learning rate ({lrs[TOKEN]:g} for the {TOKEN}, {lrs[MEAN]:g} for the {MEAN})"
    minus = f"{TOKEN} minus {MEAN} is {format_points(apart)}"
    if abs(apart.mean) > MAX_SIMILAR_DIFFERENCE:
        if not apart.is_clear:
            return f"Whether the heads differ, {each}, is unclear: {minus}.", "unclear"
        better, worse, ahead = (TOKEN, MEAN, apart) if apart.is_gain else (MEAN, TOKEN, apart.negated)
        return f"The {better} is better than the {worse} by {format_points(ahead)}, {each}.", "disagrees"
    similar = f"differ by {100 * MAX_SIMILAR_DIFFERENCE:.0f} point at most"
    alike = f"The heads {similar if apart.is_clear else 'do not differ clearly'}, {each}: {minus}"
    no_need = "so there is no evidence that they need different ones"
    if lrs[TOKEN] == lrs[MEAN]:
        return f"{alike}; but one learning rate is the best for both, {no_need}.", "unclear"
    losses = {
        head: grid.subtract((head, lrs[other]), (head, lrs[head]))
        for head, other in ((TOKEN, MEAN), (MEAN, TOKEN))
        if (head, lrs[other]) in grid
    }
    clear = [f"the {head} changes by {format_points(loss)}" for head, loss in losses.items() if loss.is_loss]
    if not clear:
        return f"{alike}; but neither clearly loses at the other's learning rate, {no_need}.", "unclear"
    chosen = "on the validation images that chose the learning rates, which makes it look more certain than it is"
    return f"{alike}; at the other's learning rate {' and '.join(clear)}, {chosen}.", "agrees"


STUDY = Study(
    name="head",
    question="Does a class token work better than mean pooling, and do both need the same learning rate?",
    reference="figure 9, appendix D.3",
    paper_finding=(
        "A class token and global average pooling work similarly well, but require different learning rates: at first pooling "
        "“performed very poorly”, which the learning rate alone explains (in a figure; no number is given)."
    ),
    scales={
        "test": base.on_one_core(seeds=1, lrs=(1e-3, 1e-2), sizes=base.vit_sizes(16, 1, 2, 2)),
        # 49 tokens, width 64, depth 4: 350 images/s on an idle core, 1,000/s without training. 800 steps × 64 = 51,200: 146
        # s. A tuning run: + 12,000 validation images 12 s + 8 s to start = 166 s; 2 heads × 5 rates × 3 seeds = 30 tuning
        # runs: 4,980 s. A final run: + 10,000 test images = 176 s; 6 of them: 1,056 s. 6,036 s, two at a time 50 min.
        "laptop": base.on_two_cores(data="fashion-mnist", minutes=50, lrs=(4e-4, 1e-3, 2.5e-3, 6e-3, 1.5e-2),
            sizes=base.vit_sizes(64, 4, 4, 4)),
        # 64 tokens of CIFAR-10, Ti's width and depth, estimated with 10,000 images/s: 10,000 steps × 256 take 256 s, and 30
        # s more. 36 runs × 286 s = 172 min.
        "gpu": base.on_gpu(minutes=172, lrs=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2), sizes=base.TI_CIFAR),
        # B/16 as in table 3 for ImageNet-21k, 30 epochs of 14 M: 102,500 steps, 19 h, estimated with 6,000 images/s. 2 × (3
        # + 1) runs.
        "cluster": base.on_cluster(minutes=9_300, lrs=(3e-4, 1e-3, 3e-3), sizes=base.B16),
    },
    plan=plan, interpret=interpret_results,
)  # fmt: skip
