"""Inference in the fastest precision: chosen by constructed timings, checked against fp32 on the first images."""

import json

import numpy as np
import pytest
import torch

from tests.deploy.asked import images, model, read, vitrail
from tests.evaluation import made
from vitrail import evaluate, load, predict, save
from vitrail.deploy.export.comparison import tolerances_for
from vitrail.deploy.export.export import export
from vitrail.deploy.predict import resume as resuming
from vitrail.deploy.predict.processes import ProcessShare, share_choices
from vitrail.deploy.runtimes import exported, int8, precision
from vitrail.deploy.runtimes import open as opening
from vitrail.deploy.runtimes.open import open_deployed_model
from vitrail.deploy.runtimes.precision import CheckedRuntime, PrecisionCheck
from vitrail.tasks import TASKS
from vitrail.tasks.comparison import compare_features
from vitrail.utils.precision import PrecisionChoice

COUNT = 20


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("precision")
    model(root / "model.safetensors")
    broken = load(model(root / "broken.safetensors"))
    with torch.no_grad():  # LayerNorm removes it; in bf16 nothing of the image is left beside it
        broken.embed.projection.bias += 1000
    save(broken, root / "broken.safetensors")
    images(root / "photos", COUNT)
    return root


@pytest.fixture
def measured(monkeypatch):
    """Let bf16 be measured twice as fast on any processor, for any number of images; return the measurements."""
    calls = []

    def measure(runs, *_):
        calls.append(tuple(runs))
        return {name: {"fp32": 1.0, "bf16": 0.5}.get(name, 1.0) for name in runs}

    monkeypatch.setattr(precision, "CHOICES", {})
    for name, value in {"MIN_IMAGES": 2, "MIN_MACS": 0, "MIN_MACS_PER_IMAGE": 0, "CHECKED_IMAGES": 8}.items():
        monkeypatch.setattr(precision, name, value)
    monkeypatch.setattr(precision, "multiplies_bf16", lambda device: True)
    monkeypatch.setattr(precision, "measure_interleaved", measure)
    return calls


def run(place, out, *more, command="predict", file="model"):
    return vitrail(command, place / f"{file}.safetensors", place / "photos", "--out", out, "--runtime", "torch", *more)


def test_predict_says_what_it_chose_and_checked(place, tmp_path, measured, capsys):
    assert run(place, tmp_path / "a.csv") == 0
    printed = capsys.readouterr().out
    assert "precision: bf16 (measured 2.0 times as fast as fp32 on " in printed
    assert "100 % same predictions on the first " in printed
    assert "; torch, bf16, " in printed
    assert len(measured) == 2  # one image for the duration, then all candidates
    assert "bf16" in measured[1]
    assert run(place, tmp_path / "b.csv", "--precision", "fp32", "--json") == 0
    assert json.loads(capsys.readouterr().out)["precision"] == "fp32"
    one, two = read(tmp_path / "a.csv"), read(tmp_path / "b.csv")
    assert [row["label"] for row in one] == [row["label"] for row in two]
    assert [row["score"] for row in one] != [row["score"] for row in two]


@pytest.mark.parametrize("command", ["predict", "embed"])
def test_a_model_that_fails_in_bf16_is_run_in_fp32(place, tmp_path, measured, capsys, command):
    out = "a.csv" if command == "predict" else "a.jsonl"
    assert run(place, tmp_path / out, command=command, file="broken") == 0
    printed = capsys.readouterr().out
    reason = "of the predictions changed, more than 5 %" if command == "predict" else "have a cosine of only"
    assert "precision: fp32 (bf16 refused on the first " in printed
    assert reason in printed
    assert run(place, tmp_path / f"fp32-{out}", "--precision", "fp32", command=command, file="broken") == 0
    assert (tmp_path / out).read_bytes() == (tmp_path / f"fp32-{out}").read_bytes()  # also the images already run


def test_few_images_and_small_models_are_not_measured(place, tmp_path, measured, monkeypatch, capsys):
    monkeypatch.setattr(precision, "MIN_IMAGES", COUNT + 1)
    assert run(place, tmp_path / "few.csv") == 0
    monkeypatch.setattr(precision, "MIN_IMAGES", 2)
    monkeypatch.setattr(precision, "MIN_MACS", 1e15)
    assert run(place, tmp_path / "short.csv") == 0
    monkeypatch.setattr(
        precision, "MIN_MACS_PER_IMAGE", 1e15
    )  # of the service, which does not know the number of images
    assert open_deployed_model(place / "model.safetensors", runtime="torch").choice is None
    assert not measured
    assert "precision:" not in capsys.readouterr().out
    assert run(place, tmp_path / "asked.csv", "--precision", "fp32") == 0
    expected = (tmp_path / "asked.csv").read_bytes()
    assert (tmp_path / "few.csv").read_bytes() == (tmp_path / "short.csv").read_bytes() == expected


def test_a_choice_is_measured_once_in_a_process(place, measured):
    for kind in ("logits", "features"):
        opened = open_deployed_model(place / "model.safetensors", runtime="torch", output_kind=kind)
        assert isinstance(opened.runtime, CheckedRuntime)
    assert len(measured) == 2


def test_the_service_uses_fp32_until_enough_images_are_compared(place, measured):
    lines: list[str] = []
    opened = open_deployed_model(place / "model.safetensors", runtime="torch", report=lines.append)
    plain = open_deployed_model(place / "model.safetensors", runtime="torch", precision="fp32")
    pixels = np.random.default_rng(0).integers(0, 256, (6, *opened.contract.preprocessing.shape), dtype=np.uint8)
    assert np.array_equal(opened.runtime(pixels), plain.runtime(pixels))
    assert (precision.current_precision(opened), precision.decided_precision(opened)) == ("fp32", None)
    assert np.array_equal(opened.runtime(pixels), plain.runtime(pixels))  # 12 images: enough
    assert precision.decided_precision(opened) == "bf16"
    assert [line[:15] for line in lines] == ["precision: bf16"]
    assert not np.array_equal(opened.runtime(pixels), plain.runtime(pixels))


def test_evaluate_computes_all_images_in_the_precision_it_prints(tmp_path, measured, capsys):
    data, path = str(made.folder(tmp_path / "data")), made.model(tmp_path / "m.safetensors")
    logits = {kind: evaluate(path, data, precision=kind).evaluations[0] for kind in ("auto", "bf16", "fp32")}
    auto = logits["auto"].outputs.logits
    np.testing.assert_allclose(auto, logits["bf16"].outputs.logits, atol=1e-6)
    assert not np.array_equal(auto[:4], logits["fp32"].outputs.logits[:4])
    assert logits["auto"].environment["precision"] == "bf16"
    capsys.readouterr()
    assert vitrail("evaluate", path, data) == 0
    printed = capsys.readouterr().out
    assert "precision: bf16 (measured 2.0 times as fast" in printed
    assert ", in bf16" in printed
    assert vitrail("evaluate", path, data, "--precision", "fp32") == 0
    assert ", in fp32" in capsys.readouterr().out


def test_a_resumed_run_keeps_the_recorded_precision(place, tmp_path, measured, monkeypatch, capsys):
    monkeypatch.setattr(resuming, "MAX_PENDING_ROWS", 1)
    out, whole = tmp_path / "a.csv", resuming.PartialOutput.add

    def add(self, row):
        if self.rows + len(self.pending) == 14:
            raise KeyboardInterrupt
        whole(self, row)

    monkeypatch.setattr(resuming.PartialOutput, "add", add)
    assert run(place, out, "--batch-size", 1) == 130
    assert json.loads((tmp_path / "a.csv.partial.json").read_text())["precision"] == "bf16"
    monkeypatch.setattr(resuming.PartialOutput, "add", whole)
    measured.clear()
    capsys.readouterr()
    assert run(place, out, "--batch-size", 1, "--resume", "--json") == 0
    assert json.loads(capsys.readouterr().out)["precision"] == "bf16"
    assert not measured
    assert len(read(out)) == COUNT


def test_the_python_interface_takes_precisions(place, measured):
    rows = list(predict(place / "model.safetensors", place / "photos", runtime="torch", precision="auto"))
    assert len(rows) == COUNT
    assert len(measured) == 2
    with pytest.raises(ValueError, match="unknown precision 'int4': use auto, fp32, bf16, fp16"):
        predict(place / "model.safetensors", place / "photos", precision="int4")


def test_changed_confidence_and_features_are_violations():
    logits = np.random.default_rng(0).normal(size=(64, 5)) * 2
    (reason,) = tolerances_for("bf16").find_violations(TASKS["single"].compare_outputs(logits, 1.5 * logits))
    assert reason.startswith("the mean confidence changed by ")
    assert tolerances_for("bf16").find_violations(TASKS["single"].compare_outputs(logits, 1.001 * logits)) == []
    (reason,) = tolerances_for("bf16").find_violations(compare_features(logits, -logits))
    assert reason == "features have a cosine of only -1.0000, less than 0.99"
    assert tolerances_for("bf16").find_violations(compare_features(logits, logits)) == []


def test_a_check_without_finite_references_stays_in_fp32(place):
    contract = open_deployed_model(place / "model.safetensors", runtime="torch").contract
    check = PrecisionCheck(contract, "logits", PrecisionChoice("bf16"))
    check.add(np.full((80, 7), np.nan), np.zeros((80, 7)))
    assert (check.passed, check.precision) == (None, "fp32")
    assert "fp32 until 64 images are compared" in check.describe()


def test_the_runtime_auto_takes_an_int8_export_only_within_the_tolerance(
    place, tmp_path, measured, monkeypatch, capsys
):
    """The file is made by the real export; how much it loses and how fast it is are constructed."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    seconds = {"fp32": 1.0, "int8": 0.5}
    monkeypatch.setattr(int8, "time_runtimes", lambda runtimes, contract: seconds)
    monkeypatch.setattr(opening, "select_runtime", lambda *_: ("torch", ""))
    path, file = place / "model.safetensors", tmp_path / "small.onnx"
    plain = open_deployed_model(path, runtime="torch", precision="fp32")
    export(plain.model, plain.contract, file, target="onnx", uint8=True)
    int8.record_export(file, plain.contract, 0.4, "accuracy", 500)
    options = {"precision": "fp32", "n_images": 200}
    assert open_deployed_model(path, **options).runtime.name == "torch"  # without a tolerance
    (note,) = open_deployed_model(path, tolerance=0.3, **options).notes
    assert note.startswith("no int8 export within --tolerance 0.3: ")
    taken = open_deployed_model(path, tolerance=0.5, **options)
    assert (taken.runtime.name, taken.contract.precision) == ("onnx", "int8")
    assert "0.40 points of accuracy lost on 500 images, tolerance 0.5" in str(taken.choice)
    assert vitrail("predict", path, place / "photos", "--out", tmp_path / "a.csv", "--tolerance", 0.5) == 0
    assert "precision: int8 (measured 2.0 times as fast as bf16 on torch" in capsys.readouterr().out
    seconds["int8"] = 0.95
    assert (
        "small.onnx is not used: int8 measured 1.1 times"
        in open_deployed_model(path, tolerance=0.5, **options).notes[0]
    )
    seconds["int8"] = 0.5
    file.write_bytes(file.read_bytes() + b"x")  # not the file that was verified
    assert open_deployed_model(path, tolerance=0.5, **options).runtime.name == "torch"


def test_a_verified_int8_export_is_recorded(place, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = ("--int8", "--tolerance", 100, "--calibration", 4)
    assert vitrail("export", place / "model.safetensors", tmp_path / "small.onnx", *arguments) == 0
    contract = open_deployed_model(place / "model.safetensors", runtime="torch").contract
    (found,) = int8.read_exports(contract)
    assert (found.file, found.measure) == (str(tmp_path / "small.onnx"), "predictions")
    assert found.is_intact()


def test_wrong_tolerances_are_errors(place):
    path = place / "model.safetensors"
    with pytest.raises(ValueError, match=r"tolerance= must be from 0 to 100 points, got -1"):
        open_deployed_model(path, tolerance=-1.0)
    with pytest.raises(ValueError, match="tolerance= is for runtime='auto', not 'torch': omit it"):
        open_deployed_model(path, runtime="torch", tolerance=0.5)
    with pytest.raises(ValueError, match="a loaded model runs on PyTorch: leave out tolerance="):
        open_deployed_model(load(path), tolerance=0.5)


def test_openvino_computes_in_bf16_by_the_same_rule(place, tmp_path, measured, monkeypatch):
    pytest.importorskip("openvino")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, hints, settings = place / "model.safetensors", [], exported.compile_settings

    def compile_settings(kind, threads):
        hints.append(kind)
        return settings("fp32", threads)  # on any processor

    monkeypatch.setattr(exported, "compile_settings", compile_settings)
    monkeypatch.setattr(opening, "openvino_precisions", lambda: ["FP32", "BF16"])
    opened = open_deployed_model(path, runtime="openvino")
    assert (hints[-1], opened.runtime.name) == ("bf16", "openvino")
    assert isinstance(opened.runtime, CheckedRuntime)
    clone = opening.clone_runtime(opened, 1)
    assert (clone.lower.precision, clone.reference.precision, hints[-2:]) == ("bf16", "fp32", ["bf16", "fp32"])
    monkeypatch.setattr(opening, "openvino_precisions", lambda: ["FP32"])
    opened = open_deployed_model(path, runtime="openvino")
    assert (opened.choice.precision, opened.choice.why[-31:]) == ("fp32", "does not multiply bf16 natively")
    assert open_deployed_model(path, runtime="openvino", precision="fp32").choice is None


def test_an_index_keeps_the_precision_that_was_chosen_for_it(place, tmp_path, measured, capsys):
    out = tmp_path / "index"
    arguments = ("search", "index", place / "model.safetensors", place / "photos", "--out", out, "--runtime", "torch")
    assert vitrail(*arguments, "--precision", "auto") == 0
    assert "precision: bf16 (measured 2.0 times as fast as fp32 on " in capsys.readouterr().out
    assert json.loads((out / "index.json").read_text())["model"]["precision"] == "bf16"
    measured.clear()
    assert vitrail(*arguments, "--precision", "auto", "--update") == 0
    assert vitrail("search", "find", out, sorted((place / "photos").rglob("*.*"))[0]) == 0
    assert not measured
    refused = tmp_path / "refused"
    arguments = ("search", "index", place / "broken.safetensors", place / "photos", "--out", refused)
    assert vitrail(*arguments, "--runtime", "torch", "--precision", "auto") == 0
    assert json.loads((refused / "index.json").read_text())["model"]["precision"] == "fp32"


def test_the_first_process_of_torchrun_chooses_for_all(place, tmp_path, measured, monkeypatch):
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    for name, value in (environment | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr(precision, "CHOICES", {})  # of another process
        assert run(place, tmp_path / "a.csv") == 0
        assert len(measured) == 2  # how long an image takes, and the candidates: by the first process
    assert len(read(tmp_path / "a.csv")) == COUNT
    empty = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(empty.port))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ZeroDivisionError), share_choices(ProcessShare(0, 2)):
        raise ZeroDivisionError
    monkeypatch.setenv("RANK", "1")
    with share_choices(ProcessShare(1, 2)):  # it does not wait for a process that failed
        pass
