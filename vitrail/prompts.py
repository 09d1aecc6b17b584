"""Zero-shot classification: class names, as prompts, become the classifier of an image tower (Radford et al. 2021).

The result is an ordinary classifier with labels, so whatever takes a classifier takes it: prediction, evaluation, export,
the service.

K classes, N templates, F features.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.class_names import IMAGENET, NamesByIndex, find_duplicates, name_outputs, read_names_file
from vitrail.data.labels import normalise_class_name
from vitrail.models.adapt import assemble
from vitrail.models.base import Model
from vitrail.models.text import EndOfText, TextConfig
from vitrail.models.two_towers import TwoTowers

TEMPLATES = ("a photo of a {}.",)  # CLIP's; {} is the name of the class
BATCH_SIZE = 256  # texts


def zero_shot(
    model: TwoTowers, classes: str | Path | Sequence[str], templates: str | Sequence[str] = TEMPLATES
) -> Model:
    """Return a classifier of images by their similarity with the names of classes, in evaluation mode.

    `classes` is a list of names, names with commas between them ("a cat,a dog"), a file of names, or "imagenet". `templates`
    are the texts that a name is put in, at `{}`; the features of several are averaged. The weights of the image tower are
    shared with `model`, not copied.
    """
    labels, names = read_classes(classes)
    prompts = check_templates(templates)
    config = model.config.image.with_similarity(len(labels))
    tower = {name: tensor for name, tensor in model.image.state_dict().items() if name != "head.weight"}
    if (projection := model.image.state_dict().get("head.weight")) is not None:
        tower["head.pre_logits.weight"] = projection
    weight = encode_classes(model, names, prompts)
    with torch.no_grad():
        bias = (
            weight.new_zeros(len(labels))
            if model.logits.bias is None
            else model.logits.bias.expand(len(labels)).clone()
        )
        weight = model.logits.scale.exp() * weight
    tower |= {"head.linear.weight": weight, "head.linear.bias": bias}
    classifier = assemble(config, tower, like=weight)
    classifier.labels, classifier.preprocessing = labels, model.preprocessing
    classifier.card = {**model.card, "zero_shot": {"templates": list(prompts)}}
    return classifier.eval()


@torch.inference_mode()
def encode_texts(model: TwoTowers, prompts: Sequence[str]) -> Tensor:
    """Return the features of texts as unit vectors, [N, F]."""
    if model.tokenizer is None:
        raise ValueError("the model has no tokeniser: give one with vitrail.load_towers(…, tokenizer=…)")
    device = model.logits.scale.device
    parts = [prompts[start : start + BATCH_SIZE] for start in range(0, len(prompts), BATCH_SIZE)]
    tokens = [trim_tokens(model.config.text, model.tokenizer(part)) for part in parts]
    return torch.cat([model.encode_texts(part.to(device)) for part in tokens])


def trim_tokens(config: TextConfig, tokens: Tensor) -> Tensor:
    """Return the tokens up to the last that is read, [N, T]: with a causal mask the padding after the end changes nothing."""
    if not config.causal or not isinstance(config.pool, EndOfText):
        return tokens
    return tokens[:, : int(config.pool.find(tokens).max()) + 1]


def encode_classes(model: TwoTowers, names: Sequence[str], templates: Sequence[str]) -> Tensor:
    """Return a unit vector for each class, [K, F]: the mean of the unit vectors of its prompts, normalised."""
    training = model.training
    model.eval()
    try:
        texts = encode_texts(model, [template.replace("{}", name) for name in names for template in templates])
    finally:
        model.train(training)
    return F.normalize(texts.clone().unflatten(0, (len(names), len(templates))).mean(1), dim=-1)


def check_templates(templates: str | Sequence[str]) -> tuple[str, ...]:
    """Return the templates; raise ValueError without any, or for one without a place for the name."""
    templates = (templates,) if isinstance(templates, str) else tuple(templates)
    if not templates:
        raise ValueError("no templates: give at least '{}'")
    if bad := next((text for text in templates if not isinstance(text, str) or "{}" not in text), None):
        raise ValueError(f"a template must have {{}} where the name goes, got {bad!r}")
    return templates


def read_classes(classes: str | Path | Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the labels of a classifier and the names for its prompts; raise ValueError for names that are no classes.

    They differ where ImageNet has two classes of one name: crane (n02012849).
    """
    if isinstance(classes, str) and "," in classes and not os.path.isfile(classes):
        names = tuple(classes.split(","))
    elif isinstance(classes, str) and is_one_name(classes):
        raise ValueError(f"classes= needs at least two names with commas between them, or a file, got {classes!r}")
    elif isinstance(classes, str | Path):
        names = name_outputs(classes, None, "classes=")
        if str(classes) == IMAGENET:
            return _tell_apart(names), names
    else:
        names = tuple(classes)
    if strange := next((name for name in names if not isinstance(name, str)), None):
        raise ValueError(f"classes= must be names, got {strange!r}")
    names = tuple(map(normalise_class_name, names))
    if len(names) < 2:
        raise ValueError(f"classes= needs at least two names, got {', '.join(names) or 'none'}")
    if "" in names:
        raise ValueError(f"classes= has an empty name at position {names.index('') + 1}: remove it")
    if duplicates := find_duplicates(names):
        raise ValueError(f"classes= lists {duplicates[0]!r} twice: remove one")
    return names, names


def is_one_name(classes: str) -> bool:
    """Return True for a text that is one name of a class rather than the path of a file."""
    return classes != IMAGENET and not Path(classes).suffix and "/" not in classes and not os.path.exists(classes)


def _tell_apart(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return ImageNet's names, those of several classes with the identifier of the class."""
    parsed, count = read_names_file(IMAGENET, "classes="), Counter(names)
    assert isinstance(parsed, NamesByIndex)
    identifiers = [found[-1] for _, found in parsed.names]
    return tuple(f"{n} ({i})" if count[n] > 1 else n for n, i in zip(names, identifiers, strict=True))
