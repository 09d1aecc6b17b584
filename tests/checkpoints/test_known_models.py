"""Public models by name: the table, the names that commands take, and a directory that stands in for the Hub."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vitrail
from vitrail.checkpoints import card
from vitrail.checkpoints.convert import convert
from vitrail.checkpoints.io.safetensors import save_safetensors
from vitrail.checkpoints.known_models import KNOWN_MODELS, MODELS_BY_NAME, expand_name
from vitrail.checkpoints.load import build_meta_model, compute_checksum, derive_model_name, resolve_path
from vitrail.cli import main
from vitrail.models.registry import configure
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches
from vitrail.nn.head import Projection
from vitrail.nn.mlp import SwiGLU
from vitrail.nn.position import Learned1D

WEIGHTS = Path(__file__).parents[3] / "shared" / "weights" / "deit_tiny_patch16_224.safetensors"
TINY = {"patch": 8, "width": 32, "depth": 1, "heads": 2, "image_size": 16, "classes": 3}


def configure_known(model):
    """Return the configuration of a row, with objects for the options that have no short name."""
    options = dict(model.options)
    if "projection" in options:
        options["head"] = Projection(options.pop("projection"))
    if not options.pop("patch_bias", True):
        options["embed"] = Patches(int(model.architecture.partition("/")[2]), bias=False)
    if not options.pop("qkv_bias", True):
        options["block"] = PreNorm(qkv_bias=False)
    if options.pop("mlp_norm", False):
        options["mlp"] = SwiGLU(normed=True)
    if not options.pop("class_position", True):
        options["position"] = Learned1D(prefix="none")
    return configure(model.architecture, image_size=model.size, classes=model.classes, **options)


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A directory of weights, with deit-tiny under its name and dinov2-small under its repository."""
    for name, seed in (("deit-tiny.safetensors", 1), ("facebook/dinov2-small/model.safetensors", 2)):
        torch.manual_seed(seed)
        model = vitrail.build(**TINY)
        model.preprocessing = vitrail.Preprocessing((16, 16), (16, 16))
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        vitrail.save(model, tmp_path / name, labels=["a", "b", "c"], licence="mit")
    monkeypatch.setenv("VITRAIL_MODELS", str(tmp_path))
    monkeypatch.chdir(tmp_path.parent)
    return tmp_path


@pytest.mark.parametrize("model", KNOWN_MODELS, ids=lambda model: model.name)
def test_parameters_of_the_table_are_those_of_the_architecture(model):
    built = build_meta_model(configure_known(model))
    assert sum(parameter.numel() for parameter in built.parameters()) == model.parameters


def test_names_and_repositories_are_unique_and_facts_have_sources():
    assert len(MODELS_BY_NAME) == len(KNOWN_MODELS) == len({model.repo for model in KNOWN_MODELS}) >= 40
    for model in KNOWN_MODELS:
        assert (model.accuracy is None) == (model.source is None), model.name
        assert model.measure == "top-1" or model.classes is None, model.name
        assert model.licence in ("apache-2.0", "mit", "cc-by-nc-4.0", "dinov3-license"), model.name


def test_listing_needs_neither_torch_nor_numpy():
    script = (
        "import sys, vitrail.cli; vitrail.cli.main(['models', 'dino', '--json']); "
        "print('torch' in sys.modules, 'numpy' in sys.modules, file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stderr.split() == ["False", "False"]
    rows = json.loads(result.stdout)
    assert {"dino-small", "dinov2-giant"} <= {row["name"] for row in rows}
    small = next(row for row in rows if row["name"] == "dino-small")
    assert small["address"] == "hf://timm/vit_small_patch16_224.dino"
    assert (small["accuracy"], small["measure"], small["source"]) == (77.0, "linear", "README of facebookresearch/dino")


def test_table_shows_accuracies_with_their_sources_and_gaps(capsys):
    assert main(["models", "mae"]) == 0
    text = capsys.readouterr().out
    assert "timm/vit_base_patch16_224.mae" in text
    assert "no published accuracy was found" in text
    assert main(["models", "deit", "tiny", "distilled"]) == 0
    text = capsys.readouterr().out
    assert "1 model." in text
    assert "timm, results/results-imagenet.csv" in text


def test_filter_without_a_match_is_an_error(capsys):
    assert main(["models", "resnext"]) == 2
    assert "no model matches 'resnext'" in capsys.readouterr().err


def test_name_stands_for_its_address_unless_there_is_such_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert expand_name("deit-tiny") == "hf://timm/deit_tiny_patch16_224.fb_in1k"
    assert expand_name("hf://me/vit") == "hf://me/vit"
    (tmp_path / "deit-tiny").mkdir()
    assert expand_name("deit-tiny") == "deit-tiny"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("deit-tinny", "did you mean 'deit-tiny'?"),
        ("dino_v2_base", "did you mean 'dinov2-base'?"),
        ("zzzz", "model name: `vitrail models`"),
    ],
)
def test_unknown_name_suggests_the_closest(name, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"{name}: no such file or model name") as failure:
        vitrail.load(name)
    assert hint in str(failure.value)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("name", ["S/16", "R50x1", "Swin-T", "R50+B/16"])
def test_name_of_an_architecture_has_no_weights(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = f"{name} names an architecture, without weights: `vitrail models` lists trained models, model='{name}' "
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        vitrail.load(name)


def test_directory_stands_in_for_the_hub(models):
    by_name, by_address = vitrail.load("deit-tiny"), vitrail.load("hf://timm/deit_tiny_patch16_224.fb_in1k")
    assert torch.equal(by_name.head.weight, by_address.head.weight)
    assert resolve_path("dinov2-small") == models / "facebook" / "dinov2-small"
    assert derive_model_name("dinov2-small", resolve_path("dinov2-small")) == "dinov2-small"
    assert vitrail.Model.from_pretrained("facebook/dinov2-small").labels == ("a", "b", "c")


def test_openclip_repository_loads_from_its_own_weights_beside_those_of_transformers(models):
    folder = models / "laion" / "CLIP-ViT-B-32-laion2B-s34B-b79K"
    options = {"patch": 8, "width": 64, "depth": 1, "heads": 1, "image_size": 16, "token_norm": True, "eps": 1e-5}
    clip = vitrail.build(**options, classes=None, head=Projection(5), embed=Patches(8, bias=False))
    vitrail.save(clip, models / "clip.safetensors")
    folder.mkdir(parents=True)
    convert(models / "clip.safetensors", folder / "open_clip_model.safetensors", "clip")
    save_safetensors(folder / "model.safetensors", {"vision_model.embeddings.class_embedding": torch.zeros(64)}, {})
    (folder / "open_clip_config.json").write_text('{"model_cfg": {"vision_cfg": {"width": 64, "head_width": 64}}}')
    assert torch.equal(vitrail.load("openclip-base-32").head.weight, clip.head.weight)
    assert compute_checksum(folder) == compute_checksum(folder / "open_clip_model.safetensors")


def test_commands_take_names(models, capsys):
    assert main(["describe", "deit-tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loads"] is True
    assert main(["convert", "deit-tiny", str(models / "out.safetensors"), "--to", "vitrail"]) == 0
    assert main(["describe", "deit-tinny"]) == 2
    assert "did you mean 'deit-tiny'?" in capsys.readouterr().err


def test_run_records_the_address_of_a_name(models, tmp_path):
    run, _ = vitrail.train("digits", init="deit-tiny", out=tmp_path / "run", steps=1, batch_size=8)
    assert json.loads((run / "recipe.json").read_text())["init"] == "hf://timm/deit_tiny_patch16_224.fb_in1k"


def test_offline_error_tells_both_ways(tmp_path):
    script = "import vitrail; vitrail.load('deit-small')"
    environment = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": str(Path(vitrail.__file__).parents[1]),
    }
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    line = result.stderr.strip().splitlines()[-1]
    assert "hf://timm/deit_small_patch16_224.fb_in1k: not in the cache" in line
    assert "load it once with the network, or set VITRAIL_MODELS to a directory with deit-small.safetensors" in line


def test_directory_of_models_that_does_not_exist_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("VITRAIL_MODELS", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"VITRAIL_MODELS=.*nowhere is not a directory"):
        vitrail.load("deit-tiny")


@pytest.mark.skipif(not WEIGHTS.exists(), reason="the DeiT-Ti weights are not beside this checkout (../shared/weights)")
def test_real_weights_load_by_name(tmp_path, monkeypatch):
    (tmp_path / "deit-tiny.safetensors").symlink_to(WEIGHTS)
    monkeypatch.setenv("VITRAIL_MODELS", str(tmp_path))
    model = vitrail.load("deit-tiny")
    assert sum(parameter.numel() for parameter in model.parameters()) == MODELS_BY_NAME["deit-tiny"].parameters
    assert model.preprocessing.mean == (0.485, 0.456, 0.406)


def test_pretrained_methods_are_those_of_load_and_save(tmp_path, monkeypatch):
    model = vitrail.build(**TINY)
    model.save_pretrained(tmp_path / "mine", labels=["a", "b", "c"], licence="mit")
    again = type(model).from_pretrained(tmp_path / "mine")
    assert again.config == model.config
    assert (again.labels, again.card["licence"]) == (("a", "b", "c"), "mit")
    assert vitrail.Model.from_pretrained(tmp_path / "mine", classes=None).config == replace(model.config, classes=None)
    with pytest.raises(ValueError, match=r"is a ViT, not a BiT: use vitrail\.load"):
        type(vitrail.build("R26x0.5", classes=3, image_size=32)).from_pretrained(tmp_path / "mine")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file: give a directory"):
        model.save_pretrained(tmp_path / "file")
    monkeypatch.setattr(card, "push", lambda *given, **more: (given, more))
    assert model.push_to_hub("me/vit", private=True) == ((model, "me/vit"), {"private": True})
