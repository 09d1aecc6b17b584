"""Data sets of VTAB in the files that their publishers give, without TensorFlow: `svhn:FOLDER`, `clevr-count:FOLDER`.

The name comes first, since the files of CLEVR, dSprites and smallNORB answer more than one question. What is published as plain
class folders, EuroSAT for example, is divided as VTAB divides it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vitrail.data.pictures import Dataset
from vitrail.data.sources import folders, parts
from vitrail.data.sources.gathered import gathered
from vitrail.data.sources.vtab import arrays, lists, scenes
from vitrail.data.sources.vtab.found import Found, lies


@dataclass(frozen=True)
class Form:
    """How a data set is published: what it is known by in a folder, and who reads it; nobody, where it is class folders."""

    files: tuple[str, ...]
    read: Callable[[Path], Found] | None = None


SIXTY = (0.6, 0.2, 0.2)  # how VTAB divides class folders
FORMS = {
    "caltech-101": Form(("101_ObjectCategories",), lists.caltech),
    "dtd": Form(("labels/train1.txt", "labels/val1.txt", "labels/test1.txt", "images"), lists.dtd),
    "flowers-102": Form(("imagelabels.mat", "setid.mat", "jpg"), lists.flowers),
    "pets": Form(("annotations/trainval.txt", "annotations/test.txt", "images"), lists.pets),
    "sun397": Form(("a/abbey",), lists.sun397),
    "svhn": Form(("train_32x32.mat", "test_32x32.mat"), arrays.svhn),
    "patch-camelyon": Form(
        tuple(arrays.CAMELYON.format(part, which) for part in arrays.PARTS.values() for which in "xy"), arrays.camelyon
    ),
    "eurosat": Form(("AnnualCrop",)),
    "resisc45": Form(("airplane",)),
    "retinopathy": Form(("trainLabels.csv", "retinopathy_solution.csv", "train", "test"), lists.retinopathy),
    "clevr-count": Form(("scenes/CLEVR_train_scenes.json", "images"), partial(scenes.clevr, task="count")),
    "clevr-distance": Form(("scenes/CLEVR_train_scenes.json", "images"), partial(scenes.clevr, task="distance")),
    "kitti-distance": Form(("training/label_2", "training/image_2"), scenes.kitti),
    "dsprites-location": Form((arrays.DSPRITES,), partial(arrays.dsprites, latent=4, values=32)),
    "dsprites-orientation": Form((arrays.DSPRITES,), partial(arrays.dsprites, latent=3, values=40)),
    "smallnorb-azimuth": Form(
        tuple(f"{name}-{kind}.mat" for name in arrays.NORB.values() for kind in ("dat", "info")),
        partial(arrays.smallnorb, column=2, step=2),
    ),
    "smallnorb-elevation": Form(
        tuple(f"{name}-{kind}.mat" for name in arrays.NORB.values() for kind in ("dat", "info")),
        partial(arrays.smallnorb, column=1, step=1),
    ),
}


def root(name: str, folder: str | Path) -> Path | None:
    """Where the files of a data set lie: in the folder, or in one of its folders, as archives unpack; None where they do not."""
    above = Path(folder)
    known = FORMS[name].files[0] if name in FORMS else None
    if known is None or not above.is_dir():
        return None
    below = sorted(path for path in above.iterdir() if path.is_dir())
    return next((path for path in (above, *below) if lies(path, known) is not None), None)


def asked(where: str) -> tuple[str, str] | None:
    """The name and the folder of `svhn:FOLDER`; None for anything else."""
    name, colon, folder = where.partition(":")
    return (name, folder) if colon and name in FORMS else None


def read(name: str, folder: str, fractions: parts.Fractions | None, progress: parts.Progress | None) -> Dataset:
    """The data set of a name from its publisher's files."""
    form, place = FORMS[name], root(name, folder)
    if place is None:
        raise ValueError(
            f"{folder} has no {' and no '.join(form.files[:2])}, as {name} is published: give the folder of these"
        )
    if form.read is None:
        return folders.read(str(place), fractions or SIXTY, progress)
    found = form.read(place)
    if unknown := sorted(set(found.labels) - set(found.order)):
        raise ValueError(f"{place} has the class {unknown[0]}, which {name} does not have: get it again")
    return gathered(
        f"{name}:{folder}",
        "vtab",
        found.store,
        found.labels,
        found.splits,
        order=found.order,
        fractions=fractions or found.fractions,
        progress=progress,
        notes=found.notes,
    )
