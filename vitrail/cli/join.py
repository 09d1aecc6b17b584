"""Join the parts that the processes of `vitrail predict` or `vitrail embed` have written to one file.

FILE is what --out was. Processes that share a directory join their parts themselves, the last one to end. Hosts without a
shared disk leave FILE.part-1-of-8 and FILE.part-1-of-8.json on each; copy both of every part to one place and join them
there. The bytes are those that one process would have written. A missing, incomplete or shortened part, or one of another
run, is an error, and nothing is written. Masks of --out masks/ are copied along with masks.csv.part-1-of-8; FILE is then
masks/.

examples:
  vitrail join predictions.csv
  vitrail join predictions.parquet host1 host2 host3
  vitrail join masks/ --keep
"""

import argparse
from pathlib import Path
from typing import Any

from vitrail.cli.options import CommandParser, print_result


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `vitrail join`."""
    parser.add_argument("out", metavar="FILE", help="output file of the processes, as --out was given")
    parser.add_argument("places", metavar="DIR", nargs="*", help="directories of the parts [that of FILE]")
    parser.add_option("--keep", "keep the parts")
    parser.add_option("--force", "replace FILE")
    parser.add_shared("--json")


def run(options: argparse.Namespace) -> int:
    """Join the parts and print a summary."""
    from vitrail.deploy.predict.join import join_parts
    from vitrail.deploy.predict.masks import PANOPTIC_TABLE, TABLE, is_directory

    out = Path(options.out)
    if is_directory(options.out):
        out /= PANOPTIC_TABLE if any(out.glob(f"{PANOPTIC_TABLE}.part-*")) else TABLE
    places = [Path(place) for place in options.places] or [out.parent]
    summary = join_parts(out, places, keep=bool(options.keep), force=bool(options.force))
    return print_result(options, summary, format_lines(summary))


def format_lines(summary: dict[str, Any]) -> list[str]:
    """Return the summary as lines."""
    lines = [f"{summary['rows']:,} rows of {summary['parts']:,} parts"]
    if summary["errors"]:
        lines.append(f"{summary['errors']:,} are unreadable: see the error in their rows")
    if len(summary["precisions"]) > 1:
        lines.append(f"the parts were computed in {' and '.join(summary['precisions'])}: give --precision to all")
    return [*lines, summary["out"]]
