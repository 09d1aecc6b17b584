"""Write the feature vector of every image, in the order of the images.

MODEL and PATHS are as for `vitrail predict`, and so are --resume, --runtime and torchrun. Features are the input of the head; a
distilled model gives both tokens, concatenated. An image that cannot be read gives a row with the error.
"""

import argparse

from vitrail.cli.output import add_output_options, write_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrail embed`."""
    parser.epilog = (
        "examples:\n"
        "  vitrail embed dino.pth photos --out features.npy\n"
        "  vitrail embed deit_tiny.safetensors 'shards/*.tar' --out features.parquet --resume\n"
        "  vitrail embed model.safetensors cat.jpg --out - --format jsonl | jq '.features | length'\n"
        "\nformats of --out:\n"
        "  .npy      float32 [images, features]; FILE.paths.csv holds path,error of each row; the row of an\n"
        "            unreadable image is nan\n"
        "  .parquet  path, error, features (a list of float32)\n"
        "  .jsonl    the same, one object per line\n"
        "  .csv      path,error,f0,f1 and so on\n"
    )
    add_output_options(parser, "npy, parquet, jsonl or csv")


def run(options: argparse.Namespace) -> int:
    """Write the features."""
    return write_output(options, "features", 0)
