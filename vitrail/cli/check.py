"""Find defects in a dataset before training.

Every image is decoded completely, on all cores, and compared with all others. Results are cached by path, size and time, so
that a second run is fast. The exit code is 1 if there are errors: unusable images, classes that are empty or differ between
splits, one image with different labels, the same image in the training and the test split.
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.options import parse_count, print_json
from vitrail.cli.text.check import format_audit
from vitrail.cli.text.progress import clear_progress, count_progress

if TYPE_CHECKING:
    from vitrail.data.audit import Audit


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrail check`."""
    parser.epilog = (
        "examples:\n"
        "  vitrail check photos\n"
        "  vitrail check photos --quarantine bad.txt    then: vitrail train photos --quarantine bad.txt\n"
        "  vitrail check labels.csv --json\n"
        "  vitrail check photos --near none             only byte-identical copies, no near-duplicates\n"
    )
    parser.add_argument("data", metavar="DATA", help="folder, manifest, Parquet file, tar shards, or name (digits)")
    parser.add_argument("--json", action="store_true", help="print all findings as JSON")
    parser.add_argument(
        "--quarantine", type=Path, metavar="FILE", help="list of the images to leave out: path, tab, reason"
    )
    parser.add_argument("--examples", type=parse_count, default=3, metavar="N", help="paths shown per finding [3]")
    parser.add_argument("--workers", type=parse_count, metavar="N", help="worker processes [one per core]")
    parser.add_argument("--no-cache", action="store_true", help="read every image again and store no results")
    parser.add_argument(
        "--near",
        type=parse_bits,
        default=12,
        metavar="BITS",
        help="bits of 128 that may differ between near-duplicates [12]; none compares bytes only",
    )
    parser.add_argument("--tiny", type=parse_count, default=8, metavar="N", help="smallest accepted side in pixels [8]")
    parser.add_argument(
        "--imbalance", type=parse_ratio, default=10.0, metavar="X", help="ratio of class sizes that is reported [10]"
    )


def run(options: argparse.Namespace) -> int:
    """Audit the dataset and print the findings."""
    from vitrail.data.audit import audit_dataset
    from vitrail.data.sources import load_dataset

    show = count_progress()
    try:
        audit = audit_dataset(
            load_dataset(options.data, progress=show),
            cache=not options.no_cache,
            workers=options.workers,
            progress=show,
            max_hash_distance=options.near,
            min_side=options.tiny,
            max_imbalance=options.imbalance,
        )
    finally:
        clear_progress()
    n_quarantined = write_quarantine(audit, options.quarantine) if options.quarantine else None
    if options.json:
        print_json(audit.to_dict())
    else:
        print(format_audit(audit, options.examples))
        if n_quarantined is not None:
            print(f"{options.quarantine}: {n_quarantined:,} to leave out")
    return 0 if audit.is_ok else 1


def write_quarantine(audit: "Audit", file: Path) -> int:
    """Write the list of images to leave out, atomically, and return its length."""
    from vitrail.data.audit import format_quarantine

    quarantined = audit.list_quarantine()
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.write_text(format_quarantine(quarantined), encoding="utf-8")
        os.replace(partial, file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(f"{file} was not written: {error.strerror or error}") from None
    return len(quarantined)
