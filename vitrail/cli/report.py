"""A run's page anew, or several runs side by side.

Of one RUN, a directory that vitrail train or pretrain wrote, the page RUN/report.html is written: numbers with their
intervals, curves, classes, the surest mistakes; of pretraining its signals and reconstructions. A run that has not finished
has a page too.

Several are compared: a table of their scores, where their recipes differ, and whether the difference between two is more
than chance, judged on the same pictures; of pretraining runs, their signals. The page of it goes to --out.
"""

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One run, or several."""
    parser.epilog = (
        "examples:\n"
        "  vitrail report runs/clothing\n"
        "  vitrail report runs/a runs/b runs/c --out abc.html\n"
        "  vitrail report runs/* --json\n"
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directories that vitrail train or pretrain wrote")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page (default RUN/report.html; of several comparison.html)"
    )
    parser.add_argument("--json", action="store_true", help="the numbers for machines, on standard output")


def run(options: argparse.Namespace) -> int:
    """Writes the page; says where it is, and what is in it."""
    return one(options) if len(options.runs) == 1 else several(options)


def one(options: argparse.Namespace) -> int:
    """The page of one run."""
    from vitrail.report.headline import headline
    from vitrail.report.markup import plain
    from vitrail.report.page import page, write_page
    from vitrail.report.run import read_run

    found = read_run(options.runs[0])
    path = options.out or found.directory / "report.html"
    write_page(page(found), path)
    said = plain(headline(found)).replace("\u00a0", " ")
    if options.json:
        told = {"page": str(path), "headline": said, "finished": found.finished, "split": found.split}
        splits = [found.split or ""] if found.pretraining and found.finished else list(found.evaluations)
        told |= {"measures": {split: found.measured(split) for split in splits}, "problems": found.problems}
        told |= {"collapse": found.collapse} if found.pretraining else {}
        print(json.dumps(told, indent=2, ensure_ascii=False))
        return 0
    print(said)
    for problem in found.problems:
        print(f"  note: {plain(problem)}")
    print(f"{path}")
    return 0


def several(options: argparse.Namespace) -> int:
    """The page of several runs, and a table of them."""
    from vitrail.report.compare import compare_runs
    from vitrail.report.page import write_page
    from vitrail.report.side_by_side import page, text

    comparison = compare_runs(options.runs)
    path = options.out or Path("comparison.html")
    write_page(page(comparison), path)
    if options.json:
        print(json.dumps({"page": str(path)} | comparison.as_dict(), indent=2, ensure_ascii=False))
        return 0
    print(text(comparison))
    print(f"\n{path}")
    return 0
