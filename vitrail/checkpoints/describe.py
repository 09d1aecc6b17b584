"""The report of `vitrail describe FILE`, as JSON and as text."""

import math
from collections import Counter
from typing import Any

from vitrail.checkpoints.card import describe_architecture
from vitrail.checkpoints.checkpoint import ByteProgress, Checkpoint
from vitrail.checkpoints.keys import build_meta_state, format_names
from vitrail.utils.json import to_json


def build_report(checkpoint: Checkpoint, progress: ByteProgress | None) -> dict[str, Any]:
    """Return all facts of a checkpoint; without `progress`, from its header only."""
    source, detection, contract = checkpoint.source, checkpoint.detection, checkpoint.contract
    not_finite = None if progress is None else checkpoint.find_nonfinite(progress)
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
        "not_told_by_tensors": {
            name: {"value": value, "from": why} for name, (value, why) in detection.assumptions.items()
        },
        "coverage": {
            "loaded": len(detection.loaded),
            "left_out": detection.ignored,
            "missing": {name: list(shape) for name, shape in detection.missing.items()},
            "unexpected": {name: list(shape) for name, shape in detection.unexpected.items()},
            "wrong_shape": {
                name: {"found": list(shape), "expected": list(expected)}
                for name, (shape, expected) in detection.mismatched.items()
            },
        },
        "differences": detection.list_differences(),
        "dtype": dict(dtypes),
        "not_finite": not_finite,
        "labels": None if contract.labels is None else list(contract.labels),
        "labels_from": checkpoint.labels_from,
        "preprocessing": None if contract.preprocessing is None else to_json(contract.preprocessing),
        "preprocessing_in_words": None if contract.preprocessing is None else contract.preprocessing.describe(),
        "preprocessing_from": checkpoint.preprocessing_from,
        "card": contract.card,
    }


def format_report(report: dict[str, Any], limit: int = 12) -> str:
    """Return the report as text."""
    coverage = report["coverage"]
    kinds = ", ".join(f"{kind}" if len(report["dtype"]) == 1 else f"{n} {kind}" for kind, n in report["dtype"].items())
    rows: list[tuple[str, str]] = [
        ("file", f"{report['container']}, {report['bytes'] / 2**20:,.1f} MB, {report['tensors']} tensors, {kinds}")
    ]
    if report["taken"] or report["others"]:
        others = f"; also there: {', '.join(map(repr, report['others']))}" if report["others"] else ""
        rows.append(("taken", f"{report['taken'] or 'the file itself'!r}{others}"))
    rows += [("format", report["form"]), ("  because", report["why"])]
    slots = dict(report["architecture"])
    rows.append(("model", f"{slots.pop('model')}, {report['parameters']:,} parameters"))
    rows += [(f"  {name}", value) for name, value in slots.items()]
    counts = [f"{coverage['loaded']} loaded"]
    for key in ("left_out", "missing", "unexpected", "wrong_shape"):
        counts.append(f"{len(coverage[key])} {key.replace('_', ' ')}")
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
    rows += [
        ("values", values),
        ("labels", shown),
        ("preprocessing", report["preprocessing_in_words"] or "none"),
        ("  from", report["preprocessing_from"]),
    ]
    if report["not_told_by_tensors"]:
        rows.append(("assumed", "not determined by the tensors; --assume NAME=VALUE to change"))
    for name, fact in report["not_told_by_tensors"].items():
        value = "×".join(map(str, fact["value"])) if isinstance(fact["value"], tuple) else fact["value"]
        rows.append((f"  {name}", f"{value}: {fact['from']}"))
    if licence := report["card"].get("licence"):
        rows.append(("licence", str(licence)))
    width = max(len(key) for key, _ in rows) + 2
    body = [f"{key:<{width}}{value}" for key, value in rows]
    end = "The checkpoint can be loaded." if report["loads"] else "The checkpoint cannot be loaded."
    if report["loads"] and bad is None:
        end = "All tensors match; their values were not read."
    return "\n".join([report["path"], "", *body, "", end])
