"""`vitrail evaluate MODEL DATA --probe knn|linear|few-shot`: the options of probes, and what is printed."""

import argparse
import json
from typing import TYPE_CHECKING

from vitrail.cli import reading

if TYPE_CHECKING:
    from vitrail.run.features import Progress

# The same names as in vitrail.evaluation.probes, kept here too so that --help need not import PyTorch; a test compares.
PROBES = ("knn", "linear", "few-shot")


def probes(text: str) -> tuple[str, ...]:
    """knn, or knn,linear: names with commas between them."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if unknown := [name for name in names if name not in PROBES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no probe: use {', '.join(PROBES)}")
    if not names:
        raise argparse.ArgumentTypeError(f"which probe? Use {', '.join(PROBES)}")
    return tuple(dict.fromkeys(names))


def numbers(text: str) -> tuple[int, ...]:
    """1,5,10 as numbers."""
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write whole numbers from 1 as 1,5,10,25")
    return found


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 1")
    return int(text)


def add_probe_arguments(parser: argparse.ArgumentParser) -> None:
    """--probe, and what each probe can be told."""
    group = parser.add_argument_group(
        "probes of frozen features",
        "the head is left out; the features of both splits are computed once and kept in the cache directory",
    )
    group.add_argument(
        "--probe",
        type=probes,
        metavar="KIND,…",
        help="knn (weighted, DINO's protocol), linear (logistic regression, C chosen on a part of the training pictures), "
        "few-shot (the paper's least squares)",
    )
    group.add_argument("--neighbours", type=positive, metavar="K", help="for knn: 20, or as many as there are")
    group.add_argument("--temperature", type=float, metavar="T", help="for knn: 0.07")
    group.add_argument("--shots", type=numbers, metavar="N,…", help="for few-shot: 1,5,10,25 pictures of each class")
    group.add_argument("--draws", type=positive, metavar="N", help="for few-shot: 5 draws for each number of shots")
    group.add_argument("--seed", type=int, metavar="N", help="of the draws, and of the part that chooses C: 0")
    group.add_argument("--no-cache", action="store_true", help="compute the features anew, and keep none")


def run_probes(options: argparse.Namespace, progress: "Progress | None" = None) -> int:
    """Probes, and prints the table or, with --json, everything."""
    from vitrail.cli.probed import table
    from vitrail.evaluation.probes import Settings
    from vitrail.evaluation.probing import probe
    from vitrail.recipe import Data

    told = {name: getattr(options, name) for name in ("neighbours", "temperature", "shots", "draws", "seed")}
    probed = probe(
        options.model,
        Data(options.data, task=options.task, quarantine=options.quarantine),
        options.probe,
        Settings(**{name: value for name, value in told.items() if value is not None}),
        device=options.device,
        workers=options.workers,
        cache=not options.no_cache,
        assume=reading.assumed(options),
        take=options.take,
        size=options.size,
        progress=progress,
    )
    if options.json:
        print(json.dumps(probed.as_dict(), indent=2, ensure_ascii=False))
    else:
        print("\n".join(table(probed)))
    return 0
