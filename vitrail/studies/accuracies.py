"""Accuracies of a study as they are told: how many pictures they are shares of, as points of a chart, as words of a table."""

from collections.abc import Mapping, Sequence

from vitrail.studies.intervals import Difference, estimate, percent, points
from vitrail.studies.study import Result, Series, Setting

NONE_YET = "–"  # in a table, where nothing is known


def judged_on(results: Sequence[Result]) -> int | None:
    """The number of test pictures; None where no result tells."""
    told = [
        result.numbers["pictures"] for result in results if result.phase == "final" and "pictures" in result.numbers
    ]
    return min(told, default=None)


def series(label: str, values: Mapping[float | str, Sequence[float]], pictures: int | None) -> Series:
    """A family's means over seeds with their intervals, by x; `pictures` is None for what is no share of them."""
    found = [estimate(each, pictures) for each in values.values()]
    return Series(
        label,
        tuple(values),
        tuple(each.mean for each in found),
        tuple(each.low for each in found),
        tuple(each.high for each in found),
    )


def told(values: Sequence[float] | None, pictures: int | None = None) -> str:
    """A mean with its interval; a dash where there are no values."""
    return percent(estimate(values, pictures)) if values else NONE_YET


def told_difference(found: Difference | None) -> str:
    """A difference with its interval; a dash where there is none."""
    return points(found) if found is not None else NONE_YET


def rate_of(results: Sequence[Result], place: Mapping[str, Setting]) -> str:
    """The rate that was chosen for a place of the grid."""
    for result in results:
        if result.phase == "final" and all(result.at.get(name) == value for name, value in place.items()):
            return f"{result.at['rate']:g}"
    return NONE_YET
