"""What differs too much does not pass, and what does not pass is not put in its place."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from tests.data.making import tree
from tests.deploy.exports import contract_of, pixels, saved, shared, tiny
from vitrail.cli import main
from vitrail.deploy import proving
from vitrail.deploy.gate import AtSize, Shown, Speed, compare, limits, measured, not_faster
from vitrail.deploy.generated import generated
from vitrail.deploy.opening import opened
from vitrail.deploy.proving import Asked, Refused, export_with_proof
from vitrail.deploy.timing import interleaved

pytest.importorskip("onnxruntime")
LOGITS = np.random.default_rng(0).normal(size=(200, 5)).astype(np.float32)


def changed(count: int) -> np.ndarray:
    """The same logits, but so many answers are others."""
    made = LOGITS.copy()
    made[np.arange(count), (LOGITS[:count].argmax(1) + 1) % 5] += 100
    return made


def test_float_passes_within_a_thousandth_and_with_the_same_answers():
    assert limits("fp32").refusals(compare(LOGITS, LOGITS + 0.9e-3)) == []
    (said,) = limits("fp32").refusals(compare(LOGITS, LOGITS + 1.1e-3))
    assert "logits differ by 0.0011, more than 0.001" in said
    assert len(limits("fp32", 1e-9).refusals(compare(LOGITS, changed(1)))) == 2
    assert limits("fp32", 1000).refusals(compare(LOGITS, changed(1))) == ["0.50% of the answers changed"]


def test_what_is_rounded_may_lose_a_point_of_accuracy():
    targets = LOGITS.argmax(1)
    assert limits("int8").refusals(compare(LOGITS, changed(2), targets)) == []
    (said,) = limits("int8").refusals(compare(LOGITS, changed(3), targets))
    assert said == "accuracy falls by 1.50 points, more than 1"
    assert limits("int8", 1.5).refusals(compare(LOGITS, changed(3), targets)) == []
    # Answers that change from wrong to wrong cost nothing where labels are known, and count where they are not.
    wrong = (LOGITS.argmax(1) + 2) % 5
    assert limits("int8").refusals(compare(LOGITS, changed(20), wrong)) == []
    assert limits("int8").refusals(compare(LOGITS, changed(20))) == ["10.00 % of the answers changed, more than 5 %"]
    assert limits("int8").refusals(compare(LOGITS, changed(10))) == []


def test_numbers_that_are_not_finite_never_pass():
    bad = LOGITS.copy()
    bad[3, 2] = math.nan
    for precision in ("fp32", "int8"):
        assert limits(precision, 1e9).refusals(compare(LOGITS, bad)) == ["it gives numbers that are not finite"]
    with pytest.raises(ValueError, match="--tolerance"):
        limits("fp32", math.nan)


def test_accuracy_comes_with_intervals_and_is_paired():
    score = compare(LOGITS, changed(4), LOGITS.argmax(1)).score
    assert (score.measure, score.first, score.second) == ("accuracy", 1.0, 0.98)
    assert score.difference == pytest.approx(-0.02)
    assert score.difference_interval[0] < -0.02 < score.difference_interval[1]
    assert score.second_interval[0] < 0.98 < score.second_interval[1]


def test_several_labels_are_judged_by_their_ranking():
    targets = (LOGITS > 0.5).astype(np.uint8)
    found = compare(LOGITS, LOGITS[:, ::-1].copy(), targets, several=True)
    assert (found.score.measure, found.score.first) == ("mAP", 1.0)
    assert found.score.second < 0.7
    assert found.agreement < 0.5


def test_a_smaller_precision_that_gains_nothing_is_told():
    speeds = {"file": Speed(1.0, 102.0), "plain": Speed(1.0, 100.0)}
    assert "int8 is not faster here: 1.02×" in not_faster(speeds, "file", "plain", "int8")
    assert not_faster(speeds | {"file": Speed(1.0, 150.0)}, "file", "plain", "int8") is None


def test_speeds_are_measured_in_turns():
    order = []
    interleaved({name: lambda name=name: order.append(name) for name in "abc"}, rounds=3, seconds=100)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    speeds = measured({"a": lambda x: x, "b": lambda x: x}, np.zeros((3, 1, 2, 2), np.uint8), 0.1)
    assert all(speed.latency > 0 and speed.throughput > 0 for speed in speeds.values())


def test_generated_pictures_are_always_the_same_and_differ():
    pipeline = contract_of(tiny()).preprocessing
    made = generated(pipeline, 4)
    assert made.shape == (4, 3, 16, 24)
    assert (made == generated(pipeline, 4)).all()
    assert (made[0] != made[1]).mean() > 0.5


def test_what_does_not_pass_is_not_put_in_its_place(tmp_path, monkeypatch):
    model, path = tiny(), tmp_path / "model.onnx"
    contract, shown = contract_of(model), Shown(pixels(model), "made")
    path.write_bytes(b"what was there before")
    made = (shared() / "model.onnx").read_bytes()
    monkeypatch.setattr(proving, "write", lambda _, contract, place, *others: place.write_bytes(made))
    model.head.bias.data += 0.01  # no longer what the file was made of
    asked = Asked("onnx", measuring=0.1)
    with pytest.raises(Refused, match=r"was not written: logits differ by 0\.01") as refused:
        export_with_proof(model, contract, path, asked, shown)
    assert not refused.value.proof.passed
    assert path.read_bytes() == b"what was there before"
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    proof = export_with_proof(model, contract, path, replace(asked, force=True), shown)
    assert not proof.passed
    assert path.read_bytes() == made
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    model.head.bias.data -= 0.01
    assert export_with_proof(model, contract, path, asked, shown).passed


def test_the_command_proves_on_pictures_with_labels(tmp_path, capsys):
    source = saved(tiny(channels=1, image_size=16), tmp_path / "model.safetensors")
    out = tmp_path / "model.onnx"
    table = tmp_path / "map.json"
    table.write_text(json.dumps({str(digit): digit % 5 for digit in range(10)}))
    arguments = ["export", str(source), str(out), "--verify", "digits", "--limit", "20", "--map", str(table)]
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["passed"]
    assert told["pictures"] == 20
    assert told["compared"]["agreement"] == 1.0
    assert told["compared"]["score"]["difference"] == 0.0
    assert told["compared"]["largest_difference"] < 1e-4
    assert told["bytes"] == out.stat().st_size
    assert set(told["speeds"]) == {"model", "file"}


def test_the_command_proves_on_pictures_without_labels(tmp_path, capsys):
    source, out = saved(tiny(), tmp_path / "model.safetensors"), tmp_path / "model.onnx"
    photos = tree(tmp_path / "photos", {**{f"{number}.png": number for number in range(6)}, "bad.png": b"no picture"})
    assert main(["export", str(source), str(out), "--verify", str(photos), "--json"]) == 0
    told = capsys.readouterr()
    proof = json.loads(told.out)
    assert (proof["pictures"], proof["source"]) == (6, f"{photos}, unlabelled")
    assert proof["compared"]["agreement"] == 1.0
    assert proof["compared"]["score"] is None
    assert "is compared without labels, so nothing is said of accuracy" in told.err
    for more in (("--split", "test"), ("--map", "index"), ("--label-from", "^(x+)")):  # these speak of labels
        assert main(["export", str(source), str(out), "--verify", str(photos), *more]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["export", str(source), str(out), "--verify", str(tmp_path / "empty")]) == 2


def test_a_file_for_any_size_is_proven_at_others_and_opened_at_them(tmp_path, capsys):
    source, out = saved(tiny(), tmp_path / "model.safetensors"), tmp_path / "model.onnx"
    assert main(["export", str(source), str(out), "--dynamic-size"]) == 0
    told = capsys.readouterr().out
    assert "at 16×16, generated pictures: logits: largest difference" in told
    assert "at 24×40, generated pictures: logits: largest difference" in told
    found, plain = (opened(path, runtime="auto", size=(32, 48)) for path in (out, source))
    assert found.contract.preprocessing == plain.contract.preprocessing
    assert found.contract.config == plain.contract.config
    pictures = generated(plain.contract.preprocessing, 3)
    np.testing.assert_allclose(found.runtime(pictures), plain.runtime(pictures), atol=1e-4)
    photos = tree(tmp_path / "photos", {f"{number}.png": number for number in range(3)})
    for size, message in (("30", "not divisible by the patch size 8"), ("8", "from 2 patches a side on")):
        rows = str(tmp_path / f"{size}.csv")
        assert main(["predict", str(out), str(photos), "--size", size, "--out", rows]) == 2
        assert message in capsys.readouterr().err
    assert main(["predict", str(out), str(photos), "--size", "32", "--out", str(tmp_path / "rows.csv")]) == 0


def test_the_size_of_a_file_for_one_is_settled():
    assert opened(shared() / "model.onnx", size=(16, 24)).contract.preprocessing.size == (16, 24)
    with pytest.raises(ValueError, match="--size is settled in it, 16×24: leave it out, or export the model with"):
        opened(shared() / "model.onnx", size=(32, 24))


def test_a_file_that_differs_at_another_size_does_not_pass(tmp_path, monkeypatch):
    model = tiny()
    monkeypatch.setattr(proving, "beside_at_others", lambda *_: (AtSize((16, 16), compare(LOGITS, LOGITS + 0.1)),))
    asked = Asked("onnx", dynamic_size=True, measuring=0.1)
    with pytest.raises(Refused, match=r"at 16×16 logits differ by 0\.1"):
        export_with_proof(model, contract_of(model), tmp_path / "model.onnx", asked, Shown(pixels(model), "made"))
