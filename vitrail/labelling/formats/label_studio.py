"""Tasks of Label Studio: choices for images; labels of people are annotations, predicted ones are predictions.

Label Studio shows a local file by an address below its document root, /data/local-files/?d=folder/name.jpg. The labelling
interface that the choices belong to is written beside the tasks.
"""

import json
import os
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from vitrail.data.sources.splits import parse_split_name
from vitrail.labelling.formats.table import LabelRow, LabelTable, build_table, clean_label, relative_path, resolve_path
from vitrail.utils.files import atomic_write

LOCAL_FILES = "/data/local-files/"
CHOICES, IMAGE = "label", "image"  # names of the interface's tags
PLAIN_KEYS = ("label", "choice", "choices", "class")  # of a JSON_MIN export


def is_label_studio(value: Any) -> bool:
    """Return True for the content of a file of tasks."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and find_address(value[0]) is not None


def find_address(task: dict[str, Any]) -> str | None:
    """Return the address of a task's image."""
    data = task.get("data", task)
    address = data.get(IMAGE) if isinstance(data, dict) else None
    return address if isinstance(address, str) and address.strip() else None


def read_label_studio(path: Path, tasks: Any, root: Path | None = None) -> LabelTable:
    """Read an export (JSON or JSON_MIN); of several annotations the latest that was not skipped counts."""
    if not isinstance(tasks, list) or not tasks:
        raise ValueError(f"{path} lists no tasks")
    rows = []
    for number, task in enumerate(tasks, 1):
        where = f"{path}, task {number}"
        address = find_address(task) if isinstance(task, dict) else None
        if address is None:
            raise ValueError(f"{where}: no {IMAGE} in its data")
        data = task.get("data", task)
        labels, confidence = read_choices(task, where)
        split = parse_split_name(str(data.get("split") or ""))
        rows.append(LabelRow(find_file(address, data.get("path"), path, root), labels, split, confidence))
    return build_table(rows)


def find_file(address: str, stated: Any, path: Path, root: Path | None) -> str:
    """Return the file of an address: as stated beside it, or below the document root [the folder of the tasks]."""
    if isinstance(stated, str) and os.path.isfile(found := resolve_path(stated, path.parent)):
        return found
    parts = urlsplit(address)
    name = address
    if parts.path.endswith(LOCAL_FILES):
        name = parse_qs(parts.query).get("d", [""])[0]
    elif parts.scheme == "file":
        name = parts.path
    return resolve_path(name, root or path.parent)


def read_choices(task: dict[str, Any], where: str) -> tuple[tuple[str, ...], float | None]:
    """Return the labels of a task, and the confidence of predicted ones."""
    annotations = [each for each in task.get("annotations") or () if isinstance(each, dict)]
    finished = [each for each in annotations if not each.get("was_cancelled")]
    if finished:
        latest = max(enumerate(finished), key=lambda pair: (str(pair[1].get("updated_at") or ""), pair[0]))[1]
        return collect_choices(latest, where), None
    if annotations:  # skipped by a person: no label
        return (), None
    for prediction in task.get("predictions") or ():
        if isinstance(prediction, dict) and (labels := collect_choices(prediction, where)):
            score = prediction.get("score")
            return labels, float(score) if isinstance(score, (int, float)) else None
    plain = next((task[key] for key in PLAIN_KEYS if task.get(key)), None)
    values = plain.get("choices") if isinstance(plain, dict) else plain
    values = [values] if isinstance(values, str) else values or []
    return tuple(clean_label(value, where) for value in values), None


def collect_choices(annotation: dict[str, Any], where: str) -> tuple[str, ...]:
    """Return the choices of an annotation or a prediction."""
    labels: list[str] = []
    for result in annotation.get("result") or ():
        value = result.get("value") if isinstance(result, dict) and result.get("type") == "choices" else None
        for choice in value.get("choices") or () if isinstance(value, dict) else ():
            labels.append(clean_label(choice, where))
    return tuple(dict.fromkeys(labels))


def write_label_studio(table: LabelTable, path: Path, root: Path | None = None) -> list[Path]:
    """Write the tasks, and the labelling interface beside them."""
    if root is None:
        folders = [os.path.dirname(row.path) for row in table.rows]
        root = Path(os.path.commonpath(folders)) if folders else path.parent
    tasks = []
    for number, row in enumerate(table.rows, 1):
        name = relative_path(row.path, root)
        if os.path.isabs(name):
            raise ValueError(f"{row.path} is not below root={str(root)!r}: give a folder that holds all images")
        data = {IMAGE: f"{LOCAL_FILES}?d={quote(name)}", "path": relative_path(row.path, path.parent)}
        result = [{"id": f"choice-{number}", "from_name": CHOICES, "to_name": IMAGE, "type": "choices"}]
        result = [result[0] | {"value": {"choices": list(row.labels)}}] if row.labels else []
        annotations = [{"result": result}] if row.labels and row.confidence is None else []
        guess = {"model_version": "vitrail", "score": row.confidence, "result": result}
        tasks.append(
            {
                "id": number,
                "data": data | ({"split": row.split} if row.split else {}),
                "annotations": annotations,
                "predictions": [guess] if row.confidence is not None else [],
            }
        )
    interface = path.with_suffix(".xml")
    with atomic_write(path) as file:
        file.write(json.dumps(tasks, ensure_ascii=False, indent=1).encode("utf-8"))
    several = any(len(row.labels) > 1 for row in table.rows)
    with atomic_write(interface) as file:
        file.write(render_interface(table.classes, several).encode("utf-8"))
    return [path, interface]


def render_interface(classes: tuple[str, ...], several: bool) -> str:
    """Return the labelling interface: the image and its choices."""
    choice = "multiple" if several else "single"
    lines = [f'    <Choice value="{escape(name)}"/>' for name in classes]
    return "\n".join(
        [
            "<View>",
            f'  <Image name="{IMAGE}" value="${IMAGE}"/>',
            f'  <Choices name="{CHOICES}" toName="{IMAGE}" choice="{choice}">',
            *lines,
            "  </Choices>",
            "</View>",
            "",
        ]
    )
