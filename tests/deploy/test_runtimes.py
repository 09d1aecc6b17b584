"""Damaged, foreign or malicious model files are rejected in one line, and nothing in them is executed."""

import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import vitrail
from tests.deploy.exports import pixels, shared, tiny
from vitrail.data.decode import open_image as opened_picture
from vitrail.deploy.export.export import convert_onnx, export, open_own_file
from vitrail.deploy.export.torch_program import open_program
from vitrail.deploy.runtimes.exported import open_onnx
from vitrail.deploy.runtimes.open import open_checkpoint, open_deployed_model
from vitrail.inference import run_pixels

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

SHARED = Path(__file__).parents[3] / "shared"
WEIGHTS, SAMPLES = SHARED / "weights" / "deit_tiny_patch16_224.safetensors", SHARED / "data" / "imagenet-samples"


@pytest.fixture(scope="module")
def files():
    return shared()


def one_line(path, message, gives="logits"):
    with pytest.raises((ValueError, OSError)) as error:
        open_deployed_model(path, output_kind=gives)
    assert "\n" not in str(error.value)
    assert message in str(error.value), str(error.value)
    assert str(path.name) in str(error.value)


def test_damaged_onnx_gives_one_line(files, tmp_path):
    whole = (files / "model.onnx").read_bytes()
    for place, content in enumerate((b"", b"text", whole[:1000], whole[: len(whole) // 2], os.urandom(5000))):
        path = tmp_path / f"damaged-{place}.onnx"
        path.write_bytes(content)
        one_line(path, str(path))
    one_line(tmp_path / "none.onnx", "no such file")


def test_foreign_onnx_is_rejected(files, tmp_path):
    proto = onnx.load_model(files / "model.onnx")
    del proto.metadata_props[:]
    path = tmp_path / "foreign.onnx"
    path.write_bytes(proto.SerializeToString())
    one_line(path, "not exported by vitrail, so labels and preprocessing are unknown")
    proto.metadata_props.add(key="vitrail", value="{}")
    path.write_bytes(proto.SerializeToString())
    one_line(path, "unsupported metadata format None")


def test_missing_output_is_an_error(files, tmp_path):
    proto = onnx.load_model(files / "model.onnx")
    (logits,) = (output for output in proto.graph.output if output.name == "logits")
    proto.graph.output.remove(logits)
    path = tmp_path / "features.onnx"
    path.write_bytes(proto.SerializeToString())
    one_line(path, "has no classifier: its only output is features")
    assert open_onnx(path, "features")[0](pixels(tiny())).shape == (3, 32)


def test_openvino_files_are_checked(files, tmp_path):
    openvino = pytest.importorskip("openvino")
    model = openvino.convert_model(str(files / "model.onnx"))
    path = tmp_path / "foreign.xml"
    openvino.save_model(model, str(path), compress_to_fp16=False)
    one_line(path, "not exported by vitrail")
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    one_line(path, "not an OpenVINO model, or damaged")
    path.with_suffix(".bin").unlink()
    one_line(path, "foreign.bin is missing")


DROPPED_ELSEWHERE = """
import os, signal, sys, threading
from vitrail.deploy.runtimes.open import open_deployed_model

held = [open_deployed_model(sys.argv[1])]
ender = threading.Thread(target=held.clear)
ender.start()
ender.join()
signal.signal(signal.SIGCHLD, lambda number, frame: print("handled"))
os.kill(os.getpid(), signal.SIGCHLD)
"""


def test_signals_work_after_another_thread_releases_a_model(files, tmp_path):
    pytest.importorskip("openvino")
    _, contract = open_onnx(files / "model.onnx")
    convert_onnx(files / "model.onnx", contract, tmp_path / "model.xml", "openvino", False)
    report = subprocess.run(
        [sys.executable, "-c", DROPPED_ELSEWHERE, tmp_path / "model.xml"], capture_output=True, text=True, check=False
    )
    assert (report.returncode, report.stdout) == (0, "handled\n"), report.stderr


USED = """
import sys
from pathlib import Path
from vitrail.deploy.runtimes.open import open_deployed_model

for path in sys.argv[1:]:
    open_deployed_model(Path(path))
print(*sorted(name for name in sys.modules if "telemetry" in name))
"""


def test_telemetry_is_off(files, tmp_path):
    pytest.importorskip("openvino")
    _, contract = open_onnx(files / "model.onnx")
    convert_onnx(files / "model.onnx", contract, tmp_path / "model.xml", "openvino", False)
    home = tmp_path / "home"
    home.mkdir()
    report = subprocess.run(
        [sys.executable, "-c", USED, files / "model.onnx", tmp_path / "model.xml"],
        env={"PATH": os.environ["PATH"], "HOME": str(home)},  # without CI, which turns telemetry off too
        capture_output=True,
        text=True,
        check=False,
    )
    assert report.returncode == 0, report.stderr
    assert report.stdout.split() == [
        "openvino.tools.ovc.telemetry_params",
        "openvino.tools.ovc.telemetry_stub",
        "openvino.tools.ovc.telemetry_utils",
    ]
    assert list(home.rglob("*")) == []  # telemetry would store its identifiers here


def test_damaged_programs_give_one_line(files, tmp_path):
    whole = (files / "model.pt2").read_bytes()
    for place, content in enumerate((b"", b"PK", whole[: len(whole) // 2])):
        path = tmp_path / f"damaged-{place}.pt2"
        path.write_bytes(content)
        one_line(path, "not an exported PyTorch program, or damaged")


def test_exported_programs_hold_no_pickle(files):
    with zipfile.ZipFile(files / "model.pt2") as archive:
        for name in archive.namelist():
            content = archive.read(name)
            assert not (name.endswith((".pkl", ".pt")) and content), name


class Program:
    """An object whose unpickling runs code."""

    def __reduce__(self):
        return os.mkdir, ("/tmp/vitrail-was-tricked",)


def test_programs_are_not_executed_or_unpickled(files, tmp_path):
    def spoilt(change):
        path = tmp_path / "spoilt.pt2"
        with zipfile.ZipFile(files / "model.pt2") as archive, zipfile.ZipFile(path, "w") as out:
            for info in archive.infolist():
                out.writestr(info.filename, change(info.filename, archive.read(info)))
        return path

    def tricked(name, content):
        if name.endswith("weights_config.json"):
            report = json.loads(content)
            next(iter(report["config"].values()))["use_pickle"] = True
            return json.dumps(report).encode()
        return pickle.dumps(Program()) if name.endswith("weight_0") else content

    one_line(spoilt(tricked), "is not stored as raw contiguous values")
    # Samples and the graph are not even looked at: such a file opens, and nothing has happened.
    path = spoilt(lambda name, content: pickle.dumps(Program()) if "sample" in name or "models/" in name else content)
    assert open_program(path)[0](pixels(tiny())).shape == (3, 5)
    assert not os.path.exists("/tmp/vitrail-was-tricked")
    deep = spoilt(lambda name, content: content.replace(b'"depth": 1,', b'"depth": 100000000,'))
    one_line(deep, "its configuration has 100,000,000 layers")
    shorter = spoilt(lambda name, content: content[:-4] if name.endswith("weight_0") else content)
    one_line(shorter, "is missing or has the wrong size")


def prepared(count=None):
    pipeline = vitrail.load(WEIGHTS).preprocessing
    made = []
    for path in sorted(SAMPLES.iterdir())[:count]:
        with opened_picture(str(path), path.name) as image:
            made.append(pipeline.to_pixels(image).numpy())
    return np.stack(made)


@pytest.mark.slow
@pytest.mark.skipif(not (WEIGHTS.exists() and SAMPLES.exists()), reason="DeiT-Ti and its samples are not in ../shared")
def test_every_runtime_matches_pytorch_on_imagenet_samples(tmp_path):
    pytest.importorskip("openvino")
    found, images = open_checkpoint(WEIGHTS, torch.device("cpu"), None, 0, None, None, None, "fp32"), prepared()
    assert len(images) == 200
    wanted = run_pixels(found.runtime, images)

    def same(runtime, count):
        logits = run_pixels(runtime, images[:count])
        assert np.abs(logits - wanted[:count]).max() < 1e-3
        assert (logits.argmax(1) == wanted[:count].argmax(1)).all()

    report = export(found.model, found.contract, tmp_path / "deit.onnx", target="onnx", uint8=True)
    same(open_deployed_model(tmp_path / "deit.onnx").runtime, 200)
    convert_onnx(tmp_path / "deit.onnx", report, tmp_path / "deit.xml", "openvino", True)
    same(open_deployed_model(tmp_path / "deit.xml", precision="fp32").runtime, 200)
    export(found.model, found.contract, tmp_path / "deit.pt2", target="torch")
    same(open_deployed_model(tmp_path / "deit.pt2").runtime, 32)  # its weights, run by the same PyTorch
    same(open_own_file(tmp_path / "deit.pt2")[0], 32)  # the program itself
