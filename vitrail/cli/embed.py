"""Write the feature vector of every image, in the order of the images.

MODEL and PATHS are as for `vitrail predict`, and so are --resume, --part, --runtime and torchrun. Features are the input
of the head; a distilled model gives both tokens, concatenated. An image that cannot be read gives a row with the error.

examples:
  vitrail embed dino.pth photos --out features.npy
  vitrail embed deit_tiny.safetensors 'shards/*.tar' --out features.parquet --resume
  vitrail embed model.safetensors cat.jpg --out - --format jsonl | jq '.features | length'

formats of --out:
  .npy      float32 [images, features]; FILE.paths.csv holds path,error of each row; the row of an
            unreadable image is nan
  .parquet  path, error, features (a list of float32)
  .jsonl    the same, one object per line
  .csv      path,error,f0,f1 and so on
"""

import argparse

from vitrail.cli.options import CommandParser
from vitrail.cli.predict import add_output_options, write_output


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `vitrail embed`."""
    add_output_options(parser, "npy, parquet, jsonl or csv")


def run(options: argparse.Namespace) -> int:
    """Write the features."""
    return write_output(options, "features", 0)
