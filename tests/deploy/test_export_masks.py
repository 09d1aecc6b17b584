"""Exports of segmentation models: outputs, contract, the gate of pixels and mIoU, and the precision of predictions."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.deploy.asked import vitrail as command
from tests.deploy.masks import COLOURS, LABELS, photos, save_segmenter, segmenter
from vitrail.deploy.export.comparison import (
    VerificationImages,
    choose_batch_size,
    generate_images,
    tolerances_for,
)
from vitrail.deploy.export.export import export
from vitrail.deploy.export.verify import ExportRequest, VerificationError, export_and_verify
from vitrail.deploy.runtimes import base
from vitrail.deploy.runtimes import precision as precisions
from vitrail.deploy.runtimes.base import ModelContract, contract_from_json, contract_to_json
from vitrail.deploy.runtimes.exported import open_exported_file
from vitrail.deploy.runtimes.open import open_checkpoint
from vitrail.deploy.runtimes.precision import PrecisionCheck
from vitrail.inference import TorchRuntime
from vitrail.models.eomt import EoMT
from vitrail.models.registry import build_segmenter
from vitrail.models.segmenter import DECODERS, DecoderSlot, LinearDecoder, UPerNet
from vitrail.nn.packing import can_pack
from vitrail.tasks.masks import MaskOutputs, Masks
from vitrail.utils.precision import PrecisionChoice

MASKS = Masks()
SMALL_DECODERS = (LinearDecoder(), UPerNet(channels=8), EoMT(queries=8, blocks=1))
SUFFIXES = {"onnx": ".onnx", "openvino": ".xml", "torch": ".pt2"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exports")
    save_segmenter(root / "model.safetensors")
    photos(root / "photos", 4)
    return root


@pytest.fixture(scope="module")
def contract(place: Path) -> ModelContract:
    return open_checkpoint(place / "model.safetensors").contract


@pytest.fixture(scope="module")
def images(contract: ModelContract) -> VerificationImages:
    return VerificationImages(generate_images(contract.preprocessing, 6), "generated")


def request(target: str = "onnx", **options) -> ExportRequest:
    pytest.importorskip({"onnx": "onnxruntime", "openvino": "openvino", "torch": "torch"}[target])
    return ExportRequest(target, timing_seconds=0.01, search_seconds=5, **options)


@pytest.mark.parametrize("decoder", SMALL_DECODERS, ids=lambda slot: type(slot).__name__)
@pytest.mark.parametrize("target", SUFFIXES)
def test_exported_masks_are_those_of_the_model(
    contract: ModelContract, images: VerificationImages, tmp_path: Path, target: str, decoder: DecoderSlot
) -> None:
    model, path = segmenter(decoder), tmp_path / f"m{SUFFIXES[target]}"
    contract = replace(contract, config=open_checkpoint(model).contract.config)
    report = export_and_verify(model, contract, path, request(target), images)
    assert report.passed
    assert report.features is None
    assert report.compared.of_pixels
    assert report.compared.agreement is not None
    assert report.compared.agreement >= 0.999
    runtime, stored = open_exported_file(path)
    outputs = runtime(images.pixels[:2])
    assert outputs.shape == (2, len(LABELS), *contract.preprocessing.size)
    assert (stored.target_kind, stored.labels, stored.colours) == ("masks", LABELS, COLOURS)
    with pytest.raises(ValueError, match="has the outputs logits, not features"):
        open_exported_file(path, "features")


def test_a_file_predicts_the_masks_of_its_checkpoint(place: Path, contract: ModelContract, tmp_path: Path) -> None:
    export(segmenter(), contract, tmp_path / "m.onnx", target="onnx", uint8=True, dynamic_size=True)
    for options in ({}, {"size": (40, 48)}, {"inference": "sliding", "flip": True}):
        rows = [
            list(vitrail.predict(path, place / "photos", **options))
            for path in (place / "model.safetensors", tmp_path / "m.onnx")
        ]
        for first, second in zip(*rows, strict=True):
            assert first.mask is not None
            assert second.mask is not None
            assert (first.mask == second.mask).mean() > 0.999


def test_the_command_reports_pixels_and_refuses_merging(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    assert command("export", place / "model.safetensors", tmp_path / "m.onnx", "--verify", place / "photos") == 0
    output = capsys.readouterr()
    found = re.search(r"same class: ([\d.]+)% of the pixels", output.out)
    assert found is not None
    assert float(found[1]) >= 99.9
    assert "compared without labels" in output.err
    assert command("export", place / "model.safetensors", tmp_path / "n.onnx", "--merge", 2) == 2
    assert "--merge does not support segmentation models" in capsys.readouterr().err
    assert not (tmp_path / "n.onnx").exists()


def test_data_with_masks_measures_miou(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    photos(tmp_path / "data" / "images", 4)
    for row in vitrail.predict(place / "model.safetensors", tmp_path / "data" / "images"):
        path = tmp_path / "data" / "masks" / Path(row.path).relative_to(tmp_path / "data" / "images")
        path.parent.mkdir(parents=True, exist_ok=True)
        assert row.mask is not None
        Image.fromarray(row.mask).save(path)
    (tmp_path / "data" / "classes.txt").write_text("\n".join(LABELS), encoding="utf-8")
    asked = ("export", place / "model.safetensors", tmp_path / "m.onnx", "--verify", tmp_path / "data", "--json")
    assert command(*asked) == 0
    score = json.loads(capsys.readouterr().out)["compared"]["score"]
    assert score["measure"] == "mIoU"
    assert abs(score["difference"]) < 0.01
    assert score["first"] > 0.8  # the model's own masks, resized to its size


def test_int8_is_held_to_the_limit_of_pixels(
    contract: ModelContract, images: VerificationImages, tmp_path: Path
) -> None:
    calibration = generate_images(contract.preprocessing, 8, seed=1)
    asked, path = request(precision="int8"), tmp_path / "m.onnx"
    report = export_and_verify(segmenter(), contract, path, asked, images, calibration=calibration)
    assert report.compared.agreement is not None
    assert report.compared.agreement >= 0.99
    assert report.compared.measure_loss()[1] == "pixels"
    assert open_exported_file(path)[1].precision == "int8"


def test_a_file_beyond_the_tolerance_is_not_written(
    contract: ModelContract, images: VerificationImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitrail.deploy.export import export as writing

    other = segmenter()
    with torch.no_grad():
        other.head.classifier.bias[0] += 0.5
    write = writing.write_model
    monkeypatch.setattr(writing, "write_model", lambda model, *more: write(other, *more))
    with pytest.raises(VerificationError, match=r"logits differ by 0\.5.* of the pixels changed"):
        export_and_verify(segmenter(), contract, tmp_path / "m.pt2", request("torch"), images)
    assert not list(tmp_path.iterdir())


# --- the gate, on constructed outputs ---


def constructed(changed: int, images: int = 4) -> tuple[MaskOutputs, MaskOutputs, np.ndarray]:
    """Return the outputs of two models that differ at so many of 1,000 pixels of each image, and masks like the first."""
    masks = np.tile(np.arange(1000, dtype=np.uint8).reshape(20, 50) % 3, (images, 1, 1))
    other = masks.copy()
    other[:, :1, :changed] = (other[:, :1, :changed] + 1) % 3
    logits = np.zeros((images, 3), np.float32)
    logits[:, 0] = 1
    return MaskOutputs(masks, logits), MaskOutputs(other, logits), masks


def test_the_gate_counts_pixels() -> None:
    for changed, passes in ((1, True), (2, False)):
        first, second, _ = constructed(changed)
        assert (tolerances_for("fp32").find_violations(MASKS.compare_outputs(first, second)) == []) == passes
    first, second, _ = constructed(11)
    (reason,) = tolerances_for("bf16").find_violations(MASKS.compare_outputs(first, second))
    assert reason == "1.10 % of the pixels changed, more than 1 %"
    first, second, _ = constructed(10)
    assert tolerances_for("bf16").find_violations(MASKS.compare_outputs(first, second)) == []
    assert MASKS.compare_outputs(first, second).describe() == "99 % same pixels"


def test_the_gate_measures_the_loss_of_miou_on_masks() -> None:
    first, second, targets = constructed(20)
    compared = MASKS.compare_outputs(first, second, targets)
    assert compared.score is not None
    assert compared.score.measure == "mIoU"
    assert compared.score.first == 1
    assert compared.score.second == pytest.approx(0.96, abs=0.01)
    (reason,) = tolerances_for("int8").find_violations(compared)
    assert reason.startswith("mIoU falls by ")
    assert tolerances_for("int8", 10).find_violations(compared) == []
    ignored = np.full_like(targets, 255)
    ignored[:, 1:] = targets[:, 1:]
    assert tolerances_for("int8").find_violations(MASKS.compare_outputs(first, second, ignored)) == []


def test_outputs_that_are_not_finite_never_pass() -> None:
    maps = np.random.default_rng(0).normal(size=(2, 3, 40, 70)).astype(np.float32)
    broken = maps.copy()
    broken[1, 2, 3, 3] = np.nan  # not on the grid of compared logits
    compared = MASKS.compare_outputs(MASKS.keep_outputs(maps), MASKS.keep_outputs(broken))
    assert tolerances_for("bf16", 100).find_violations(compared) == ["its outputs are not finite"]
    assert MASKS.keep_outputs(maps).logits.shape == (2 * 20 * 24, 3)
    with pytest.raises(ValueError, match="masks differ in shape"):
        MASKS.compare_outputs(MASKS.keep_outputs(maps), MASKS.keep_outputs(maps[:, :, :20]))


def test_maps_of_many_classes_are_computed_in_small_batches(contract: ModelContract) -> None:
    assert choose_batch_size(contract) == 16
    large = replace(contract, preprocessing=contract.preprocessing.with_size((2048, 2048)))
    assert choose_batch_size(large) == 8


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("decoder", DECODERS)
def test_every_decoder_runs_in_a_lower_precision(decoder: str, packed: bool, images: VerificationImages) -> None:
    if packed and not can_pack(torch.bfloat16):
        pytest.skip("this processor does not pack bf16")
    model = build_segmenter(patch=8, width=32, depth=4, heads=2, image_size=(32, 32), classes=4, decoder=decoder).eval()
    preprocessing = segmenter().preprocessing
    exact, lower = (
        TorchRuntime(model, preprocessing, precision=precision, packed=packed)(images.pixels)
        for precision in ("fp32", "bf16")
    )
    assert lower.dtype == np.float32
    assert np.abs(lower - exact).max() <= 0.05 * max(1, np.abs(exact).max())


@pytest.mark.parametrize(("shift", "passed"), [(0.0, True), (1.0, False)])
def test_a_lower_precision_is_checked_by_pixels(
    contract: ModelContract, monkeypatch: pytest.MonkeyPatch, shift: float, passed: bool
) -> None:
    monkeypatch.setattr(precisions, "CHECKED_IMAGES", 4)
    check = PrecisionCheck(contract, "logits", PrecisionChoice("bf16", "measured"))
    maps = np.random.default_rng(0).normal(size=(2, 4, 32, 32)).astype(np.float32)
    lower = maps.copy()
    lower[:, 0] += shift
    check.add(np.full_like(maps, np.nan), lower)  # the model itself is broken here
    assert check.passed is None
    check.add(maps, lower)
    assert check.passed is passed
    assert "pixels" in check.describe() or "logits" in check.describe()
    assert "on the first 2 images" in check.describe()
    assert check.lower_outputs() is None


def test_the_kind_of_a_contract_is_computed_once(contract: ModelContract, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, parsed = replace(contract), []
    text = contract_to_json(fresh, "uint8")
    with monkeypatch.context() as patch:
        parse = base.config_from_json
        patch.setattr(base, "config_from_json", lambda config: parsed.append(config) or parse(config))
        assert [fresh.target_kind, fresh.target_kind] == ["masks", "masks"]
    assert len(parsed) == 1
    assert fresh == replace(contract)
    assert contract_to_json(fresh, "uint8") == text
    assert replace(fresh, labels=None, colours=None).target_kind == "single"


def test_contracts_of_earlier_versions_have_no_colours(contract: ModelContract) -> None:
    stored = json.loads(contract_to_json(contract, "uint8"))
    del stored["colours"]
    assert contract_from_json(json.dumps(stored))[0] == replace(contract, colours=None)
    for colours, message in ((["#000000"], "1 colours for 4 labels"), (["red"] * 4, "written as #rrggbb, got 'red'")):
        with pytest.raises(ValueError, match=message):
            contract_from_json(json.dumps(stored | {"colours": colours}))
