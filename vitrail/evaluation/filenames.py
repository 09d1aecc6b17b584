"""Pictures in folders that say nothing, whose class is a part of their own names: `0207_golden_retriever.JPEG`."""

import os
import re

from vitrail.data.pictures import Dataset
from vitrail.data.sources import parts
from vitrail.data.sources.files import printable
from vitrail.data.sources.folders import Walk
from vitrail.data.sources.gathered import gathered


def read_by_name(folder: str, pattern: str, progress: parts.Progress | None = None) -> Dataset:
    """All pictures below a folder; their class is what the pattern's first group finds in the file's name, or all it finds."""
    try:
        find = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"--label-from '{pattern}' is no regular expression: {error}") from None
    path = os.path.expanduser(folder)
    if not os.path.isdir(path):
        raise ValueError(f"--label-from is for a folder of pictures, and {folder} is none")
    walk = Walk(progress=progress)
    walk.below(path, set())
    store, labels = walk.listing.store(), []
    for item in range(len(store)):
        name = os.path.basename(store.path(item))
        found = find.search(name)
        label = (found[1] if find.groups else found[0]) if found else None
        if not label or not label.strip() or printable(label) != label:
            raise ValueError(f"--label-from '{pattern}' finds no class in {store.name(item)}: change the pattern")
        labels.append(label)
    note = f"classes are what '{pattern}' finds in the files' names"
    return gathered(
        folder,
        "file names",
        store,
        labels,
        [None] * len(labels),
        fractions=parts.UNDIVIDED,
        notes=(note,),
        passed_over=walk.passed_over,
    )
