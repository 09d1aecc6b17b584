"""Studies and results that were made up, so that what is read and drawn of them is known."""

import math
import random
from collections.abc import Sequence
from pathlib import Path

from vitrail.recipe import Data, Facts, Recipe
from vitrail.recipes.scratch_small import recipe as scratch_small
from vitrail.studies.intervals import difference, estimate, grouped, percent, points
from vitrail.studies.study import Answer, Cell, Chart, Result, Scale, Series, Setup, Study
from vitrail.studies.tuning import tuned

NAMES = ("none", "1-D", "1-D, every layer", "1-D, shared", "2-D", "2-D, every layer", "2-D, shared", "relative")
PICTURES = 10_000


def made_setup(place: Path, **changes) -> Setup:
    """Eight by eight digits, three seeds, two rates."""
    scale = Scale("digits", 40, "two cores", **{"seeds": 3, "rates": (1e-3, 3e-3), **changes})
    return Setup(scale, Data("digits"), Facts(1000, 10, False, (8, 8), 1, False), place)


def made_recipe(setup: Setup, seed: int = 0) -> Recipe:
    return scratch_small(setup.facts, setup.data)


def made_study(setup: Setup, names: Sequence[str] = NAMES) -> Study:
    """Kinds of positions, each with its own rate."""

    def plan(setup: Setup, results: Sequence[Result]) -> list[Cell]:
        places = [{"positions": name} for name in names]
        return tuned(setup, results, places, lambda place, rate, seed: made_recipe(setup))

    def read(results: Sequence[Result], scale: Scale) -> Answer:
        found = grouped(results, "positions")
        estimates = {str(key[0]): estimate(values, PICTURES) for key, values in found.items()}
        gain = difference(found[names[1],], found[names[0],], PICTURES)
        return Answer(
            f"Positions are worth {points(gain)}; which kind makes no clear difference.",
            "agrees" if gain.clear else "no difference",
            ("positions", "test", "seeds"),
            tuple((name, percent(each), str(each.n)) for name, each in estimates.items()),
            (bars(estimates),),
            "Digits of 8×8 pixels have four patches: where they are is soon learnt without being told.",
            ("Each kind was tried with two rates.",),
        )

    return Study(
        "positions",
        "Does it matter how a patch’s place is told?",
        "table 8, appendix D.4",
        "A large gap between none (61.4 %) and any (64.0 to 64.3 %), and little between kinds (ImageNet, 5-shot).",
        {"laptop": setup.scale},
        plan,
        read,
    )


def bars(estimates) -> Chart:
    series = Series(
        "test",
        tuple(estimates),
        tuple(each.mean for each in estimates.values()),
        tuple(each.low for each in estimates.values()),
        tuple(each.high for each in estimates.values()),
    )
    return Chart("Accuracy by kind of positions", "bars", (series,), y_name="top-1 on test pictures")


def made_results(study: Study, setup: Setup, most: int | None = None) -> list[Result]:
    """What plan asks for, until it asks for nothing more; or the first ones."""
    chance, results = random.Random(0), []
    while True:
        known = {(result.phase, *sorted(result.at.items())) for result in results}
        missing = [c for c in study.plan(setup, results) if (c.phase, *sorted(c.at.items())) not in known]
        if not missing or (most is not None and len(results) >= most):
            return results
        cell = missing[0]
        right = 0.843 - 0.05 * (cell.at.get("positions") == "none") - 0.01 * math.log10(cell.at["rate"])
        numbers = {"validation": right + chance.gauss(0, 0.004)}
        if cell.phase == "final":
            numbers |= {"test": right + chance.gauss(0, 0.004), "pictures": PICTURES}
        results.append(Result(cell.at, cell.phase, numbers, 61.5 + chance.random(), f"cells/{cell.name}/run"))


def growing() -> Chart:
    """Three families over six sizes."""
    sizes = (500, 1_500, 5_000, 15_000, 30_000, 60_000)
    families = {"ViT": (0.58, 0.155), "hybrid R+ViT": (0.66, 0.12), "BiT ResNet": (0.74, 0.078)}
    made = []
    for label, (start, slope) in families.items():
        y = tuple(start + slope * math.log10(size / 500) - 0.008 * math.log10(size / 500) ** 2 for size in sizes)
        low, high = tuple(v - 0.014 for v in y), tuple(v + 0.014 for v in y)
        made.append(Series(label, tuple(map(float, sizes)), y, low, high))
    names = {"x_name": "training pictures", "y_name": "top-1 on test pictures"}
    return Chart("Accuracy as the training set grows", "lines", tuple(made), x_log=True, **names)


def cloud() -> Chart:
    """Accuracy against compute."""
    made = []
    for k, label in enumerate(("ViT", "hybrid", "BiT ResNet")):
        x = tuple(2.3e12 * 2.4**n * (1 + 0.2 * k) for n in range(4))
        y = tuple(0.70 + 0.045 * n - 0.03 * (k - 1) ** 2 - 0.012 * n * (k == 2) for n in range(4))
        made.append(Series(label, x, y, tuple(v - 0.006 for v in y), tuple(v + 0.006 for v in y)))
    names = {"x_name": "training compute, multiply-adds", "y_name": "top-1 on test pictures"}
    return Chart("Accuracy against compute", "dots", tuple(made), x_log=True, **names)


def distances() -> Chart:
    """Heads of each layer, of two kinds of model."""
    chance, made = random.Random(1), []
    for k, label in enumerate(("pure ViT", "hybrid")):
        x = tuple(float(layer) for layer in range(1, 7) for _ in range(4))
        y = tuple(max(1.2, 4 + layer * (1.1 + 0.2 * k) + chance.uniform(-3.5, 2) / layer) for layer in x)
        made.append(Series(label, x, y))
    names = {"x_name": "layer", "y_name": "mean attention distance, pixels"}
    return Chart("Attention distance of each head by layer", "dots", tuple(made), percent=False, **names)


def grids(panels: int = 6, side: int = 7) -> Chart:
    """Likeness of positions as grids of grids."""
    made = []
    for panel in range(panels):
        sharp = 1.5 + panel
        maps = tuple(
            tuple(
                tuple(2 * math.exp(-((a - r) ** 2 + (b - c) ** 2) / (2 * sharp)) - 0.4 for b in range(side))
                for a in range(side)
            )
            for r in range(side)
            for c in range(side)
        )
        label = ("as usual", "twice as long", "half as long", "rate × 3", "rate ÷ 3", "no weight decay at all")[
            panel % 6
        ]
        made.append(Series(label, maps=maps))
    names = {
        "y_name": "cosine similarity with each other position",
        "x_name": "each small map stands where its position does",
    }
    return Chart("Cosine of every position with all others", "maps", tuple(made), percent=False, **names)
