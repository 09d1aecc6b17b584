"""Find wrong labels, propose labels, choose which images to label next, and apply decisions.

DATA is a folder or a CSV of images with one class each. Nothing is ever changed in it: every command writes a new file.

`vitrail label suspects DATA` lists labels that are probably wrong. A linear classifier of frozen features predicts the images of
each fold that it was not fitted to, and the nearest images vote; both are shown and combined into one ranking. The estimated
noise is that of confident learning (Northcutt et al. 2021). It writes a table and a contact sheet, a page on which you accept,
correct or dismiss each suspect with the mouse or the keyboard and save your decisions.
`vitrail label propose DATA` labels the images of another folder, above a confidence at which the precision on validation images
reaches the target by its lower 95 % bound, and refuses if there is none.
`vitrail label next DATA` chooses the images whose labels would help most, uncertain and different from each other, with the same
page for labelling them. `vitrail label apply DATA DECISIONS` writes the new labels as a CSV that `vitrail train` reads.
`vitrail label convert IN OUT` exchanges labels with COCO, Label Studio and FiftyOne.

examples:
  vitrail label suspects photos                              suspects.csv and the page suspects.html
  vitrail label suspects photos --model dino.pth --out review/suspects.csv
  vitrail label apply photos suspects-decisions.csv --out corrected.csv      then: vitrail train corrected.csv
  vitrail label apply photos suspects.csv --undecided remove --out clean.csv without any suspect
  vitrail label propose photos --unlabelled more --model runs/photos-finetune-1
  vitrail label propose photos --unlabelled more --init deit-tiny --precision-target 0.95 --per-class
  vitrail label next photos --unlabelled more --model deit-tiny --budget 50
  vitrail label convert photos labels.json --format coco     also: label-studio, fiftyone, fiftyone-dataset
  vitrail label convert project-1.json labels.csv            an export of Label Studio
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.cli.options import (
    CHECKPOINT_HELP,
    CommandParser,
    parse_assumptions,
    parse_count,
    parse_positive,
    print_result,
)
from vitrail.cli.text.messages import spell_options
from vitrail.cli.text.progress import clear_progress, count_progress
from vitrail.labelling import DEFAULT_MODEL, FORMATS, METHODS, UNDECIDED
from vitrail.utils.text import format_percent, format_table

if TYPE_CHECKING:
    from vitrail.labelling.formats import LabelTable
    from vitrail.labelling.images import Compute
    from vitrail.labelling.sheet import Sheet
    from vitrail.labelling.suspects import LabelErrors

DATA_HELP = "folder, or CSV of path,label, of image files with one class each"
UNLABELLED_HELP = "folder or CSV of images to label; those in DATA are left out"
MAX_ROWS = 10  # of tables in the terminal


def add_arguments(parser: CommandParser) -> None:
    """Add the subcommands."""
    parts = parser.add_subparsers(dest="part", metavar="suspects|propose|next|apply|convert", required=True)
    add_suspects(parts)
    add_propose(parts)
    add_next(parts)
    add_apply(parts)
    add_convert(parts)


def add_suspects(parts: Any) -> None:
    """Add `vitrail label suspects`."""
    about = "List the labels that are probably wrong, most suspicious first, and estimate how many there are."
    part = parts.add_parser("suspects", help="find labels that are probably wrong", description=about)
    part.add_argument("data", metavar="DATA", help=DATA_HELP)
    part.add_option(
        "--model MODEL", f"{CHECKPOINT_HELP}; its head is not used [{DEFAULT_MODEL}]", default=DEFAULT_MODEL
    )
    part.add_option(
        "--out FILE.csv", "table to write; the page is beside it [suspects.csv]", Path, default="suspects.csv"
    )
    part.add_option("--cards N", "suspects on the page; 0: no page [500]", parse_count, default=500)
    part.add_option("--split NAME", "search only train, validation or test [all splits]")
    part.add_option(
        "--folds N", "folds of the cross-validation; near-duplicates are in one fold [5]", parse_positive, default=5
    )
    votes = "nearest images that vote [half of the images of a class, 3 to 20]"
    part.add_option("--neighbours K", votes, parse_positive)
    add_common(part)


def add_propose(parts: Any) -> None:
    """Add `vitrail label propose`."""
    about = "Label images without labels, above a confidence whose precision holds on validation images."
    part = parts.add_parser("propose", help="propose labels with a stated precision", description=about)
    part.add_argument("data", metavar="DATA", help=DATA_HELP)
    part.add_option("--unlabelled FOLDER", UNLABELLED_HELP, required=True)
    model = part.add_mutually_exclusive_group(required=True)
    trained = "trained classifier of the classes of DATA: a run or a checkpoint"
    model.add_argument("--model", metavar="MODEL", help=trained)
    frozen = "checkpoint for frozen features; a linear classifier is fitted to the training images"
    model.add_argument("--init", metavar="MODEL", help=frozen)
    target = "precision that the lower 95 %% bound must reach on validation images [0.98]"
    part.add_option("--precision-target P", target, parse_fraction, default=0.98)
    part.add_option("--per-class", "a threshold for each class, each with its own bound [one for all]")
    part.add_option("--split NAME", "images that the threshold is found on [validation]", default="validation")
    part.add_option("--out FILE.csv", "table of path,label,confidence [proposals.csv]", Path, default="proposals.csv")
    add_common(part)


def add_next(parts: Any) -> None:
    """Add `vitrail label next`."""
    about = "Choose the images whose labels would help most, and write a page for labelling them."
    part = parts.add_parser("next", help="choose which images to label next", description=about)
    part.add_argument("data", metavar="DATA", help=DATA_HELP)
    part.add_option("--unlabelled FOLDER", UNLABELLED_HELP, required=True)
    frozen = f"{CHECKPOINT_HELP}; a linear classifier of its features is fitted to DATA [{DEFAULT_MODEL}]"
    part.add_option("--model MODEL", frozen, default=DEFAULT_MODEL)
    part.add_option("--budget N", "number of images [50]", parse_positive, default=50)
    methods = (
        "uncertain-diverse: one image for each cluster of the most uncertain ones; margin, entropy: the most uncertain; "
        f"k-center, k-means++: the most different; random [{METHODS[0]}]"
    )
    part.add_option("--method NAME", methods, choices=METHODS, default=METHODS[0])
    part.add_option("--out FILE.csv", "table to write; the page is beside it [next.csv]", Path, default="next.csv")
    add_common(part)


def add_apply(parts: Any) -> None:
    """Add `vitrail label apply`."""
    about = "Write the labels of DATA with decisions applied. DATA itself stays as it is."
    part = parts.add_parser("apply", help="apply decisions to labels", description=about)
    part.add_argument("data", metavar="DATA", help=DATA_HELP)
    files = "CSV that the page saved, a table of suspects or proposals, or an export of another project"
    part.add_argument("decisions", metavar="DECISIONS", help=files)
    part.add_option("--out FILE", "file to write: labels of all images, with their split", Path, required=True)
    add_format(part)
    undecided = "suspects without a decision: keep the given label, accept the suggestion, or remove the image [keep]"
    part.add_option("--undecided WHAT", undecided, choices=UNDECIDED, default="keep")
    part.add_option("--new-classes", "allow labels that are no class of DATA")
    part.add_shared("--label-from REGEX", "--json")


def add_convert(parts: Any) -> None:
    """Add `vitrail label convert`."""
    about = "Convert labels between CSV, COCO, Label Studio and FiftyOne. Images are not copied."
    part = parts.add_parser("convert", help="convert labels from and to other projects", description=about)
    files = "file or directory of labels in any of the formats, or a folder of images with class folders"
    part.add_argument("source", metavar="IN", help=files)
    part.add_argument("out", metavar="OUT", type=Path, help="file to write, or directory for FiftyOne")
    part.add_option("--from FORMAT", "format of IN [detected]", choices=tuple(FORMATS))
    add_format(part)
    part.add_shared("--label-from REGEX", "--json")


def add_format(part: CommandParser) -> None:
    """Add --format and --root."""
    about = "; ".join(f"{name}: {text}" for name, text in FORMATS.items())
    part.add_option("--format FORMAT", f"{about} [csv]", choices=tuple(FORMATS), default="csv")
    root = "document root of Label Studio, below which the images are [the folder that holds all of them]"
    part.add_option("--root DIR", root, Path)


def add_common(part: CommandParser) -> None:
    """Add the options of commands that compute features."""
    part.add_shared("--label-from REGEX", "--seed N", "--json")
    compute = part.add_group("compute", "features are computed once and kept in the cache directory")
    compute.add_shared("--size N|HxW", "--device auto|cpu|cuda|mps", "--workers N", "--no-cache")
    part.add_checkpoint_options()


def parse_fraction(text: str) -> float:
    """Return a number above 0 and below 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 1, got {text!r}")
    return value


def run(options: argparse.Namespace) -> int:
    """Run a subcommand."""
    parts: dict[str, Callable[[argparse.Namespace], int]] = {
        "suspects": run_suspects,
        "propose": run_propose,
        "next": run_next,
        "apply": run_apply,
        "convert": run_convert,
    }
    return parts[options.part](options)


def read_compute(options: argparse.Namespace) -> "Compute":
    """Return the options of features."""
    from vitrail.labelling.images import Compute

    values = {name: getattr(options, name) for name in ("device", "workers", "size", "take")}
    return Compute(cache=not options.no_cache, assume=parse_assumptions(options), **values)


def common_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords that the functions have in common."""
    seed = {} if options.seed is None else {"seed": options.seed}
    return {"label_from": options.label_from, "compute": read_compute(options), "progress": count_progress(), **seed}


def check_table(out: Path, data: str, header: Sequence[str]) -> Path:
    """Return the name of a table; raise ValueError if it is no CSV, or would replace the data or a person's work."""
    from vitrail.labelling.decisions import check_target
    from vitrail.labelling.formats.csv_table import check_replaceable

    if out.suffix.lower() != ".csv":
        raise ValueError(f"--out {out}: the name of a table must end in .csv")
    check_target(out, data)
    check_folder(out)
    check_replaceable(out, header)
    return out


def check_folder(out: Path) -> None:
    """Raise ValueError before any computation if the output has no folder to stand in."""
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no directory {out.parent}")


def run_suspects(options: argparse.Namespace) -> int:
    """List the suspects, write the table and the page."""
    from vitrail.labelling.sheet import build_suspect_sheet
    from vitrail.labelling.suspects import find_label_errors
    from vitrail.labelling.tables import SUSPECT_COLUMNS, write_suspects

    out = check_table(options.out, options.data, SUSPECT_COLUMNS)
    names = ("split", "folds", "neighbours")
    given = {name: getattr(options, name) for name in names}
    errors = find_label_errors(options.data, options.model, **given, **common_options(options))
    write_suspects(errors, out)
    sheet = build_suspect_sheet(errors, f"{out.stem}-decisions.csv", options.cards)
    files = [str(out), *write_page(sheet, out, options.cards)]
    print_notes(options, errors.notes, errors.unreadable)
    return print_result(options, errors.as_dict() | {"files": files}, [*format_suspects(errors), *files])


def write_page(sheet: "Sheet", out: Path, cards: int) -> list[str]:
    """Write the contact sheet beside its table, unless it would be empty."""
    from vitrail.labelling.sheet import write_sheet

    if not cards or not sheet.cards:
        return []
    path = out.with_suffix(".html")
    write_sheet(sheet, path, count_progress())
    return [str(path)]


def format_suspects(errors: "LabelErrors") -> list[str]:
    """Return the counts, the first suspects and the most frequent confusions."""
    count, total = len(errors.suspects), errors.n_labels
    estimate = (
        f"estimated noise {format_percent(errors.noise_rate)}, about {errors.noise_rate * total:,.0f} wrong labels"
    )
    lines = [f"{count:,} of {total:,} labels are suspected; {estimate}, by {errors.model}", ""]
    if errors.suspects:
        rows: list[tuple[str, ...]] = [
            ("rank", "given", "suggested", "score", "self-confidence", "neighbours", "image")
        ]
        for suspect in errors.suspects[:MAX_ROWS]:
            measures = (suspect.score, suspect.self_confidence, suspect.neighbour_agreement)
            names = (suspect.given_label, suspect.suggested_label)
            rows.append((str(suspect.rank), *names, *(f"{value:.2f}" for value in measures), suspect.path))
        lines += [*format_table(rows, right=(0, 3, 4, 5), rules=(1,)), ""]
    if errors.confusions:
        pairs = (f"{given} → {true} {number:.0f}" for given, true, number in errors.confusions[:5])
        lines += [f"estimated confusions: {', '.join(pairs)}", ""]
    return lines


def run_propose(options: argparse.Namespace) -> int:
    """Write the proposed labels and print the thresholds."""
    from vitrail.labelling.propose import propose_labels
    from vitrail.labelling.tables import PROPOSAL_COLUMNS, write_proposals

    out = check_table(options.out, options.data, PROPOSAL_COLUMNS)
    names = ("model", "init", "precision_target", "per_class", "split")
    given = {name: getattr(options, name) for name in names}
    result = propose_labels(options.data, options.unlabelled, **given, **common_options(options))
    write_proposals(result, out)
    rows = [("class", "threshold", f"{result.split} images", "errors", "precision", "95 % bound")]
    for name, fit in result.thresholds.items():
        shown = "none" if fit.threshold is None else f"{fit.threshold:.3f}"
        numbers = (f"{fit.count:,}", f"{fit.errors:,}", format_percent(fit.precision), format_percent(fit.bound))
        rows.append((name or "all", shown, *numbers))
    share = f"{len(result.proposals):,} of {result.n_images:,} images get a label, by {result.model}"
    print_notes(options, result.notes, result.unreadable)
    lines = [*format_table(rows, right=(1, 2, 3, 4, 5), rules=(1,)), "", share, str(out)]
    return print_result(options, result.as_dict() | {"files": [str(out)]}, lines)


def run_next(options: argparse.Namespace) -> int:
    """Write the images to label next, as a table and a page."""
    from vitrail.labelling.next_images import choose_images_to_label
    from vitrail.labelling.sheet import build_next_sheet
    from vitrail.labelling.tables import NEXT_COLUMNS, write_next

    out = check_table(options.out, options.data, NEXT_COLUMNS)
    given = {"budget": options.budget, "method": options.method}
    result = choose_images_to_label(options.data, options.unlabelled, options.model, **given, **common_options(options))
    write_next(result, out)
    files = [str(out), *write_page(build_next_sheet(result, f"{out.stem}-decisions.csv"), out, len(result.images))]
    rows: list[tuple[str, ...]] = [("rank", "suggested", "confidence", "margin", "distance", "image")]
    for image in result.images[:MAX_ROWS]:
        measures = (image.confidence, image.margin, image.distance)
        rows.append((str(image.rank), image.suggested_label, *(f"{value:.2f}" for value in measures), image.path))
    title = f"{len(result.images):,} of {result.n_unlabelled:,} unlabelled images, {result.method}, by {result.model}"
    print_notes(options, result.notes, result.unreadable)
    lines = [title, "", *format_table(rows, right=(0, 2, 3, 4), rules=(1,)), "", *files]
    return print_result(options, result.as_dict() | {"files": files}, lines)


def run_apply(options: argparse.Namespace) -> int:
    """Write the corrected labels."""
    from vitrail.labelling.decisions import apply_labels

    applied = apply_labels(
        options.data,
        options.decisions,
        options.out,
        form=options.format,
        undecided=options.undecided,
        new_classes=options.new_classes,
        root=options.root,
        label_from=options.label_from,
        progress=count_progress(),
    )
    names = ("corrected", "confirmed", "removed", "added", "undecided")
    counts = ", ".join(f"{getattr(applied, name):,} {name}" for name in names)
    print_notes(options, applied.notes)
    return print_result(options, applied.as_dict(), [f"{applied.images:,} images: {counts}", *applied.files])


def run_convert(options: argparse.Namespace) -> int:
    """Convert labels."""
    from vitrail.labelling.convert import convert_labels

    given = {"root": options.root, "label_from": options.label_from}
    table, files = convert_labels(options.source, options.out, options.format, getattr(options, "from"), **given)
    record = {"images": len(table.rows), "classes": list(table.classes), "files": files, "notes": list(table.notes)}
    print_notes(options, table.notes)
    return print_result(options, record, [*describe_table(table), *files])


def describe_table(table: "LabelTable") -> list[str]:
    """Return the counts of a table."""
    unlabelled = sum(not row.labels for row in table.rows)
    more = f", {unlabelled:,} without a label" if unlabelled else ""
    return [f"{len(table.rows):,} images, {len(table.classes):,} classes{more}"]


def print_notes(
    options: argparse.Namespace, notes: tuple[str, ...], unreadable: Mapping[str, str] | None = None
) -> None:
    """Print notes and unreadable images to standard error; JSON has them already."""
    clear_progress()
    if options.json:
        return
    for note in notes:
        print(f"note: {spell_options(note, options.flags)}", file=sys.stderr)
    for path, reason in list((unreadable or {}).items())[:MAX_ROWS]:
        print(f"left out: {path}: {reason}", file=sys.stderr)
    if unreadable and len(unreadable) > MAX_ROWS:
        print(f"and {len(unreadable) - MAX_ROWS:,} more unreadable images", file=sys.stderr)
