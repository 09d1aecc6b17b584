"""CSV tables of suspects, proposals and images to label. Paths are relative to the table if the image is below its folder."""

import os
from pathlib import Path

from vitrail.labelling.formats.csv_table import write_csv
from vitrail.labelling.formats.table import relative_path
from vitrail.labelling.next_images import ImagesToLabel
from vitrail.labelling.propose import LabelProposals
from vitrail.labelling.suspects import LabelErrors

MEASURES = ("score", "confidence", "self_confidence", "margin", "neighbour_agreement", "classifier_confidence")
SUSPECT_COLUMNS = ("rank", "path", "given_label", "suggested_label", *MEASURES, "split")
PROPOSAL_COLUMNS = ("path", "label", "confidence")
NEXT_MEASURES = ("confidence", "margin", "entropy", "distance")
NEXT_COLUMNS = ("rank", "path", "label", "suggested_label", "second_label", *NEXT_MEASURES)


def locate(path: str, table: Path) -> str:
    """Return the path of an image as it stands in a table."""
    return relative_path(os.path.abspath(path), table.parent)


def write_suspects(errors: LabelErrors, path: Path) -> None:
    """Write the suspects, the most suspicious first."""
    rows = []
    for suspect in errors.suspects:
        measures = [f"{getattr(suspect, name):.6f}" for name in MEASURES]
        names = [suspect.given_label, suspect.suggested_label]
        rows.append([suspect.rank, locate(suspect.path, path), *names, *measures, suspect.split])
    write_csv(path, SUSPECT_COLUMNS, rows)


def write_proposals(proposals: LabelProposals, path: Path) -> None:
    """Write the proposed labels, as `vitrail train` and `vitrail label apply` read them."""
    rows = [[locate(each.path, path), each.label, f"{each.confidence:.6f}"] for each in proposals.proposals]
    write_csv(path, PROPOSAL_COLUMNS, rows)


def write_next(chosen: ImagesToLabel, path: Path) -> None:
    """Write the images to label, the most useful first, with an empty column for the label."""
    rows = []
    for image in chosen.images:
        measures = [f"{getattr(image, name):.6f}" for name in NEXT_MEASURES]
        rows.append([image.rank, locate(image.path, path), "", image.suggested_label, image.second_label, *measures])
    write_csv(path, NEXT_COLUMNS, rows)
