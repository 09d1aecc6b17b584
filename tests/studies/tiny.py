"""A made-up study in seconds, and the command line that knows it: python -m tests.studies.tiny paper run tiny --scale test.

What it does can be steered by files beside the study's directory: `broken` holds words, and a cell whose place is one of them
fails. Every finished cell leaves a line in `measured`.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vitrail.models.build import configure_vit
from vitrail.recipe import Recipe
from vitrail.studies import NAMES
from vitrail.studies.base import recipe
from vitrail.studies.study import Answer, Cell, Chart, Result, Scale, Series, Setting, Setup, Study
from vitrail.studies.tuning import tuned

POOLS = ("class", "mean")


def made(setup: Setup, place: Mapping[str, Setting], rate: float, seed: int) -> Recipe:
    facts = setup.facts
    side = -(-max(facts.side) // 4) * 4
    model = configure_vit(
        patch=4,
        width=16,
        depth=1,
        heads=2,
        pool=str(place["pool"]),
        classes=facts.classes,
        channels=facts.channels,
        image_size=(side, side),
    )
    return recipe(setup, model, rate, seed)


def plan(setup: Setup, results: Sequence[Result]) -> list[Cell]:
    return tuned(setup, results, [{"pool": pool} for pool in POOLS], lambda *where: made(setup, *where))


def measure(cell: Cell, run: Path) -> dict[str, Any]:
    around = run.parents[3]
    broken = around / "broken"
    if broken.is_file() and cell.at["pool"] in broken.read_text().split():
        raise ValueError(f"{cell.at['pool']} is broken")
    with open(around / "measured", "a") as file:
        file.write(f"{run.parent.name} {os.getpid()}\n")
    return {"files": sorted(path.name for path in run.iterdir())}


def read(results: Sequence[Result], scale: Scale) -> Answer:
    finals = [result for result in results if result.phase == "final"]
    values = tuple(float(result.numbers["test"]) for result in finals)
    return Answer(
        finding=f"{len(finals)} cells are final.",
        agreement="unclear",
        columns=("pool", "seed", "test"),
        rows=tuple((str(r.at["pool"]), str(r.at["seed"]), f"{100 * r.numbers['test']:.1f} %") for r in finals),
        charts=(Chart("Test", "bars", (Series("test", tuple(str(r.at["pool"]) for r in finals), values),)),),
        limits="It is made up.",
    )


STUDY = Study(
    name="tiny",
    question="Does any of this work?",
    where="nowhere",
    found="Nobody looked.",
    scales={
        "test": Scale("digits", 0.5, "one core", seeds=2, steps=3, batch=32, rates=(1e-3, 3e-3)),
        "laptop": Scale("digits", 1, "one core", seeds=1, steps=3, batch=32),
    },
    plan=plan,
    read=read,
    measure=measure,
)


def main(arguments: list[str] | None = None) -> int:
    """The command line with one more study."""
    import vitrail.cli
    import vitrail.studies

    ours = (sys.executable, "-m", "tests.studies.tiny")
    sys.modules["vitrail.studies.tiny"] = sys.modules[__name__]
    with (
        patch.object(vitrail.studies, "NAMES", (*NAMES, "tiny")),
        patch("vitrail.cli.paper.PROGRAM", ours),
    ):
        return vitrail.cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
