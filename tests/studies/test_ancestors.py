"""The study `ancestors`: its plan, and its findings from constructed results."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.studies.test_findings_1 import JITTER, finals, read, turned
from vitrail.models.flops import count
from vitrail.models.vit_config import ViTConfig
from vitrail.studies import ancestors
from vitrail.studies.study import Answer, CellResult, StudySetup
from vitrail.training.recipe import Data, Facts

FACTS = Facts(images=1000, classes=10, several=False, side=(8, 8), channels=1, several_sizes=False)


def setup(scale: str = "test", **sizes: object) -> StudySetup:
    chosen = ancestors.STUDY.scales[scale]
    return StudySetup(chosen, Data("digits"), FACTS, Path("study"))


def run(accuracies: Mapping[str, Sequence[float]], slow: float = 3.0) -> Answer:
    """Return the answer for these accuracies at 4 and 49 patches."""
    results: list[CellResult] = []
    for number, (name, values) in enumerate(accuracies.items()):
        for patches, value in zip((4, 49), values, strict=True):
            jitter = JITTER if number == 0 else turned(JITTER)
            times = {"milliseconds": 1.0, "training milliseconds": slow if number else 1.0}
            results += finals({"encoder": name, "patches": patches}, value, jitter, **times)
    return read(ancestors.STUDY, results)


@pytest.mark.parametrize("scale", ["test", "laptop", "gpu", "cluster"])
def test_all_encoders_read_the_same_patches_at_the_same_cost(scale: str) -> None:
    facts = {"images": 60_000, "classes": 10, "several": False, "channels": 3, "several_sizes": False}
    side = {"test": 8, "laptop": 28, "gpu": 32, "cluster": 256}[scale]
    chosen = ancestors.STUDY.scales[scale]
    where = StudySetup(chosen, Data("data"), Facts(side=(side, side), **facts), Path("study"))  # type: ignore[arg-type]
    cells = ancestors.STUDY.plan(where, [])
    models = {(str(cell.at["encoder"]), cell.at["patches"]): cell.recipe.model for cell in cells}
    assert len({patches for _, patches in models}) == len(chosen.sizes["patches"])
    for (name, patches), model in models.items():
        vit = models["ViT", patches]
        assert isinstance(vit, ViTConfig)
        assert model.grid_of(model.image_size) == vit.shape.grid
        assert model.describe().startswith({"ViT": "", "Neural Turing Machine": "TuringMachine"}.get(name, name))
        assert abs(count(model).macs / count(vit).macs - 1) <= ancestors.MAX_COST_DIFFERENCE


def test_a_model_too_small_to_match_is_an_error() -> None:
    vit = ancestors.base.configure_study_vit(setup(), patch=2, width=4, heads=1, depth=1)
    with pytest.raises(ValueError, match="no width of ntm costs as much"):
        ancestors.match_width(setup(), "ntm", vit)


def test_attention_that_leads_everywhere_agrees() -> None:
    answer = run({"ViT": (0.7, 0.85), "RNN": (0.7, 0.6), "LSTM": (0.7, 0.8), "Neural Turing Machine": (0.7, 0.75)})
    assert answer.agreement == "agrees"
    assert answer.finding.startswith(
        "With 49 patches attention is better than every older encoder: ViT minus RNN +25.0"
    )
    assert "LSTM 3.0×" in answer.finding
    assert [row[:2] for row in answer.rows[:2]] == [("ViT", "4"), ("RNN", "4")]
    assert answer.rows[-1][-1] == "3.0×"
    assert [len(chart.series) for chart in answer.charts] == [4, 4]
    assert answer.charts[0].series[0].x == (4.0, 49.0)


def test_an_older_encoder_that_leads_disagrees() -> None:
    answer = run({"ViT": (0.7, 0.8), "RNN": (0.7, 0.6), "LSTM": (0.7, 0.85)})
    assert answer.agreement == "disagrees"
    assert "an older encoder is better than attention" in answer.finding


def test_equal_accuracies_are_no_difference() -> None:
    answer = run({"ViT": (0.7, 0.8), "LSTM": (0.7, 0.8001)})
    assert answer.agreement == "no difference"


def test_a_lead_over_some_is_unclear() -> None:
    assert run({"ViT": (0.7, 0.8), "RNN": (0.7, 0.7), "LSTM": (0.7, 0.8001)}).agreement == "unclear"


def test_missing_runs_are_named() -> None:
    results = finals({"encoder": "LSTM", "patches": 4}, 0.5)
    assert "ViT, 4 patches" in read(ancestors.STUDY, results).finding
    assert "an encoder besides the ViT" in read(ancestors.STUDY, finals({"encoder": "ViT", "patches": 4}, 0.5)).finding
