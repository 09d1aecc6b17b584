"""Every command with a small model of every family whose tokens stand in stages. A new family is one row of FAMILIES."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.training.runs import last, trained
from tests.training.test_distributed import run as run_processes
from vitrail.cli import main
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.lora import tune
from vitrail.models.registry import configure

SMALL: dict[str, Any] = {"width": 16, "depths": (2, 2), "heads": (1, 2), "image_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "swin": {"family": "swin", "window": 4, **SMALL},
    "swin-v2": {"family": "swin", "version": 2, "window": 4, **SMALL},
    "mvit": {"family": "mvit", **SMALL},
}
GREY = Preprocessing((32, 32), (32, 32), mean=(0.5,), std=(0.5,))
DIGITS = tuple("0123456789")
families = pytest.mark.parametrize("family", FAMILIES)


def build(family: str, **options: Any) -> vitrail.Model:
    """Build a small model of a family in which nothing is zero or one."""
    torch.manual_seed(0)
    model = vitrail.build_from(configure(**{"classes": 10, "channels": 1, **FAMILIES[family], **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model of each family, a small ViT, and a folder of images."""
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        vitrail.save(build(family), root / f"{family}.safetensors", labels=DIGITS, preprocessing=GREY)
    vit = vitrail.build(patch=8, width=16, depth=2, heads=2, image_size=32, channels=1, classes=10)
    vitrail.save(vit, root / "vit.safetensors", labels=DIGITS, preprocessing=GREY)
    (root / "images").mkdir()
    for number in range(6):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 36), dtype=np.uint8)
        Image.fromarray(pixels).save(root / "images" / f"{number}.png")
    return root


def answer(capsys: pytest.CaptureFixture[str], *arguments: Any) -> Any:
    """Run a command that must succeed and return its JSON."""
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# --- the model itself ---


@families
def test_layer_decay_groups_cover_every_parameter_once(family: str) -> None:
    model = build(family)
    indices = {name: model.layer_index(name) for name, _ in model.named_parameters()}
    depth = model.config.depth
    assert set(indices.values()) == set(range(depth + 2))
    assert [layer.name for layer in model.layers()] == [f"blocks.{k}" for k in range(depth)]
    for name, index in indices.items():
        if name.startswith("blocks."):
            assert index == int(name.split(".")[1]) + 1
        elif name.startswith("embed"):
            assert index == 0
    undecayed = {name for name, p in model.named_parameters() if not model.decays(name, p)}
    assert undecayed >= {name for name, p in model.named_parameters() if p.ndim == 1}
    assert not any(name.endswith(("qkv.weight", "out.weight", "fc1.weight")) for name in undecayed)


@families
def test_lora_leaves_the_embedding_frozen(family: str) -> None:
    model = build(family)
    before = model(torch.randn(2, 1, 32, 32))
    tune(model, "lora-2")
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable
    assert not any(name.startswith("embed.") for name in trainable)
    assert model(torch.randn(2, 1, 32, 32)).shape == before.shape


@families
def test_activation_checkpointing_gives_the_same_gradients(family: str) -> None:
    model, images = build(family).train(), torch.randn(2, 1, 32, 32)
    gradients = []
    for recompute in (False, True):
        model.activation_checkpointing = recompute
        gradients.append(torch.autograd.grad(model(images).square().sum(), list(model.parameters())))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
@families
def test_compiles_without_a_graph_break(family: str) -> None:
    torch.compiler.reset()
    model, images = build(family), torch.randn(2, 1, 32, 32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-4)


@families
def test_gradients_reach_every_parameter(family: str) -> None:
    model = build(family).train()
    model(torch.randn(2, 1, 32, 32)).square().sum().backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]


# --- the commands ---


@families
def test_describe(family: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = answer(capsys, "describe", files / f"{family}.safetensors")
    assert "swin" in json.dumps(facts).lower() or family.split("-")[0] in json.dumps(facts).lower()
    assert main(["describe", str(files / f"{family}.safetensors")]) == 0
    assert "layers" in capsys.readouterr().out


@families
@pytest.mark.parametrize("probe", ["knn", "linear"])
def test_probes(family: str, probe: str, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(files / "cache"))
    result = answer(capsys, "evaluate", files / f"{family}.safetensors", "digits", "--probe", probe)
    assert probe in json.dumps(result)


@families
@pytest.mark.parametrize("role", ["teacher", "student"])
def test_distillation(family: str, role: str, files: Path, tmp_path: Path) -> None:
    own, vit = files / f"{family}.safetensors", files / "vit.safetensors"
    teacher, student = (own, vit) if role == "teacher" else (vit, own)
    run, summary = vitrail.train(
        "digits", init=student, teacher=teacher, recipe="finetune", steps=2, batch_size=16, out=tmp_path / "run"
    )
    assert 0 <= summary["top1"] <= 1
    assert type(vitrail.load(run / "model.safetensors")) is type(vitrail.load(student))


@pytest.mark.slow
@families
@pytest.mark.parametrize("suffix", [".onnx", ".xml", ".pt2"])
def test_export_behind_the_gate(
    family: str, suffix: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip({".onnx": "onnxruntime", ".xml": "openvino", ".pt2": "torch"}[suffix])
    target = tmp_path / f"model{suffix}"
    record = answer(capsys, "export", files / f"{family}.safetensors", target, "--verify", "digits", "--limit", "20")
    assert target.exists()
    assert record["passed"]
    images = sorted((files / "images").iterdir())
    rows = [list(vitrail.predict(model, images)) for model in (files / f"{family}.safetensors", target)]
    assert [row.label for row in rows[0]] == [row.label for row in rows[1]]


@pytest.mark.slow
@families
def test_int8_export_is_gated_too(family: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    target = tmp_path / "small.onnx"
    given = (files / f"{family}.safetensors", target, "--int8", "--verify", "digits", "--limit", "20")
    record = answer(capsys, "export", *given, "--calibration", "8", "--force")  # random weights may miss the gate
    assert record["precision"] == "int8"
    assert record["passed"] == (not record["refusals"])
    assert target.stat().st_size > 0
    assert len(list(vitrail.predict(target, sorted((files / "images").iterdir())))) == 6


@families
def test_dynamic_size_is_refused_by_name(
    family: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "any.onnx"
    assert main(["export", str(files / f"{family}.safetensors"), str(target), "--dynamic-size"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert "dynamic" in lines[-1]
    assert "does not support" in lines[-1]
    assert not target.exists()


@families
def test_predict_embed_and_search(family: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, images = files / f"{family}.safetensors", files / "images"
    assert main(["predict", str(model), str(images), "--out", str(tmp_path / "rows.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 6
    assert main(["embed", str(model), str(images), "--out", str(tmp_path / "features.npy")]) == 0
    features = np.load(tmp_path / "features.npy")
    pixels = GREY(Image.open(images / "0.png"))[None]
    with torch.no_grad():
        expected = vitrail.load(model).eval().embed_images(pixels)[0].numpy()
    np.testing.assert_allclose(features[0], expected, rtol=1e-3, atol=1e-4)
    assert main(["search", "index", str(model), str(images), "--out", str(tmp_path / "index")]) == 0
    capsys.readouterr()
    assert main(["search", "find", str(tmp_path / "index"), str(images / "0.png"), "--json"]) == 0
    neighbours = json.loads(capsys.readouterr().out)["answers"][0]["neighbours"]
    assert "0.png" not in neighbours[0]["path"]


@families
def test_serve(family: str, files: Path) -> None:
    pytest.importorskip("fastapi", reason="fastapi is not installed: pip install 'vitrail[serve]'")
    from tests.serve import made as service

    with service.serving(f"own={files / f'{family}.safetensors'}") as client:
        data = (files / "images" / "0.png").read_bytes()
        assert len(client.predicted(data)) == 3
        status, facts, _ = client.ask("GET", "/models")
        assert status == 200
        assert facts["models"][0]["attention"] is False
        status, refusal, _ = client.post("/attention", data)
        assert status == 409
        assert "has no attention maps" in json.dumps(refusal)


@families
def test_inspect(family: str, files: Path, tmp_path: Path) -> None:
    model, image = str(files / f"{family}.safetensors"), str(files / "images" / "0.png")
    assert main(["inspect", model, image, "--view", "attention", "--at", "9,9", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "0" / "attention-at.png").exists()


# --- several processes ---

LENGTH = ("--recipe", "finetune", "--batch-size", "32", "--steps", "6", "--set", "optimizer=SGD", "--lr", "0.01")


@pytest.fixture(scope="module")
def alone(files: Path) -> dict[str, Path]:
    """Train each family with one process."""
    for family in FAMILIES:
        trained(files, "digits", "--init", f"{family}.safetensors", "--out", f"{family}-alone", *LENGTH)
    return {family: files / f"{family}-alone" for family in FAMILIES}


@pytest.mark.slow
@families
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_give_the_result_of_one(family: str, parallel: str, files: Path, alone: dict[str, Path]) -> None:
    out = f"{family}-{parallel}"
    run_processes(files, 2, "digits", "--init", f"{family}.safetensors", "--out", out, "--parallel", parallel, *LENGTH)
    ours, theirs = last(files / out), last(alone[family])
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        torch.testing.assert_close(
            value, theirs[name], rtol=1e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
