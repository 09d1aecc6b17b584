"""Train a model without labels.

DATA is anything that `vitrail train` accepts, or a folder of images without class folders. Labels, if present, are used only
to measure the features. --method features distils the features of a trained model, whatever its classes. The run directory
receives report.html and model.safetensors, which `vitrail train --init`, `evaluate --probe`, `inspect` and `convert` accept.
A run whose features collapse is stopped, with the likely cause and a remedy.
"""

import argparse

from vitrail.cli.options import given_options, parse_fractions
from vitrail.cli.train import (
    MACHINE_OPTIONS,
    add_machine_options,
    add_override_options,
    add_run_options,
    add_teacher_options,
    check_run_options,
    create_display,
    print_outcome,
    recipe_settings,
)

OVERRIDES = ("epochs", "steps", "batch_size", "lr", "model", "size", "seed", "precision")
TEACHER_OPTIONS = ("teacher", "teacher_cache")
DATA_FIELDS = {"split": "fractions", "quarantine": "quarantine"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrail pretrain`."""
    parser.epilog = (
        "examples:\n"
        "  vitrail pretrain photos --method dino                   self-distillation between crops of an image\n"
        "  vitrail pretrain photos --method mae --model S/16       masked autoencoder, to be fine-tuned\n"
        "  vitrail pretrain cifar-10 --method mpp                  masked patch prediction, as in the ViT paper\n"
        "  vitrail pretrain photos --method features --teacher clip.safetensors   features of a trained model\n"
        "  vitrail pretrain photos --method dino --init deit_tiny.safetensors --epochs 10\n"
        "  vitrail pretrain photos --method mpp --set objective.target=down --set objective.corrupt=0.15\n"
        "  vitrail pretrain --resume runs/photos-dino-1            continue after a stop or a crash\n"
        "then:\n"
        "  vitrail evaluate runs/photos-dino-1/model.safetensors labelled --probe knn,linear\n"
        "  vitrail train labelled --init runs/photos-dino-1/model.safetensors\n"
    )
    parser.add_argument("data", nargs="?", metavar="DATA", help="folder, file or dataset name; labels are optional")
    parser.add_argument(
        "--method",
        choices=("mpp", "mae", "dino", "features"),
        help="masked patch prediction, masked autoencoder, DINO, or features of a --teacher",
    )
    parser.add_argument("--recipe", metavar="FILE", help="recipe.json of a run, instead of --method")
    add_run_options(parser, "DATA-METHOD-N", "objective.mask=0.6")
    parser.add_argument("--collapse", choices=("stop", "warn"), help="action when the features collapse [stop]")
    add_override_options(parser, "model: Ti/16, S/16, B/16 …")
    add_teacher_options(parser.add_argument_group("teacher for --method features"))
    data = parser.add_argument_group("data")
    data.add_argument(
        "--split", type=parse_fractions, metavar="A,B,C", help="fractions of train, validation, test [0.9,0.1,0]"
    )
    data.add_argument(
        "--quarantine", metavar="FILE", help="images to leave out, a list of `vitrail check --quarantine`"
    )
    add_machine_options(parser)


def run(options: argparse.Namespace) -> int:
    """Pretrain or resume, and print the outcome. The exit code is 1 if the features collapsed."""
    overrides = given_options(options, OVERRIDES)
    data_options = given_options(options, tuple(DATA_FIELDS))
    teacher = given_options(options, TEACHER_OPTIONS)
    machine = given_options(options, MACHINE_OPTIONS)
    names = ("method", "init", "recipe", "out", "set", "collapse", "patience", "skip_nonfinite")
    check_run_options(options, data_options, (*overrides, *teacher), names)

    from vitrail.training.recipe import Data, Machine
    from vitrail.training.train import pretrain, resume
    from vitrail.training.trainer import Stopped

    is_main, display, connected = create_display(options)
    try:
        if options.resume:
            directory, summary = resume(options.resume, changes=machine, **connected)
        else:
            fields = {DATA_FIELDS[name]: value for name, value in data_options.items()}
            directory, summary = pretrain(
                options.data and Data(options.data, **fields),
                method=options.method,
                init=options.init,
                **teacher,
                recipe=options.recipe,
                out=options.out,
                settings=recipe_settings(options, "collapse"),
                overrides=overrides,
                machine=Machine(**machine),
                **connected,
            )
    except Stopped as stopped:
        display.print_line(f"{stopped}. Continue with: vitrail pretrain --resume {options.resume or stopped.run}")
        return 128 + stopped.number
    display.clear()
    print_outcome(options, is_main, summary, directory)
    return 1 if summary.get("stopped") == "collapse" else 0
