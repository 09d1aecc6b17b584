"""Export of models of clips: verified against the model, opened again by `predict`, and refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitrail
from tests.deploy.clips import CLIP, LABELS, clip_model, frames, save_model, write_folder
from vitrail.cli import main
from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.export.comparison import VerificationImages, generate_images
from vitrail.deploy.export.verify import ExportRequest, export_and_verify
from vitrail.deploy.runtimes.exported import open_exported_file
from vitrail.deploy.runtimes.open import build_contract
from vitrail.models.base import Model

FORMS: dict[str, dict[str, Any]] = {
    "joint": {},
    "divided": {"block": "divided"},
    "mvit": {"family": "mvit", "width": 16, "depths": (1, 1), "heads": (1, 2), "image_size": 32},
}


def needs(suffix: str) -> None:
    for package in {".onnx": ("onnxscript", "onnxruntime"), ".xml": ("onnxscript", "openvino"), ".pt2": ()}[suffix]:
        pytest.importorskip(package)


def make_model(form: str) -> Model:
    if form != "mvit":
        return clip_model(**FORMS[form])
    torch.manual_seed(0)
    net = vitrail.build(classes=3, frames=4, **FORMS[form]).eval()
    net.labels, net.preprocessing = LABELS, Preprocessing((32, 32), (32, 32), clip=CLIP)
    return net


@pytest.mark.parametrize(
    ("form", "suffix", "uint8"), [("mvit", ".onnx", False), ("divided", ".pt2", True), ("joint", ".xml", True)]
)
def test_an_export_computes_what_the_model_does(form: str, suffix: str, uint8: bool, tmp_path: Path) -> None:
    needs(suffix)
    net, path = make_model(form), tmp_path / f"model{suffix}"
    contract = build_contract("model", None, net)
    clips = VerificationImages(generate_images(contract.preprocessing, 3), "generated")
    assert clips.pixels.shape == (3, *contract.preprocessing.shape)
    request = ExportRequest({".onnx": "onnx", ".xml": "openvino", ".pt2": "torch"}[suffix], uint8, timing_seconds=0.1)
    assert export_and_verify(net, contract, path, request, clips).passed
    runtime, stored = open_exported_file(path)
    assert stored.preprocessing == net.preprocessing
    with torch.inference_mode():
        expected = net(contract.preprocessing.normalise(torch.from_numpy(clips.pixels))).numpy()
    assert np.allclose(runtime(clips.pixels), expected, atol=1e-4)
    assert np.allclose(runtime(clips.pixels[:1]), expected[:1], atol=1e-4)  # any number of clips


def test_the_command_verifies_on_labelled_videos_and_predict_opens_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = save_model(tmp_path / "model.safetensors", replace(CLIP, clips=2, crops=2)), tmp_path / "model.pt2"
    for number, label in enumerate(LABELS):
        write_folder(tmp_path / "videos" / label / "one", frames(seed=number))
    data = f"frames:{tmp_path / 'videos'}"
    assert main(["export", str(model), str(out), "--uint8", "--verify", data, "--split", "train", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["images"], report["media"]) == (2, "video")
    assert report["compared"]["score"]["difference"] == 0
    videos = [tmp_path / "videos" / label / "one" for label in LABELS]
    for path in (model, out):
        assert main(["predict", str(path), *map(str, videos), "--out", str(path) + ".csv"]) == 0
    rows = list(vitrail.predict(out, tmp_path / "videos", top=3))  # folders of frames are found
    direct = {row.path: dict(row.predictions) for row in vitrail.predict(model, videos, top=3)}
    for row in rows:
        assert dict(row.predictions) == pytest.approx(direct[row.path], abs=1e-4)  # the mean of all views
    (features,) = vitrail.embed(out, videos[0])
    (expected,) = vitrail.embed(model, videos[0])
    assert features.features is not None and expected.features is not None  # noqa: PT018
    assert np.allclose(features.features, expected.features, atol=1e-4)


def test_int8_is_calibrated_on_clips(tmp_path: Path) -> None:
    needs(".onnx")
    net = clip_model()
    contract = build_contract("model", None, net)
    clips = generate_images(contract.preprocessing, 12)
    request = ExportRequest("onnx", precision="int8", tolerance=34, timing_seconds=0.1)
    images = VerificationImages(clips[:6], "generated")
    report = export_and_verify(net, contract, tmp_path / "model.onnx", request, images, calibration=clips[6:])
    assert any("layers use int8" in note for note in report.notes)
    assert next(vitrail.predict(tmp_path / "model.onnx", frames())).label in LABELS


def test_what_clips_do_not_have_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model(tmp_path / "model.safetensors")
    assert main(["export", str(model), str(tmp_path / "m.pt2"), "--dynamic-size"]) == 2
    assert "--dynamic-size does not support models of clips" in capsys.readouterr().err
    image = write_folder(tmp_path / "video", frames()) / "frame_0.png"
    assert main(["export", str(model), str(tmp_path / "m.pt2"), "--verify", str(image)]) == 2
    assert "takes videos" in capsys.readouterr().err
    assert not list(tmp_path.glob("m.pt2*"))


def test_a_damaged_clip_in_the_header_is_refused(tmp_path: Path) -> None:
    from vitrail.deploy.runtimes.base import contract_from_json, contract_to_json

    text = contract_to_json(build_contract("model", None, clip_model()), "uint8")
    assert contract_from_json(text)[0].media == "video"
    for wrong in ('"frames": 8', '"frames": 0', '"frames": "4"'):
        stored = json.loads(text)
        stored["preprocessing"]["clip"] |= json.loads(f"{{{wrong}}}")
        with pytest.raises(ValueError, match="frames"):
            contract_from_json(json.dumps(stored))
