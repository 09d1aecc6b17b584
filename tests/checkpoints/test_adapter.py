"""LoRA adapters: ours open in PEFT, PEFT's open in vitrail, and the logits are the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vitrail
from tests.parity.peers import spread
from vitrail.checkpoints.adapter import (
    CONFIG_FILE,
    METADATA_KEY,
    TRANSFORMERS_NAMINGS,
    WEIGHTS_FILE,
    find_low_rank,
    map_modules,
    read_adapter,
    write_adapter,
)
from vitrail.checkpoints.convert import convert
from vitrail.cli import main
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.lora import merge_lora, tune
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches
from vitrail.utils.json import to_json

peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'vitrail[peers]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'vitrail[peers]'")
from safetensors.torch import load_file, save_file  # noqa: E402

FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "vit": ({}, "ViTForImageClassification"),
    "deit": ({"prefix": "class+distillation"}, "DeiTForImageClassificationWithTeacher"),
    "dinov2": ({"layer_scale": 0.5, "pool": "class+mean"}, "Dinov2ForImageClassification"),
    "swiglu": (
        {"layer_scale": 0.5, "pool": "class+mean", "mlp": "swiglu", "mlp_width": 48},
        "Dinov2ForImageClassification",
    ),
    "beit": (
        {
            "position": "relative",
            "pool": "mean-norm",
            "prefix": "class",
            "block": PreNorm(layer_scale=0.5, key_bias=False),
        },
        "BeitForImageClassification",
    ),
    "ast": (
        {"embed": Patches(4, overlap=1), "pool": "output-mean", "head": "norm-linear", "channels": 1},
        "ASTForAudioClassification",
    ),
}
SIZES: dict[str, Any] = {"patch": 4, "width": 16, "depth": 2, "heads": 2, "classes": 5, "image_size": 16}
IMAGE = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(5))


def base(tmp_path: Path, family: str = "vit", **changes: Any) -> vitrail.Model:
    """Return a model without zero weights, saved as an artifact and for transformers."""
    torch.manual_seed(1)
    model = vitrail.build(None, **(SIZES | FAMILIES[family][0] | changes)).eval()
    spread(model)
    model.preprocessing = Preprocessing((16, 16), (16, 16)).with_channels(model.config.channels)
    vitrail.save(model, tmp_path / "base.safetensors")
    convert(tmp_path / "base.safetensors", tmp_path / "base", "hf")
    return model


def theirs(tmp_path: Path, family: str = "vit") -> Any:
    return getattr(transformers, FAMILIES[family][1]).from_pretrained(tmp_path / "base").eval()


def tuned(model: vitrail.Model, how: str = "lora-4") -> vitrail.Model:
    """Return the model with nonzero low-rank additions and another head."""
    tune(model, how)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, one in find_low_rank(model):
            one.b.copy_(0.2 * torch.randn(one.b.shape, generator=generator))
        for name, parameter in model.named_parameters():
            if name.startswith("head."):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


@torch.inference_mode()
def logits(model: Any, image: Tensor = IMAGE) -> Tensor:
    if hasattr(model.config, "num_mel_bins"):  # transformers' AST takes [B, frames, mel bins]
        image = image[:, 0].mT
    outputs = model.eval()(image[:, : model.config.channels] if isinstance(model, vitrail.Model) else image)
    return outputs if isinstance(outputs, Tensor) else outputs.logits


def open_with_peft(tmp_path: Path, adapter: Path, family: str = "vit") -> Any:
    """Open an adapter with PEFT; its warnings are errors."""
    model = peft.PeftModel.from_pretrained(theirs(tmp_path, family), adapter)
    stored = load_file(adapter / WEIGHTS_FILE)
    back = peft.get_peft_model_state_dict(model)
    assert set(back) == set(stored)
    assert all(torch.equal(back[name], stored[name]) for name in stored)
    return model


def close(one: Tensor, other: Tensor) -> None:
    assert (one - other).abs().max() <= 1e-5 * max(1.0, float(other.abs().max()))


@pytest.mark.filterwarnings("error:Found missing adapter keys")
@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_gives_the_same_logits_in_peft(tmp_path: Path, family: str) -> None:
    model = base(tmp_path, family)
    before = logits(model)
    close(logits(theirs(tmp_path, family)), before)
    tuned(model)
    write_adapter(tmp_path / "adapter", model, base="somebody/base")
    found = open_with_peft(tmp_path, tmp_path / "adapter", family)
    merge_lora(model)
    expected = logits(model)
    assert (expected - before).abs().max() > 0.1
    close(logits(found), expected)
    settings = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())
    assert settings["base_model_name_or_path"] == "somebody/base"
    assert (settings["r"], settings["lora_alpha"]) == (4, 4)
    again = vitrail.load(tmp_path / "base.safetensors", adapter=tmp_path / "adapter")
    close(logits(again), expected)


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_adapter_of_a_dinov3_gives_the_same_features_in_peft(tmp_path: Path, mlp: str) -> None:
    slots = {"position": "rotary-dinov3", "registers": 2, "layer_scale": 0.5, "key_bias": False}
    model = base(tmp_path, classes=None, mlp=mlp, **slots)
    tuned(model)
    write_adapter(tmp_path / "adapter", model)
    peer = transformers.DINOv3ViTModel.from_pretrained(tmp_path / "base").eval()
    with torch.inference_mode():
        expected = model(IMAGE)
        found = peft.PeftModel.from_pretrained(peer, tmp_path / "adapter").eval()(IMAGE).pooler_output
    close(found, expected)
    close(logits(vitrail.load(tmp_path / "base.safetensors", adapter=tmp_path / "adapter")), expected)


def write_with_peft(tmp_path: Path, family: str = "vit", **settings: Any) -> Tensor:
    """Write a PEFT adapter with a different A and a nonzero B per module; return PEFT's logits."""
    torch.manual_seed(3)
    model = peft.get_peft_model(theirs(tmp_path, family), peft.LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "theirs")
    return logits(model)


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]},
        {"r": 3, "lora_alpha": 6, "use_rslora": True, "target_modules": ["q_proj", "k_proj", "v_proj", "fc1"]},
        {"r": 2, "target_modules": "all-linear", "modules_to_save": ["classifier"]},
        {
            "r": 2,
            "lora_alpha": 4,
            "target_modules": ["q_proj", "fc2"],
            "rank_pattern": {"fc2": 5},
            "alpha_pattern": {"fc2": 20},
            "layers_to_transform": [1],
        },
    ],
    ids=["q-v", "rslora", "all-linear", "patterns"],
)
def test_peft_adapters_give_peft_logits_here(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = base(tmp_path)
    expected = write_with_peft(tmp_path, **settings)
    assert (expected - logits(model)).abs().max() > 0.1
    close(logits(vitrail.load(tmp_path / "base.safetensors", adapter=tmp_path / "theirs")), expected)
    close(logits(vitrail.load(tmp_path / "base", adapter=tmp_path / "theirs")), expected)


@pytest.mark.parametrize("family", ["deit", "dinov2", "swiglu", "beit", "ast"])
def test_peft_adapters_of_other_families(tmp_path: Path, family: str) -> None:
    base(tmp_path, family)
    leaves = ["q_proj", "k_proj", "v_proj", "o_proj"]
    leaves += ["gate_proj", "up_proj", "down_proj"] if family == "swiglu" else ["fc1", "fc2"]
    expected = write_with_peft(tmp_path, family, r=3, lora_alpha=6, target_modules=leaves)
    close(logits(vitrail.load(tmp_path / "base.safetensors", adapter=tmp_path / "theirs")), expected)


def test_names_of_transformers_4_are_read_and_written(tmp_path: Path) -> None:
    model = tuned(base(tmp_path))
    for place, spelling in enumerate(TRANSFORMERS_NAMINGS):
        write_adapter(tmp_path / str(place), model, naming=spelling)
    new, old = (load_file(tmp_path / str(place) / WEIGHTS_FILE) for place in range(2))
    assert "base_model.model.vit.encoder.layer.1.attention.attention.query.lora_A.weight" in old
    assert "base_model.model.vit.encoder.layer.0.output.dense.lora_B.weight" in old
    assert not set(new) & set(old) - {"base_model.model.classifier.weight", "base_model.model.classifier.bias"}
    one, other = (read_adapter(tmp_path / str(place), model.config) for place in range(2))
    assert all(torch.equal(one.deltas[name], other.deltas[name]) for name in one.deltas)
    assert json.loads((tmp_path / "1" / CONFIG_FILE).read_text())["target_modules"] == [
        "attention.attention.key",
        "attention.attention.query",
        "attention.attention.value",
        "attention.output.dense",
        "intermediate.dense",
        "output.dense",
    ]


def test_names_are_those_of_the_installed_transformers(tmp_path: Path) -> None:
    for family in FAMILIES:
        folder = tmp_path / family
        folder.mkdir()
        model = base(folder, family)
        linear = {name for name, one in theirs(folder, family).named_modules() if isinstance(one, torch.nn.Linear)}
        assert {name for name in linear if "classifier" not in name} == set(
            map_modules(model.config, TRANSFORMERS_NAMINGS[0])
        )


def test_adapter_with_new_head_sets_labels_and_size(tmp_path: Path) -> None:
    base(tmp_path)
    other = tuned(vitrail.load(tmp_path / "base.safetensors", classes=3, image_size=24))
    pipeline = Preprocessing((24, 24), (24, 24), turn=True)
    write_adapter(tmp_path / "adapter", other, labels=("a", "b", "c"), preprocessing=pipeline)
    image = torch.randn(2, 3, 24, 24)
    merge_lora(other)
    found = vitrail.load(tmp_path / "base.safetensors", adapter=tmp_path / "adapter")
    assert found.labels == ("a", "b", "c")
    assert found.preprocessing == pipeline
    assert found.config.image_size == (24, 24)
    close(logits(found, image), logits(other, image))


def test_convert_merges_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tuned(base(tmp_path))
    write_adapter(tmp_path / "adapter", model, labels=tuple("abcde"))
    merge_lora(model)
    source, adapter = str(tmp_path / "base.safetensors"), str(tmp_path / "adapter")
    out = str(tmp_path / "out.safetensors")
    assert main(["convert", source, out, "--to", "vitrail", "--adapter", adapter]) == 0
    assert "low-rank additions" in capsys.readouterr().out
    found = vitrail.load(out)
    assert found.labels == tuple("abcde")
    close(logits(found), logits(model))
    assert main(["convert", source, str(tmp_path / "hf"), "--to", "hf", "--adapter", adapter]) == 0
    close(logits(transformers.ViTForImageClassification.from_pretrained(tmp_path / "hf")), logits(model))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "trained biases are not supported"),
        ({"peft_type": "LOHA"}, "only LORA"),
        ({"init_lora_weights": "pissa"}, "changes the base"),
        ({"layer_replication": [[0, 2]]}, "unsupported setting layer_replication"),
        ({"something_new": 3}, "unsupported setting something_new"),
        ({"alpha_pattern": {"^fc.*": 3}}, "is not the end of a name"),
        ({"lora_alpha": "much"}, "lora_alpha must be a number"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a number"),
        ({"lora_alpha": True}, "lora_alpha must be a number"),
        ({"lora_alpha": 1e308}, "too large for torch.float32"),
        ({"alpha_pattern": ["fc1"]}, "alpha_pattern must be a JSON object"),
        ({"alpha_pattern": "fc1"}, "alpha_pattern must be a JSON object"),
    ],
)
def test_unsupported_settings_are_refused_in_one_line(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    model = tuned(base(tmp_path))
    write_adapter(tmp_path / "adapter", model)
    path = tmp_path / "adapter" / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(ValueError, match=message) as error:
        vitrail.load(tmp_path / "base.safetensors", adapter=tmp_path / "adapter")
    assert "\n" not in str(error.value)


def test_adapters_for_other_models_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    model = tuned(base(tmp_path))
    source, adapter = tmp_path / "base.safetensors", tmp_path / "adapter"
    write_adapter(adapter, model)
    other = vitrail.build(None, **(SIZES | {"width": 32})).config
    with pytest.raises(ValueError, match="is the adapter for another size"):
        read_adapter(adapter, other)
    shallow = vitrail.build(None, **(SIZES | {"depth": 1})).config
    with pytest.raises(ValueError, match="is the adapter for another model"):
        read_adapter(adapter, shallow)
    stored = load_file(adapter / WEIGHTS_FILE)
    name = next(name for name in stored if "lora_A" in name)
    for change, message in (
        ({name: torch.full_like(stored[name], torch.nan)}, "not finite"),
        ({name.replace("lora_A", "lora_magnitude_vector"): stored[name].clone()}, "this model has no"),
    ):
        save_file(stored | change, adapter / WEIGHTS_FILE)
        with pytest.raises(ValueError, match=message):
            vitrail.load(source, adapter=adapter)
    save_file({key: tensor for key, tensor in stored.items() if key != name}, adapter / WEIGHTS_FILE)
    with pytest.raises(ValueError, match="has only lora_B"):
        vitrail.load(source, adapter=adapter)
    (adapter / WEIGHTS_FILE).unlink()
    with pytest.raises(ValueError, match="safe_serialization"):
        vitrail.load(source, adapter=adapter)
    with pytest.raises(ValueError, match="is no adapter"):
        vitrail.load(source, adapter=tmp_path)


FIRST = "base_model.model.vit.layers.0.attention.q_proj"
HEAD = "base_model.model.classifier"


def refused(tmp_path: Path, tensors: dict[str, Tensor], about: dict[str, Any] | None = None) -> str:
    """Return the one-line error for an adapter with these tensors."""
    model = base(tmp_path)
    write_adapter(tmp_path / "adapter", tuned(model))
    save_file(tensors, tmp_path / "adapter" / WEIGHTS_FILE, {METADATA_KEY: json.dumps(about or {})})
    with pytest.raises(ValueError, match=r".") as error:
        vitrail.load(tmp_path / "base.safetensors", adapter=tmp_path / "adapter")
    assert "\n" not in str(error.value)
    return str(error.value)


def pair(module: str = FIRST, rank: int = 2) -> dict[str, Tensor]:
    return {f"{module}.lora_A.weight": torch.ones(rank, 16), f"{module}.lora_B.weight": torch.ones(16, rank)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "no tensors to merge"),
        (pair(rank=0), "rank 0"),
        ({name: one.to(torch.float8_e4m3fn) for name, one in pair().items()}, "stored as F8_E4M3"),
        ({name: one.to(torch.int32) for name, one in pair().items()}, "stored as I32"),
        ({f"{HEAD}.weight": torch.tensor(1.0), f"{HEAD}.bias": torch.ones(5)}, "the head must have weights"),
        ({f"{HEAD}.weight": torch.ones(5, 16), f"{HEAD}.bias": torch.tensor(1.0)}, "the head must have weights"),
        ({f"{HEAD}.weight": torch.ones(0, 16), f"{HEAD}.bias": torch.ones(0)}, "the head must have weights"),
        ({f"{HEAD}.weight": torch.ones(5, 16), f"{HEAD}.bias": torch.ones(4)}, "the head must have weights"),
        (pair() | pair(FIRST.replace("vit.", "")), "are the same weights"),
        (
            pair() | pair(FIRST.replace("layers.0.attention.q_proj", "encoder.layer.0.attention.attention.query")),
            "same",
        ),
        (pair() | pair(FIRST.removeprefix("base_model.model.")), "is there twice"),
    ],
)
def test_invalid_tensors_are_refused_in_one_line(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    assert message in refused(tmp_path, tensors)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"labels": ["a", "b", "c", "b", "e"]}, "two labels are 'b'"),
        (
            {"preprocessing": to_json(Preprocessing((16, 16), (16, 16), mean=(0.5,), std=(0.5,)))},
            "preprocessing gives 1 channels and the model takes 3",
        ),
    ],
)
def test_adapter_metadata_must_match_the_model(tmp_path: Path, about: dict[str, Any], message: str) -> None:
    assert message in refused(tmp_path, pair(), about)


def test_model_without_lora_has_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no low-rank additions"):
        write_adapter(tmp_path / "adapter", vitrail.build(None, **SIZES))
    assert not (tmp_path / "adapter").exists()


def test_run_with_lora_writes_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.training.test_train import COLOURS, picture

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base(tmp_path)
    for name, colour in COLOURS.items():
        for number in range(8):
            part = "train" if number < 6 else "val"
            picture(tmp_path / "photos" / part / name / f"{number}.png", colour, 100 * number + len(name))
    arguments = ["train", "photos", "--init", "base.safetensors", "--tune", "lora-2", "--steps", "4", "--workers", "0"]
    assert main([*arguments, "--out", "run", "--batch-size", "6", "--quiet"]) == 0
    made = vitrail.load("run/model.safetensors")
    found = vitrail.load("base.safetensors", adapter="run/adapter")
    assert found.labels == made.labels == ("blue", "green", "red")
    assert found.preprocessing == made.preprocessing
    close(logits(found), logits(made))
    assert json.loads(Path("run/adapter", CONFIG_FILE).read_text())["base_model_name_or_path"] == "base.safetensors"
    assert json.loads(Path("run/summary.json").read_text())["adapter"] == "adapter, in PEFT's form"
    shutil.rmtree(tmp_path / "base")
    convert("base.safetensors", tmp_path / "base", "hf", classes=3)
    close(logits(open_with_peft(tmp_path, tmp_path / "run" / "adapter")), logits(made))


def test_run_notes_a_model_that_transformers_cannot_express(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.training.test_train import COLOURS, picture

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = vitrail.build(None, **(SIZES | {"pool": "mean"}))
    vitrail.save(model, tmp_path / "mean.safetensors", preprocessing=Preprocessing((16, 16), (16, 16)))
    for name, colour in COLOURS.items():
        for number in range(8):
            part = "train" if number < 6 else "val"
            picture(tmp_path / "photos" / part / name / f"{number}.png", colour, 100 * number + len(name))
    arguments = ["train", "photos", "--init", "mean.safetensors", "--tune", "lora", "--steps", "1", "--workers", "0"]
    assert main([*arguments, "--out", "run", "--batch-size", "6", "--quiet"]) == 0
    assert not Path("run/adapter").exists()
    note = json.loads(Path("run/summary.json").read_text())["adapter"]
    assert note.startswith("not written: transformers cannot express this model")
