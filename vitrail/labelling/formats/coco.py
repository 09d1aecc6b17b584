"""COCO JSON of classified images: an annotation with a category for each label, its box the whole image."""

import json
import os
from pathlib import Path
from typing import Any

from PIL import Image

from vitrail.data.decode import IMAGE_ERRORS, name_image_errors, open_image
from vitrail.data.sources.coco import CocoFile, find_image_folder, open_coco, read_categories
from vitrail.data.sources.splits import parse_split_name
from vitrail.labelling.formats.table import LabelRow, LabelTable, build_table, relative_path, resolve_path
from vitrail.utils.files import atomic_write


def is_coco(value: Any) -> bool:
    """Return True for the content of a COCO file."""
    return isinstance(value, dict) and isinstance(value.get("images"), list) and "categories" in value


def read_coco_labels(path: Path) -> LabelTable:
    """Read the categories of each image; objects count as labels of their image."""
    file = open_coco(str(path), required=True)
    if file is None:
        raise ValueError(f"{path} is not a COCO file: it needs images, annotations and categories")
    categories = read_categories(file)
    found: dict[Any, tuple[str, dict[str, float | None]]] = {}
    splits: dict[Any, str | None] = {}
    folder: str | None = None
    for entry in file.data["images"]:
        key, name = (entry.get("id"), entry.get("file_name")) if isinstance(entry, dict) else (None, None)
        if type(key) not in (int, str) or not isinstance(name, str) or not name.strip():
            raise ValueError(f"{path}: an image needs an id and a file_name, got {str(entry)[:60]}")
        if key in found:
            raise ValueError(f"{path} has the image id {key} twice")
        folder = find_folder(file, name) if folder is None else folder
        found[key] = (resolve_path(name, folder), {})
        splits[key] = parse_split_name(str(entry.get("split") or "")) or file.split
    if not found:
        raise ValueError(f"{path} lists no images")
    for entry in file.data["annotations"]:
        where = f"{path}, annotation {entry.get('id') if isinstance(entry, dict) else None}"
        key, number = (entry.get("image_id"), entry.get("category_id")) if isinstance(entry, dict) else (None, None)
        if type(key) not in (int, str) or key not in found:
            raise ValueError(f"{where}: no image has the id {key!r}")
        if type(number) is not int or number not in categories:
            raise ValueError(f"{where}: no category has the id {number!r}")
        score = entry.get("score")
        found[key][1][categories[number]] = float(score) if isinstance(score, (int, float)) else None
    rows = (
        LabelRow(name, tuple(labels), splits[key], next(iter(labels.values())) if len(labels) == 1 else None)
        for key, (name, labels) in found.items()
    )
    return build_table(rows, categories.values())


def find_folder(file: CocoFile, name: str) -> str:
    """Return the folder of the images; that of the file if the first image is nowhere."""
    try:
        return find_image_folder(file, name)
    except FileNotFoundError:
        return os.path.dirname(os.path.abspath(file.path))


def write_coco_labels(table: LabelTable, path: Path) -> list[Path]:
    """Write a COCO file; the size of each image is read from its header."""
    numbers = {name: number for number, name in enumerate(table.classes, 1)}
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for key, row in enumerate(table.rows, 1):
        width, height = read_size(row.path)
        image: dict[str, Any] = {"id": key, "file_name": relative_path(row.path, path.parent)}
        image |= {"width": width, "height": height} | ({"split": row.split} if row.split else {})
        images.append(image)
        for label in row.labels:
            box = {"bbox": [0, 0, width, height], "area": width * height, "iscrowd": 0, "segmentation": []}
            entry = {"id": len(annotations) + 1, "image_id": key, "category_id": numbers[label], **box}
            annotations.append(entry if row.confidence is None else entry | {"score": row.confidence})
    categories = [{"id": number, "name": name, "supercategory": ""} for name, number in numbers.items()]
    data = {"info": {"description": "classes of images"}, "licenses": [], "images": images}
    data |= {"annotations": annotations, "categories": categories}
    with atomic_write(path) as file:
        file.write(json.dumps(data, ensure_ascii=False, indent=1).encode("utf-8"))
    return [path]


def read_size(path: str) -> tuple[int, int]:
    """Return width and height of an upright image; raise ValueError if it cannot be read."""
    try:
        with name_image_errors(path), open_image(path, path) as image:
            turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8) if isinstance(image, Image.Image) else False
            return (image.height, image.width) if turned else (image.width, image.height)
    except IMAGE_ERRORS as error:
        raise ValueError(f"COCO needs the size of each image: {error}") from None
