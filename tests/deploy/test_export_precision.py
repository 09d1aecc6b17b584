"""`vitrail export --precision`: chosen by constructed timings and by what a processor is said to multiply, checked on images."""

from pathlib import Path

import pytest
import torch

from tests.deploy.asked import vitrail as command
from tests.deploy.exports import contract_of, pixels, saved, tiny
from vitrail.deploy.export import precision as choosing
from vitrail.deploy.export.comparison import VerificationImages, VerificationReport
from vitrail.deploy.export.precision import export_in_fastest_precision
from vitrail.deploy.export.verify import ExportRequest
from vitrail.deploy.runtimes import exported, precision
from vitrail.deploy.runtimes.exported import open_exported_file
from vitrail.models.base import Model


@pytest.fixture
def gain(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Let PyTorch multiply bf16 natively and be measured 1.5 times as fast; a test may change the number."""
    seconds = {"fp32": 1.5, "bf16": 1.0}
    monkeypatch.setattr(choosing, "multiplies_bf16", lambda device: True)
    monkeypatch.setattr(precision, "measure_interleaved", lambda runs, *_: {name: seconds[name] for name in runs})
    return seconds


def export(model: Model, path: Path, **options: object) -> VerificationReport:
    target = {".pt2": "torch", ".xml": "openvino", ".onnx": "onnx"}[path.suffix]
    request = ExportRequest(target, precision="auto", timing_seconds=0.01, **options)  # type: ignore[arg-type]
    return export_in_fastest_precision(
        model, contract_of(model), path, request, VerificationImages(pixels(model, 8), "made")
    )


def test_a_program_computes_in_bf16_where_it_is_native_faster_and_agrees(
    gain: dict[str, float], tmp_path: Path
) -> None:
    report = export(tiny(), tmp_path / "model.pt2", tolerance=100.0)
    runtime, contract = open_exported_file(tmp_path / "model.pt2")
    assert (report.precision, contract.precision, runtime.precision) == ("bf16", "bf16", "bf16")  # type: ignore[attr-defined]
    assert report.notes[0].startswith("precision: bf16 (measured 1.5 times as fast as fp32 on ")
    assert report.notes[0].endswith(" % same predictions on 8 images)")


def test_it_computes_in_fp32_where_bf16_gains_little(gain: dict[str, float], tmp_path: Path) -> None:
    gain["bf16"] = 1.45
    report = export(tiny(), tmp_path / "model.pt2")
    assert open_exported_file(tmp_path / "model.pt2")[1].precision == report.precision == "fp32"
    assert "precision: fp32 (bf16 measured 1.0 times as fast as fp32 on " in report.notes[0]


def test_it_computes_in_fp32_where_bf16_is_not_native(
    gain: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "multiplies_bf16", lambda device: False)
    monkeypatch.setattr(choosing, "open_candidates", None)  # nothing is written for a measurement
    report = export(tiny(), tmp_path / "model.pt2")
    assert report.precision == "fp32"
    assert report.notes[0].endswith(" does not multiply bf16 natively)")


def test_it_computes_in_fp32_where_the_outputs_in_bf16_differ(gain: dict[str, float], tmp_path: Path) -> None:
    model = tiny()
    with torch.no_grad():  # LayerNorm removes it; in bf16 nothing of the image is left beside it
        model.embed.projection.bias += 1000
    report = export(model, tmp_path / "model.pt2")
    assert report.precision == "fp32"
    assert report.notes[0].startswith("precision: fp32 (bf16 refused on 8 images: ")


def test_the_tolerance_of_bf16_is_not_that_of_fp32(gain: dict[str, float], tmp_path: Path) -> None:
    gain["bf16"] = 1.5
    assert export(tiny(), tmp_path / "model.pt2", tolerance=0.0).passed  # 0 points, not logits equal in every bit


def test_an_openvino_file_states_the_precision_that_it_is_opened_in(
    gain: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino")
    pytest.importorskip("onnxscript")
    settings, hints = exported.compile_settings, []

    def compile_settings(kind: str, threads: int | None) -> dict[str, object]:
        hints.append(kind)
        return settings("fp32", threads)  # on any processor

    monkeypatch.setattr(exported, "compile_settings", compile_settings)
    monkeypatch.setattr(exported, "openvino_precisions", lambda: ["FP32", "BF16"])
    path = tmp_path / "model.xml"
    assert export(tiny(), path).precision == "bf16"
    runtime, contract = open_exported_file(path)
    assert (contract.precision, runtime.precision, hints[-1]) == ("bf16", "bf16", "bf16")  # type: ignore[attr-defined]
    monkeypatch.setattr(exported, "openvino_precisions", lambda: ["FP32"])
    runtime, contract = open_exported_file(path)  # as it would be computed by another processor
    assert (contract.precision, runtime.precision, hints[-1]) == ("bf16", "fp32", "fp32")  # type: ignore[attr-defined]
    report = export(tiny(), path)
    assert (report.precision, report.notes[0][-31:-1]) == ("fp32", "does not multiply bf16 natively"[-30:])


@pytest.mark.parametrize("kind", ["auto", "bf16"])
def test_onnx_runtime_has_no_precision_to_choose(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tiny(), tmp_path / "model.safetensors")
    assert command("export", path, tmp_path / "model.onnx", "--precision", kind) == 2
    expected = f"--precision {kind} is for .xml and .pt2: ONNX Runtime computes in fp32 on CPUs"
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "model.onnx").exists()


def test_the_command_prints_the_choice_and_fp32_stays_the_default(
    gain: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tiny(), tmp_path / "model.safetensors")
    assert command("export", path, tmp_path / "a.pt2", "--precision", "auto", "--tolerance", 100) == 0
    assert "  note: precision: bf16 (measured 1.5 times as fast as fp32 on " in capsys.readouterr().out
    assert command("export", path, tmp_path / "b.pt2") == 0
    assert "(torch, fp32)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command("export", path, tmp_path / "c.pt2", "--precision", "auto", "--fp16")
