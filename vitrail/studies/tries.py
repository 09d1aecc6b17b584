"""What was tried before a study chose: validation accuracy by family and rate."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vitrail.report.words import is_number, percent
from vitrail.studies.record import family
from vitrail.studies.study import Result, Setting

Place = tuple[tuple[str, Setting], ...]


@dataclass
class Tries:
    """Scores in words by family and rate, in order of appearance."""

    families: dict[Place, dict[Setting, str]] = field(default_factory=dict)
    rates: list[Setting] = field(default_factory=list)
    best: dict[Place, tuple[float, Setting]] = field(default_factory=dict)

    def chosen(self, place: Place) -> Setting:
        """The rate that validated best, the first of equals; None while not all are tried."""
        return self.best[place][1] if place in self.best and len(self.families[place]) == len(self.rates) else None


def tries(results: Sequence[Result]) -> Tries:
    """From the results of the phase "tune"."""
    found = Tries()
    for result in results:
        if result.phase != "tune":
            continue
        place, rate, value = family(result.at), result.at.get("rate"), result.numbers.get("validation")
        if rate not in found.rates:
            found.rates.append(rate)
        scores = found.families.setdefault(place, {})
        scores[rate] = "diverged" if result.numbers.get("diverged") else percent(value)
        if is_number(value) and value > found.best.get(place, (-1.0, None))[0]:
            found.best[place] = (value, rate)
    found.rates.sort(key=lambda rate: (not is_number(rate), rate if is_number(rate) else 0.0))
    return found
