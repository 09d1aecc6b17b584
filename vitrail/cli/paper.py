"""Run the studies of the ViT paper at any scale.

`vitrail paper list` shows the question of each study, the authors' finding and the duration. `vitrail paper run NAME --scale
laptop` runs one; after an interruption, the same command continues. The directory receives report.html and study.json: the
table with intervals, the finding beside the paper's, and the limits of the scale. Several runners may share a directory: with
--jobs on one machine, with torchrun, or as a job array of SLURM on a shared file system.

examples:
  vitrail paper list                                      all studies
  vitrail paper run positions --scale laptop --jobs 2     about an hour on two cores
  vitrail paper run positions --scale test                the same in seconds, as a test
  vitrail paper run head --scale gpu --data photos        on your own images
  vitrail paper run position-maps --scale laptop --model deit-tiny   a trained model beside those of the study
  vitrail paper show studies/positions-laptop             table and finding so far
  vitrail paper page studies/positions-laptop --out docs  docs/positions.md with its figures
  torchrun --nproc-per-node 8 -m vitrail paper run shape --scale cluster --out studies/shape
  vitrail paper run shape --scale cluster --slurm array=16,gpus=1,time=8:00:00   a job array for SLURM
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail import studies
from vitrail.cli.options import DATA_HELP, CommandParser, check_at_least, print_result
from vitrail.cli.slurm import add_slurm_options, write_job

if TYPE_CHECKING:
    from vitrail.studies.study import Study
    from vitrail.studies.sweep import Sweep

PROGRAM = (sys.executable, "-m", "vitrail")  # command that starts another runner
SCALES = ("test", "laptop", "gpu", "cluster")


def add_arguments(parser: CommandParser) -> None:
    """Add the subcommands list, run, show and page."""
    commands = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    listing = commands.add_parser("list", help="list the studies: question, section of the paper, duration")
    running = commands.add_parser("run", help="run or continue a study")
    showing = commands.add_parser("show", help="print the table and the finding of a study")
    paging = commands.add_parser("page", help="write a study as a documentation page: Markdown and SVG")
    for sub in (listing, running, showing, paging):
        sub.add_shared("--traceback", default=argparse.SUPPRESS)
        sub.add_shared("--json")
    running.add_argument("name", metavar="NAME", help=f"one of {', '.join(studies.STUDY_NAMES)}")
    running.add_option("--scale", "size of the study", choices=SCALES, required=True)
    running.add_option("--data DATA", f"your own images: {DATA_HELP} [the scale's dataset]")
    running.add_shared("--fractions A,B,C", note="0.8,0.1,0.1")
    running.add_shared("--init FILE", note="study transfer only: pretrained by the study")
    for sub in (running, showing):
        model = (
            "trained model to show beside those of the study: attention-distance and position-maps only (repeatable)"
        )
        sub.add_option("--model FILE", model, action="append", default=[])
    running.add_option("--out STUDY", "directory of the study [studies/NAME-SCALE]")
    running.add_option("--seeds N", "seeds per final cell, may be raised later [the scale's]", int)
    running.add_shared("--set NAME=VALUE")
    running.add_option("--jobs N", "processes on this machine [1]", int, default=1)
    running.add_shared("--device auto|cpu|cuda|mps", "--workers N")
    running.add_shared("--save-seconds N", note="120", default=120.0)
    running.add_shared("--quiet")
    add_slurm_options(running, array=True)
    running.add_option("--worker", argparse.SUPPRESS)  # a process of --jobs
    for sub in (showing, paging):
        sub.add_argument("study", metavar="STUDY", help="directory of a study")
    paging.add_option("--out DIR", "directory of the page and its figures", required=True)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand."""
    return {"list": list_studies, "run": run_study, "show": show_study, "page": write_docs_page}[options.what](options)


def list_studies(options: argparse.Namespace) -> int:
    """Print all studies."""
    from vitrail.cli.text.study import format_study

    loaded = [studies.load_study(name) for name in studies.STUDY_NAMES]
    return print_result(options, [study_as_dict(study) for study in loaded], ["\n\n".join(map(format_study, loaded))])


def study_as_dict(study: "Study") -> dict[str, Any]:
    """Return a study as values for JSON."""
    record = {"name": study.name, "question": study.question, "where": study.reference, "found": study.paper_finding}
    scales = {
        name: {"data": scale.data, "minutes": scale.minutes, "on": scale.hardware}
        | {"seeds": scale.seeds, "measured": scale.is_measured}
        for name, scale in study.scales.items()
    }
    return record | {"scales": scales}


def show_study(options: argparse.Namespace) -> int:
    """Print the results of a study so far and write its report again."""
    from vitrail.studies.given import measure_given_model
    from vitrail.studies.sweep import open_sweep

    sweep = open_sweep(options.study)
    for model in options.model:
        measure_given_model(sweep.study, sweep.setup.data, sweep.directory, model)
    return report_study(open_sweep(options.study) if options.model else sweep, options)


def write_docs_page(options: argparse.Namespace) -> int:
    """Write a study as a documentation page."""
    from vitrail.studies.report import write_page

    path = write_page(options.study, options.out)
    return print_result(options, {"page": str(path)}, [path])


def run_study(options: argparse.Namespace) -> int:
    """Run the missing cells of a study and print the results."""
    if options.submit and not options.slurm:
        raise ValueError("--submit needs --slurm: give it too, for example --slurm array=8,gpus=1,time=4:00:00")
    study = studies.load_study(options.name)
    check_at_least(1, options.jobs, "--jobs")
    if options.fractions and not options.data:
        raise ValueError("--fractions needs DATA: give --data too")
    out = options.out or os.path.join("studies", f"{options.name}-{options.scale}")
    if options.slurm:
        study.get_scale(options.scale)  # raises where the study has none of this name
        if options.jobs > 1:
            raise ValueError("srun starts the processes: give array= or tasks= of --slurm instead of --jobs")
        return write_job(options, out, group=False)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and options.jobs > 1:
        raise ValueError("torchrun starts the processes: leave out --jobs")
    quiet = options.quiet or os.environ.get("RANK", "0") != "0"

    from vitrail.cli.text.study import SweepDisplay, format_plan
    from vitrail.studies.given import check_given, measure_given_model
    from vitrail.studies.runner import Runner, leave_process_group, print_record, run_jobs
    from vitrail.studies.sweep import begin_sweep, open_sweep
    from vitrail.training.distributed import pick_device
    from vitrail.training.recipe import Data, Machine
    from vitrail.training.trainer import Stopped

    for model in options.model:
        check_given(study, model)
    leave_process_group()
    pick_device(options.device)  # raises before anything is written
    display = SweepDisplay(quiet or options.worker, max(options.jobs, world))
    sweep = begin_sweep(
        out,
        study,
        options.scale,
        Data(options.data, fractions=options.fractions) if options.data else None,
        options.seeds,
        options.set,
        display.progress,
        options.init,
    )
    machine = Machine(device=options.device, workers=options.workers, save_seconds=options.save_seconds)
    remedy = f"the same command continues; vitrail paper show {shorten_path(sweep.directory)} shows the results so far"
    try:
        if options.worker:
            Runner(sweep, machine, print_record).run()
            return 0
        for line in format_plan(sweep, sweep.read_state()):
            display.print_line(line)
        codes = []
        if options.jobs > 1:
            codes = run_jobs((*PROGRAM, *options.arguments, "--worker"), options.jobs, display.on_record)
        else:
            Runner(sweep, machine, display.on_record).run()
    except Stopped as stopped:
        display.print_line(f"stopped; {remedy}")
        return stopped.exit_code
    except (KeyboardInterrupt, SystemExit):
        display.print_line(f"stopped; {remedy}")
        raise
    for model in options.model:
        measure_given_model(study, sweep.setup.data, sweep.directory, model)
    sweep = open_sweep(sweep.directory)
    display.clear()
    failed = [code for code in codes if code]
    failure = f"{len(failed)} of {options.jobs} runners failed, the first with exit code {failed[0]}" if failed else ""
    return report_study(sweep, options, failure, quiet)


def report_study(sweep: "Sweep", options: argparse.Namespace, failure: str = "", quiet: bool = False) -> int:
    """Write the report and print it. The exit code is 1 if `run` left cells without a result."""
    from vitrail.cli.text.study import format_answer, format_missing
    from vitrail.studies.report import write_report

    state = sweep.read_state()
    results, failed = list(state.results.values()), list(state.failed.values())
    answer = write_report(sweep.study, sweep.setup, results, failed, sweep.directory, sweep.settings)
    problems = [*format_missing(state), *([failure] if failure else [])]
    directory = shorten_path(sweep.directory)
    if options.json:
        print((sweep.directory / "study.json").read_text(encoding="utf-8").rstrip())
    elif not quiet:
        paths = [f"report        {directory / 'report.html'}", f"numbers       {directory / 'study.json'}"]
        print("\n".join([*format_answer(sweep.study, answer), *problems, *paths]))
    if quiet and problems:
        print("\n".join(problems), file=sys.stderr)
    return 1 if options.what == "run" and state.missing else 0


def shorten_path(path: Path) -> Path:
    """Return the relative path if it is shorter."""
    relative = Path(os.path.relpath(path))
    return relative if len(str(relative)) < len(str(path)) else path
