"""What few seeds allow to be said: their spread is not known, so what is small may be chance of training."""

from dataclasses import replace

from vitrail.studies.intervals import FEW, NOISE
from vitrail.studies.study import Answer
from vitrail.studies.unfinished import NOTHING_YET


def cautious(answer: Answer, seeds: int) -> Answer:
    """The answer as it can be held: with few seeds the finding says so, and that nothing was seen is no finding."""
    if seeds >= FEW or answer.finding.startswith(NOTHING_YET):
        return answer
    few = f"with {seeds} seed{'s' if seeds > 1 else ''}, which cannot tell chance of training from a difference"
    finding = f"{answer.finding.removesuffix('.')}; {few}, {100 * NOISE:.0f} point or less counts for nothing."
    agreement = "unclear" if answer.agreement == "no difference" else answer.agreement
    return replace(answer, finding=finding, agreement=agreement)
