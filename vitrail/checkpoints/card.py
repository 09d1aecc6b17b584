"""The model card that goes to the Hub with a model: what it is, what it was made from, and how others open it."""

import json
from typing import Any

from vitrail.checkpoints import timm
from vitrail.checkpoints.artifact import Contract
from vitrail.checkpoints.convert import as_said, expressible
from vitrail.models.build import Config
from vitrail.models.sizes import RESNETS, SIZES
from vitrail.models.vit import ViTConfig
from vitrail.nn.embed import Patches


def model_name(config: Config) -> str:
    """ "B/16", "R50x1", or the sizes in words where they have no name."""
    if not isinstance(config, ViTConfig):
        depth = next((number for number, stages in RESNETS.items() if stages == config.stages), None)
        return f"BiT R{depth}x{config.factor:g}" if depth else f"BiT {config.stages}, width ×{config.factor:g}"
    size, patch = config.size, config.embed.stride
    name = next((name for name, known in SIZES.items() if known == size), None)
    kind = "" if isinstance(config.embed, Patches) else f"{type(config.embed).__name__} + "
    if name:
        return f"{kind}{name}/{patch}"
    return f"{kind}width {size.width}, depth {size.depth}, {size.heads} heads, MLP {size.mlp}, patch {patch}"


def architecture(config: Config) -> dict[str, str]:
    """A model's slots, one line each."""
    height, width = config.image_size
    image = f"{height}×{width}, {config.channels} channel{'s' if config.channels != 1 else ''}"
    found = {"model": model_name(config), "image": image}
    if isinstance(config, ViTConfig):
        tokens = {0: "none", 1: "class", 2: "class and distillation"}[config.prefix.outputs]
        registers = f", {config.prefix.registers} registers" if config.prefix.registers else ""
        h, w = config.shape.grid
        block = config.block
        options = [
            type(block.mlp).__name__,
            *(["LayerScale"] if block.layer_scale is not None else []),
            *(["q/k norm"] if block.qk_norm else []),
            *(["no q/k/v bias"] if not block.qkv_bias else []),
            *(["a norm on z_0"] if config.token_norm else []),
        ]
        found |= {
            "patches": f"{h}×{w}",
            "positions": str(config.position),
            "prefix tokens": tokens + registers,
            "blocks": f"{type(block).__name__}, {', '.join(options)}",
            "pooling": str(config.pool),
            "head": str(config.head),
        }
    found["classes"] = "none: it ends in features" if config.classes is None else f"{config.classes:,}"
    return found


def card(contract: Contract, repo: str, params: int) -> str:
    """README.md for the Hub."""
    config, about = contract.config, contract.card
    licence = str(about.get("licence") or "")
    task = "image-feature-extraction" if config.classes is None else "image-classification"
    name = repo.rpartition("/")[2]
    front = ["---", "library_name: vitrail", f"pipeline_tag: {task}", "tags:", "- vitrail", "- vision-transformer"]
    front += [f"license: {json.dumps(licence)}"] if licence else []
    rows = [*architecture(config).items(), ("parameters", f"{params:,}")]
    parts = [
        "\n".join([*front, "---"]),
        f"# {name}",
        f"A Vision Transformer ({model_name(config)}) in one file that vitrail reads: "
        "weights, labels and preprocessing together, with checksums.",
        _table("Architecture", rows),
        "## Preprocessing\n\n" + (contract.preprocessing.in_words() if contract.preprocessing else "Not recorded."),
        _labels(contract),
        _facts("Data", about.get("data")),
        _facts("Recipe", about.get("recipe")),
        _facts("Metrics", about.get("metrics")),
        _facts("Provenance", about.get("provenance")),
        "## Licence\n\n" + (licence or "Not recorded. Ask the author before you use it."),
        use(contract, repo),
    ]
    return "\n\n".join(parts) + "\n"


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    return f"## {title}\n\n| | |\n|---|---|\n" + "\n".join(f"| {key} | {_cell(value)} |" for key, value in rows)


def _cell(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def _facts(title: str, facts: Any) -> str:
    if not facts:
        return f"## {title}\n\nNot recorded."
    if isinstance(facts, dict) and not any(isinstance(value, dict | list) for value in facts.values()):
        return _table(title, [(str(key), value) for key, value in facts.items()])
    return f"## {title}\n\n```json\n{json.dumps(facts, indent=2, ensure_ascii=False)}\n```"


def _labels(contract: Contract) -> str:
    if contract.config.classes is None:
        return "## Labels\n\nNone: the model ends in features."
    if contract.labels is None:
        return "## Labels\n\nNot recorded."
    more = len(contract.labels) - 20
    names = ", ".join(f"{i} {_cell(label)}" for i, label in enumerate(contract.labels[:20]))
    return f"## Labels\n\n{names}" + (f", and {more:,} more" if more > 0 else "")


def use(contract: Contract, repo: str) -> str:
    """How to open the model in vitrail, timm and transformers: code that runs as it stands."""
    parts = [
        "## Use\n\nIn vitrail:\n\n```python\nimport vitrail\nfrom PIL import Image\n\n"
        f'model = vitrail.load("hf://{repo}")\n'
        'image = model.preprocessing(Image.open("picture.jpg")).unsqueeze(0)\n'
        "answer = model(image)\n```"
    ]
    for to, title in (("timm", "timm"), ("hf", "transformers")):
        try:
            expressible(to, contract.config, contract.preprocessing)
        except ValueError as error:
            parts.append(f"In {title}: not possible. {str(error)[:1].upper()}{str(error)[1:]}.")
            continue
        parts.append(_timm(contract, repo) if to == "timm" else _transformers(contract, repo))
    return "\n\n".join(parts)


def _timm(contract: Contract, repo: str) -> str:
    config = as_said("timm", contract.config)
    arguments = timm.arguments(config)
    text = f"In timm:\n\n```console\n$ vitrail convert hf://{repo} timm.safetensors --to timm\n```"
    if arguments is None:
        return f"{text}\n\nand load it, strictly, into the timm model of the same architecture."
    assert isinstance(config, ViTConfig)
    distilled = config.prefix.outputs == 2
    home, kind = (
        ("timm.models.deit", "VisionTransformerDistilled")
        if distilled
        else ("timm.models.vision_transformer", "VisionTransformer")
    )
    given = [f"    {key}={value!r},\n" for key, value in arguments.items()]
    imports = f"from safetensors.torch import load_file\nfrom {home} import {kind}\n"
    if config.eps != 1e-6:
        imports = f"from functools import partial\n\nfrom torch import nn\n{imports}"
        given.append(f"    norm_layer=partial(nn.LayerNorm, eps={config.eps!r}),\n")
    return (
        f"{text}\n\n```python\n{imports}\nmodel = {kind}(\n{''.join(given)})\n"
        'model.load_state_dict(load_file("timm.safetensors"), strict=True)\nmodel.eval()\n```'
    )


def _transformers(contract: Contract, repo: str) -> str:
    body = "AutoModel" if contract.config.classes is None else "AutoModelForImageClassification"
    return (
        f"In transformers:\n\n```console\n$ vitrail convert hf://{repo} transformers --to hf\n```\n\n```python\n"
        f"from transformers import AutoImageProcessor, {body}\n\n"
        f'model = {body}.from_pretrained("transformers")\n'
        'processor = AutoImageProcessor.from_pretrained("transformers")\n```'
    )
