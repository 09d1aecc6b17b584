"""A class token or the mean of the patches: which one reads the picture better, and at which learning rate (figure 9).

    vitrail paper run head --scale laptop

Both with every rate and every seed, judged on validation pictures: the whole grid is reported. Then each at the rate that is best
for it, judged on test pictures: these are what is compared. What a head loses at the other's rate is known of validation pictures
alone, which chose the rates; the finding says so.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from vitrail.studies.accuracies import judged_on, series, told
from vitrail.studies.base import recipe, vit
from vitrail.studies.intervals import difference, grouped, points
from vitrail.studies.study import Agreement, Answer, Cell, Chart, Result, Scale, Setup, Study
from vitrail.studies.unfinished import lacking, too_early

TOKEN, MEAN = "class token", "mean of patches"
POOLS = {TOKEN: "class", MEAN: "mean"}
LIMITS = (
    "A short training of a small model. The best rate is known only up to the distance between the rates that were tried, and "
    "depends on how long one trains; the paper compares the two over a whole pre-training."
)
SIMILAR = 0.01  # one point: up to there heads are alike, however surely they differ
Grid = Mapping[str, Mapping[float, Sequence[float]]]  # head, rate, validation accuracy of each seed


def plan(setup: Setup, results: Sequence[Result]) -> list[Cell]:
    """Both heads at every rate; and each at its best once all of its tries are finished."""
    scale, grid = setup.scale, gathered(results)
    models = {head: vit(setup, pool=pool) for head, pool in POOLS.items()}
    places = [(head, rate, seed) for head in POOLS for rate in scale.rates for seed in range(scale.seeds)]
    cells = [Cell(at(*place), recipe(setup, models[place[0]], *place[1:]), "tune") for place in places]
    for head, model in models.items():
        tries = grid.get(head, {})
        if all(len(tries.get(rate, ())) == scale.seeds for rate in scale.rates):
            rate = best(tries)
            cells += [Cell(at(head, rate, seed), recipe(setup, model, rate, seed)) for seed in range(scale.seeds)]
    return cells


def at(head: str, rate: float, seed: int) -> dict[str, str | float | int]:
    """A place of the grid."""
    return {"head": head, "rate": rate, "seed": seed}


def gathered(results: Sequence[Result]) -> Grid:
    """The tries by head and rate, in order of the rates."""
    grid: dict[str, dict[float, list[float]]] = {}
    for (head, rate), values in grouped(results, "head", "rate", phase="tune", number="validation").items():
        grid.setdefault(str(head), {})[float(rate or 0)] = values
    return {head: dict(sorted(grid[head].items())) for head in POOLS if head in grid}


def best(tries: Mapping[float, Sequence[float]]) -> float:
    """The rate with the best mean on validation pictures, the lowest of equals."""
    return max(tries, key=lambda rate: (fmean(tries[rate]), -rate))


def read(results: Sequence[Result], scale: Scale) -> Answer:
    grid, pictures = gathered(results), judged_on(results)
    tests = {str(head): values for (head,), values in grouped(results, "head").items()}
    both = [(head,) for head in grid if head in tests]
    if missing := lacking(both, POOLS):
        return too_early(missing, LIMITS)
    finding, agreement = found(grid, tests, pictures)
    rates = sorted({rate for tries in grid.values() for rate in tries})
    rows = [(f"{rate:g}", *(told(grid.get(head, {}).get(rate)) for head in POOLS)) for rate in rates]
    rows.append(("best rate", *(f"{best(grid[head]):g}" for head in POOLS)))
    rows.append(("test, at its best rate", *(told(tests.get(head), pictures) for head in POOLS)))
    return Answer(
        finding=finding,
        agreement=agreement,
        columns=("rate", f"{TOKEN}, validation", f"{MEAN}, validation"),
        rows=tuple(rows),
        charts=(
            Chart(
                "Validation accuracy at every rate",
                "lines",
                tuple(series(head, {**tries}, None) for head, tries in grid.items()),
                x_name="learning rate",
                y_name="top-1",
                x_log=True,
            ),
        ),
        limits=LIMITS,
        notes=(
            "The grid is of validation pictures; test pictures were looked at once, at each head's best rate.",
            f"Heads count as alike where they differ by {100 * SIMILAR:.0f} point or less; a clear difference beyond that would "
            "be a disagreement.",
        ),
    )


def found(grid: Grid, tests: Mapping[str, Sequence[float]], pictures: int | None) -> tuple[str, Agreement]:
    """Both at their best rates on test pictures, and each at the other's, of which only validation pictures tell."""
    apart = difference(tests[TOKEN], tests[MEAN], pictures)
    rates = {head: best(grid[head]) for head in POOLS}
    where = f"{rates[TOKEN]:g} for the {TOKEN}, {rates[MEAN]:g} for the {MEAN}"
    if apart.clear and abs(apart.mean) > SIMILAR:
        better, worse = (TOKEN, MEAN) if apart.mean > 0 else (MEAN, TOKEN)
        ahead = apart if apart.mean > 0 else apart.opposite
        return (
            f"The {better} is better than the {worse} by {points(ahead)}, each at its best rate ({where}).",
            "disagrees",
        )
    if abs(apart.mean) > SIMILAR:
        return (
            f"Whether the heads differ, each at its best rate ({where}), cannot be told: {TOKEN} minus {MEAN} is "
            f"{points(apart)}.",
            "unclear",
        )
    differ = f"differ by {100 * SIMILAR:.0f} point at most" if apart.clear else "do not differ clearly"
    alike = f"The heads {differ}, each at its best rate ({where}): {TOKEN} minus {MEAN} is {points(apart)}"
    if rates[TOKEN] == rates[MEAN]:
        return f"{alike}; but one rate is the best for both, so no need for different ones is seen.", "unclear"
    losses = {
        head: difference(grid[head][rates[other]], grid[head][rates[head]])
        for head, other in ((TOKEN, MEAN), (MEAN, TOKEN))
        if rates[other] in grid[head]
    }
    clear = [f"the {head} changes by {points(loss)}" for head, loss in losses.items() if loss.clear and loss.mean < 0]
    if clear:
        chosen = "on the validation pictures that chose the rates, which makes it look surer than it is"
        return f"{alike}; at the other's rate {' and '.join(clear)}, {chosen}.", "agrees"
    return f"{alike}; but neither clearly loses at the other's rate, so no need for different ones is seen.", "unclear"


STUDY = Study(
    name="head",
    question="Does it matter whether a class token or the mean of the patches is read, and do both want the same learning rate?",
    where="figure 9, appendix D.3",
    found=(
        "A class token and global average pooling work similarly well, but require different learning rates: at first pooling "
        "“performed very poorly”, which the rate alone explains (in a figure; no number is given)."
    ),
    scales={
        "test": Scale(
            "digits", 0.2, "one core", seeds=1, steps=4, batch=32, rates=(1e-3, 1e-2),
            sizes={"width": 16, "depth": 1, "heads": 2, "patch": 2},
        ),
        # 49 tokens, width 64, depth 4: 350 pictures/s on a free core, 1,000/s without training. 800 steps × 64 = 51,200: 146 s.
        # A try: + 12,000 validation pictures 12 s + 8 s to begin = 166 s; 2 heads × 5 rates × 3 seeds = 30 tries: 4,980 s. A
        # final run: + 10,000 test pictures = 176 s; 6 of them: 1,056 s. 6,036 s, two at a time 50 min.
        "laptop": Scale(
            "fashion-mnist", 50, "two cores", seeds=3, steps=800, batch=64, rates=(4e-4, 1e-3, 2.5e-3, 6e-3, 1.5e-2),
            sizes={"width": 64, "depth": 4, "heads": 4, "patch": 4},
        ),
        # 64 tokens of CIFAR-10, Ti's width and depth, reckoned with 10,000 pictures/s: 10,000 steps × 256 take 256 s, and 30
        # s more. 36 runs × 286 s = 172 min.
        "gpu": Scale(
            "cifar-10", 172, "one GPU", seeds=3, steps=10_000, batch=256, rates=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
            sizes={"width": 192, "depth": 12, "heads": 3, "patch": 4, "precision": "bf16", "warmup": 1_000},
        ),
        # B/16 as in table 3 for ImageNet-21k, 30 epochs of 14 M: 102,500 steps, 19 h, reckoned with 6,000 pictures/s. 2 × (3
        # + 1) runs.
        "cluster": Scale(
            "imagenet-21k", 9_300, "8 GPUs", seeds=1, steps=102_500, batch=4096, rates=(3e-4, 1e-3, 3e-3),
            sizes={
                "width": 768, "depth": 12, "heads": 12, "patch": 16, "image": 224, "dropout": 0.1, "weight_decay": 0.03,
                "precision": "bf16", "warmup": 10_000,
            },
        ),
    },
    plan=plan,
    read=read,
)  # fmt: skip
