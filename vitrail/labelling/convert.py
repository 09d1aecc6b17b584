"""Convert labels from one file to another."""

import os
from dataclasses import replace
from pathlib import Path

from vitrail.labelling.decisions import check_target
from vitrail.labelling.formats import LabelTable, read_labels, write_labels


def convert_labels(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    form: str = "csv",
    from_form: str | None = None,
    *,
    root: Path | None = None,
    label_from: str | None = None,
) -> tuple[LabelTable, list[str]]:
    """Read labels in any of `vitrail.labelling.FORMATS` and write them in another; return the labels and the files.

    `source` is a file or a directory, or any data of image files that `vitrail.train` takes. `root` is Label Studio's document
    root.
    """
    check_target(Path(out), os.fspath(source))
    table = read_labels(source, from_form, root=root, label_from=label_from)
    if not table.rows:
        raise ValueError(f"{os.fspath(source)} has no images")
    notes = list(table.notes)
    if form == "fiftyone" and any(row.split for row in table.rows):
        notes.append("splits are left out: this format has none, fiftyone-dataset has tags")
    missing = [row.path for row in table.rows if not os.path.exists(row.path)]
    if missing:
        notes.append(f"{len(missing):,} images do not exist, such as {missing[0]}: give root= if they are elsewhere")
    files = write_labels(table, Path(out), form, root=root)
    return replace(table, notes=tuple(notes)), list(map(str, files))
