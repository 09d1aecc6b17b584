"""Pictures without labels to a model with good features.

DATA is whatever `vitrail train` takes, and also a folder of pictures without class folders: labels are not needed. Where there
are labels, they are used to say how good the features are, and for nothing else. With --method features a small model learns
what a trained one sees in the pictures, whose classes do not matter. The run directory ends with report.html and
with model.safetensors, which `vitrail train --init`, `evaluate --probe`, `inspect` and `convert` take as it is. A run whose
features collapse is stopped, with the likely cause and what to change.
"""

import argparse
import json

from vitrail.cli.describe import size
from vitrail.cli.outcome import outcome
from vitrail.cli.train import MACHINE, add_computing, changes_of, fractions, option, told, watched

WISHES = ("epochs", "steps", "batch_size", "lr", "model", "size", "seed", "precision")
TEACHER = ("teacher", "teacher_cache")
DATA = {"split": "fractions", "quarantine": "quarantine"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to learn from, how, and everything that can be changed."""
    parser.epilog = (
        "examples:\n"
        "  vitrail pretrain photos --method dino                   crops of one picture are answered alike\n"
        "  vitrail pretrain photos --method mae --model S/16       to be fine-tuned\n"
        "  vitrail pretrain cifar-10 --method mpp                  the ViT paper's own: colours of hidden patches\n"
        "  vitrail pretrain photos --method features --teacher clip.safetensors   what a trained model sees in them\n"
        "  vitrail pretrain photos --method dino --init deit_tiny.safetensors --epochs 10\n"
        "  vitrail pretrain photos --method mpp --set objective.target=down --set objective.corrupt=0.15\n"
        "  vitrail pretrain --resume runs/photos-dino-1            go on after a stop or a crash\n"
        "then:\n"
        "  vitrail evaluate runs/photos-dino-1/model.safetensors labelled --probe knn,linear\n"
        "  vitrail train labelled --init runs/photos-dino-1/model.safetensors\n"
    )
    parser.add_argument("data", nargs="?", metavar="DATA", help="a folder, a file or a name; labels are not needed")
    parser.add_argument(
        "--method",
        choices=("mpp", "mae", "dino", "features"),
        help="masked patch prediction, masked autoencoder, DINO, or the features of a --teacher",
    )
    parser.add_argument("--init", metavar="FILE", help="a checkpoint to begin with, as for train")
    parser.add_argument("--recipe", metavar="FILE", help="a run's recipe.json, instead of a method")
    parser.add_argument("--out", metavar="RUN", help="the run directory; runs/DATA-METHOD-N unless given")
    parser.add_argument("--resume", metavar="RUN", help="go on with a run that was stopped")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="change the recipe: objective.mask=0.6"
    )
    parser.add_argument("--collapse", choices=("stop", "warn"), help="what the alarm does (stop)")
    common = parser.add_argument_group("what the recipe adapts to")
    common.add_argument("--epochs", type=float, metavar="N")
    common.add_argument("--steps", type=int, metavar="N")
    common.add_argument("--batch-size", type=int, metavar="N", help="over all processes; the learning rate follows")
    common.add_argument("--lr", type=float, metavar="RATE")
    common.add_argument("--model", metavar="NAME", help="Ti/16, S/16, B/16 …")
    common.add_argument("--size", type=size, metavar="N|HxW", help="of the pictures as the model sees them")
    common.add_argument("--seed", type=int, metavar="N")
    taught = parser.add_argument_group("a teacher, for --method features")
    taught.add_argument(
        "--teacher",
        metavar="MODEL",
        help="a trained model, with a head or without: a file, a run, a directory, hf://owner/name",
    )
    taught.add_argument(
        "--teacher-cache",
        action="store_true",
        default=None,
        help="ask it once about each picture as it is, and keep that on the disk: quicker, and it sees no augmentation",
    )
    data = parser.add_argument_group("data")
    data.add_argument("--split", type=fractions, metavar="A,B,C", help="train, validation, test (0.9,0.1,0)")
    data.add_argument("--quarantine", metavar="FILE", help="pictures to leave out, as for train")
    add_computing(parser)


def run(options: argparse.Namespace) -> int:
    """Learns or goes on, and says where the result is."""
    wishes, about, changes = told(options, WISHES), told(options, tuple(DATA)), told(options, MACHINE)
    teacher = told(options, TEACHER)
    names = ("method", "init", "recipe", "out", "set", "collapse", "patience", "skip_nonfinite")
    other = {name: getattr(options, name) for name in names}
    if options.resume and (
        extra := [*wishes, *about, *teacher, *(["data"] if options.data else []), *(n for n in other if other[n])]
    ):
        raise ValueError(f"--resume goes on with a run as it was begun: leave out {option(extra[0])}")
    if about and not options.data:
        raise ValueError(f"{option(next(iter(about)))} is about DATA: name it too")

    from vitrail.engine.loop import Stopped
    from vitrail.pretraining import pretrain
    from vitrail.recipe import Data, Machine
    from vitrail.training import resume

    leads, live, shared = watched(options)
    settings = changes_of(options) + ([f"collapse={options.collapse}"] if options.collapse else [])
    try:
        if options.resume:
            directory, summary = resume(options.resume, changes=changes, **shared)
        else:
            data = options.data and Data(options.data, **{DATA[name]: given for name, given in about.items()})
            directory, summary = pretrain(
                data,
                method=options.method,
                init=options.init,
                **teacher,
                recipe=options.recipe,
                out=options.out,
                settings=settings,
                wishes=wishes,
                machine=Machine(**changes),
                **shared,
            )
    except Stopped as stopped:
        live.say(f"{stopped}. Go on with: vitrail pretrain --resume {options.resume or stopped.run}")
        return 128 + stopped.number
    live.clear()
    if leads and options.json:
        print(json.dumps(summary, indent=2, ensure_ascii=False))
    elif leads and not options.quiet:
        print(outcome(summary, directory))
    return 1 if summary.get("stopped") == "collapse" else 0
