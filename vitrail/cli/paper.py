"""The paper's studies as programs, at any scale.

`vitrail paper list` says what each asks, what the authors found and how long it takes. `vitrail paper run NAME --scale laptop`
runs one: kill it at any time, and the same command goes on. Its directory ends with report.html and study.json: the table
with intervals, our finding beside the paper's, and what the scale cannot show. Several runners may share a directory: with
--jobs on one machine, or with torchrun or SLURM array tasks on a file system that all of them see.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail import studies
from vitrail.cli.train import fractions

if TYPE_CHECKING:
    from vitrail.studies.study import Study
    from vitrail.studies.sweep import State, Sweep

PROGRAM = (sys.executable, "-m", "vitrail")  # how a runner of the same kind is started
SCALES = ("test", "laptop", "gpu", "cluster")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """list, run, show or page, each with its own options."""
    parser.epilog = (
        "examples:\n"
        "  vitrail paper list                                      every study\n"
        "  vitrail paper run positions --scale laptop --jobs 2     an hour or so on two cores\n"
        "  vitrail paper run positions --scale test                the same in seconds, to see it work\n"
        "  vitrail paper run head --scale gpu --data photos        on your own pictures\n"
        "  vitrail paper show studies/positions-laptop             its table and finding, as far as it is\n"
        "  vitrail paper page studies/positions-laptop --out docs  docs/positions.md, with its pictures\n"
        "  torchrun --nproc-per-node 8 -m vitrail paper run shape --scale cluster --out studies/shape\n"
    )
    whats = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    listing = whats.add_parser("list", help="every study: its question, where it is in the paper, what it takes")
    running = whats.add_parser("run", help="run a study, or go on with it")
    showing = whats.add_parser("show", help="the table and the finding of a study's directory")
    paging = whats.add_parser("page", help="a study's directory as a page of documentation: Markdown and SVG")
    for sub in (listing, running, showing, paging):
        sub.add_argument(
            "--traceback", action="store_true", default=argparse.SUPPRESS, help="show where an error comes from"
        )
        sub.add_argument("--json", action="store_true", help="the same for machines")
    running.add_argument("name", metavar="NAME", help=f"one of {', '.join(studies.NAMES)}")
    running.add_argument("--scale", choices=SCALES, required=True, help="how large")
    running.add_argument("--data", metavar="DATA", help="your own pictures, as `vitrail train` takes them")
    running.add_argument(
        "--split",
        type=fractions,
        metavar="A,B,C",
        help="train, validation, test, where DATA has no splits (0.8,0.1,0.1)",
    )
    running.add_argument("--init", metavar="FILE", help="the model that `transfer` begins with, instead of its own")
    running.add_argument("--out", metavar="STUDY", help="the study's directory; studies/NAME-SCALE unless given")
    running.add_argument(
        "--seeds", type=int, metavar="N", help="of every final cell; the scale's unless given, and may be raised later"
    )
    running.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="change every cell's recipe: steps=50"
    )
    running.add_argument("--jobs", type=int, default=1, metavar="N", help="processes on this machine (1)")
    running.add_argument("--device", default="auto", metavar="auto|cpu|cuda|mps", help="auto unless given")
    running.add_argument("--workers", type=int, metavar="N", help="processes that prepare pictures, for each job")
    running.add_argument(
        "--save-seconds", type=float, default=120.0, metavar="N", help="a checkpoint at least this often (120)"
    )
    running.add_argument("--quiet", action="store_true", help="say nothing but errors")
    running.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # one of --jobs
    for sub in (showing, paging):
        sub.add_argument("study", metavar="STUDY", help="a study's directory")
    paging.add_argument("--out", required=True, metavar="DIR", help="where the page goes, and its pictures beside it")


def run(options: argparse.Namespace) -> int:
    """Lists, runs, shows, or makes a page."""
    return {"list": listed, "run": ran, "show": shown, "page": paged}[options.what](options)


def listed(options: argparse.Namespace) -> int:
    """Every study."""
    from vitrail.cli.answered import described

    found = [studies.study_named(name) for name in studies.NAMES]
    if options.json:
        print(json.dumps([as_table(each) for each in found], indent=2, ensure_ascii=False))
    else:
        print("\n\n".join(described(each) for each in found))
    return 0


def as_table(each: "Study") -> dict[str, Any]:
    """A study for machines."""
    scales = {
        name: {
            "data": scale.data,
            "minutes": scale.minutes,
            "on": scale.on,
            "seeds": scale.seeds,
            "measured": scale.measured,
        }
        for name, scale in each.scales.items()
    }
    return {
        "name": each.name,
        "question": each.question,
        "where": each.where,
        "found": each.found,
        "scales": scales,
    }


def shown(options: argparse.Namespace) -> int:
    """What a study's directory says by now, with its report written again."""
    from vitrail.studies.sweep import open_sweep

    sweep = open_sweep(options.study)
    return concluded(sweep, sweep.state(), options, "")


def paged(options: argparse.Namespace) -> int:
    """A page of documentation, of what a study's directory says."""
    from vitrail.studies.page import write_page

    path = write_page(options.study, options.out)
    print(json.dumps({"page": str(path)}) if options.json else path)
    return 0


def ran(options: argparse.Namespace) -> int:
    """Runs what is missing, and says what came of it."""
    asked = studies.study_named(options.name)
    if options.jobs < 1:
        raise ValueError(f"--jobs {options.jobs}: use 1 or more")
    if options.split and not options.data:
        raise ValueError("--split is about DATA: give --data too")
    together = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if together and options.jobs > 1:
        raise ValueError("torchrun starts the processes: leave out --jobs")
    quiet = options.quiet or os.environ.get("RANK", "0") != "0"

    from vitrail.cli.answered import announced
    from vitrail.cli.sweeping import Sweeping
    from vitrail.engine.distributed import pick_device
    from vitrail.engine.loop import Stopped
    from vitrail.recipe import Data, Machine
    from vitrail.studies.jobs import by_itself, run_jobs, tell
    from vitrail.studies.runner import Runner
    from vitrail.studies.sweep import begin_sweep

    runners = max(options.jobs, int(os.environ.get("WORLD_SIZE", "1")))
    by_itself()
    pick_device(options.device)  # refuses one that is not there before anything is written
    live = Sweeping(quiet or options.worker, runners)
    sweep = begin_sweep(
        options.out or Path("studies") / f"{options.name}-{options.scale}",
        asked,
        options.scale,
        Data(options.data, fractions=options.split) if options.data else None,
        options.seeds,
        options.set,
        live.progress,
        options.init,
    )
    machine = Machine(device=options.device, workers=options.workers, save_seconds=options.save_seconds)
    again = f"the same command goes on; vitrail paper show {shortest(sweep.directory)} shows what is there"
    try:
        if options.worker:
            Runner(sweep, machine, tell).run()
            return 0
        for line in announced(sweep, sweep.state()):
            live.say(line)
        if options.jobs > 1:
            codes = run_jobs((*PROGRAM, *options.arguments, "--worker"), options.jobs, live.hear)
            died = [code for code in codes if code]
        else:
            Runner(sweep, machine, live.hear).run()
            died = []
    except Stopped as stopped:
        live.say(f"stopped; {again}")
        return 128 + stopped.number
    except (KeyboardInterrupt, SystemExit):
        live.say(f"stopped; {again}")
        raise
    live.clear()
    lost = f"{len(died)} of {options.jobs} runners died, the first with exit code {died[0]}" if died else ""
    return concluded(sweep, sweep.state(), options, lost, quiet)


def concluded(sweep: "Sweep", state: "State", options: argparse.Namespace, lost: str, quiet: bool = False) -> int:
    """Writes the report and says what it says. Exit code 1 where something is missing that was to be run."""
    from vitrail.cli.answered import answered, left_over
    from vitrail.studies.report import write

    results, failed = list(state.results.values()), list(state.failed.values())
    answer = write(sweep.study, sweep.setup, results, failed, sweep.directory, sweep.settings)
    short = [*left_over(state), *([lost] if lost else [])]
    place = shortest(sweep.directory)
    if options.json:
        print((sweep.directory / "study.json").read_text(encoding="utf-8").rstrip())
    elif not quiet:
        paths = [f"report        {place / 'report.html'}", f"numbers       {place / 'study.json'}"]
        print("\n".join([*answered(sweep.study, answer), *short, *paths]))
    if quiet and short:
        print("\n".join(short), file=sys.stderr)
    return 1 if options.what == "run" and state.missing else 0


def shortest(path: Path) -> Path:
    """A path from here, where that is shorter."""
    near = Path(os.path.relpath(path))
    return near if len(str(near)) < len(str(path)) else path
