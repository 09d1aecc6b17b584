"""What is wrong with a dataset, found before it is trained on.

Every picture is read to its end, on all cores, and compared with all others. What was seen is remembered by path, size and
time, so a second look is quick. Exit code 1 if something would hurt: pictures that cannot be used, classes that are empty or
differ between splits, one picture with different labels, the same picture to train on and to test on.
"""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.findings import text
from vitrail.cli.progress import cleared, counted

if TYPE_CHECKING:
    from vitrail.data.audit import Audit


def bits(text: str) -> int | None:
    """How many bits may differ, or none."""
    if text in ("none", "off"):
        return None
    if not text.isdecimal() or int(text) > 32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bits: use 0 to 32, or none")
    return int(text)


def whole(text: str) -> int:
    """A number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def ratio(text: str) -> float:
    """A number above 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a ratio: use a number above 1")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to look at, and how closely."""
    parser.epilog = (
        "examples:\n"
        "  vitrail check photos\n"
        "  vitrail check photos --quarantine bad.txt    then: vitrail train photos --quarantine bad.txt\n"
        "  vitrail check labels.csv --json\n"
        "  vitrail check photos --near none             copies byte for byte, and no look-alikes\n"
    )
    parser.add_argument("data", metavar="DATA", help="a folder, a manifest, Parquet, tar shards, or a name: digits")
    parser.add_argument("--json", action="store_true", help="everything for machines, on standard output")
    parser.add_argument(
        "--quarantine", type=Path, metavar="FILE", help="write the pictures to leave out: a path, a tab, the reason"
    )
    parser.add_argument("--examples", type=whole, default=3, metavar="N", help="paths shown of a kind (default 3)")
    parser.add_argument("--workers", type=whole, metavar="N", help="processes (default: one for each core)")
    parser.add_argument("--no-cache", action="store_true", help="remember nothing, and look at every picture again")
    parser.add_argument(
        "--near",
        type=bits,
        default=12,
        metavar="BITS",
        help="of 128 that may differ between pictures that look the same (default 12); none compares bytes alone",
    )
    parser.add_argument("--tiny", type=whole, default=8, metavar="N", help="a side below N pixels is tiny (default 8)")
    parser.add_argument(
        "--imbalance",
        type=ratio,
        default=10.0,
        metavar="X",
        help="largest class to smallest that is named (default 10)",
    )


def run(options: argparse.Namespace) -> int:
    """Looks, and prints what was found."""
    from vitrail.data.audit import audit
    from vitrail.data.sources import read

    show = counted()
    try:
        found = audit(
            read(options.data, progress=show),
            cache=not options.no_cache,
            workers=options.workers,
            progress=show,
            near=options.near,
            tiny=options.tiny,
            imbalance=options.imbalance,
        )
    finally:
        cleared()
    held = write_quarantine(found, options.quarantine) if options.quarantine else None
    if options.json:
        print(json.dumps(found.as_dict(), indent=2, ensure_ascii=False))
    else:
        print(text(found, options.examples))
        if held is not None:
            print(f"{options.quarantine}: {held:,} to leave out")
    return 0 if found.ok else 1


def write_quarantine(found: "Audit", file: Path) -> int:
    """The list of what to leave out, whole or not at all; how many there are."""
    from vitrail.data.audit.quarantine import written

    held = found.quarantine()
    partial = file.with_name(f".{file.name}.partial")
    try:
        partial.write_text(written(held), encoding="utf-8")
        os.replace(partial, file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(f"{file} was not written: {error.strerror or error}") from None
    return len(held)
