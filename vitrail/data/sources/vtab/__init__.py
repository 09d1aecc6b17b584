"""VTAB datasets in their publishers' files, without TensorFlow: `svhn:FOLDER`, `clevr-count:FOLDER`.

The name selects the task, since the files of CLEVR, dSprites and smallNORB serve several. Datasets published as class
folders, such as EuroSAT, are split as VTAB splits them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vitrail.data.dataset import Dataset
from vitrail.data.sources import folders
from vitrail.data.sources.manifest import build_dataset
from vitrail.data.sources.splits import ReadOptions
from vitrail.data.sources.vtab import arrays, files
from vitrail.data.sources.vtab.files import VtabRecords, find_published, read_clevr, read_kitti


@dataclass(frozen=True)
class VtabLayout:
    """The files by which a published dataset is recognised, and its reader; None for class folders."""

    files: tuple[str, ...]
    reader: Callable[[Path], VtabRecords] | None = None


FOLDER_FRACTIONS = (0.6, 0.2, 0.2)  # VTAB's split of class folders
NORB_MATRICES = tuple(f"{name}-{kind}.mat" for name in arrays.NORB_FILES.values() for kind in ("dat", "info"))
CAMELYON_PARTS = arrays.CAMELYON_SPLITS.values()
CAMELYON_FILES = tuple(arrays.CAMELYON_FILE.format(part, which) for part in CAMELYON_PARTS for which in "xy")
VTAB_LAYOUTS = {
    "caltech-101": VtabLayout(("101_ObjectCategories",), files.read_caltech),
    "dtd": VtabLayout(("labels/train1.txt", "labels/val1.txt", "labels/test1.txt", "images"), files.read_dtd),
    "flowers-102": VtabLayout(("imagelabels.mat", "setid.mat", "jpg"), files.read_flowers),
    "pets": VtabLayout(("annotations/trainval.txt", "annotations/test.txt", "images"), files.read_pets),
    "sun397": VtabLayout(("a/abbey",), files.read_sun397),
    "svhn": VtabLayout(("train_32x32.mat", "test_32x32.mat"), arrays.read_svhn),
    "patch-camelyon": VtabLayout(CAMELYON_FILES, arrays.read_camelyon),
    "eurosat": VtabLayout(("AnnualCrop",)),
    "resisc45": VtabLayout(("airplane",)),
    "retinopathy": VtabLayout(("trainLabels.csv", "retinopathy_solution.csv", "train", "test"), files.read_retinopathy),
    "clevr-count": VtabLayout(("scenes/CLEVR_train_scenes.json", "images"), partial(read_clevr, task="count")),
    "clevr-distance": VtabLayout(("scenes/CLEVR_train_scenes.json", "images"), partial(read_clevr, task="distance")),
    "kitti-distance": VtabLayout(("training/label_2", "training/image_2"), read_kitti),
    "dsprites-location": VtabLayout((arrays.DSPRITES_FILE,), partial(arrays.read_dsprites, latent=4, values=32)),
    "dsprites-orientation": VtabLayout((arrays.DSPRITES_FILE,), partial(arrays.read_dsprites, latent=3, values=40)),
    "smallnorb-azimuth": VtabLayout(NORB_MATRICES, partial(arrays.read_smallnorb, column=2, step=2)),
    "smallnorb-elevation": VtabLayout(NORB_MATRICES, partial(arrays.read_smallnorb, column=1, step=1)),
}


def find_root(name: str, folder: str | Path) -> Path | None:
    """Return the folder with the files of a dataset: this one, or one of its subfolders; otherwise None."""
    root = Path(folder)
    known = VTAB_LAYOUTS[name].files[0] if name in VTAB_LAYOUTS else None
    if known is None or not root.is_dir():
        return None
    children = sorted(path for path in root.iterdir() if path.is_dir())
    return next((path for path in (root, *children) if find_published(path, known) is not None), None)


def parse_source(source: str) -> tuple[str, str] | None:
    """Split `svhn:FOLDER` into name and folder; return None for anything else."""
    name, colon, folder = source.partition(":")
    return (name, folder) if colon and name in VTAB_LAYOUTS else None


def read_vtab(name: str, folder: str, options: ReadOptions) -> Dataset:
    """Read a dataset from its publisher's files."""
    layout, root = VTAB_LAYOUTS[name], find_root(name, folder)
    if root is None:
        expected = " or ".join(layout.files[:2])
        raise ValueError(f"{folder} has no {expected}, as {name} is published: give the folder that contains them")
    if layout.reader is None:
        options = ReadOptions(options.fractions or FOLDER_FRACTIONS, progress=options.progress)
        return folders.read_class_folders(str(root), options)
    records = layout.reader(root)
    if unknown := sorted(set(records.labels) - set(records.class_order)):
        raise ValueError(f"{root} has the class {unknown[0]}, which is not in {name}: download it again")
    options = replace(options, fractions=options.fractions or records.fractions)
    source, order, notes = f"{name}:{folder}", records.class_order, records.notes
    return build_dataset(
        source, "vtab", records.store, records.labels, records.splits, options, class_order=order, notes=notes
    )
