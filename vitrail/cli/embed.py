"""What a model makes of pictures before its head: a vector of features for each, in their order.

MODEL and PATHS are as for vitrail predict, and so are --resume, --runtime and torchrun. Features are what comes to the head; of a
distilled model both tokens, side by side. A picture that cannot be read is a row with the error.
"""

import argparse

from vitrail.cli import writing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is embedded, and where the features go."""
    parser.epilog = (
        "examples:\n"
        "  vitrail embed dino.pth photos --out features.npy\n"
        "  vitrail embed deit_tiny.safetensors 'shards/*.tar' --out features.parquet --resume\n"
        "  vitrail embed model.safetensors cat.jpg --out - --format jsonl | jq '.features | length'\n"
        "\nforms of --out:\n"
        "  .npy      NumPy's float32 [pictures, features]; FILE.paths.csv beside it has path,error of each row, and\n"
        "            a picture that could not be read is a row of nan\n"
        "  .parquet  path, error, features (a list of float32)\n"
        "  .jsonl    the same, an object a line\n"
        "  .csv      path,error,f0,f1 and so on\n"
    )
    writing.add_arguments(parser, "npy, parquet, jsonl or csv")


def run(options: argparse.Namespace) -> int:
    """Embeds."""
    return writing.run(options, "features", 0)
