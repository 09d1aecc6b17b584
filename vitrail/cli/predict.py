"""Write the predicted label of every image, in the order of the images.

MODEL is a checkpoint of any known format, a run of `vitrail train`, hf://owner/name, or a file of `vitrail export`. A row has
the path, the label and its probability (score); for an unreadable image it has the error instead. --top 5 adds the next
labels. Labels of the dataset are not read.

--resume continues an interrupted run without lost or repeated rows. Under torchrun, each process handles a share of the
images, and the last one to end joins the files.
"""

import argparse

from vitrail.cli.options import check_at_least
from vitrail.cli.output import add_output_options, write_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrail predict`."""
    parser.epilog = (
        "examples:\n"
        "  vitrail predict runs/photos-1 photos --out predictions.csv\n"
        "  vitrail predict deit_tiny.safetensors cat.jpg dog.jpg --out -\n"
        "  vitrail predict model.safetensors list.csv --top 5 --out predictions.jsonl\n"
        "  vitrail predict model.safetensors 'shards/{000..099}.tar' --out predictions.parquet --resume\n"
        "  vitrail predict model.onnx photos --out predictions.csv --json | jq .pictures_per_second\n"
        "  torchrun --nproc-per-node 4 -m vitrail predict model.safetensors photos --out predictions.csv\n"
        "\nformats of --out:\n"
        "  .csv      path,label,score,error; --top adds label2,score2 and so on\n"
        "  .jsonl    one object per line; --top adds the list `answers`\n"
        "  .parquet  the columns of the CSV\n"
    )
    add_output_options(parser, "csv, jsonl or parquet")
    parser.add_argument("--top", type=int, default=1, metavar="K", help="labels per image, most probable first [1]")


def run(options: argparse.Namespace) -> int:
    """Write the predictions."""
    check_at_least(1, options.top, "--top")
    return write_output(options, "logits", options.top)
