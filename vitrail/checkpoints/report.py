"""What `vitrail describe FILE` says of a checkpoint, as a table for machines and as text for people."""

import math
from collections import Counter
from typing import Any

from vitrail.checkpoints.card import architecture
from vitrail.checkpoints.checkpoint import Checkpoint, Progress
from vitrail.checkpoints.keys import layout, some
from vitrail.models.written import to_json


def report(checkpoint: Checkpoint, progress: Progress | None) -> dict[str, Any]:
    """All that is known of a checkpoint; without `progress`, from its header alone."""
    source, reading, contract = checkpoint.source, checkpoint.reading, checkpoint.contract
    not_finite = None if progress is None else checkpoint.values(progress)
    kinds = Counter(str(source.specs[name].dtype).removeprefix("torch.") for name in reading.loaded)
    return {
        "path": str(source.path),
        "container": source.container,
        "bytes": source.bytes,
        "tensors": len(source.specs),
        "taken": source.taken,
        "others": source.others,
        "form": reading.form,
        "why": reading.why,
        "loads": reading.whole and not not_finite,
        "architecture": architecture(contract.config),
        "parameters": sum(math.prod(tensor.shape) for tensor in layout(contract.config).values()),
        "config": to_json(contract.config),
        "not_told_by_tensors": {name: {"value": value, "from": why} for name, (value, why) in reading.facts.items()},
        "coverage": {
            "loaded": len(reading.loaded),
            "left_out": reading.left_out,
            "missing": {name: list(shape) for name, shape in reading.missing.items()},
            "unexpected": {name: list(shape) for name, shape in reading.unexpected.items()},
            "wrong_shape": {
                name: {"found": list(found), "expected": list(want)}
                for name, (found, want) in reading.misshapen.items()
            },
        },
        "differences": reading.differences(),
        "dtype": dict(kinds),
        "not_finite": not_finite,
        "labels": None if contract.labels is None else list(contract.labels),
        "labels_from": checkpoint.labels_from,
        "preprocessing": None if contract.preprocessing is None else to_json(contract.preprocessing),
        "preprocessing_in_words": None if contract.preprocessing is None else contract.preprocessing.in_words(),
        "preprocessing_from": checkpoint.preprocessing_from,
        "card": contract.card,
    }


def text(report: dict[str, Any], most: int = 12) -> str:
    """The report for people."""
    coverage = report["coverage"]
    kinds = ", ".join(f"{kind}" if len(report["dtype"]) == 1 else f"{n} {kind}" for kind, n in report["dtype"].items())
    rows: list[tuple[str, str]] = [
        ("file", f"{report['container']}, {report['bytes'] / 2**20:,.1f} MB, {report['tensors']} tensors, {kinds}"),
    ]
    if report["taken"] or report["others"]:
        others = f"; also there: {', '.join(map(repr, report['others']))}" if report["others"] else ""
        rows.append(("taken", f"{report['taken'] or 'the file itself'!r}{others}"))
    rows += [("form", report["form"]), ("  because", report["why"])]
    slots = dict(report["architecture"])
    rows.append(("model", f"{slots.pop('model')}, {report['parameters']:,} parameters"))
    rows += [(f"  {name}", value) for name, value in slots.items()]
    counts = [f"{coverage['loaded']} loaded"]
    for key in ("left_out", "missing", "unexpected", "wrong_shape"):
        counts.append(f"{len(coverage[key])} {key.replace('_', ' ')}")
    rows.append(("coverage", ", ".join(counts)))
    for reason in dict.fromkeys(coverage["left_out"].values()):
        names = [name for name, why in coverage["left_out"].items() if why == reason]
        rows.append(("  left out", f"{reason}: {some(names, 3)}"))
    rows += [("  differs", line) for line in report["differences"][:most]]
    if len(report["differences"]) > most:
        rows.append(("", f"and {len(report['differences']) - most} more"))
    bad = report["not_finite"]
    values = "not read" if bad is None else f"not finite in {len(bad)}: {some(bad)}" if bad else "all finite"
    labels = report["labels"]
    shown = f"{some(labels, 4)} (from {report['labels_from']})" if labels else f"none ({report['labels_from']})"
    rows += [
        ("values", values),
        ("labels", shown),
        ("preprocessing", report["preprocessing_in_words"] or "none"),
        ("  from", report["preprocessing_from"]),
    ]
    if report["not_told_by_tensors"]:
        rows.append(("assumed", "what the tensors do not tell; --assume NAME=VALUE to say otherwise"))
    for name, fact in report["not_told_by_tensors"].items():
        value = "×".join(map(str, fact["value"])) if isinstance(fact["value"], tuple) else fact["value"]
        rows.append((f"  {name}", f"{value}: {fact['from']}"))
    if licence := report["card"].get("licence"):
        rows.append(("licence", str(licence)))
    width = max(len(key) for key, _ in rows) + 2
    body = [f"{key:<{width}}{value}" for key, value in rows]
    end = "It loads whole." if report["loads"] else "It would not be loaded."
    if report["loads"] and bad is None:
        end = "Every tensor has its place; their values were not read."
    return "\n".join([report["path"], "", *body, "", end])
