"""Trained models that the user gives to a study: measured as its own are, shown beside them, no part of the finding."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import vitrail
from tests.studies.test_findings_2 import GLOBAL, RISING, answered, looked, mapped
from vitrail.cli import main
from vitrail.studies import attention_distance, position_maps
from vitrail.studies.given import measure_given_model, name_model, read_given
from vitrail.studies.study import CellResult
from vitrail.training.recipe import Data

DIGITS = Data("digits")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a grid of 9×9 patches, larger than is drawn."""
    path = tmp_path_factory.mktemp("given") / "small.safetensors"
    built = vitrail.build(patch=4, width=16, depth=3, heads=2, image_size=36, channels=1, classes=10)
    built.preprocessing = vitrail.Preprocessing((36, 36)).with_channels(1)
    vitrail.save(built, path)
    return path


def test_positions_of_a_large_grid_are_drawn_smaller(model: Path) -> None:
    given = position_maps.measure_given(vitrail.load(model), DIGITS)
    own = position_maps.measure_model(vitrail.load(model))
    assert np.shape(given["similarity"]) == (7, 7, 7, 7)
    assert np.shape(own["similarity"]) == (9, 9, 9, 9)
    assert (given["place"], given["lines"]) == (own["place"], own["lines"])


def test_distances_are_measured_with_the_preprocessing_of_the_model(model: Path) -> None:
    given = attention_distance.measure_given(vitrail.load(model), DIGITS)
    assert np.shape(given["distance"]) == (3, 2)
    assert given["looked at"] == 128
    assert 0 < np.min(given["distance"]) <= np.max(given["distance"]) < 2


def test_numbers_are_stored_by_name_and_replaced(model: Path, tmp_path: Path) -> None:
    for _ in range(2):
        measure_given_model(position_maps.STUDY, DIGITS, tmp_path, str(model))
    (result,) = read_given(tmp_path)
    assert (result.phase, dict(result.at)) == ("given", {"model": "small"})
    assert json.loads((tmp_path / "given.json").read_text())["models"]["small"]["place"] == result.numbers["place"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("weights/deit_tiny.safetensors", "deit_tiny"),
        ("runs/photos-1/model.safetensors", "photos-1"),
        ("hf://owner/name", "name"),
    ],
)
def test_a_model_has_the_name_of_its_file_or_run(path: str, name: str) -> None:
    assert name_model(path) == name


def test_a_given_model_does_not_change_the_finding() -> None:
    far = CellResult({"model": "other"}, "given", {"distance": [[0.1, 0.1]] * 12}, 0.0)
    without = answered(attention_distance.STUDY, looked(RISING, GLOBAL))
    answer = answered(attention_distance.STUDY, [*looked(RISING, GLOBAL), far])
    assert (answer.finding, answer.agreement) == (without.finding, without.agreement)
    assert [row[0] for row in answer.rows] == ["ViT", "hybrid", "other (given)"]
    assert answer.rows[2][-1] == "8 of 8"
    assert {series.label for chart in answer.charts for series in chart.series} == {"ViT", "hybrid", "other (given)"}

    results = mapped({"as usual": 0.6, "twice as long": 0.7})
    maps = replace(results[0], at={"model": "other"}, phase="given")
    with_maps, plain = answered(position_maps.STUDY, [*results, maps]), answered(position_maps.STUDY, results)
    assert (with_maps.finding, with_maps.agreement) == (plain.finding, plain.agreement)
    assert with_maps.rows[-1][0] == "other (given)"
    assert len(with_maps.charts[0].series) == len(plain.charts[0].series) + 1


@pytest.mark.parametrize(
    ("study", "file", "message"),
    [
        (
            "head",
            "small.safetensors",
            "study head does not support --model: it has nothing to measure without training",
        ),
        ("position-maps", "missing.safetensors", "no such model: missing.safetensors"),
    ],
)
def test_unsuitable_models_are_refused_before_anything_is_run(
    study: str, file: str, message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.chdir(model.parent):
        code = main(["paper", "run", study, "--scale", "test", "--out", str(tmp_path / "study"), "--model", file])
    assert code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


def test_a_model_without_added_positions_is_refused(tmp_path: Path) -> None:
    built = vitrail.build(patch=4, width=16, depth=1, heads=2, image_size=16, position="rotary2d", classes=2)
    with pytest.raises(ValueError, match="use a model that adds its positions to the patches"):
        position_maps.measure_given(built, DIGITS)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "given.json").write_text('{"models": 3}')
    with pytest.raises(ValueError, match="delete it, and give --model again"):
        read_given(tmp_path)
