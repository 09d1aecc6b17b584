"""Write the report page of a run, or compare several runs.

One RUN, a directory of `vitrail train` or `pretrain`: the page RUN/report.html shows metrics with intervals, curves, classes
and the most confident mistakes; for pretraining its signals and reconstructions. An unfinished run has a page too.

Several runs: a table of their metrics, the differences between their recipes, and paired tests on the same images; for
pretraining runs their signals. The page is written to --out.
"""

import argparse
from pathlib import Path

from vitrail.cli.options import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrail report`."""
    parser.epilog = (
        "examples:\n"
        "  vitrail report runs/clothing\n"
        "  vitrail report runs/a runs/b runs/c --out abc.html\n"
        "  vitrail report runs/* --json\n"
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory of vitrail train or pretrain")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="output page [RUN/report.html; for several runs comparison.html]"
    )
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON")


def run(options: argparse.Namespace) -> int:
    """Write the page and print its headline and path."""
    return report_single(options) if len(options.runs) == 1 else report_comparison(options)


def report_single(options: argparse.Namespace) -> int:
    """Write the page of one run."""
    from vitrail.reports.document import write_html
    from vitrail.reports.html import clean_text
    from vitrail.reports.page import render_run_page
    from vitrail.reports.run import read_run
    from vitrail.reports.summary import format_headline

    run = read_run(options.runs[0])
    path = options.out or run.directory / "report.html"
    write_html(render_run_page(run), path)
    headline = clean_text(format_headline(run)).replace("\u00a0", " ")
    if options.json:
        splits = [run.split or ""] if run.is_pretraining and run.is_finished else list(run.evaluations)
        record = {"page": str(path), "headline": headline, "finished": run.is_finished, "split": run.split}
        record |= {"measures": {split: run.split_metrics(split) for split in splits}, "problems": run.problems}
        print_json(record | ({"collapse": run.collapse} if run.is_pretraining else {}))
        return 0
    print(headline)
    for problem in run.problems:
        print(f"  note: {clean_text(problem)}")
    print(path)
    return 0


def report_comparison(options: argparse.Namespace) -> int:
    """Write the page of several runs and print their table."""
    from vitrail.reports.compare import compare_runs
    from vitrail.reports.compare_page import format_run_comparison, render_comparison_page
    from vitrail.reports.document import write_html

    comparison = compare_runs(options.runs)
    path = options.out or Path("comparison.html")
    write_html(render_comparison_page(comparison), path)
    if options.json:
        print_json({"page": str(path)} | comparison.to_dict())
        return 0
    print(format_run_comparison(comparison))
    print(f"\n{path}")
    return 0
