"""A small study that runs in seconds, and a command line with it: python -m tests.studies.tiny paper run tiny --scale test.

Files beside the study's directory control it: a cell whose pool is named in `broken`
fails. Every finished cell leaves a line in `measured`.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vitrail.models.registry import configure_tokens
from vitrail.studies import STUDY_NAMES
from vitrail.studies.base import build_recipe, plan_tuned
from vitrail.studies.study import Answer, Cell, CellResult, Chart, Series, Setting, Study, StudyScale, StudySetup
from vitrail.training.recipe import Recipe

POOLS = ("class", "mean")


def made(setup: StudySetup, place: Mapping[str, Setting], lr: float, seed: int) -> Recipe:
    facts = setup.facts
    side = -(-max(facts.side) // 4) * 4
    model = configure_tokens(
        patch=4,
        width=16,
        depth=1,
        heads=2,
        pool=str(place["pool"]),
        classes=facts.classes,
        channels=facts.channels,
        image_size=(side, side),
    )
    return build_recipe(setup, model, lr, seed)


def plan(setup: StudySetup, results: Sequence[CellResult]) -> list[Cell]:
    return plan_tuned(setup, results, [{"pool": pool} for pool in POOLS], lambda *where: made(setup, *where))


def measure(cell: Cell, run: Path) -> dict[str, Any]:
    around = run.parents[3]
    broken = around / "broken"
    if broken.is_file() and cell.at["pool"] in broken.read_text().split():
        raise ValueError(f"{cell.at['pool']} is broken")
    with open(around / "measured", "a") as file:
        file.write(f"{run.parent.name} {os.getpid()}\n")
    return {"files": sorted(path.name for path in run.iterdir())}


def read(results: Sequence[CellResult], scale: StudyScale) -> Answer:
    finals = [result for result in results if result.phase == "final"]
    values = tuple(float(result.numbers["test"]) for result in finals)
    return Answer(
        finding=f"{len(finals)} cells are final.",
        agreement="unclear",
        columns=("pool", "seed", "test"),
        rows=tuple((str(r.at["pool"]), str(r.at["seed"]), f"{100 * r.numbers['test']:.1f} %") for r in finals),
        charts=(Chart("Test", "bars", (Series("test", tuple(str(r.at["pool"]) for r in finals), values),)),),
        limits="Constructed.",
    )


STUDY = Study(
    name="tiny",
    question="Does any of this work?",
    reference="nowhere",
    paper_finding="Not studied.",
    scales={
        "test": StudyScale("digits", 0.5, "one core", seeds=2, steps=3, batch=32, lrs=(1e-3, 3e-3)),
        "laptop": StudyScale("digits", 1, "one core", seeds=1, steps=3, batch=32),
    },
    plan=plan,
    interpret=read,
    measure=measure,
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line with one more study."""
    import vitrail.cli
    import vitrail.studies

    ours = (sys.executable, "-m", "tests.studies.tiny")
    sys.modules["vitrail.studies.tiny"] = sys.modules[__name__]
    with patch.object(vitrail.studies, "STUDY_NAMES", (*STUDY_NAMES, "tiny")), patch("vitrail.cli.paper.PROGRAM", ours):
        return vitrail.cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
