"""What few seeds and a scale allow to be said: a spread that is not known may be chance, and a few steps answer nothing."""

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


TRIAL = "This scale only shows that the study runs: its few steps answer nothing."
WHOLE = (
    "Models and training are of the paper's size here. It pre-trained on JFT, which is not public: ImageNet-21k stands in for "
    "it. So long a run is made once for each place, as a rule at the paper's own rate."
)


def limited(answer: Answer, scale: str) -> Answer:
    """The answer with the limits of its scale. A study's own are of the small ones."""
    if scale == "test":
        return replace(answer, agreement="unclear", limits=f"{TRIAL} {answer.limits}")
    return replace(answer, limits=WHOLE) if scale == "cluster" else answer
