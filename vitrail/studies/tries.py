"""What was tried before a study chose: validation accuracy by family and rate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from vitrail.report.words import is_number, percent
from vitrail.studies.record import family, in_words
from vitrail.studies.study import Result, Setting

Place = tuple[tuple[str, Setting], ...]


@dataclass
class Tries:
    """Scores by family and rate, one for each seed; families in order of appearance, rates in theirs."""

    families: dict[Place, dict[Setting, list[float]]] = field(default_factory=dict)
    rates: list[Setting] = field(default_factory=list)

    @property
    def seeds(self) -> int:
        """Of each try."""
        return max((len(values) for scores in self.families.values() for values in scores.values()), default=0)

    @property
    def names(self) -> list[str]:
        """What families are told apart by; one word for all where they have not the same settings."""
        kinds = {tuple(name for name, _ in place) for place in self.families}
        return list(kinds.pop()) if len(kinds) == 1 and () not in kinds else ["family"]

    def words(self, place: Place) -> list[str]:
        """A family in as many words as there are names."""
        if self.names == ["family"] and [name for name, _ in place] != ["family"]:
            return [in_words(place) or "all"]
        return [
            f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value) for _, value in place
        ]

    def score(self, place: Place, rate: Setting) -> str:
        """A try's mean over seeds; one that diverged is the worst, and is called so."""
        values = self.families[place].get(rate)
        if not values:
            return "–"
        return "diverged" if any(math.isnan(value) for value in values) else percent(fmean(values))

    def chosen(self, place: Place) -> Setting:
        """The rate that validated best, the lowest of equals; None while not all are tried: each family has as many."""
        scores, all_of_them = self.families[place], max(map(len, self.families.values()))
        if len(scores) < all_of_them or any(len(values) < self.seeds for values in scores.values()):
            return None
        means = {rate: fmean(scores[rate]) for rate in self.rates if rate in scores}
        sound = [rate for rate in means if not math.isnan(means[rate])]
        return max(sound, key=lambda rate: means[rate]) if sound else None  # the first of equals

    @property
    def edges(self) -> str:
        """That the best rate lies at an end of those that were tried, where it does; better ones may lie beyond."""
        best: list[Setting] = [rate for place in self.families if (rate := self.chosen(place)) is not None]
        if len(self.rates) < 2:
            return ""
        ends = (("lowest", best.count(self.rates[0])), ("highest", best.count(self.rates[-1])))
        said = [f"for {count} of {len(best)} the {end} that was tried" for end, count in ends if count]
        return f"The best rate is {' and '.join(said)}: better ones may lie beyond." if said else ""


def tries(results: Sequence[Result], phase: str = "tune") -> Tries:
    """Of a phase. Models that others begin with are tried with the first seed alone, and not all of them are tried at all."""
    found = Tries()
    for result in results:
        if result.phase == phase and (phase == "tune" or ("rate" in result.at and result.at.get("seed") == 0)):
            value = result.numbers.get("validation")
            score = float(value) if is_number(value) and not result.numbers.get("diverged") else math.nan
            rate = result.at.get("rate")
            found.families.setdefault(family(result.at), {}).setdefault(rate, []).append(score)
            if rate not in found.rates:
                found.rates.append(rate)
    if phase != "tune" and len(found.rates) < 2:
        return Tries()
    found.rates.sort(key=lambda rate: (not is_number(rate), rate if is_number(rate) else 0.0))
    return found
