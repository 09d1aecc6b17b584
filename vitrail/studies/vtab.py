"""The 19 tasks of VTAB (Zhai et al. 2019) and the other data of table 2: what they are called, and where a user's files of
them lie.

A task is a folder in the user's directory, DATA/eurosat for example, with the files as their publisher gives them, where
`vitrail/data/sources/vtab` reads these; or in any form that `vitrail check` reads: folders train, validation and test of class
folders, class folders alone, CIFAR's binary files, Parquet, tar shards. Its name may be spelt with other marks and letters:
CIFAR_100 is cifar-100. Where one publication serves two tasks, one folder does: DATA/clevr.

As in VTAB, a task is learnt from 1,000 pictures, drawn at random: 800 to learn from and 200 to choose by, and all of them once
nothing is chosen any more. Test pictures are all that there are.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitrail.data.sources import vtab as published

Group = Literal["natural", "specialised", "structured", "whole", "small"]
GROUPS: tuple[Group, ...] = ("natural", "specialised", "structured")  # of VTAB
EXAMPLES = (800, 200)  # pictures to learn from and to choose by in each task of VTAB
FEW = 100  # of each class of small data, about as many


@dataclass(frozen=True)
class Task:
    """A data set to transfer to."""

    name: str
    group: Group
    classes: int
    folder: str = ""  # where another task has the same pictures
    also: tuple[str, ...] = ()  # what else the folder may be called

    @property
    def where(self) -> str:
        """What it is called in a user's directory, and among the data that is known by name."""
        return self.folder or self.name

    @property
    def examples(self) -> tuple[int, int] | None:
        """VTAB's pictures to learn from, and to choose by."""
        return EXAMPLES if self.group in GROUPS else None

    @property
    def per_class(self) -> int | None:
        """Pictures of each class to learn from: as many as there are, unless the data is small."""
        return FEW if self.group == "small" else None


CLEVR = ("clevr", "clevr-v1.0")
VTAB = (
    Task("caltech-101", "natural", 102, also=("caltech101",)),
    Task("cifar-100", "natural", 100),
    Task("dtd", "natural", 47),
    Task("flowers-102", "natural", 102, also=("oxford-flowers-102",)),
    Task("pets", "natural", 37, also=("oxford-iiit-pet",)),
    Task("sun397", "natural", 397),
    Task("svhn", "natural", 10),
    Task("patch-camelyon", "specialised", 2, also=("pcam",)),
    Task("eurosat", "specialised", 10),
    Task("resisc45", "specialised", 45, also=("nwpu-resisc45",)),
    Task("retinopathy", "specialised", 5, also=("diabetic-retinopathy-detection",)),
    Task("clevr-count", "structured", 8, also=CLEVR),
    Task("clevr-distance", "structured", 6, also=CLEVR),
    Task("dmlab", "structured", 6),
    Task("kitti-distance", "structured", 4, also=("kitti",)),
    Task("dsprites-location", "structured", 16, also=("dsprites",)),
    Task("dsprites-orientation", "structured", 16, also=("dsprites",)),
    Task("smallnorb-azimuth", "structured", 18, also=("smallnorb",)),
    Task("smallnorb-elevation", "structured", 9, also=("smallnorb",)),
)
WHOLE = (  # table 2 beside VTAB: all pictures are learnt from
    Task("imagenet", "whole", 1000),
    Task("cifar-10", "whole", 10),
    Task("cifar-100, whole", "whole", 100, "cifar-100"),
    Task("pets, whole", "whole", 37, "pets", ("oxford-iiit-pet",)),
    Task("flowers-102, whole", "whole", 102, "flowers-102", ("oxford-flowers-102",)),
)
SMALL = (  # what every machine has, each with as many pictures as a task of VTAB
    Task("digits", "small", 10),
    Task("fashion-mnist", "small", 10),
    Task("cifar-10", "small", 10),
)


def spelt(name: str) -> str:
    """A name without marks and capitals."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def located(root: str | Path) -> dict[Task, str]:
    """The tasks whose folders lie in a directory, in the order of the tables, each as data is named: `svhn:FOLDER` where the
    publisher's files lie there, and else the folder."""
    path = Path(root).expanduser()
    folders = {spelt(each.name): each for each in sorted(path.iterdir()) if each.is_dir()} if path.is_dir() else {}
    found = {}
    for task in (*VTAB, *WHOLE):
        for name in (task.where, *task.also):
            folder = folders.get(spelt(name))
            if folder is None or task in found:
                continue
            if published.root(task.where, folder) is not None:
                found[task] = f"{task.where}:{folder}"
            elif shared(name) == 1:  # a folder of two tasks says nothing of classes
                found[task] = str(folder)
    return found


def shared(name: str) -> int:
    """How many tasks of VTAB a folder of this name would be for."""
    return sum(name in (task.where, *task.also) for task in VTAB) or 1


def absent(names: Sequence[str]) -> list[str]:
    """A line for each task of VTAB that is not among these names: what it is, and what is looked for where."""
    lines = []
    for task in VTAB:
        if task.name in names:
            continue
        form = published.FORMS.get(task.where)
        if form is not None:
            files = (
                f"as published ({', '.join(form.files[:2])}{' …' if len(form.files) > 2 else ''}), or in class folders"
            )
        elif task.name == "dmlab":
            files = (
                "in folders train, validation and test of class folders: it is published as TFRecord, which is not read"
            )
        else:
            files = "as published"
        lines.append(
            f"{task.name} ({task.group}, {task.classes} classes) is missing: put it in DATA/{task.where} {files}"
        )
    return lines
