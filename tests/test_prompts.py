"""Zero-shot classifiers: the logits of the two towers, as a model that everything else takes."""

import pytest
import torch
from PIL import Image

pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'vitrail[text]'")
import vitrail
from tests.checkpoints.towers_made import make_towers
from vitrail.checkpoints.convert import convert
from vitrail.models.base import Unsupported
from vitrail.prompts import encode_texts, read_classes, trim_tokens

CLASSES = ["cat", "dog", "house"]


@pytest.mark.parametrize("bias", [False, True])
def test_classifier_gives_the_logits_of_the_prompts(bias) -> None:
    model, images = make_towers(bias), torch.randn(4, 3, 32, 32)
    classifier = vitrail.zero_shot(model, CLASSES, "a photo of a {}.")
    prompts = [f"a photo of a {name}." for name in CLASSES]
    torch.testing.assert_close(classifier(images), model(images, model.tokenizer(prompts)))
    assert classifier.labels == tuple(CLASSES)
    assert torch.equal(classifier.embed_images(images), model.encode_images(images))


def test_templates_are_averaged_as_in_open_clip() -> None:
    open_clip = pytest.importorskip("open_clip", reason="open_clip_torch is not installed")
    model, templates = make_towers(), ("a {}.", "a photo of the {}", "{}")

    class Peer(torch.nn.Module):
        def encode_text(self, tokens, normalize):
            return model.encode_texts(tokens)

    functions = [lambda name, text=text: text.format(name) for text in templates]
    theirs = open_clip.build_zero_shot_classifier(Peer(), model.tokenizer, CLASSES, functions, None)
    ours = vitrail.zero_shot(model, CLASSES, templates)
    torch.testing.assert_close(ours.head.linear.weight, (model.logits.scale.exp() * theirs.T).detach())


def test_siglips_pooling_needs_no_projection() -> None:
    options = {"pool": "map", "head": "linear", "width": 24, "heads": 4, "token_norm": False, "prefix": "none"}
    model, images = make_towers(True, **options), torch.randn(2, 3, 32, 32)
    classifier = vitrail.zero_shot(model, CLASSES, "{}")
    torch.testing.assert_close(classifier(images), model(images, model.tokenizer(CLASSES)))


def test_classifier_is_saved_predicted_with_and_tuned(tmp_path) -> None:
    classifier = vitrail.zero_shot(make_towers(), CLASSES)
    path = tmp_path / "zero.safetensors"
    vitrail.save(classifier, path)
    again, images = vitrail.load(path), torch.randn(2, 3, 32, 32)
    assert torch.equal(again(images), classifier(images))
    assert again.card["zero_shot"] == {"templates": ["a photo of a {}."]}
    for name in ("one", "two"):
        Image.new("RGB", (40, 50), (name == "one" and "red") or "blue").save(tmp_path / f"{name}.png")
    rows = list(vitrail.predict(path, [tmp_path / "one.png", tmp_path / "two.png"], device="cpu"))
    assert len(rows) == 2
    assert again.replace_head(7)(images).shape == (2, 7)
    assert again.replace_head(None)(images).shape == (2, 24)
    with pytest.raises(ValueError, match="cannot express this model: it has no classifier of unit vectors"):
        convert(path, tmp_path / "timm.safetensors", "timm")
    classifier.divide_logits(2.0)
    torch.testing.assert_close(classifier(images), again(images) / 2)


def test_names_come_from_lists_texts_and_files(tmp_path) -> None:
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    assert read_classes(["cat", " dog "]) == (("cat", "dog"), ("cat", "dog"))
    assert read_classes("a cat, a dog")[0] == ("a cat", "a dog")
    assert read_classes(tmp_path / "names.txt")[0] == ("cat", "dog")
    labels, names = read_classes("imagenet")
    assert (len(names), len(set(labels))) == (1000, 1000)
    assert names[:2] == labels[:2] == ("tench", "goldfish")
    assert sum("(n0" in label for label in labels) == 2 * (len(names) - len(set(names)))


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ([], "needs at least two names, got none"),
        (["cat"], "needs at least two names, got cat"),
        (["cat", "dog", " cat"], "lists 'cat' twice: remove one"),
        (["cat", ""], "an empty name at position 2: remove it"),
        ("cat,,dog", "an empty name at position 2: remove it"),
        (["cat", 3], "must be names, got 3"),
    ],
)
def test_lists_that_are_no_classes_are_refused(classes, message) -> None:
    with pytest.raises(ValueError, match=message):
        vitrail.zero_shot(make_towers(), classes)


def test_models_and_templates_that_cannot_work_are_refused() -> None:
    model = make_towers()
    with pytest.raises(ValueError, match=r"a template must have {} where the name goes, got 'a photo'"):
        vitrail.zero_shot(model, CLASSES, ["{}", "a photo"])
    with pytest.raises(ValueError, match="no templates: give at least"):
        vitrail.zero_shot(model, CLASSES, [])
    model.tokenizer = None
    with pytest.raises(ValueError, match=r"the model has no tokeniser: give one with vitrail.load_towers"):
        vitrail.zero_shot(model, CLASSES)
    with pytest.raises(Unsupported, match="zero-shot classification does not support BiT"):
        vitrail.configure("R50x1", classes=None).with_similarity(2)


def test_padding_after_the_end_of_a_text_changes_nothing() -> None:
    model = make_towers()
    texts = ["a cat", "of the dog, a photo of a cat"]
    assert model.tokenizer is not None
    whole = model.encode_texts(model.tokenizer(texts)).detach()
    torch.testing.assert_close(encode_texts(model, texts), whole, atol=1e-6, rtol=0)
    assert trim_tokens(model.config.text, model.tokenizer(texts[:1])).shape[1] < model.config.text.context
