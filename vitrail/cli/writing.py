"""What vitrail predict and vitrail embed share: pictures in, a file of rows out."""

import argparse
import gc
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from vitrail.cli import computing
from vitrail.cli.progress import cleared, counted

PATHS = (
    "files, folders (with all below them), patterns ('*.jpg', '**/*.png', 'part-{00..09}.tar'), lists of paths (CSV, TSV, JSON "
    "lines, Parquet), tar shards, Parquet with the pictures inside"
)


def add_arguments(parser: argparse.ArgumentParser, forms: str) -> None:
    """Everything but what the rows hold."""
    parser.add_argument("model", metavar="MODEL", help="a file, a directory, a run, hf://owner/name, .onnx, .xml, .pt2")
    parser.add_argument("paths", metavar="PATHS", nargs="+", help=PATHS)
    parser.add_argument("--out", required=True, metavar="FILE", help=f"{forms}, by its ending; - for standard output")
    parser.add_argument("--format", metavar="NAME", help=f"{forms}, whatever the name's ending")
    parser.add_argument("--resume", action="store_true", help="go on with what was stopped, killed or ran out of space")
    parser.add_argument("--force", action="store_true", help="begin anew, and replace FILE when the new one is whole")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N pictures")
    parser.add_argument("--json", action="store_true", help="a summary for machines on standard output")
    computing.add_arguments(parser)


def run(options: argparse.Namespace, gives: Any, top: int) -> int:
    """Writes the rows, and says what came of it."""
    gc.disable()  # imports make a great many objects that all stay: looking for some that do not takes a tenth of the time
    from vitrail.deploy.inputs import gathered
    from vitrail.deploy.predicting import ready
    from vitrail.deploy.resuming import check_free
    from vitrail.deploy.rows import form_of
    from vitrail.deploy.writing import Interrupted, share, write

    gc.enable()
    gc.freeze()
    form = form_of(options.out, options.format, gives, top)
    if options.out == "-" and (options.json or options.resume):
        raise ValueError(f"--{'json' if options.json else 'resume'} needs --out FILE")
    if options.resume and options.force:
        raise ValueError("--resume goes on and --force begins anew: give one of them")
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit {options.limit}: at least 1 picture")
    how = computing.chosen(options)
    place = share()
    if options.out != "-":  # before anything is computed that would have no place
        check_free(Path(options.out), place.rank, place.world, resume=options.resume, force=options.force)
    show = counted() if not place.rank else None
    try:
        inputs = gathered(options.paths, show)
        total = len(inputs) if options.limit is None else min(options.limit, len(inputs))
        model = ready(options.model, gives, how, place.span(total)[1] - place.span(total)[0], noted)
        labels = model.deployed.contract.labels
        if labels is not None and top > len(labels):
            raise ValueError(f"--top {top}: {model.deployed.name} has {len(labels):,} classes")
        summary = write(
            model,
            inputs,
            options.out,
            form,
            how,
            top=top,
            limit=options.limit,
            options=same(options, top),
            resume=options.resume,
            force=options.force,
            progress=show,
        )
    except Interrupted as stopped:
        cleared()
        print(f"vitrail {options.command}: {stopped.rows:,} of {stopped.count:,} pictures are done", file=sys.stderr)
        if options.out != "-":
            print(f"go on with: {again(options, place.world)}", file=sys.stderr)
        return 130
    finally:
        cleared()
    if options.json:
        print(json.dumps(summary.as_dict(), indent=2, ensure_ascii=False))
        return 0
    for line in told(options, summary):
        print(line, file=sys.stderr if options.out == "-" else sys.stdout)
    return 0


def noted(text: str) -> None:
    """What takes long, for somebody who is looking."""
    cleared()
    print(text, file=sys.stderr, flush=True)


def same(options: argparse.Namespace, top: int) -> dict[str, Any]:
    """What makes the rows what they are, by the options' names."""
    told = {
        "top": top,
        "merge": options.merge,
        "precision": options.precision,
        "size": options.size,
        "take": options.take,
    }
    return told | {"assume": sorted(options.assume), "limit": options.limit, "format": options.format}


def again(options: argparse.Namespace, world: int) -> str:
    """The command that goes on, with as many processes."""
    arguments = [each for each in options.arguments if each not in ("--force", "--resume")]
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world))  # others may be on other machines
    machines = ["--nnodes", str(world // here)] if world > here else []
    before = ["torchrun", *machines, "--nproc-per-node", str(here), "-m"] if world > 1 else []
    return shlex.join([*before, "vitrail", *arguments, "--resume"])


def told(options: argparse.Namespace, summary: Any) -> list[str]:
    """What was done, in a few lines."""
    count, made = summary.pictures, summary.pictures - summary.resumed
    who = f"process {summary.rank + 1} of {summary.processes}: " if summary.processes > 1 else ""
    lines = [*summary.notes]
    if summary.errors:
        lines.append(f"{who}{summary.errors:,} of {count:,} pictures could not be read: their rows say why")
    before = f" ({summary.resumed:,} were there already)" if summary.resumed else ""
    speed = f", {summary.pictures_per_second:,.1f} pictures/s" if made else ""
    lines.append(
        f"{who}{count:,} pictures{before} in {summary.seconds:,.1f} s{speed}; {summary.runtime}, "
        f"{summary.workers} at once, batches of {summary.batch}"
    )
    if options.out != "-":
        lines.append(options.out if summary.whole else f"{options.out} is joined by the process that ends last")
    return lines
