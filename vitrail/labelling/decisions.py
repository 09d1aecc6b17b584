"""Apply a person's decisions: a new manifest with corrected, added and removed labels. Images are never changed.

A decision is a row of a CSV: path, decision (accept, correct, dismiss, remove) and label, as the contact sheet saves it. A table
without decisions, such as proposals or a file of another project, adds its labels or replaces those of the data.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitrail.data.labels import LabelMap, normalise_class_name, sort_class_names
from vitrail.data.sources.manifest import PATH_COLUMNS
from vitrail.labelling import UNDECIDED
from vitrail.labelling.formats import LabelRow, LabelTable, read_labels, write_labels
from vitrail.labelling.formats.csv_table import parse_score, pick, read_csv_rows
from vitrail.labelling.images import LabelledImages, load_labelled
from vitrail.utils.progress import ProgressCallback

DECISIONS = ("accept", "correct", "dismiss", "remove")
GIVEN, SUGGESTED = ("given_label",), ("suggested_label",)
MAX_NAMED = 3


@dataclass(frozen=True)
class Decision:
    """The decision about the label of one image."""

    where: str  # file and line, for messages
    path: str  # absolute
    action: str  # "label", "remove", "dismiss" or "" for undecided
    label: str = ""  # the new one
    given: str = ""  # the label that the decision was made for
    confidence: float | None = None  # of a predicted label


@dataclass(frozen=True)
class AppliedLabels:
    """A corrected manifest with the number of changes."""

    out: str
    files: tuple[str, ...]
    images: int
    corrected: int
    confirmed: int  # labels that a person kept or that were the same already
    removed: int
    added: int
    undecided: int
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return vars(self) | {"files": list(self.files), "notes": list(self.notes)}


def apply_labels(
    data: Any,
    decisions: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    form: str = "csv",
    undecided: str = "keep",
    new_classes: bool = False,
    root: Path | None = None,
    label_from: str | None = None,
    progress: ProgressCallback | None = None,
) -> AppliedLabels:
    """Write the labels of a dataset with decisions applied, as a manifest that `vitrail.train` reads, and return the counts.

    `undecided` says what becomes of rows without a decision: keep the given label, accept the suggestion, or remove the image
    from the list. A label that is no class of the data is an error, unless `new_classes` is True. Every row has a split: its
    own, or the one that `vitrail.train` would give it, so that models before and after are compared on the same images. Added
    images are training images. `form` is one of `vitrail.labelling.FORMATS`.
    """
    if undecided not in UNDECIDED:
        raise ValueError(f"unknown undecided={undecided!r}: use {', '.join(UNDECIDED)}")
    labelled = load_labelled(data, label_from=label_from, fractions=None, progress=progress)
    check_target(Path(out), labelled.dataset.source, os.fspath(decisions))
    table = list(iter_decisions(Path(decisions), undecided, root))
    rows = {os.path.realpath(path): row for path, row in list_rows(labelled).items()}
    state = Applied(rows, labelled.classes, new_classes)
    for decision in table:
        state.apply(decision)
    state.check_all(os.fspath(decisions))
    kept = tuple(row for row in state.rows.values() if row is not None)
    if not kept:
        raise ValueError(f"{decisions} removes every image of {labelled.dataset.source}")
    left = sort_class_names(label for row in kept for label in row.labels)
    notes = [*state.list_notes(), *describe_lost(labelled.classes, left)]
    files = write_labels(LabelTable(kept, left), Path(out), form, root=root)
    counts = {name: state.counts[name] for name in ("corrected", "confirmed", "removed", "added", "undecided")}
    return AppliedLabels(os.fspath(out), tuple(map(str, files)), len(kept), notes=tuple(notes), **counts)


def check_target(out: Path, *sources: str) -> None:
    """Raise ValueError if the output is one of the inputs."""
    for source in sources:
        if os.path.exists(source) and out.exists() and os.path.samefile(out, source):
            raise ValueError(f"out={str(out)!r} is an input, which is never changed: give another name")


def list_rows(labelled: LabelledImages) -> dict[str, LabelRow]:
    """Return the rows of a dataset by path."""
    rows = {}
    for index, path in enumerate(map(os.path.abspath, labelled.paths())):
        label = labelled.classes[int(labelled.images.targets[index])]
        rows[path] = LabelRow(path, (label,), str(labelled.splits[index]))
    return rows


def iter_decisions(path: Path, undecided: str, root: Path | None = None) -> Iterator[Decision]:
    """Yield the decisions of a CSV, or the labels of a file of another format as decisions."""
    if not path.exists():
        raise FileNotFoundError(f"no such file of decisions: {path}")
    if path.suffix.lower() not in (".csv", ".tsv"):
        for row in read_labels(path, root=root).rows:
            if len(row.labels) > 1:
                raise ValueError(f"{path}: {row.path} has several labels: labelling needs one class per image")
            action = "label" if row.labels else ""
            yield Decision(str(path), row.path, action, row.label, confidence=row.confidence)
        return
    for line, row in read_csv_rows(path, (PATH_COLUMNS, ("label", "decision", *SUGGESTED))):
        where = f"{path}, line {line}"
        if not (name := pick(row, PATH_COLUMNS)):
            raise ValueError(f"{where}: no path")
        yield parse_decision(where, find_file(name, path), row, undecided)


def find_file(name: str, path: Path) -> str:
    """Return the absolute path of a row: relative to the working directory, as commands write it, else to the CSV."""
    return os.path.abspath(name if os.path.exists(name) else path.parent / name)


def parse_decision(where: str, path: str, row: dict[str, str], undecided: str) -> Decision:
    """Return the decision of a row."""
    label, given = normalise_class_name(row.get("label", "")), normalise_class_name(pick(row, GIVEN))
    suggested = normalise_class_name(pick(row, SUGGESTED))
    word = row.get("decision", "").casefold()
    if not word and (label or not suggested):  # a plain table of labels
        word = "correct" if label else ""
    elif not word:
        word = {"keep": "", "accept": "accept", "remove": "remove"}[undecided]
    if word not in ("", *DECISIONS):
        raise ValueError(f"{where}: unknown decision {word!r}: use {', '.join(DECISIONS)}")
    new = label or suggested if word == "accept" else label
    if word in ("accept", "correct") and not new:
        raise ValueError(f"{where}: the decision {word} needs a label")
    action = {"accept": "label", "correct": "label"}.get(word, word)
    from_model = bool(row.get("confidence")) and not given and not row.get("decision")
    confidence = parse_score(row["confidence"], where) if from_model else None
    return Decision(where, path, action, new, given, confidence)


class Applied:
    """The rows of a dataset while decisions are applied to them."""

    def __init__(self, rows: dict[str, LabelRow], classes: tuple[str, ...], new_classes: bool) -> None:
        self.rows: dict[str, LabelRow | None] = dict(rows)  # by real path; None: removed
        self.classes, self.new_classes = LabelMap(classes), new_classes
        self.counts: Counter[str] = Counter()
        self.gone: list[str] = []  # decisions for files that do not exist
        self.stale: list[str] = []  # made for another label than the data has
        self.seen: dict[str, Decision] = {}

    def apply(self, decision: Decision) -> None:
        """Apply a decision; raise ValueError for an unknown class, or for two decisions that differ."""
        key = os.path.realpath(decision.path)
        earlier = self.seen.setdefault(key, decision)
        if earlier is not decision:
            if (earlier.action, earlier.label) != (decision.action, decision.label):
                raise ValueError(
                    f"{decision.where}: contradicts {earlier.where}: keep one decision for {decision.path}"
                )
            return
        if decision.action == "label" and not self.new_classes and decision.label not in self.classes.names:
            name = self.classes.format_unknown(decision.label)
            raise ValueError(f"{decision.where}: {name} is no class of the data: correct it, or use new_classes=True")
        row = self.rows.get(key)
        if row is None and not os.path.isfile(decision.path):
            self.gone.append(decision.path)
        elif row is None:
            self.add(key, decision)
        elif decision.given and decision.given not in (row.label, decision.label) and row.label != decision.label:
            self.stale.append(decision.path)
        else:
            self.change(key, row, decision)

    def add(self, key: str, decision: Decision) -> None:
        """Add an image that the data does not have yet."""
        if decision.action == "label":
            self.rows[key] = LabelRow(decision.path, (decision.label,), "train", decision.confidence)
            self.counts["added"] += 1
        else:
            self.counts["undecided"] += 1

    def change(self, key: str, row: LabelRow, decision: Decision) -> None:
        """Change the label of an image of the data, or remove the image."""
        if decision.action == "remove":
            self.rows[key] = None
            self.counts["removed"] += 1
        elif decision.action == "label" and decision.label != row.label:
            self.rows[key] = replace(row, labels=(decision.label,))
            self.counts["corrected"] += 1
        else:
            self.counts["confirmed" if decision.action else "undecided"] += 1

    def check_all(self, source: str) -> None:
        """Raise ValueError if no decision could be applied."""
        if not self.seen:
            raise ValueError(f"{source} has no decisions")
        if len(self.gone) == len(self.seen):
            raise ValueError(f"none of the {len(self.gone):,} images in {source} exists, such as {self.gone[0]}")

    def list_notes(self) -> list[str]:
        """Return notes about decisions that were left out."""
        notes = []
        if self.gone:
            named = ", ".join(self.gone[:MAX_NAMED])
            notes.append(f"{len(self.gone):,} decisions are for files that are gone, left out: {named}")
        if self.stale:
            named = ", ".join(self.stale[:MAX_NAMED])
            notes.append(
                f"{len(self.stale):,} decisions were made for another label than the data has, left out: {named}"
            )
        return notes


def describe_lost(before: tuple[str, ...], after: tuple[str, ...]) -> list[str]:
    """Return a note about classes that have no image any more."""
    lost = [name for name in before if name not in after]
    return [f"no image is left of {', '.join(lost)}"] if lost else []
