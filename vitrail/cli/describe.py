"""Describe a checkpoint, or the cost of an architecture before any weight exists.

MODEL is a size and a patch (Ti S B L H g G: "B/16", "G/14"), a hybrid ("R50+B/16"), a BiT ResNet ("R50x1"), a Swin
Transformer ("Swin-T", "SwinV2-B/16"), an MViT ("MViTv2-T") or an Audio Spectrogram Transformer ("AST-B/16"). The table
has the shape, parameters, multiply-adds and bytes of each stage.
Multiply-adds and activation bytes are for the whole batch, in 32-bit floats; those of attention are for one image.

--training adds memory, communication and time of a training on --gpus GPUs with --batch-size images a step, for a copy of
the model in each GPU (ddp), a sharded model (fsdp) and one sharded in each host (hsdp). They are computed, not measured:
--tflops is the published peak of a GPU and --utilisation the share of it that you assume.

FILE is a checkpoint (safetensors, .pth, .npz, a directory, hf://owner/name, a name of `vitrail models`). The
report has its format and the evidence for it, the architecture, missing and unused tensors, the origin of labels and
preprocessing, and whether all values are finite.

examples:
  vitrail describe B/16 --size 384 --batch 8
  vitrail describe S/16 --position sincos2d --pool mean --registers 4 --channels 1 --size 160x224
  vitrail describe B/16 --frames 16 --tubelet 2
  vitrail describe MViTv2-S --frames 16
  vitrail describe Ti/4 --width 128 --depth 6 --heads 4 --size 28 --channels 1 --classes 10
  vitrail describe AST-B/16 --size 128x512
  vitrail describe R152x4 --json
  vitrail describe L/16 --training --gpus 64 --batch-size 4096 --tflops 312 --images 14197122 --epochs 90
  vitrail describe deit_tiny.safetensors
  vitrail describe my_vit.pth --assume heads=6 --assume mean=imagenet
  vitrail describe hf://google/vit-base-patch16-224 --header
"""

import argparse
import re
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.options import CommandParser, given_options, parse_assumptions, print_result, refuse_options
from vitrail.cli.text.progress import byte_progress
from vitrail.models.sizes import SLOT_NAMES
from vitrail.utils.files import WEIGHT_SUFFIXES
from vitrail.utils.text import format_bytes, format_image_count, format_table

if TYPE_CHECKING:
    from vitrail.models.flops import Cost
    from vitrail.models.training_cost import TrainingCost

CHECKPOINT_SUFFIXES = (*WEIGHT_SUFFIXES, ".ckpt", ".index.json")
SIZE_OPTIONS = ("patch", "width", "depth", "heads", "mlp_width")
CLIP_OPTIONS = ("frames", "tubelet")
SENT = {"sent in a step by a GPU": "sent_by_gpu", "sent by a host to others": "sent_by_host"}
TRAINING_OPTIONS = (
    *("gpus", "gpus_per_host", "batch_size", "accumulate", "precision", "no_ema"),
    *("tflops", "utilisation", "network", "images", "epochs"),
)


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `vitrail describe`: one for each slot of a model."""
    names = '"B/16", "R50+B/16", "R50x1", "Swin-T", "MViTv2-T", "AST-B/16"'
    models = f"architecture ({names}), or checkpoint: file, directory, hf://owner/name, deit-tiny"
    parser.add_argument("model", metavar="MODEL|FILE", help=models)
    parser.add_shared("--size N|HxW", note="224; 128x1024 for an AST", default=argparse.SUPPRESS)
    parser.add_option("--batch N", "images per batch [1]", int, default=1)
    parser.add_shared("--classes N", note="1000; 400 for an MViT of clips, 527 for an AST", default=argparse.SUPPRESS)
    parser.add_shared("--channels N", note="3; 1 for an AST", default=argparse.SUPPRESS)
    parser.add_shared("--json")
    slots = parser.add_group("slots of a Vision Transformer")
    for name, (names, meaning) in SLOT_NAMES.items():
        at = "; @every or @shared adds it at every layer [learned1d]" if name == "position" else ""
        value = "NAME[@every|@shared]" if name == "position" else "NAME"
        slots.add_option(f"--{name} {value}", f"{meaning}: {', '.join(names)}{at}")
    slots.add_option("--registers N", "number of register tokens [0]", int)
    slots.add_option("--layer-scale X", "initial value of LayerScale [no LayerScale]", float)
    slots.add_option("--qk-norm", "normalise queries and keys")
    slots.add_option("--frames N", "frames of a clip, for a model of clips [a model of images]", int)
    slots.add_option("--tubelet N", "frames of a tubelet, the patch of a clip [2]", int)
    for name in SIZE_OPTIONS:
        slots.add_option(f"--{name.replace('_', '-')} N", f"{name.replace('_', ' ')} [the named size's]", int)
    parser.add_checkpoint_options()
    parser.add_shared("--text-tower")
    parser.add_option("--header", "do not read the values of a checkpoint: fast")
    training = parser.add_group("training on GPUs")
    training.add_option("--training", "add memory, communication and time of a training")
    training.add_option("--gpus N", "number of GPUs [8]", int)
    training.add_option("--gpus-per-host N", "GPUs of a host [8]", int)
    training.add_option("--batch-size N", "images of a step, on all GPUs [1024]", int)
    training.add_option("--accumulate N", "micro-batches of a step [1]", int)
    training.add_option("--precision NAME", "precision of matrix products [bf16]", choices=("bf16", "fp16", "fp32"))
    training.add_option("--no-ema", "no EMA of the weights")
    training.add_option("--tflops X", "published peak of a GPU in this precision, TFLOP/s [no times]", float)
    training.add_option("--utilisation X", "assumed share of the peak [0.4]", float)
    training.add_option("--network GBS", "bandwidth of a host to others, GB/s [no network times]", float)
    training.add_option("--images N", "images of an epoch [no hours]", int)
    training.add_option("--epochs N", "epochs of training [1]", float)
    resnet = parser.add_group("slots of a ResNet")
    resnet.add_option("--root", "stem; small suits images of 32×32 [large]", choices=("large", "small"))


def run(options: argparse.Namespace) -> int:
    """Print the cost table of an architecture, or the report on a checkpoint."""
    if not options.training:
        refuse_options(options, TRAINING_OPTIONS, "needs --training: give it too")
    if is_checkpoint(options.model):
        refuse_options(options, ("training",), "is for architectures, such as L/16: leave it out")
        return describe_checkpoint(options)
    from vitrail.models.flops import count
    from vitrail.models.registry import configure

    names = (*SLOT_NAMES, "registers", "layer_scale", "qk_norm", *SIZE_OPTIONS, *CLIP_OPTIONS, "root")
    given = given_options(options, names)
    usual = {"size": (224, 224), "channels": 3, "classes": 1000}
    if options.model.startswith("AST-"):  # it has defaults of its own
        usual = {}
    elif options.frames is not None:
        del usual["classes"]
    for name in ("size", "channels", "classes"):
        if name in options or name in usual:  # classes none counts as given
            given["image_size" if name == "size" else name] = getattr(options, name, usual.get(name))
    config = configure(options.model, **given)
    cost = count(config, options.batch)
    values, lines = {"model": options.model, **cost.as_dict()}, format_cost_table(options.model, cost)
    if options.training:
        from vitrail.models.training_cost import Cluster, estimate_training

        chosen = given_options(options, TRAINING_OPTIONS)
        chosen |= {"ema": not chosen.pop("no_ema", False)}
        training = estimate_training(config, Cluster(**chosen))
        values["training"], lines = training.as_dict(), [*lines, "", *format_training(training)]
    return print_result(options, values, lines)


def is_checkpoint(name: str) -> bool:
    """Return whether `name` is a checkpoint and not the name of an architecture."""
    if re.fullmatch(r"(R\d*\+)?[A-Za-z]+/\d+", name):
        return False
    if name.startswith("hf://") or name.endswith(CHECKPOINT_SUFFIXES) or Path(name).exists():
        return True
    if "-" not in name:  # as the names of `vitrail models` have
        return False
    from vitrail.models.registry import FAMILIES

    return not any(family.matches(name) for family in FAMILIES.values())


def describe_checkpoint(options: argparse.Namespace) -> int:
    """Print the report on a checkpoint and return 1 if it cannot be loaded."""
    from vitrail.checkpoints.card import build_report, format_report
    from vitrail.checkpoints.load import inspect_checkpoint

    assume = parse_assumptions(options)
    with inspect_checkpoint(options.model, assume, options.take, options.text_tower) as checkpoint:
        report = build_report(checkpoint, None if options.header else byte_progress("reading"))
    print_result(options, report, [format_report(report)])
    return 0 if report["loads"] else 1


def format_cost_table(name: str, cost: "Cost") -> list[str]:
    """Return the stages of a model with their cost as a table. Equal consecutive layers share a line."""
    rows = [("stage", "shape", "parameters", "multiply-adds", "kept for backward")]
    layers = groupby(cost.stages, lambda stage: replace(stage, name="") if stage.name.startswith("layer ") else stage)
    for first, *others in (list(group) for _, group in layers):
        count = 1 + len(others)
        label = first.name if count == 1 else first.name.replace("layer 1", f"layers 1 to {count}")
        shape = f"[{', '.join(map(str, first.shape))}]"
        macs, nbytes = format_count(count * first.macs), count * first.activation_bytes
        kept = format_bytes(nbytes) if nbytes else "–"
        rows.append((label, shape, f"{count * first.params:,}", macs, kept))
    rows.append(("total", "", f"{cost.params:,}", format_count(cost.macs), format_bytes(cost.activation_bytes)))
    height, width = cost.image_size
    batch, size = format_image_count(cost.batch), f"{height}×{width}"
    if cost.frames is not None:
        batch, size = f"{cost.batch} {'clip' if cost.batch == 1 else 'clips'}", f"{cost.frames}×{size}"
    return [
        f"{name}: {batch} of {size}, 32-bit floats",
        "",
        *format_table(rows, right=(2, 3, 4), rules=(1, len(rows) - 1)),
        "",
        *(f"{label:<12}{fact}" for label, fact in _cost_facts(cost)),
    ]


def _cost_facts(cost: "Cost") -> list[tuple[str, str]]:
    inference, training = format_bytes(cost.inference_bytes), format_bytes(cost.training_bytes)
    facts = [
        ("inference", f"{inference}: weights, and activations alive at the same time"),
        ("training", f"{training}: weights, gradients, two Adam moments, activations for backward"),
    ]
    if cost.macs_every_token > cost.macs:
        every = format_count(cost.macs_every_token)
        fact = f"only the tokens that the head reads are computed; with all tokens {every} multiply-adds"
        facts.append(("last layer", fact))
    if cost.tokens:
        one = "image" if cost.frames is None else "clip"
        alike = cost.attention_bytes_total == cost.attention_matrices * cost.attention_bytes_per_matrix
        which = "" if alike else "largest "  # attention over space and over time
        matrix, total = format_bytes(cost.attention_bytes_per_matrix), format_bytes(cost.attention_bytes_total)
        facts += [
            ("tokens", f"{cost.tokens:,} per {one}"),
            (
                "attention",
                f"{cost.attention_entries:,} entries, {matrix}, per {which}attention matrix between patches;",
            ),
            ("", f"{cost.attention_matrices:,} matrices, {total} per {one}, computed and never stored"),
        ]
    return facts


def format_training(training: "TrainingCost") -> list[str]:
    """Return memory and communication of a training as a table of layouts, then its time and what is assumed."""
    cluster, layouts = training.cluster, training.layouts
    hosts = cluster.gpus // cluster.host_size
    memory = ("weights", "gradients", "moments", "ema", "working", "activations", "total")
    names = {"moments": "Adam moments", "ema": "EMA", "working": "buckets, gathered layers, 16-bit copies"}
    rows = [("memory of a GPU", *(layout.layout for layout in layouts))]
    rows += [(names.get(name, name), *(format_bytes(getattr(layout, name)) for layout in layouts)) for name in memory]
    rows += [(label, *(format_bytes(getattr(layout, name)) for layout in layouts)) for label, name in SENT.items()]
    if cluster.network is not None and hosts > 1:
        seconds = (f"{layout.network_seconds or 0:.3f} s" for layout in layouts)
        rows.append((f"network at {cluster.network:g} GB/s", *seconds))
    accumulate = f", {cluster.accumulate} micro-batches" if cluster.accumulate > 1 else ""
    gpus = "1 GPU" if cluster.gpus == 1 else f"{cluster.gpus} GPUs, {hosts} × {cluster.host_size}"
    title = f"training on {gpus}: {cluster.batch_size:,} images a step"
    facts = [("step", f"{training.flops_per_image * cluster.batch_size / 1e12:,.1f} TFLOP, forward and backward")]
    if training.step_seconds is not None:
        share, peak = f"{100 * cluster.utilisation:g} %", f"{cluster.tflops:g} TFLOP/s"
        facts.append(("", f"{training.step_seconds:.3f} s at {share} (assumed) of {peak} per GPU (given)"))
        facts.append(("", f"{training.images_per_second:,.0f} images/s"))
    if training.steps is not None:
        hours = "" if training.hours is None else f", {training.hours:,.1f} hours"
        facts.append(
            ("run", f"{training.steps:,} steps{hours} for {cluster.epochs:g} epochs of {cluster.images:,} images")
        )
    facts.append(("computed", "not measured; without the CUDA context, gaps of the allocator and evaluation"))
    return [
        f"{title}, {cluster.local_batch} per GPU at a time{accumulate}, {cluster.precision}",
        "",
        *format_table(rows, right=(1, 2, 3), rules=(1, len(memory), len(memory) + 1)),
        "",
        *(f"{label:<12}{fact}" for label, fact in facts),
    ]


def format_count(value: int) -> str:
    """Return a count as 1,234, 5.70 M or 16.46 G."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.2f} {unit}"
    return f"{value:,}" if value else "–"
