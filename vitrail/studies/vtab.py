"""The 19 tasks of VTAB (Zhai et al. 2019) and the other data of table 2: what they are called, and where a user's files of
them lie.

A task is a folder in the user's directory, DATA/eurosat for example, in any form that `vitrail check` reads: folders train,
validation and test of class folders, class folders alone, CIFAR's binary files, Parquet, tar shards. Its name may be spelt with
other marks and letters: CIFAR_100 is cifar-100.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Group = Literal["natural", "specialised", "structured", "whole", "small"]
GROUPS: tuple[Group, ...] = ("natural", "specialised", "structured")  # of VTAB
EXAMPLES = 1_000  # pictures to learn from in each task of VTAB


@dataclass(frozen=True)
class Task:
    """A data set to transfer to."""

    name: str
    group: Group
    classes: int
    folder: str = ""  # where another task has the same pictures

    @property
    def where(self) -> str:
        """What it is called in a user's directory, and among the data that is known by name."""
        return self.folder or self.name

    @property
    def per_class(self) -> int | None:
        """Pictures of each class to learn from: all of them, or about as many as VTAB has."""
        return None if self.group == "whole" else -(-EXAMPLES // self.classes)


VTAB = (
    Task("caltech-101", "natural", 102),
    Task("cifar-100", "natural", 100),
    Task("dtd", "natural", 47),
    Task("flowers-102", "natural", 102),
    Task("pets", "natural", 37),
    Task("sun397", "natural", 397),
    Task("svhn", "natural", 10),
    Task("patch-camelyon", "specialised", 2),
    Task("eurosat", "specialised", 10),
    Task("resisc45", "specialised", 45),
    Task("retinopathy", "specialised", 5),
    Task("clevr-count", "structured", 8),
    Task("clevr-distance", "structured", 6),
    Task("dmlab", "structured", 6),
    Task("kitti-distance", "structured", 4),
    Task("dsprites-location", "structured", 16),
    Task("dsprites-orientation", "structured", 16),
    Task("smallnorb-azimuth", "structured", 18),
    Task("smallnorb-elevation", "structured", 9),
)
WHOLE = (  # table 2 beside VTAB: all pictures are learnt from
    Task("imagenet", "whole", 1000),
    Task("cifar-10", "whole", 10),
    Task("cifar-100, whole", "whole", 100, "cifar-100"),
    Task("pets, whole", "whole", 37, "pets"),
    Task("flowers-102, whole", "whole", 102, "flowers-102"),
)
SMALL = (  # what every machine has, each with as many pictures as a task of VTAB
    Task("digits", "small", 10),
    Task("fashion-mnist", "small", 10),
    Task("cifar-10", "small", 10),
)


def spelt(name: str) -> str:
    """A name without marks and capitals."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def located(root: str | Path) -> dict[Task, Path]:
    """The tasks whose folders lie in a directory, in the order of the tables."""
    path = Path(root).expanduser()
    folders = {spelt(each.name): each for each in sorted(path.iterdir()) if each.is_dir()} if path.is_dir() else {}
    return {task: folders[spelt(task.where)] for task in (*VTAB, *WHOLE) if spelt(task.where) in folders}


def absent(names: Sequence[str]) -> list[str]:
    """A line for each task of VTAB that is not among these names: what it is, and where its files are looked for."""
    return [
        f"{task.name} ({task.group}, {task.classes} classes) is missing: put its pictures in DATA/{task.where}"
        for task in VTAB
        if task.name not in names
    ]
