"""Train a model without labels.

DATA is anything that `vitrail train` accepts, or a folder of images without class folders. Labels, if present, are used only
to measure the features. --method features distils the features of a trained model, whatever its classes. The run directory
receives report.html and model.safetensors, which `vitrail train --init`, `evaluate --probe`, `inspect` and `convert` accept.
A run whose features collapse is stopped, with the likely cause and a remedy.

examples:
  vitrail pretrain photos --method dino                   self-distillation between crops of an image
  vitrail pretrain photos --method mae --model S/16       masked autoencoder, to be fine-tuned
  vitrail pretrain videos --method videomae --clip 16x4   masked autoencoder of clips
  vitrail pretrain cifar-10 --method mpp                  masked patch prediction, as in the ViT paper
  vitrail pretrain photos --method features --teacher clip.safetensors   features of a trained model
  vitrail pretrain photos --method dino --init deit_tiny.safetensors --epochs 10
  vitrail pretrain photos --method mpp --set objective.target=down --set objective.corrupt=0.15
  vitrail pretrain --resume runs/photos-dino-1            continue after a stop or a crash
  vitrail pretrain photos --method dino --out runs/dino --slurm gpus=4,time=8:00:00   a batch script for SLURM
then:
  vitrail evaluate runs/photos-dino-1/model.safetensors labelled --probe knn,linear
  vitrail train labelled --init runs/photos-dino-1/model.safetensors
"""

import argparse

from vitrail.cli.options import DATA_HELP, CommandParser
from vitrail.cli.train import (
    add_machine_options,
    add_run_options,
    check_run_options,
    run_training,
    write_training_job,
)
from vitrail.training.recipes import METHODS


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `vitrail pretrain`."""
    parser.add_argument("data", nargs="?", metavar="DATA", help=f"{DATA_HELP}; labels are optional")
    methods = "masked patch prediction, masked autoencoder of images or of videos, DINO, or features of a --teacher"
    parser.add_option("--method", methods, choices=METHODS)
    parser.add_option("--recipe FILE", "recipe.json of a run, instead of --method")
    add_run_options(parser, "DATA-METHOD-N", "teacher for --method features")
    parser.add_option("--collapse", "action when the features collapse [stop]", choices=("stop", "warn"))
    data = parser.add_group("data")
    data.add_shared("--fractions A,B,C", note="0.9,0.1,0")
    data.add_shared("--label-from REGEX", "--names FILE", "--quarantine FILE", "--cache-size SIZE")
    add_machine_options(parser)


def run(options: argparse.Namespace) -> int:
    """Pretrain or resume, and print the outcome. The exit code is 1 if the features collapsed."""
    check_run_options(options)
    if options.slurm:
        return write_training_job(options)
    from vitrail.training.train import pretrain

    return run_training(options, pretrain, method=options.method)
