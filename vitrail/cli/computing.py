"""How answers are computed: the options that predict, embed and search share."""

import argparse
from typing import TYPE_CHECKING

from vitrail.cli import reading
from vitrail.cli.describe import size

if TYPE_CHECKING:
    from vitrail.deploy.predicting import How

Parser = argparse.ArgumentParser | argparse._ArgumentGroup


def add_runtime(parser: Parser) -> None:
    """--runtime and --device."""
    parser.add_argument(
        "--runtime",
        default="auto",
        choices=("auto", "torch", "onnx", "openvino"),
        help="auto measures once what is quickest here, where it pays",
    )
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda|mps", help="auto unless given")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything that is quicker or slower for the same answers, and what MODEL's file does not say."""
    how = parser.add_argument_group("how it is computed")
    add_runtime(how)
    how.add_argument(
        "--merge", type=int, default=0, metavar="R", help="merge R tokens in each layer: quicker, a bit less exact"
    )
    how.add_argument("--size", type=size, metavar="N|HxW", help="of the pictures; positions are resampled")
    how.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="of matrix products (fp32)")
    how.add_argument("--batch-size", type=int, metavar="N", help="what turns out to be quick, unless given")
    how.add_argument("--workers", type=int, metavar="N", help="batches that are worked on at once (one for each core)")
    reading.add_arguments(parser.add_argument_group("of MODEL's file"))


def chosen(options: argparse.Namespace) -> "How":
    """What was said, for the library."""
    from vitrail.deploy.predicting import How

    return How(
        options.runtime,
        options.device,
        options.precision,
        options.merge,
        options.size,
        options.batch_size,
        options.workers,
        reading.assumed(options),
        options.take,
    )
