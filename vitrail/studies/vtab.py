"""Tasks of the transfer study: the 19 tasks of VTAB (Zhai et al. 2019) and the other data of table 2, and their folders.

A task is a folder in the user's directory, e.g. DATA/eurosat, with the published files if `vitrail/data/sources/vtab` reads them,
or in any form that `vitrail check` reads: folders train, validation and test of class folders, class folders alone, CIFAR's
binary files, Parquet, tar shards. Case and punctuation of the name are ignored: CIFAR_100 is cifar-100. Tasks of one publication
share a folder: DATA/clevr.

As in VTAB, a task has 1,000 random training images: 800 for training and 200 for validation while tuning, all 1,000 in the final
runs. The test set is complete.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitrail.data.sources import vtab as published

Group = Literal["natural", "specialised", "structured", "whole", "small"]
GROUPS: tuple[Group, ...] = ("natural", "specialised", "structured")  # of VTAB
VTAB_EXAMPLES = (800, 200)  # training and validation images of each VTAB task
SMALL_PER_CLASS = 100  # training images per class of small data


@dataclass(frozen=True)
class TransferTask:
    """A dataset of the transfer study."""

    name: str
    group: Group
    classes: int
    folder: str = ""  # if shared with another task
    aliases: tuple[str, ...] = ()  # other names of the folder

    @property
    def folder_name(self) -> str:
        """Return its name in the user's directory and among the named datasets."""
        return self.folder or self.name

    @property
    def examples(self) -> tuple[int, int] | None:
        """Return the numbers of training and validation images of a VTAB task, else None."""
        return VTAB_EXAMPLES if self.group in GROUPS else None

    @property
    def per_class(self) -> int | None:
        """Return the number of training images per class of small data; None for all images."""
        return SMALL_PER_CLASS if self.group == "small" else None


CLEVR_FOLDERS = ("clevr", "clevr-v1.0")
VTAB_TASKS = (
    TransferTask("caltech-101", "natural", 102, aliases=("caltech101",)),
    TransferTask("cifar-100", "natural", 100),
    TransferTask("dtd", "natural", 47),
    TransferTask("flowers-102", "natural", 102, aliases=("oxford-flowers-102",)),
    TransferTask("pets", "natural", 37, aliases=("oxford-iiit-pet",)),
    TransferTask("sun397", "natural", 397),
    TransferTask("svhn", "natural", 10),
    TransferTask("patch-camelyon", "specialised", 2, aliases=("pcam",)),
    TransferTask("eurosat", "specialised", 10),
    TransferTask("resisc45", "specialised", 45, aliases=("nwpu-resisc45",)),
    TransferTask("retinopathy", "specialised", 5, aliases=("diabetic-retinopathy-detection",)),
    TransferTask("clevr-count", "structured", 8, aliases=CLEVR_FOLDERS),
    TransferTask("clevr-distance", "structured", 6, aliases=CLEVR_FOLDERS),
    TransferTask("dmlab", "structured", 6),
    TransferTask("kitti-distance", "structured", 4, aliases=("kitti",)),
    TransferTask("dsprites-location", "structured", 16, aliases=("dsprites",)),
    TransferTask("dsprites-orientation", "structured", 16, aliases=("dsprites",)),
    TransferTask("smallnorb-azimuth", "structured", 18, aliases=("smallnorb",)),
    TransferTask("smallnorb-elevation", "structured", 9, aliases=("smallnorb",)),
)
WHOLE_TASKS = (  # the rest of table 2: all training images are used
    TransferTask("imagenet", "whole", 1000),
    TransferTask("cifar-10", "whole", 10),
    TransferTask("cifar-100, whole", "whole", 100, "cifar-100"),
    TransferTask("pets, whole", "whole", 37, "pets", ("oxford-iiit-pet",)),
    TransferTask("flowers-102, whole", "whole", 102, "flowers-102", ("oxford-flowers-102",)),
)
SMALL_TASKS = (  # built-in data, with as many images as a VTAB task
    TransferTask("digits", "small", 10),
    TransferTask("fashion-mnist", "small", 10),
    TransferTask("cifar-10", "small", 10),
)


def normalise_name(name: str) -> str:
    """Return a name in lower case without punctuation."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def locate_tasks(root: str | Path) -> dict[TransferTask, str]:
    """Return the tasks whose folders are in a directory, with the data name: `svhn:FOLDER` for published files, else FOLDER."""
    path = Path(root).expanduser()
    entries = sorted(path.iterdir()) if path.is_dir() else ()
    folders = {normalise_name(entry.name): entry for entry in entries if entry.is_dir()}
    located = {}
    for task in (*VTAB_TASKS, *WHOLE_TASKS):
        for name in (task.folder_name, *task.aliases):
            folder = folders.get(normalise_name(name))
            if folder is None or task in located:
                continue
            n_tasks = sum(name in (other.folder_name, *other.aliases) for other in VTAB_TASKS)
            if published.find_root(task.folder_name, folder) is not None:
                located[task] = f"{task.folder_name}:{folder}"
            elif n_tasks < 2:  # class folders cannot serve two tasks
                located[task] = str(folder)
    return located


def describe_missing_tasks(names: Sequence[str]) -> list[str]:
    """Return a line for each VTAB task that is not among these names, with the expected folder and files."""
    lines = []
    for task in VTAB_TASKS:
        if task.name in names:
            continue
        form = published.VTAB_LAYOUTS.get(task.folder_name)
        if form is not None:
            more = " …" if len(form.files) > 2 else ""
            files = f"as published ({', '.join(form.files[:2])}{more}), or in class folders"
        elif task.name == "dmlab":
            files = "in folders train, validation and test of class folders (the published TFRecord files are not supported)"
        else:
            files = "as published"
        about = f"{task.name} ({task.group}, {task.classes} classes)"
        lines.append(f"{about} is missing: put it in DATA/{task.folder_name} {files}")
    return lines
