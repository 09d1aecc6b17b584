"""What is said of a study while runs are missing without which there is nothing to compare."""

from collections.abc import Iterable, Sequence

from vitrail.studies.study import Answer

NOTHING_YET = "Nothing can be said yet"


def lacking(there: Iterable[tuple[object, ...]], wanted: Iterable[str]) -> list[str]:
    """Those of the wanted places, each one setting, that have no finished run."""
    found = {place[0] for place in there}
    return [each for each in wanted if each not in found]


def too_early(missing: Sequence[str], limits: str) -> Answer:
    """The answer that names them."""
    return Answer(
        finding=f"{NOTHING_YET}: there is no finished run of {'; '.join(missing)}.",
        agreement="unclear",
        columns=("missing",),
        rows=tuple((each,) for each in missing),
        charts=(),
        limits=limits,
    )
