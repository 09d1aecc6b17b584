"""Learning rates that are chosen on validation pictures, with the same number of tries for each family."""

import math
from collections.abc import Callable, Mapping, Sequence

from vitrail.recipe import Recipe
from vitrail.studies.study import Cell, Result, Setting, Setup

Place = Mapping[str, Setting]  # of the grid: {"positions": "2-D"}


def tuned(
    setup: Setup,
    results: Sequence[Result],
    families: Sequence[Place],
    recipe: Callable[[Place, float, int], Recipe],
) -> list[Cell]:
    """The tries of every family, and the final cells of those families whose tries are all finished.

    A try is the cell {**place, "rate": r, "seed": 0} of the phase "tune". Where a scale has one rate only, nothing is tried.
    """
    rates, finals = setup.scale.rates, range(setup.scale.seeds)
    tries = [
        Cell({**place, "rate": rate, "seed": 0}, recipe(place, rate, 0), "tune")
        for place in families
        for rate in rates
        if len(rates) > 1
    ]
    chosen = [(place, best_rate(place, rates, results)) for place in families]
    return tries + [
        Cell({**place, "rate": rate, "seed": seed}, recipe(place, rate, seed))
        for place, rate in chosen
        if rate is not None
        for seed in finals
    ]


def best_rate(place: Place, rates: Sequence[float], results: Sequence[Result], phase: str = "tune") -> float | None:
    """The rate that validated best, the first of equals; None while a try is missing."""
    if len(rates) == 1:
        return rates[0]
    scores: list[float] = []
    for rate in rates:
        at = {**place, "rate": rate, "seed": 0}
        found = [result for result in results if result.phase == phase and dict(result.at) == at]
        if not found:
            return None
        score = float(found[0].numbers["validation"])
        scores.append(-math.inf if math.isnan(score) else score)
    return rates[scores.index(max(scores))]
