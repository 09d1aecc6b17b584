"""What a model says of pictures: a row for each, in their order.

MODEL is a checkpoint of any known form, a run of vitrail train, hf://owner/name, or a file that vitrail export made. Rows have
the path, the label, its score (a probability) and, for a picture that cannot be read, the error in place of both; --top 5 adds
the answers that come next. Labels that lie beside the pictures are not looked at.

Whatever stops it, --resume goes on: no row is lost, none is there twice. Under torchrun every process takes its share, and the
one that ends last joins them.
"""

import argparse

from vitrail.cli import writing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is answered, and where the answers go."""
    parser.epilog = (
        "examples:\n"
        "  vitrail predict runs/photos-1 photos --out answers.csv\n"
        "  vitrail predict deit_tiny.safetensors cat.jpg dog.jpg --out -\n"
        "  vitrail predict model.safetensors list.csv --top 5 --out answers.jsonl\n"
        "  vitrail predict model.safetensors 'shards/{000..099}.tar' --out answers.parquet --resume\n"
        "  vitrail predict model.onnx photos --out answers.csv --json | jq .pictures_per_second\n"
        "  torchrun --nproc-per-node 4 -m vitrail predict model.safetensors photos --out answers.csv\n"
        "\nforms of --out:\n"
        "  .csv      path,label,score,error and with --top label2,score2 and so on\n"
        "  .jsonl    an object a line, with --top the list answers\n"
        "  .parquet  the columns of the CSV\n"
    )
    writing.add_arguments(parser, "csv, jsonl or parquet")
    parser.add_argument("--top", type=int, default=1, metavar="K", help="the K surest answers (1)")


def run(options: argparse.Namespace) -> int:
    """Answers."""
    if options.top < 1:
        raise ValueError(f"--top {options.top}: at least 1")
    return writing.run(options, "logits", options.top)
