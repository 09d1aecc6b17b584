"""Things and stuff: classes with objects that can be counted, and classes without, such as sky and road."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail.utils.text import suggest_closest

ALL = "all"  # the word for every class


def find_things(stuff: str | Sequence[str], labels: Sequence[str]) -> tuple[bool, ...]:
    """Return for each class whether it has objects: all but those of `stuff`; raise ValueError for an unknown name.

    `stuff` is a list of names, names with commas, the word all, or a file: a name per line, or JSON with `isthing`, as the
    categories of COCO's panoptic files have it.
    """
    if isinstance(stuff, str):
        if stuff == ALL and ALL not in labels:
            return (False,) * len(labels)
        names = read_stuff_file(Path(stuff)) if Path(stuff).is_file() else stuff.split(",")
        stuff = [name.strip() for name in names if name.strip()]
    for name in stuff:
        if name not in labels:
            unknown = suggest_closest(name[:60], labels)
            raise ValueError(f"stuff=: the model has no class {unknown}: use names with commas, {ALL}, or a file")
    return tuple(label not in stuff for label in labels)


def read_stuff_file(path: Path) -> list[str]:
    """Return the classes without objects that a file lists."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"stuff={str(path)!r} is not UTF-8 text: use a name per line, or COCO's categories") from None
    if not text.lstrip().startswith(("[", "{")):
        return text.splitlines()
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    items = data.get("categories", data.get("classes")) if isinstance(data, dict) else data
    if not isinstance(items, list) or not all(isinstance(item, dict) and "isthing" in item for item in items):
        raise ValueError(f"{path} must be a list of categories with name and isthing, as COCO has them")
    return [str(item.get("name")) for item in items if not item["isthing"]]
