"""Find defects in a dataset before training.

Every image is decoded completely, on all cores, and compared with all others. Results are cached by file, size and time, so
that a second run is fast. The exit code is 1 if there are errors: unusable images, classes that are empty or differ between
splits, one image with different labels, the same image in the training and the test split. Masks are read too: sizes,
values without a class, files without their pair, and the pixels of each class. Columns of numbers (--targets) are checked for
missing and infinite values; their range, mean and standard deviation are shown. A column of captions is checked for empty,
repeated and long ones. Videos are read completely, and decoded at their beginning, middle and end. Sounds are decoded
completely: silent, clipped and cut ones are listed, and copies of the same samples, whatever their format. Of remote shards the
first samples of a few are checked.

examples:
  vitrail check photos
  vitrail check photos --quarantine bad.txt    then: vitrail train photos --quarantine bad.txt
  vitrail check labels.csv --json
  vitrail check houses.csv --targets price     numbers instead of classes
  vitrail check pairs.csv                      images and captions: columns image and caption
  vitrail check photos --label-from '^(.+)_'   labels in the file names: cat_001.jpg; shows ten of them
  vitrail check imagenet --names imagenet      names for the folders n01440764 …
  vitrail check classes:photos                 every folder is a class, whatever it looks like
  vitrail check scans                          images and masks in scans/images and scans/masks; pixels of each class
  vitrail check photos --near none             only byte-identical copies, no near-duplicates
  vitrail check videos --clip 8x4              videos; those shorter than a clip are reported
  vitrail check 'https://host/train-{000..015}.tar'   a sample of remote shards; --all reads everything
  vitrail check sounds                         recordings: WAV, FLAC, OGG, MP3, AIFF
"""

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.options import CommandParser, parse_count, print_result
from vitrail.cli.text.progress import count_progress
from vitrail.utils.text import format_image_count, format_table

if TYPE_CHECKING:
    from vitrail.data.audit import Audit, Finding
    from vitrail.data.clip import Clip
    from vitrail.data.dataset import Images

COLOURS = {"error": "\033[1;31m", "warning": "\033[33m", "note": "\033[36m"}
STYLES = {"bold": "\033[1m", "dim": "\033[2m"}
RESET = "\033[0m"
INDENT = " " * 10
MAX_CLASS_ROWS = 40  # of the table of pixels


def parse_bits(text: str) -> int | None:
    """Return a number of bits from 0 to 32, or None for "none"."""
    if text in ("none", "off"):
        return None
    if not text.isdecimal() or int(text) > 32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bits: use 0 to 32, or none")
    return int(text)


def parse_ratio(text: str) -> float:
    """Return a number > 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a ratio: use a number above 1")
    return value


def parse_clip_option(text: str) -> "Clip":
    """Return the clip of a text such as 16x4."""
    from vitrail.data.clip import parse_clip

    try:
        return parse_clip(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `vitrail check`."""
    parser.add_shared(
        "data DATA", "--label-from REGEX", "--names FILE", "--ignore VALUES", "--targets NAME,…", "--json"
    )
    parser.add_option("--quarantine FILE", "list to write of the images to leave out: path, tab, reason", Path)
    parser.add_option("--examples N", "paths shown per finding [3]", parse_count, default=3)
    parser.add_shared("--workers N", note="one per core", type=parse_count)
    parser.add_shared("--no-cache")
    parser.add_option("--all", "read remote shards wholly [the first samples of a few of them]")
    parser.add_shared("--cache-size SIZE")
    near = "bits of 128 that may differ between near-duplicates [12]; none compares bytes only"
    parser.add_option("--near BITS", near, parse_bits, default=12)
    parser.add_option("--tiny N", "smallest accepted side in pixels [8]", parse_count, default=8)
    parser.add_shared("--clip TxS", note="16x4; shorter videos are reported", type=parse_clip_option)
    parser.add_option("--imbalance X", "ratio of class sizes that is reported [10]", parse_ratio, default=10.0)


def run(options: argparse.Namespace) -> int:
    """Audit the dataset and print the findings."""
    from vitrail.data.audit import check, format_quarantine
    from vitrail.data.sources.file_names import preview_labels
    from vitrail.utils.files import atomic_write

    audit = check(
        options.data,
        label_from=options.label_from,
        names=options.names,
        ignore=options.ignore,
        targets=options.targets,
        near=options.near,
        tiny=options.tiny,
        imbalance=options.imbalance,
        clip=options.clip,
        whole=options.all,
        cache=not options.no_cache,
        workers=options.workers,
        progress=count_progress(),
    )
    preview = preview_labels(audit.dataset) if options.label_from is not None else []
    lines = [*format_audit(audit, options.examples, preview)]
    if options.quarantine:
        quarantined = audit.list_quarantine()
        with atomic_write(options.quarantine) as file:
            file.write(format_quarantine(quarantined).encode("utf-8"))
        lines.append(f"{options.quarantine}: {len(quarantined):,} to leave out")
    print_result(options, audit.to_dict() | ({"preview": preview} if preview else {}), lines)
    return 0 if audit.is_ok else 1


def format_audit(audit: "Audit", examples: int, preview: Sequence[str] = ()) -> list[str]:
    """Return the splits and the preview of labels, then each kind of finding with its count, examples and remedy."""
    from vitrail.data.audit import describe_kind

    width = min(120, max(60, shutil.get_terminal_size((100, 24)).columns))
    lines = [
        *format_splits(audit),
        *format_pixels(audit),
        *format_numbers(audit),
        *format_captions(audit),
        *format_videos(audit),
        *format_sounds(audit),
        *map(escape_unprintable, audit.dataset.notes),
    ]
    lines += [INDENT + escape_unprintable(line) for line in preview]
    for kind in audit.counts:  # most severe first
        findings, description = audit.select_findings([kind]), describe_kind(kind, audit.media)
        severity = findings[0].severity
        severity = colourise(severity, severity) + " " * (8 - len(severity))
        lines += ["", f"{severity}{len(findings):>7,}  {colourise('bold', kind)}: {description.title}"]
        for finding in findings[:examples]:
            lines += format_example(finding, audit.dataset.source, width)
        if len(findings) > examples > 0:
            lines.append(colourise("dim", f"{INDENT}… and {len(findings) - examples:,} more"))
        lines.append(f"{INDENT}→ {description.remedy}")
    return [*lines, "", format_verdict(audit)]


def format_splits(audit: "Audit") -> list[str]:
    """Return the splits as a table."""
    splits = audit.dataset.splits
    n_classes = len({name for split in splits.values() for name in split.classes})
    images = format_image_count(sum(map(len, splits.values()))).replace("image", audit.media)
    kinds = f"{n_classes:,} class{'es' * (n_classes != 1)}"
    kinds = f"{n_classes:,} target{'s' * (n_classes != 1)}" if audit.numbers else kinds
    heading = f"{escape_unprintable(audit.dataset.source)}: {images}, {kinds}"
    if audit.captions:
        counts = len({number for split in splits.values() for number in split.targets.tolist()})
        files = len({item for split in splits.values() for item in split.items.tolist()})
        pairs = sum(map(len, splits.values()))
        kinds = f"{format_image_count(files)}, {pairs:,} pairs, {counts:,} different captions"
        return [colourise("bold", f"{escape_unprintable(audit.dataset.source)}: {kinds}"), ""]
    if audit.numbers:
        return [colourise("bold", heading), ""]
    rows = [
        ("split", f"{audit.media}s", "classes", *(() if audit.mask_counts else ("smallest class", "largest class")))
    ]
    for name, split in splits.items():
        ends = () if name in audit.mask_counts else describe_class_range(split)
        rows.append((name, f"{len(split):,}", f"{len(split.classes):,}", *ends))
    return [colourise("bold", heading), "", *format_table(rows, right=(1, 2), rules=(1,))]


def format_pixels(audit: "Audit") -> list[str]:
    """Return a table of the share of each class in the pixels of the masks, and of the ignored pixels in all pixels."""
    if not audit.mask_counts:
        return []
    counts = audit.mask_counts.values()
    rows = [("class", *(f"{split} pixels" for split in audit.mask_counts))]
    classes = list(dict.fromkeys(name for each in counts for name in each.classes))
    for name in classes[:MAX_CLASS_ROWS]:
        rows.append((escape_unprintable(name)[:40], *(f"{100 * each.share(name):.2f} %" for each in counts)))
    if any(each.ignored for each in counts):
        totals = [max(1, int(each.pixels.sum()) + each.ignored) for each in counts]
        rows.append(("(ignored)", *(f"{100 * e.ignored / n:.2f} %" for e, n in zip(counts, totals, strict=True))))
    more = [f"… and {len(classes) - MAX_CLASS_ROWS} more classes"] if len(classes) > MAX_CLASS_ROWS else []
    return ["", *format_table(rows, right=tuple(range(1, len(rows[0]))), rules=(1,)), *more, ""]


def format_numbers(audit: "Audit") -> list[str]:
    """Return a table of the range, the mean and the standard deviation of each target in each split."""
    if not audit.numbers:
        return []
    rows: list[tuple[str, ...]] = [("target", "split", "images", "smallest", "largest", "mean", "std")]
    for name in dict.fromkeys(name for split in audit.numbers.values() for name in split):
        for split, found in audit.numbers.items():
            count = f"{len(audit.dataset.splits[split]):,}"
            if name in found:
                each = found[name]
                values = (f"{value:.6g}" for value in (each.smallest, each.largest, each.mean, each.std))
                rows.append((escape_unprintable(name)[:40], split, count, *values))
    notes = [""] if audit.dataset.notes else []
    return [*format_table(rows, right=tuple(range(2, 7)), rules=(1,)), *notes]


def format_captions(audit: "Audit") -> list[str]:
    """Return a table of the images, pairs and captions of each split, and the words of a caption."""
    if not audit.captions:
        return []
    rows: list[tuple[str, ...]] = [("split", "images", "pairs", "captions", "words, median", "longest")]
    for name, each in audit.captions.items():
        rows.append((name, *(f"{value:,}" for value in (each.images, each.pairs, each.captions)), f"{each.words:g}"))
        rows[-1] += (f"{each.longest:,}",)
    return [*format_table(rows, right=tuple(range(1, 6)), rules=(1,)), *([""] if audit.dataset.notes else [])]


def format_videos(audit: "Audit") -> list[str]:
    """Return a table of the lengths, frame rates and sizes of the videos: smallest, median and largest of each split."""
    if not audit.videos:
        return []
    rows: list[tuple[str, ...]] = [("split", "frames", "seconds", "frames/s", "width", "height")]
    for name, each in audit.videos.items():
        columns = (each.frames, each.seconds, each.rates, each.widths, each.heights)
        rows.append((name, *(" · ".join(f"{value:.4g}" for value in column) for column in columns)))
    return ["", *format_table(rows, right=(1, 2, 3, 4, 5), rules=(1,)), "smallest · median · largest", ""]


def format_sounds(audit: "Audit") -> list[str]:
    """Return a table of the lengths and sample rates of the sounds: smallest, median and largest of each split."""
    if not audit.sounds:
        return []
    rows: list[tuple[str, ...]] = [("split", "seconds", "Hz", "channels")]
    for name, each in audit.sounds.items():
        ends = (each.seconds, each.rates, each.channels)
        rows.append((name, *(" · ".join(f"{value:.6g}" for value in column) for column in ends)))
    return ["", *format_table(rows, right=(1, 2, 3), rules=(1,)), "smallest · median · largest", ""]


def describe_class_range(images: "Images") -> tuple[str, str]:
    """Return the smallest and the largest class with their counts."""
    counts = images.count_classes()
    if not len(counts):
        return "–", "–"
    if counts.min() == counts.max():
        return f"all: {counts[0]:,}", ""
    ends = (counts.argmin(), counts.argmax())
    smallest, largest = (f"{escape_unprintable(images.classes[k])[:24]}: {counts[k]:,}" for k in ends)
    return smallest, largest


def format_example(finding: "Finding", source: str, width: int) -> list[str]:
    """Return a path with its detail on the same line, or below if the line is too long."""
    root = source.rstrip("/") + "/"
    path, detail = (escape_unprintable(text.replace(root, "")) for text in (finding.path, finding.detail))
    if len(INDENT) + len(path) + 2 + len(detail) <= width:
        return [f"{INDENT}{path}  {colourise('dim', detail)}"]
    inset = INDENT + "    "
    wrapped = textwrap.wrap(detail, max(20, width - len(inset)), break_long_words=False, break_on_hyphens=False)
    return [f"{INDENT}{path}", *(inset + colourise("dim", line) for line in wrapped)]


def format_verdict(audit: "Audit") -> str:
    """Return the last line: the number of findings and the conclusion."""
    totals = {severity: sum(finding.severity == severity for finding in audit.findings) for severity in COLOURS}
    counts = [f"{count:,} {severity}{'s' * (count != 1)}" for severity, count in totals.items() if count]
    if not audit.is_ok:
        return colourise("error", f"{', '.join(counts)}: fix the errors before training.")
    found = ", ".join(counts) or "No findings"
    if audit.dataset.sampled is not None:
        return f"{found}: no errors in the sample; --all checks every {audit.media}."
    if (
        not (audit.numbers or audit.captions)
        and len({name for images in audit.dataset.splits.values() for name in images.classes}) < 2
    ):
        return f"{found}: no errors, but training with labels needs two classes or more."
    if audit.select_findings(["thin-class"]):
        return f"{found}: no errors; train with --allow-class-mismatch, or add images to the classes too small to be split."
    if not len(audit.dataset.splits.get("validation", "any")):
        return f"{found}: no errors, but training needs images of a validation split."
    return f"{found}: no errors, ready to train." if counts else "No findings: ready to train."


def escape_unprintable(value: str) -> str:
    """Return a text with its unprintable characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)


def colourise(colour: str, value: str) -> str:
    """Return the text in a colour if standard output is a terminal that shows colours."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return value
    return (COLOURS | STYLES)[colour] + value + RESET
