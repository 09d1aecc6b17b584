"""Directories of FiftyOne: image classification (labels.json, data.json), and whole datasets (metadata.json, samples.json).

Images are not copied: data.json and samples.json name them where they are.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from vitrail.data.sources.splits import parse_split_name
from vitrail.labelling.formats.table import LabelRow, LabelTable, build_table, clean_label, relative_path, resolve_path
from vitrail.utils.files import stage_output

FIELD = "ground_truth"  # of a whole dataset
PREDICTED = "predictions"
SAMPLE_FIELDS = {
    "filepath": "fiftyone.core.fields.StringField",
    "tags": "fiftyone.core.fields.ListField(fiftyone.core.fields.StringField)",
    "metadata": "fiftyone.core.fields.EmbeddedDocumentField(fiftyone.core.metadata.Metadata)",
}
CLASSIFICATION = "fiftyone.core.fields.EmbeddedDocumentField(fiftyone.core.labels.Classification)"
CLASSIFICATIONS = "fiftyone.core.fields.EmbeddedDocumentField(fiftyone.core.labels.Classifications)"


def is_fiftyone(value: Any) -> bool:
    """Return True for the content of labels.json."""
    return isinstance(value, dict) and isinstance(value.get("labels"), dict) and "classes" in value


def is_fiftyone_dataset(value: Any) -> bool:
    """Return True for the content of samples.json."""
    return isinstance(value, dict) and isinstance(value.get("samples"), list)


def read_fiftyone(path: Path, data: Any) -> LabelTable:
    """Read labels.json; images are those of data.json, or the files of the folder data."""
    classes = data.get("classes")
    files = list_files(path.parent)
    rows = []
    for key, target in data["labels"].items():
        where = f"{path}, {key}"
        targets = [target] if not isinstance(target, list) else target
        labels = tuple(name_target(each, classes, where) for each in targets if each is not None)
        score = target.get("confidence") if isinstance(target, dict) else None
        confidence = float(score) if isinstance(score, (int, float)) else None
        rows.append(LabelRow(files.get(key, resolve_path(key, path.parent / "data")), labels, None, confidence))
    if not rows:
        raise ValueError(f"{path} lists no images")
    return build_table(rows, classes)


def list_files(folder: Path) -> dict[str, str]:
    """Return the files of a directory by their keys: those of data.json, else the paths in the folder data without suffix."""
    manifest = folder / "data.json"
    if manifest.is_file():
        names = json.loads(manifest.read_text(encoding="utf-8"))
        return {key: resolve_path(name, folder) for key, name in names.items()}
    data = folder / "data"
    return {
        file.relative_to(data).with_suffix("").as_posix(): str(file.resolve())
        for file in sorted(data.rglob("*"))
        if file.is_file()
    }


def name_target(target: Any, classes: Any, where: str) -> str:
    """Return the class of a target: an index, a name, or either with a confidence."""
    value = target.get("label") if isinstance(target, dict) else target
    if isinstance(value, int) and isinstance(classes, list):
        if not 0 <= value < len(classes):
            raise ValueError(f"{where}: no class has the index {value}")
        value = classes[value]
    return clean_label(value, where)


def write_fiftyone(table: LabelTable, path: Path) -> list[Path]:
    """Write the directory of a FiftyOneImageClassificationDataset. The format has no splits."""
    numbers = {name: number for number, name in enumerate(table.classes)}
    stems = [os.path.splitext(os.path.basename(row.path))[0] for row in table.rows]
    counts = Counter(stems)
    keys = [stem if counts[stem] == 1 else f"{number:06d}-{stem}" for number, stem in enumerate(stems)]
    targets: dict[str, Any] = {}
    for key, row in zip(keys, table.rows, strict=True):
        found: Any = [numbers[label] for label in row.labels]
        if len(found) <= 1:
            found = found[0] if found else None
        targets[key] = found if row.confidence is None else {"label": found, "confidence": row.confidence}
    names = {key: row.path for key, row in zip(keys, table.rows, strict=True)}
    with stage_output(path) as folder:
        folder.mkdir()
        write_json(folder / "labels.json", {"classes": list(table.classes), "labels": targets})
        write_json(folder / "data.json", names)
    return [path]


def read_fiftyone_dataset(path: Path, data: Any) -> LabelTable:
    """Read samples.json: the field ground_truth, else the only field with classifications."""
    rows = []
    for number, sample in enumerate(data["samples"], 1):
        where = f"{path}, sample {number}"
        if not isinstance(sample, dict) or not isinstance(sample.get("filepath"), str):
            raise ValueError(f"{where}: no filepath")
        fields = {name: value for name, value in sample.items() if is_classification(value)}
        value = fields.get(FIELD) or (next(iter(fields.values())) if len(fields) == 1 else None)
        if value is None and len(fields) > 1:
            raise ValueError(f"{where}: several fields of labels ({', '.join(fields)}), none named {FIELD}")
        found = [] if value is None else value.get("classifications", [value])
        labels = tuple(clean_label(each.get("label"), where) for each in found)
        score = found[0].get("confidence") if len(found) == 1 else None
        split = next(filter(None, map(parse_split_name, map(str, sample.get("tags") or ()))), None)
        confidence = float(score) if isinstance(score, (int, float)) else None
        rows.append(LabelRow(resolve_path(sample["filepath"], path.parent), labels, split, confidence))
    if not rows:
        raise ValueError(f"{path} lists no samples")
    return build_table(rows)


def is_classification(value: Any) -> bool:
    """Return True for the JSON of FiftyOne's Classification or Classifications."""
    return isinstance(value, dict) and value.get("_cls") in ("Classification", "Classifications")


def write_fiftyone_dataset(table: LabelTable, path: Path) -> list[Path]:
    """Write the directory of a FiftyOneDataset; splits are tags."""
    several = any(len(row.labels) > 1 for row in table.rows)
    samples = []
    for row in table.rows:
        each: list[dict[str, Any]] = [{"_cls": "Classification", "tags": [], "label": label} for label in row.labels]
        if row.confidence is not None and each:
            each[0]["confidence"] = row.confidence
        value = {"_cls": "Classifications", "classifications": each} if several else (each[0] if each else None)
        tags = [row.split] if row.split else []
        sample: dict[str, Any] = {"filepath": relative_path(row.path, path), "tags": tags, "metadata": None}
        samples.append(sample | {"_media_type": "image", FIELD: value})
    fields = SAMPLE_FIELDS | {FIELD: CLASSIFICATIONS if several else CLASSIFICATION}
    metadata = {"media_type": "image", "sample_fields": fields, "info": {}, "classes": {FIELD: list(table.classes)}}
    with stage_output(path) as folder:
        folder.mkdir()
        write_json(folder / "metadata.json", metadata | {"default_classes": list(table.classes)})
        write_json(folder / "samples.json", {"samples": samples})
    return [path]


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
