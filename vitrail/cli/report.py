"""Write the report page of a run, or compare several runs.

One RUN, a directory of `vitrail train` or `pretrain`: the page RUN/report.html shows metrics with intervals, curves, classes
and the most confident errors; for pretraining its signals and reconstructions. An unfinished run has a page too.

Several runs: a table of their metrics, the differences between their recipes, and paired tests on the same images; for
pretraining runs their signals. The page is written to --out.

examples:
  vitrail report runs/clothing
  vitrail report runs/a runs/b runs/c --out abc.html
  vitrail report runs/* --json
"""

import argparse
from pathlib import Path

from vitrail.cli.options import CommandParser, print_result


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `vitrail report`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory of vitrail train or pretrain")
    parser.add_option("--out FILE", "output page [RUN/report.html; for several runs comparison.html]", Path)
    parser.add_shared("--json")


def run(options: argparse.Namespace) -> int:
    """Write the page and print its headline and path."""
    return report_single(options) if len(options.runs) == 1 else report_comparison(options)


def report_single(options: argparse.Namespace) -> int:
    """Write the page of one run."""
    from vitrail.reports.html import clean_text
    from vitrail.reports.page import write_run_page
    from vitrail.reports.run import read_run
    from vitrail.reports.summary import format_headline

    run = read_run(options.runs[0])
    path = write_run_page(run, options.out)
    headline = clean_text(format_headline(run)).replace("\u00a0", " ")
    splits = [run.split or ""] if run.is_pretraining and run.is_finished else list(run.evaluations)
    record = {"page": str(path), "headline": headline, "finished": run.is_finished, "split": run.split}
    record |= {"measures": {split: run.split_metrics(split) for split in splits}, "problems": run.problems}
    record |= {"collapse": run.collapse} if run.is_pretraining else {}
    notes = [f"  note: {clean_text(problem)}" for problem in run.problems]
    return print_result(options, record, [headline, *notes, path])


def report_comparison(options: argparse.Namespace) -> int:
    """Write the page of several runs and print their table."""
    from vitrail.reports.compare import compare_runs, format_run_comparison, render_comparison_page
    from vitrail.reports.document import write_html

    comparison = compare_runs(options.runs)
    path = options.out or Path("comparison.html")
    write_html(render_comparison_page(comparison), path)
    text = format_run_comparison(comparison)
    return print_result(options, {"page": str(path)} | comparison.to_dict(), [text, "", path])
