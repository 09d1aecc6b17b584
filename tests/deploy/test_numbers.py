"""Predictions of a regression model as rows and files, its exports, and the gate that compares numbers."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import vitrail
from tests import forked
from tests.deploy.numbers import MEAN, STD, TARGETS, save_regressor, write_table
from vitrail.deploy.export.comparison import tolerances_for
from vitrail.deploy.predict.formats import format_cell
from vitrail.tasks import TASKS
from vitrail.tasks.comparison import TargetStatistics

STATISTICS = TargetStatistics(MEAN, STD)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("numbers")
    save_regressor(root / "prices.safetensors")
    write_table(root / "photos")
    return root


def values(count: int = 40) -> np.ndarray:
    return np.random.default_rng(0).normal(MEAN, STD, (count, 2))


def shift(numbers: np.ndarray, deviations: float) -> np.ndarray:
    return numbers + deviations * np.array(STD)


def test_rows_have_numbers_by_the_names_of_their_targets(place: Path) -> None:
    model = vitrail.load(place / "prices.safetensors")
    (row,) = vitrail.predict(model, place / "photos" / "000.png", device="cpu")
    assert [name for name, _ in row.values] == list(TARGETS)
    assert (row.label, row.score, row.features) == (None, None, None)
    with pytest.raises(ValueError, match=r"top= is for classes of images, and .* predicts numbers"):
        vitrail.predict(model, place / "photos", top=2)
    (row,) = vitrail.embed(model, place / "photos" / "000.png", device="cpu")
    assert row.features is not None
    assert row.features.shape == (24,)


def test_files_have_a_column_for_each_target(place: Path, tmp_path: Path) -> None:
    (place / "photos" / "broken.png").write_bytes(b"not an image")
    rows = {row.path: row for row in vitrail.predict(place / "prices.safetensors", place / "photos", device="cpu")}
    for name in ("rows.csv", "rows.jsonl"):
        done = forked.run("predict", "prices.safetensors", "photos", "--out", str(tmp_path / name), cwd=place)
        assert done.returncode == 0, done.stderr
    with (tmp_path / "rows.csv").open() as file:
        found = list(csv.DictReader(file))
    objects = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert list(found[0]) == list(objects[0]) == ["path", "price", "age", "error"]
    assert len(found) == len(objects) == len(rows) == 13
    for row, item in zip(found, objects, strict=True):
        if "broken" in row["path"]:
            assert (row["price"], item["price"], bool(row["error"])) == ("", None, True)
            continue
        numbers = dict(next(r for path, r in rows.items() if path.endswith(row["path"][-7:])).values)
        assert "e" not in row["price"]  # 1234570, not 1.23457e+06
        for target in TARGETS:
            assert float(row[target]) == pytest.approx(numbers[target], rel=1e-5)
            assert item[target] == pytest.approx(numbers[target], rel=1e-5)


def test_parquet_has_the_columns_of_the_csv(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    out = tmp_path / "rows.parquet"
    done = forked.run("predict", "prices.safetensors", "photos/000.png", "--out", str(out), cwd=place)
    assert done.returncode == 0, done.stderr
    assert parquet.read_table(out).column_names == ["path", "price", "age", "error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--top", "2", "--out", "-"), "--top is for classes of images, and prices predicts numbers"),
        (("--names", "imagenet", "--out", "-"), "predicts numbers, which have names: leave out --names"),
        (("--overlays", "--out", "-"), "--overlays is for segmentation models: prices predicts numbers"),
        (("--out", "masks/"), "--out masks/ is for masks: prices predicts numbers, give a .csv"),
    ],
)
def test_options_of_other_models_are_refused(place: Path, arguments: tuple[str, ...], message: str) -> None:
    done = forked.run("predict", "prices.safetensors", "photos", *arguments, cwd=place)
    assert done.returncode == 2, done.stdout
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("value", "cell"), [(1234567.8, "1234570"), (0.1234567, "0.123457"), (2e20, "2e+20"), (None, "")]
)
def test_large_numbers_are_written_without_an_exponent(value: float | None, cell: str) -> None:
    assert format_cell(value) == cell


def test_differences_are_in_standard_deviations_of_each_target() -> None:
    first = values()
    found = TASKS["numbers"].compare_outputs(first, shift(first, 0.02), statistics=STATISTICS)
    assert found.what == "numbers"
    assert (found.relative, found.mean_relative) == (pytest.approx(0.02), pytest.approx(0.02))
    assert found.agreement is None
    assert found.score is None


@pytest.mark.parametrize(("deviations", "refused"), [(1e-6, False), (5e-3, True)])
def test_float_exports_must_not_change_numbers(deviations: float, refused: bool) -> None:
    first = values()
    found = TASKS["numbers"].compare_outputs(first, shift(first, deviations), statistics=STATISTICS)
    reasons = tolerances_for("fp32").find_violations(found)
    assert [reason.startswith("numbers differ by 0.005 standard deviations") for reason in reasons] == [True] * refused


def test_rounding_of_large_offsets_is_no_violation() -> None:
    statistics = TargetStatistics((1e6,), (1.0,))  # type: ignore[arg-type]
    first = np.random.default_rng(0).normal(1e6, 1, (20, 1)).astype(np.float32)
    second = np.nextafter(first, np.float32(np.inf))
    found = TASKS["numbers"].compare_outputs(first, second, statistics=statistics)
    assert found.relative is not None
    assert found.relative > 0.05
    assert not tolerances_for("fp32").find_violations(found)


@pytest.mark.parametrize(("noise", "refused"), [(0.01, False), (0.5, True)])
def test_lower_precision_is_judged_by_r2_where_numbers_are_known(noise: float, refused: bool) -> None:
    targets = values()
    second = targets + noise * np.array(STD) * np.random.default_rng(1).normal(size=targets.shape)
    found = TASKS["numbers"].compare_outputs(targets, second, targets, statistics=STATISTICS)
    assert found.score is not None
    assert (found.score.measure, found.score.first) == ("R²", 1.0)
    reasons = tolerances_for("int8").find_violations(found)
    assert [reason.startswith("R² falls by 0.") for reason in reasons] == [True] * refused
    assert not tolerances_for("int8", 50).find_violations(found)


@pytest.mark.parametrize(("deviations", "refused"), [(0.02, False), (0.08, True)])
def test_lower_precision_is_judged_by_the_mean_change_without_numbers(deviations: float, refused: bool) -> None:
    first = values()
    found = TASKS["numbers"].compare_outputs(first, shift(first, deviations), statistics=STATISTICS)
    reasons = tolerances_for("bf16").find_violations(found)
    assert reasons == ["numbers changed by 8.00 % of their standard deviation on average, more than 5 %"] * refused


def test_outputs_that_are_not_finite_are_refused() -> None:
    first = values()
    broken = first.copy()
    broken[3, 1] = np.nan
    found = TASKS["numbers"].compare_outputs(first, broken, first, statistics=STATISTICS)
    for precision in ("fp32", "int8"):
        assert tolerances_for(precision).find_violations(found) == ["its outputs are not finite"]


@pytest.mark.parametrize("name", ["model.pt2", "model.onnx", "model.xml"])
def test_an_export_predicts_the_numbers_of_the_model(place: Path, name: str, tmp_path: Path) -> None:
    pytest.importorskip({"onnx": "onnxruntime", "xml": "openvino", "pt2": "torch"}[name.rpartition(".")[2]])
    done = forked.run(
        "export", "prices.safetensors", str(tmp_path / name), "--verify", "photos/table.csv", "--json", cwd=place
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["compared"]["relative"] < 1e-3
    assert report["compared"]["score"]["measure"] == "R²"
    (row,) = vitrail.predict(tmp_path / name, place / "photos" / "001.png")
    (own,) = vitrail.predict(place / "prices.safetensors", place / "photos" / "001.png", device="cpu")
    assert dict(row.values) == pytest.approx(dict(own.values), rel=1e-4)


def test_an_export_beyond_the_tolerance_is_not_kept(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.pt2"
    done = forked.run("export", "prices.safetensors", str(out), "--tolerance", "0", "--bf16", cwd=place)
    assert done.returncode == 2
    assert "numbers changed by" in done.stderr.splitlines()[-1]
    assert not out.exists()
