"""The Hub, tested with a local server: download, revisions, cache, offline mode, push and the card."""

import os
import re
import subprocess
import sys

import pytest
import torch

import vitrail
from tests.checkpoints.hub_on_loopback import Hub
from tests.checkpoints.towers_made import make_towers
from vitrail.checkpoints.artifact import CheckpointContract
from vitrail.checkpoints.card import render_model_card
from vitrail.checkpoints.convert import convert
from vitrail.checkpoints.hub import choose_weights, parse_address
from vitrail.models.registry import configure

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed: pip install 'vitrail[hub]'")

CONFIG = configure(patch=16, width=64, depth=1, heads=1, image_size=32, classes=3)


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.close()


@pytest.fixture
def model(tmp_path):
    made = vitrail.build_from(CONFIG)
    with torch.no_grad():
        made.head.weight.normal_()
    return made


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run(hub, tmp_path, script, offline=False):
    """Run a script in its own process: the library reads the Hub's address and offline mode at import."""
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf-home"), "HF_TOKEN": "hf_test"}
    environment["HF_HUB_OFFLINE"] = "1" if offline else "0"
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=tmp_path)


LOAD = """
import vitrail, torch
model = vitrail.load({address!r})
print(model.config.classes, model.labels, model.head.weight.sum().item())
"""


@pytest.mark.slow
def test_model_from_the_hub_is_cached_for_offline_use(hub, model, tmp_path):
    vitrail.save(model, tmp_path / "a.safetensors", labels=["a", "b", "c"])
    convert(tmp_path / "a.safetensors", tmp_path / "hf", "hf")
    hub.add("me/vit", files_of(tmp_path / "hf") | {"big.bin": b"x" * 1000, "README.md": b"---\nlicense: mit\n---\n"})
    first = run(hub, tmp_path, LOAD.format(address="hf://me/vit"))
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("3 ('a', 'b', 'c')")
    assert not any("big.bin" in asked for asked in hub.asked)
    before = len([asked for asked in hub.asked if "resolve" in asked and asked.startswith("GET")])
    again = run(hub, tmp_path, LOAD.format(address="hf://me/vit"))
    assert again.stdout == first.stdout
    assert (
        len([asked for asked in hub.asked if "resolve" in asked and asked.startswith("GET")]) == before
    )  # from the cache
    hub.close()
    offline = run(hub, tmp_path, LOAD.format(address="hf://me/vit"), offline=True)
    assert offline.stdout == first.stdout, offline.stderr
    unreachable = run(hub, tmp_path, LOAD.format(address="hf://me/vit"))
    assert unreachable.stdout == first.stdout, unreachable.stderr


UNREACHABLE = """
import time, vitrail
from vitrail.cli import main
try:
    vitrail.load("hf://me/vit")
except OSError as error:
    print(error)
start = time.monotonic()
print(main(["train", "digits", "--init", "hf://me/vit"]), time.monotonic() - start < 20)
"""


def test_unreachable_hub_is_one_line_without_repetition(hub, tmp_path):
    hub.close()
    result = run(hub, tmp_path, UNREACHABLE)
    ways = "load it once with the network, or set VITRAIL_MODELS to a directory with me/vit.safetensors"
    message = f"hf://me/vit: not in the cache, and {hub.url} cannot be reached: {ways}"
    first, second = result.stdout.splitlines()
    assert first == message
    assert second == "2 True"
    assert result.stderr.splitlines()[-1] == f"vitrail train: {message}"
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_repository_with_one_archive_works_offline(hub, model, tmp_path):
    vitrail.save(model, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "only.npz", "big_vision")
    hub.add("me/flax", {"only.npz": (tmp_path / "only.npz").read_bytes()})
    online = run(hub, tmp_path, LOAD.format(address="hf://me/flax"))
    assert online.stdout.startswith("3 None"), online.stderr
    hub.close()
    assert run(hub, tmp_path, LOAD.format(address="hf://me/flax"), offline=True).stdout == online.stdout
    absent = run(hub, tmp_path, LOAD.format(address="hf://me/never"), offline=True)
    assert "not in the cache, and the Hub's offline mode is on" in absent.stderr


@pytest.mark.slow
def test_revisions_are_separate_and_missing_ones_raise(hub, model, tmp_path):
    for revision, value in (("main", 1.0), ("v1", 2.0)):
        with torch.no_grad():
            model.head.weight.fill_(value)
        vitrail.save(model, tmp_path / "model.safetensors")
        hub.add("me/vit", {"model.safetensors": (tmp_path / "model.safetensors").read_bytes()}, revision)
    hub.add("me/empty", {"README.md": b"nothing"})
    script = """
import vitrail
print(vitrail.load("hf://me/vit").head.weight.mean().item(), vitrail.load("hf://me/vit@v1").head.weight.mean().item())
for address in ("hf://me/nowhere", "hf://me/vit@v9", "hf://me/empty", "hf://me"):
    try:
        vitrail.load(address)
    except (ValueError, OSError) as error:
        print(str(error).count(chr(10)), error)
"""
    result = run(hub, tmp_path, script)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "1.0 2.0"
    assert len(lines) == 5
    assert all(line.startswith("0 ") for line in lines[1:])
    assert "no weights among its files" in lines[3]
    assert "invalid Hub address" in lines[4]


@pytest.mark.slow
def test_pushed_model_loads_and_the_code_of_its_card_runs(hub, model, tmp_path):
    pipeline = vitrail.Preprocessing((32, 32), (36, 36))
    path = tmp_path / "m.safetensors"
    vitrail.save(model, path, labels=["a", "b", "c"], preprocessing=pipeline, metrics={"top1": 0.93})
    push = f"""
import sys
from vitrail.cli import main
sys.exit(main(["push", {str(path)!r}, "me/pushed", "--licence", "apache-2.0"]))
"""
    pushed = run(hub, tmp_path, push)
    assert pushed.returncode == 0, pushed.stderr
    assert pushed.stdout.startswith(f"{hub.url}/me/pushed/commit/")
    assert set(hub.repos["me/pushed"]["main"]) >= {"model.safetensors", "README.md"}
    text = hub.repos["me/pushed"]["main"]["README.md"].decode()
    for part in ('license: "apache-2.0"', "pipeline_tag: image-classification", "| top1 | 0.93 |", "In timm:"):
        assert part in text
    loaded = run(hub, tmp_path, LOAD.format(address="hf://me/pushed"))
    assert loaded.stdout == f"3 ('a', 'b', 'c') {model.head.weight.sum().item()}\n", loaded.stderr

    from PIL import Image

    Image.new("RGB", (40, 50), (200, 30, 90)).save(tmp_path / "image.jpg")
    operators = "\n".join(
        [
            "import torch",
            "library = torch.library.Library('torchvision', 'DEF')",
            "for name in ('nms', 'qnms'):",
            "    library.define(f'{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')",
        ]
    )
    commands = re.findall(r"\$ vitrail (convert .*)", text)
    assert len(commands) == 2
    for command in commands:
        done = run(hub, tmp_path, f"import sys; from vitrail.cli import main; sys.exit(main({command.split()!r}))")
        assert done.returncode == 0, done.stderr
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        done = run(hub, tmp_path, f"{operators}\n{block}\nprint(type(model).__name__)")
        assert done.returncode == 0, block + done.stderr


def test_card_names_unsupported_libraries():
    config = configure(patch=16, width=64, depth=1, heads=1, image_size=32, position="rotary2d", classes=None)
    text = render_model_card(CheckpointContract(config), "me/rotary", 10)
    assert "In timm: not possible. Timm cannot express this model" in text
    assert "In transformers: not possible." in text
    assert "image-feature-extraction" in text
    assert "Not recorded. Ask the author" in text


def test_hub_addresses():
    assert parse_address("hf://me/vit") == ("me/vit", None)
    assert parse_address("hf://me/vit@refs/pr/1") == ("me/vit", "refs/pr/1")
    assert parse_address("me/vit", "v1") == ("me/vit", "v1")
    for wrong in ("hf://vit", "hf://a/b/c", "hf://../x", "hf://a/b@c@d"):
        with pytest.raises(ValueError, match="invalid Hub address"):
            parse_address(wrong)


def test_the_safest_weights_are_chosen():
    assert choose_weights(["pytorch_model.bin", "model.safetensors", "tf_model.h5"]) == "model.safetensors"
    assert (
        choose_weights(["model-00001-of-00002.safetensors", "model.safetensors.index.json"])
        == "model.safetensors.index.json"
    )
    assert choose_weights(["B_16.npz", "README.md"]) == "B_16.npz"
    openclip = [
        "model.safetensors",
        "open_clip_pytorch_model.bin",
        "pytorch_model.bin",
    ]  # the others: transformers' CLIP
    assert choose_weights([*openclip, "open_clip_config.json"]) == "open_clip_pytorch_model.bin"
    assert (
        choose_weights([*openclip, "open_clip_config.json", "open_clip_model.safetensors"])
        == "open_clip_model.safetensors"
    )
    assert choose_weights(openclip) == "model.safetensors"
    with pytest.raises(ValueError, match=r"several weights files, a\.npz, b\.npz"):
        choose_weights(["a.npz", "b.npz"])


TOWERS = """
import vitrail
print(vitrail.load("hf://me/clip").tokenizer)
towers = vitrail.load_towers("hf://me/clip")
print(towers.tokenizer(["a photo of a cat"]).tolist())
classifier = vitrail.zero_shot(towers, "cat,dog")
print(classifier.labels, round(float(classifier.head.linear.weight.sum()), 3))
"""


@pytest.mark.slow
def test_zero_shot_model_from_the_hub_fetches_its_tokeniser(hub, tmp_path):
    pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'vitrail[text]'")
    towers = make_towers()
    vitrail.save(towers, tmp_path / "towers.safetensors")
    convert(tmp_path / "towers.safetensors", tmp_path / "hf", "hf", text_tower=True)
    files = files_of(tmp_path / "hf")
    assert "tokenizer.json" in files
    hub.add("me/clip", files)
    first = run(hub, tmp_path, TOWERS)
    assert first.returncode == 0, first.stderr
    assert any(asked.startswith("GET") and asked.endswith("tokenizer.json") for asked in hub.asked)
    local = vitrail.load_towers(tmp_path / "hf")
    assert local.tokenizer is not None
    weights = float(vitrail.zero_shot(local, "cat,dog").head.linear.weight.detach().sum())
    tokens = local.tokenizer(["a photo of a cat"]).tolist()
    assert first.stdout == f"None\n{tokens}\n('cat', 'dog') {round(weights, 3)}\n"
