"""Verification of exported files: a file that differs too much is not written."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from tests.data.making import tree
from tests.deploy.exports import contract_of, pixels, saved, shared, tiny
from vitrail.cli import main
from vitrail.deploy.export import export as exporting
from vitrail.deploy.export.comparison import (
    RuntimeSpeed,
    SizeComparison,
    VerificationImages,
    describe_missing_speedup,
    generate_images,
    measure_speeds,
    time_interleaved,
    tolerances_for,
)
from vitrail.deploy.export.verify import ExportRequest, VerificationError, VerifiedExport, export_and_verify
from vitrail.deploy.runtimes.open import open_deployed_model
from vitrail.tasks import TASKS

pytest.importorskip("onnxruntime")
LOGITS = np.random.default_rng(0).normal(size=(200, 5)).astype(np.float32)


def changed(count: int) -> np.ndarray:
    """Return the logits with `count` changed predictions of the same confidence."""
    made, rows, first = LOGITS.copy(), np.arange(count), LOGITS[:count].argmax(1)
    second = (first + 1) % 5
    made[rows, first], made[rows, second] = LOGITS[rows, second], LOGITS[rows, first]
    return made


def test_fp32_tolerance():
    assert tolerances_for("fp32").find_violations(TASKS["single"].compare_outputs(LOGITS, LOGITS + 0.9e-3)) == []
    (output,) = tolerances_for("fp32").find_violations(TASKS["single"].compare_outputs(LOGITS, LOGITS + 1.1e-3))
    assert "logits differ by 0.0011, more than 0.001" in output
    assert len(tolerances_for("fp32", 1e-9).find_violations(TASKS["single"].compare_outputs(LOGITS, changed(1)))) == 2
    assert tolerances_for("fp32", 1000).find_violations(TASKS["single"].compare_outputs(LOGITS, changed(1))) == [
        "0.50% of the predictions changed"
    ]


def test_lower_precision_may_lose_one_point_of_accuracy():
    targets = LOGITS.argmax(1)
    assert tolerances_for("int8").find_violations(TASKS["single"].compare_outputs(LOGITS, changed(2), targets)) == []
    (output,) = tolerances_for("int8").find_violations(TASKS["single"].compare_outputs(LOGITS, changed(3), targets))
    assert output == "accuracy falls by 1.50 points, more than 1"
    assert (
        tolerances_for("int8", 1.5).find_violations(TASKS["single"].compare_outputs(LOGITS, changed(3), targets)) == []
    )
    # Answers that change from wrong to wrong cost nothing where labels are known, and count where they are not.
    wrong = (LOGITS.argmax(1) + 2) % 5
    assert tolerances_for("int8").find_violations(TASKS["single"].compare_outputs(LOGITS, changed(20), wrong)) == []
    assert tolerances_for("int8").find_violations(TASKS["single"].compare_outputs(LOGITS, changed(20))) == [
        "10.00 % of the predictions changed, more than 5 %"
    ]
    assert tolerances_for("int8").find_violations(TASKS["single"].compare_outputs(LOGITS, changed(10))) == []


def test_outputs_that_are_not_finite_never_pass():
    bad = LOGITS.copy()
    bad[3, 2] = math.nan
    for precision in ("fp32", "int8"):
        assert tolerances_for(precision, 1e9).find_violations(TASKS["single"].compare_outputs(LOGITS, bad)) == [
            "its outputs are not finite"
        ]
    with pytest.raises(ValueError, match="--tolerance"):
        tolerances_for("fp32", math.nan)


def test_accuracy_is_paired_with_intervals():
    score = TASKS["single"].compare_outputs(LOGITS, changed(4), LOGITS.argmax(1)).score
    assert (score.measure, score.first, score.second) == ("accuracy", 1.0, 0.98)
    assert score.difference == pytest.approx(-0.02)
    assert score.difference_interval[0] < -0.02 < score.difference_interval[1]
    assert score.second_interval[0] < 0.98 < score.second_interval[1]


def test_multilabel_outputs_are_compared_by_map():
    targets = (LOGITS > 0.5).astype(np.uint8)
    found = TASKS["multi"].compare_outputs(LOGITS, LOGITS[:, ::-1].copy(), targets)
    assert (found.score.measure, found.score.first) == ("mAP", 1.0)
    assert found.score.second < 0.7
    assert found.agreement < 0.5


def test_missing_speedup_is_noted():
    speeds = {"file": RuntimeSpeed(1.0, 102.0), "plain": RuntimeSpeed(1.0, 100.0)}
    assert "int8 is not faster here: 1.02×" in describe_missing_speedup(speeds, "file", "plain", "int8")
    assert describe_missing_speedup(speeds | {"file": RuntimeSpeed(1.0, 150.0)}, "file", "plain", "int8") is None


def test_speeds_are_measured_interleaved():
    order = []
    time_interleaved({name: lambda name=name: order.append(name) for name in "abc"}, rounds=3, seconds=100)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    speeds = measure_speeds({"a": lambda x: x, "b": lambda x: x}, np.zeros((3, 1, 2, 2), np.uint8), 0.1)
    assert all(speed.latency > 0 and speed.throughput > 0 for speed in speeds.values())


def test_generated_images_are_deterministic_and_distinct():
    pipeline = contract_of(tiny()).preprocessing
    made = generate_images(pipeline, 4)
    assert made.shape == (4, 3, 16, 24)
    assert (made == generate_images(pipeline, 4)).all()
    assert (made[0] != made[1]).mean() > 0.5


def test_failed_verification_leaves_the_old_file(tmp_path, monkeypatch):
    model, path = tiny(), tmp_path / "model.onnx"
    contract, shown = contract_of(model), VerificationImages(pixels(model), "made")
    path.write_bytes(b"what was there before")
    made = (shared() / "model.onnx").read_bytes()
    monkeypatch.setattr(exporting, "write_model", lambda _, contract, place, *others: place.write_bytes(made))
    model.head.bias.data += 0.01  # no longer what the file was made of
    asked = ExportRequest("onnx", timing_seconds=0.1)
    with pytest.raises(VerificationError, match=r"was not written: logits differ by 0\.01") as refused:
        export_and_verify(model, contract, path, asked, shown)
    assert not refused.value.report.passed
    assert path.read_bytes() == b"what was there before"
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    proof = export_and_verify(model, contract, path, replace(asked, force=True), shown)
    assert not proof.passed
    assert path.read_bytes() == made
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    model.head.bias.data -= 0.01
    assert export_and_verify(model, contract, path, asked, shown).passed


def test_export_verifies_on_labelled_images(tmp_path, capsys):
    source = saved(tiny(channels=1, image_size=16), tmp_path / "model.safetensors")
    out = tmp_path / "model.onnx"
    table = tmp_path / "map.json"
    table.write_text(json.dumps({str(digit): digit % 5 for digit in range(10)}))
    arguments = ["export", str(source), str(out), "--verify", "digits", "--limit", "20", "--map", str(table)]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"]
    assert report["images"] == 20
    assert report["compared"]["agreement"] == 1.0
    assert report["compared"]["score"]["difference"] == 0.0
    assert report["compared"]["largest_difference"] < 1e-4
    assert report["bytes"] == out.stat().st_size
    assert set(report["speeds"]) == {"model", "file"}


def test_export_verifies_on_unlabelled_images(tmp_path, capsys):
    source, out = saved(tiny(), tmp_path / "model.safetensors"), tmp_path / "model.onnx"
    photos = tree(tmp_path / "photos", {**{f"{number}.png": number for number in range(6)}, "bad.png": b"no picture"})
    assert main(["export", str(source), str(out), "--verify", str(photos), "--json"]) == 0
    report = capsys.readouterr()
    proof = json.loads(report.out)
    assert (proof["images"], proof["source"]) == (6, f"{photos}, unlabelled")
    assert proof["compared"]["agreement"] == 1.0
    assert proof["compared"]["score"] is None
    assert "is compared without labels, accuracy is not measured" in report.err
    for more in (("--split", "test"), ("--map", "index"), ("--label-from", "^(x+)")):  # these speak of labels
        assert main(["export", str(source), str(out), "--verify", str(photos), *more]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["export", str(source), str(out), "--verify", str(tmp_path / "empty")]) == 2


def test_dynamic_size_file_is_verified_and_opened_at_other_sizes(tmp_path, capsys):
    source, out = saved(tiny(), tmp_path / "model.safetensors"), tmp_path / "model.onnx"
    assert main(["export", str(source), str(out), "--dynamic-size"]) == 0
    report = capsys.readouterr().out
    assert "at 16×16, generated images: logits: largest difference" in report
    assert "at 24×40, generated images: logits: largest difference" in report
    found, plain = (open_deployed_model(path, runtime="auto", size=(32, 48)) for path in (out, source))
    assert found.contract.preprocessing == plain.contract.preprocessing
    assert found.contract.config == plain.contract.config
    images = generate_images(plain.contract.preprocessing, 3)
    np.testing.assert_allclose(found.runtime(images), plain.runtime(images), atol=1e-4)
    photos = tree(tmp_path / "photos", {f"{number}.png": number for number in range(3)})
    for size, message in (("30", "not divisible by the patch size 8"), ("8", "must be at least 16 pixels a side")):
        rows = str(tmp_path / f"{size}.csv")
        assert main(["predict", str(out), str(photos), "--size", size, "--out", rows]) == 2
        assert message in capsys.readouterr().err
    assert main(["predict", str(out), str(photos), "--size", "32", "--out", str(tmp_path / "rows.csv")]) == 0


def test_fixed_size_file_rejects_another_size():
    assert open_deployed_model(shared() / "model.onnx", size=(16, 24)).contract.preprocessing.size == (16, 24)
    with pytest.raises(ValueError, match=r"size= is fixed to 16×24 in .*: omit it, or export the model with"):
        open_deployed_model(shared() / "model.onnx", size=(32, 24))


def test_difference_at_another_size_fails(tmp_path, monkeypatch):
    model = tiny()
    monkeypatch.setattr(
        VerifiedExport,
        "compare_at_sizes",
        lambda *_: (SizeComparison((16, 16), TASKS["single"].compare_outputs(LOGITS, LOGITS + 0.1)),),
    )
    asked = ExportRequest("onnx", dynamic_size=True, timing_seconds=0.1)
    with pytest.raises(VerificationError, match=r"at 16×16 logits differ by 0\.1"):
        export_and_verify(
            model, contract_of(model), tmp_path / "model.onnx", asked, VerificationImages(pixels(model), "made")
        )
