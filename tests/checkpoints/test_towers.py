"""Files with two towers: read as one model or as the image tower, stored with their tokeniser, refused in one line."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'vitrail[text]'")
import vitrail
from tests.checkpoints.towers_made import CONTEXT, make_towers
from vitrail.checkpoints.convert import convert
from vitrail.checkpoints.load import inspect_checkpoint
from vitrail.data.tokenizer import make_open_clip_tokenizer
from vitrail.models.base import Unsupported
from vitrail.models.registry import config_from_json
from vitrail.models.text import EndOfText
from vitrail.utils.json import to_json

TEXTS = ["a cat", "a photo of a dog, 日本 👍"]


@pytest.fixture
def path(tmp_path):
    vitrail.save(make_towers(), tmp_path / "towers.safetensors")
    return tmp_path / "towers.safetensors"


def test_model_file_gives_both_towers_with_the_tokeniser(path) -> None:
    model, again = make_towers(), vitrail.load_towers(path)
    assert again.config == model.config
    assert config_from_json(json.loads(json.dumps(to_json(model.config)))) == model.config
    assert again.tokenizer == model.tokenizer
    assert torch.equal(again.tokenizer(TEXTS), model.tokenizer(TEXTS))
    images = torch.randn(3, 3, 32, 32)
    assert torch.equal(again(images, again.tokenizer(TEXTS)), model(images, model.tokenizer(TEXTS)))
    assert again.preprocessing == model.preprocessing


def test_model_file_gives_the_image_tower_to_load(path) -> None:
    model, image = make_towers(), vitrail.load(path)
    images = torch.randn(2, 3, 32, 32)
    assert image.config == model.config.image
    assert torch.equal(image(images), model(images))
    assert vitrail.load(path, classes=5)(images).shape == (2, 5)
    assert vitrail.load(path, image_size=48)(torch.randn(1, 3, 48, 48)).shape == (1, 24)


def test_both_towers_change_their_image_size(path) -> None:
    model = vitrail.load_towers(path, image_size=48)
    assert model.preprocessing.size == (48, 48)
    for resized in (model, make_towers().resize((48, 48))):
        assert resized(torch.randn(1, 3, 48, 48), resized.tokenizer(TEXTS)).shape == (1, 2)


def test_every_changed_byte_of_the_tokeniser_is_noticed(path) -> None:
    data = bytearray(path.read_bytes())
    at = data.index(b'"clean":"lower"')
    data[at + 10] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="damaged: the checksum of tokenizer differs"):
        vitrail.load_towers(path)


def test_file_without_a_text_tower_is_refused(tmp_path) -> None:
    vitrail.save(vitrail.build(patch=16, width=32, depth=1, heads=2, image_size=32), tmp_path / "vit.safetensors")
    with pytest.raises(ValueError, match=r"it has no text tower: use vitrail.load"):
        vitrail.load_towers(tmp_path / "vit.safetensors")
    convert(tmp_path / "vit.safetensors", tmp_path / "timm.safetensors", "timm")
    with pytest.raises(ValueError, match="no text tower in a known format"):
        vitrail.load_towers(tmp_path / "timm.safetensors")


def test_file_with_half_a_text_tower_is_refused_and_its_image_tower_read(path, tmp_path) -> None:
    convert(path, tmp_path / "clip.safetensors", "clip", text_tower=True)
    state = load_file(tmp_path / "clip.safetensors")
    del state["ln_final.weight"]
    state["transformer.resblocks.0.extra"] = torch.zeros(2)
    save_file(state, tmp_path / "half.safetensors")
    assume = {"heads": 4, "text_heads": 4}
    with pytest.raises(
        ValueError, match=r"(?s)2 differ:.*ln_final.weight \[32\] is missing.*extra \[2\] is unexpected"
    ):
        vitrail.load_towers(tmp_path / "half.safetensors", assume=assume)
    image = vitrail.load(tmp_path / "half.safetensors", assume={"heads": 4})
    assert image.config.classes is None


def test_naflex_is_refused(tmp_path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Siglip2Config(text_config={**small, "vocab_size": 9}, vision_config=small)
    transformers.Siglip2Model(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no fixed grid .NaFlex., which is unsupported: use a fixed-resolution model"):
        vitrail.load_towers(tmp_path)


def test_conversion_says_that_the_text_tower_is_left_out(path, tmp_path) -> None:
    report = convert(path, tmp_path / "image.safetensors", "clip")
    assert "the text tower is left out: text_tower=True converts both" in report.notes
    both = convert(path, tmp_path / "clip.safetensors", "clip", text_tower=True)
    assert "the format does not store the tokeniser: give it when loading" in both.notes
    assert any("the text tower's 4 heads" in note for note in both.notes)


def test_formats_refuse_what_their_code_computes_otherwise(tmp_path) -> None:
    from dataclasses import replace

    model = make_towers()
    config = replace(model.config, text=replace(model.config.text, pool=EndOfText(3), causal=False))
    other = vitrail.build_from(config)
    vitrail.save(other, tmp_path / "other.safetensors")
    for target in ("clip", "hf"):
        with pytest.raises(ValueError, match="cannot express this model: its image tower is SigLIP's"):
            convert(tmp_path / "other.safetensors", tmp_path / target, target, text_tower=True)
    with pytest.raises(Unsupported, match="does not support models with a text tower"):
        convert(tmp_path / "other.safetensors", tmp_path / "out.pth", "timm", text_tower=True)
    biased = make_towers(logit_bias=True)
    vitrail.save(biased, tmp_path / "biased.safetensors")
    with pytest.raises(ValueError, match="its logits have no bias"):
        convert(tmp_path / "biased.safetensors", tmp_path / "hf", "hf", text_tower=True)


def test_transformers_reads_the_tokeniser_that_is_written(path, tmp_path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    report = convert(path, tmp_path / "hf", "hf", text_tower=True)
    assert "transformers does not clean texts as OpenCLIP does" in report.notes
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    again = vitrail.load_towers(tmp_path / "hf")
    options = {"padding": "max_length", "max_length": CONTEXT, "truncation": True, "return_tensors": "pt"}
    assert torch.equal(again.tokenizer(TEXTS), theirs(TEXTS, **options).input_ids)
    ours = make_towers()
    images = torch.randn(2, 3, 32, 32)
    difference = again(images, again.tokenizer(TEXTS)) - ours(images, ours.tokenizer(TEXTS))
    assert float(difference.detach().abs().max()) < 1e-3  # padding after the end of the text changes nothing


def test_repository_of_open_clip_is_read_with_its_settings_and_tokeniser(path, tmp_path) -> None:
    folder, model = tmp_path / "repository", make_towers()
    folder.mkdir()
    convert(path, folder / "open_clip_model.safetensors", "clip", text_tower=True)
    vision, text = {"width": 32, "head_width": 8}, {"heads": 4, "context_length": CONTEXT}
    settings = {"model_cfg": {"vision_cfg": vision, "text_cfg": text}}
    (folder / "open_clip_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(json.dumps(model.tokenizer.as_transformers()))
    again = vitrail.load_towers(folder)
    assert again.config.text == model.config.text
    assert again.tokenizer == model.tokenizer  # OpenCLIP's own rules, not those of the file
    for name, value in (("pool_type", "first"), ("hf_model_name", "roberta-base"), ("embed_cls", True)):
        changed = {"model_cfg": {"vision_cfg": vision, "text_cfg": {**text, name: value}}}
        (folder / "open_clip_config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=f"unsupported {name} .* of the text tower in open_clip_config.json"):
            vitrail.load_towers(folder)


def test_tokeniser_of_another_model_is_refused(path, tmp_path) -> None:
    with pytest.raises(ValueError, match="the tokeniser's context is 9, the text tower's 16"):
        vitrail.load_towers(path, tokenizer=make_open_clip_tokenizer([], 9))
    larger = make_open_clip_tokenizer([(letter, "a") for letter in "bcdefghijklmnopqrstuvwxyz"], CONTEXT)
    with pytest.raises(ValueError, match=r"the tokeniser has ids up to 538, the text tower 520 tokens"):
        vitrail.load_towers(path, tokenizer=larger)
    image = vitrail.load(path)
    image.tokenizer = larger
    with pytest.raises(ValueError, match="belongs to a text tower, and the model has none"):
        vitrail.save(image, tmp_path / "image.safetensors")


def test_report_describes_both_towers(path) -> None:
    from vitrail.checkpoints.card import build_report, format_report

    with inspect_checkpoint(path, towers=True) as checkpoint:
        text = format_report(build_report(checkpoint, None))
    assert "width 32, depth 2, 4 heads, MLP 64; 520 tokens, context 16, causal, EndOfText(token=None)" in text
    with inspect_checkpoint(path) as checkpoint:
        assert "text tower" in format_report(build_report(checkpoint, None))


def test_card_shows_how_to_compare_images_with_texts(path) -> None:
    from vitrail.checkpoints.card import render_usage

    with inspect_checkpoint(path, towers=True) as checkpoint:
        text = render_usage(checkpoint.contract, "owner/name")
    assert 'model = vitrail.load_towers("hf://owner/name")' in text
    assert 'logits = model(image, model.tokenizer(["a cat", "a dog"]))' in text
    assert "--to hf --text-tower" in text
