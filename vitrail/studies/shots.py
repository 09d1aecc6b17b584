"""The paper's quick measure: the accuracy of frozen features with five labelled pictures of each class (section 4.1)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.evaluation.probes import Settings
from vitrail.evaluation.probing import probe
from vitrail.run.prepare import prepare
from vitrail.studies.study import Cell

SHOTS, DRAWS = 5, 5


def five_shot(cell: Cell, run: Path) -> dict[str, Any]:
    """Of a final run, over five draws from the training pictures, judged on the test pictures; nothing of a try."""
    return five_shot_of(str(run / "model.safetensors"), cell)


def five_shot_of(model: str, cell: Cell) -> dict[str, Any]:
    """The same of another model, on the pictures of a final run: of the one that it began with, for example."""
    if cell.phase != "final" or cell.recipe.data.task == "multi":
        return {}
    data = replace(
        cell.recipe.data, per_class=SHOTS * DRAWS, drawn=0, test=True
    )  # features of few pictures are soon computed
    prepared = prepare(data)
    if prepared.train.several:  # the measure is for one label each
        return {}
    found = probe(
        model,
        data,
        ["few-shot"],
        Settings(shots=(SHOTS,), draws=DRAWS),
        cache=False,
        prepared=prepared,
    )
    return {"five-shot": found.rows[0].score}
