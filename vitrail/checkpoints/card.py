"""Descriptions of a model: the report of `vitrail describe FILE`, and its card with the upload to the Hub."""

import json
import math
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.checkpoints.artifact import CheckpointContract
from vitrail.checkpoints.checkpoint import ByteProgress, Checkpoint, open_and_detect
from vitrail.checkpoints.formats import timm
from vitrail.checkpoints.formats.ast import is_ast
from vitrail.checkpoints.hub import format_error, import_hub, parse_address
from vitrail.checkpoints.keys import build_meta_state, format_names
from vitrail.checkpoints.load import load, save
from vitrail.checkpoints.targets import check_expressible, restate_config
from vitrail.models.base import Model, ModelConfig, TokenConfig
from vitrail.utils.json import to_json
from vitrail.utils.text import format_temperature


def describe_architecture(config: ModelConfig) -> dict[str, str]:
    """Return the facts of an architecture, one line each."""
    height, width = config.image_size
    image = f"{height}×{width}, {config.channels} channel{'s' if config.channels != 1 else ''}"
    if config.frames is not None:
        image = f"{config.frames} frames of {image}"
    facts = {"model": config.describe(), "image" if config.frames is None else "clip": image, **config.facts()}
    facts["classes"] = "none: returns features" if config.classes is None else f"{config.classes:,}"
    return facts


def build_report(checkpoint: Checkpoint, progress: ByteProgress | None) -> dict[str, Any]:
    """Return all facts of a checkpoint; without `progress`, from its header only."""
    source, detection, contract = checkpoint.source, checkpoint.detection, checkpoint.contract
    not_finite = None if progress is None else checkpoint.find_nonfinite(progress)
    assumed = {name: {"value": value, "from": why} for name, (value, why) in detection.assumptions.items()}
    if "resampling" in assumed and not isinstance(assumed["resampling"]["value"], str):
        assumed["resampling"]["value"] = assumed["resampling"]["value"].describe()
    odd = {name: {"found": list(shape), "expected": list(want)} for name, (shape, want) in detection.mismatched.items()}
    dtypes = Counter(str(source.specs[name].dtype).removeprefix("torch.") for name in detection.loaded)
    return {
        "path": str(source.path),
        "container": source.container,
        "bytes": source.nbytes,
        "tensors": len(source.specs),
        "taken": source.selected,
        "others": source.alternatives,
        "form": detection.format,
        "why": detection.reason,
        "loads": detection.is_complete and not not_finite,
        "architecture": describe_architecture(contract.config),
        "parameters": sum(math.prod(tensor.shape) for tensor in build_meta_state(contract.config).values()),
        "config": to_json(contract.config),
        "not_told_by_tensors": assumed,
        "coverage": {
            "loaded": len(detection.loaded),
            "left_out": detection.ignored,
            "missing": {name: list(shape) for name, shape in detection.missing.items()},
            "unexpected": {name: list(shape) for name, shape in detection.unexpected.items()},
            "wrong_shape": odd,
        },
        "differences": detection.list_differences(),
        "dtype": dict(dtypes),
        "not_finite": not_finite,
        "labels": to_json(contract.labels),
        "labels_from": checkpoint.labels_from,
        "preprocessing": to_json(contract.preprocessing),
        "preprocessing_in_words": None if contract.preprocessing is None else contract.preprocessing.describe(),
        "preprocessing_from": checkpoint.preprocessing_from,
        "card": contract.card,
    }


def format_report(report: dict[str, Any], limit: int = 12) -> str:
    """Return the report as text."""
    coverage = report["coverage"]
    kinds = ", ".join(f"{kind}" if len(report["dtype"]) == 1 else f"{n} {kind}" for kind, n in report["dtype"].items())
    file = f"{report['container']}, {report['bytes'] / 2**20:,.1f} MB, {report['tensors']} tensors, {kinds}"
    rows: list[tuple[str, str]] = [("file", file)]
    if report["taken"] or report["others"]:
        others = f"; also there: {', '.join(map(repr, report['others']))}" if report["others"] else ""
        rows.append(("taken", f"{report['taken'] or 'the file itself'!r}{others}"))
    rows += [("format", report["form"]), ("  because", report["why"])]
    slots = dict(report["architecture"])
    rows.append(("model", f"{slots.pop('model')}, {report['parameters']:,} parameters"))
    rows += [(f"  {name}", value) for name, value in slots.items()]
    others = ("left_out", "missing", "unexpected", "wrong_shape")
    counts = [f"{coverage['loaded']} loaded", *(f"{len(coverage[key])} {key.replace('_', ' ')}" for key in others)]
    rows.append(("coverage", ", ".join(counts)))
    for reason in dict.fromkeys(coverage["left_out"].values()):
        names = [name for name, why in coverage["left_out"].items() if why == reason]
        rows.append(("  left out", f"{reason}: {format_names(names, 3)}"))
    rows += [("  differs", line) for line in report["differences"][:limit]]
    if len(report["differences"]) > limit:
        rows.append(("", f"and {len(report['differences']) - limit} more"))
    bad = report["not_finite"]
    values = "not read" if bad is None else f"not finite in {len(bad)}: {format_names(bad)}" if bad else "all finite"
    labels = report["labels"]
    shown = f"{format_names(labels, 4)} (from {report['labels_from']})" if labels else f"none ({report['labels_from']})"
    rows += [("values", values), ("labels", shown), ("preprocessing", report["preprocessing_in_words"] or "none")]
    rows.append(("  from", report["preprocessing_from"]))
    if report["not_told_by_tensors"]:
        rows.append(("assumed", "not determined by the tensors; --assume NAME=VALUE to change"))
    for name, fact in report["not_told_by_tensors"].items():
        value = "×".join(map(str, fact["value"])) if isinstance(fact["value"], tuple) else fact["value"]
        rows.append((f"  {name}", f"{value}: {fact['from']}"))
    statistics = report["card"].get("targets")
    if labels and isinstance(statistics, dict):  # the outputs are numbers
        columns = zip(labels, statistics.get("mean", ()), statistics.get("std", ()), strict=False)
        rows += [("  target", f"{name}, mean {mean:.6g}, standard deviation {std:.6g}") for name, mean, std in columns]
    if temperature := format_temperature(report["card"].get("calibration")):
        rows.append(("temperature", temperature))
    if licence := report["card"].get("licence"):
        rows.append(("licence", str(licence)))
    width = max(len(key) for key, _ in rows) + 2
    body = [f"{key:<{width}}{value}" for key, value in rows]
    end = "The checkpoint can be loaded." if report["loads"] else "The checkpoint cannot be loaded."
    if report["loads"] and bad is None:
        end = "All tensors match; their values were not read."
    return "\n".join([report["path"], "", *body, "", end])


def render_model_card(contract: CheckpointContract, repo: str, params: int) -> str:
    """Return the README.md for the Hub."""
    config, about = contract.config, contract.card
    licence = str(about.get("licence") or "")
    tasks = {"classes": "image-classification", "masks": "image-segmentation"}
    task = "image-feature-extraction" if config.classes is None else tasks[config.output_kind]
    name = repo.rpartition("/")[2]
    front = ["---", "library_name: vitrail", f"pipeline_tag: {task}", "tags:", "- vitrail", "- vision-transformer"]
    front += [f"license: {json.dumps(licence)}"] if licence else []
    rows = [*describe_architecture(config).items(), ("parameters", f"{params:,}")]
    parts = [
        "\n".join([*front, "---"]),
        f"# {name}",
        f"A Vision Transformer ({config.describe()}) in one vitrail file: "
        "weights, labels and preprocessing, with checksums.",
        _render_table("Architecture", rows),
        "## Preprocessing\n\n" + (contract.preprocessing.describe() if contract.preprocessing else "Not recorded."),
        _render_labels(contract),
        *(
            _render_section(name.capitalize(), about.get(name))
            for name in ("data", "recipe", "metrics", "calibration", "provenance")
        ),
        "## Licence\n\n" + (licence or "Not recorded. Ask the author before using the model."),
        render_usage(contract, repo),
    ]
    return "\n\n".join(parts) + "\n"


def _render_table(title: str, rows: list[tuple[str, str]]) -> str:
    return f"## {title}\n\n| | |\n|---|---|\n" + "\n".join(f"| {key} | {_escape_cell(value)} |" for key, value in rows)


def _escape_cell(value: Any) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def _render_section(title: str, facts: Any) -> str:
    if not facts:
        return f"## {title}\n\nNot recorded."
    if isinstance(facts, dict) and not any(isinstance(value, dict | list) for value in facts.values()):
        return _render_table(title, [(str(key), value) for key, value in facts.items()])
    return f"## {title}\n\n```json\n{json.dumps(facts, indent=2, ensure_ascii=False)}\n```"


def _render_labels(contract: CheckpointContract) -> str:
    if contract.config.classes is None:
        return "## Labels\n\nNone: the model returns features."
    if contract.labels is None:
        return "## Labels\n\nNot recorded."
    more = len(contract.labels) - 20
    names = ", ".join(f"{i} {_escape_cell(label)}" for i, label in enumerate(contract.labels[:20]))
    return f"## Labels\n\n{names}" + (f", and {more:,} more" if more > 0 else "")


def render_usage(contract: CheckpointContract, repo: str) -> str:
    """Return runnable code that opens the model in vitrail, timm and transformers."""
    has_text = contract.config.text_tower is not None
    texts = ', model.tokenizer(["a cat", "a dog"])' if has_text else ""
    parts = [
        "## Use\n\nIn vitrail:\n\n```python\nimport vitrail\nfrom PIL import Image\n\n"
        f'model = vitrail.load{"_towers" if has_text else ""}("hf://{repo}")\n'
        'image = model.preprocessing(Image.open("image.jpg")).unsqueeze(0)\n'
        f"logits = model(image{texts})\n```"
    ]
    for to, title in (("timm", "timm"), ("hf", "transformers")):
        try:
            check_expressible(to, contract.config, contract.preprocessing)
        except ValueError as error:
            parts.append(f"In {title}: not possible. {str(error)[:1].upper()}{str(error)[1:]}.")
            continue
        parts.append(_render_timm_usage(contract, repo) if to == "timm" else _render_transformers_usage(contract, repo))
    return "\n\n".join(parts)


def _render_timm_usage(contract: CheckpointContract, repo: str) -> str:
    config = restate_config("timm", contract.config)
    arguments = timm.build_timm_arguments(config)
    text = f"In timm:\n\n```console\n$ vitrail convert hf://{repo} timm.safetensors --to timm\n```"
    if arguments is None:
        return f"{text}\n\nand load it with strict=True into the timm model of the same architecture."
    assert isinstance(config, TokenConfig)
    home, kind = "timm.models.vision_transformer", "VisionTransformer"
    if config.prefix.outputs == 2:
        home, kind = "timm.models.deit", "VisionTransformerDistilled"
    given = [f"    {key}={value!r},\n" for key, value in arguments.items()]
    imports = f"from safetensors.torch import load_file\nfrom {home} import {kind}\n"
    if config.eps != 1e-6:
        imports = f"from functools import partial\n\nfrom torch import nn\n{imports}"
        given.append(f"    norm_layer=partial(nn.LayerNorm, eps={config.eps!r}),\n")
    return (
        f"{text}\n\n```python\n{imports}\nmodel = {kind}(\n{''.join(given)})\n"
        'model.load_state_dict(load_file("timm.safetensors"), strict=True)\nmodel.eval()\n```'
    )


def _render_transformers_usage(contract: CheckpointContract, repo: str) -> str:
    kinds = {"classes": "AutoModelForImageClassification", "masks": "AutoModelForUniversalSegmentation"}
    processor, variable = "AutoImageProcessor", "processor"
    if is_ast(contract.config):
        kinds, processor, variable = {"classes": "AutoModelForAudioClassification"}, "AutoFeatureExtractor", "extractor"
    body = "AutoModel" if contract.config.classes is None else kinds[contract.config.output_kind]
    towers = "" if contract.config.text_tower is None else " --text-tower"
    return (
        f"In transformers:\n\n```console\n$ vitrail convert hf://{repo} transformers --to hf{towers}\n```\n\n```python\n"
        f"from transformers import {processor}, {body}\n\n"
        f'model = {body}.from_pretrained("transformers")\n'
        f'{variable} = {processor}.from_pretrained("transformers")\n```'
    )


def push(
    model: Model | str | Path,
    address: str,
    *,
    private: bool = False,
    message: str | None = None,
    assume: Mapping[str, Any] | None = None,
    take: str | None = None,
    **about: Any,
) -> str:
    """Upload a model, or a checkpoint of any format, to `owner/name` on the Hub with a card. Return the commit's address.

    `about` adds to the card: `licence`, `data`, `recipe`, `metrics`.
    """
    repo, revision = parse_address(address)
    library = import_hub()
    given = load(model, dtype=None, assume=assume, take=take) if isinstance(model, str | Path) else model
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(given, folder / "model.safetensors", **about)
        both = given.config.text_tower is not None
        with open_and_detect(folder / "model.safetensors", towers=both) as checkpoint:
            contract = checkpoint.contract
        params = sum(parameter.numel() for parameter in given.parameters())
        (folder / "README.md").write_text(render_model_card(contract, repo, params), encoding="utf-8")
        try:
            api = library.HfApi()
            api.create_repo(repo, private=private, exist_ok=True)
            note = message or "Model and card, written by vitrail"
            done = api.upload_folder(repo_id=repo, folder_path=folder, revision=revision, commit_message=note)
        except (OSError, ValueError) as error:
            raise OSError(f"hf://{repo} was not written: {format_error(error)}") from None
    return str(getattr(done, "commit_url", done))
