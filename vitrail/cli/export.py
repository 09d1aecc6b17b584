"""A model to a file for another runtime, with proof.

MODEL is a checkpoint of any known form or a run of vitrail train. The file carries labels and preprocessing, so that vitrail
predict, evaluate and serve take it directly. After writing, it is run beside the model on pictures (--verify DATA, or generated
ones): largest difference, answers that changed, accuracy with intervals where labels are known, size, latency and throughput.
What differs by more than the tolerance is not put in its place. Logits may differ by 1e-3 in float, and no answer may change;
with --int8, --fp16 and --bf16 accuracy may fall by one point, or five of a hundred answers may change where labels are not known.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from vitrail.cli import reading
from vitrail.cli.describe import size
from vitrail.cli.progress import cleared, counted

# The same endings as in vitrail.deploy.export, kept here too so that --help need not import PyTorch; a test compares.
ENDINGS = {"onnx": ".onnx", "openvino": ".xml", "torch": ".pt2"}
LIMIT, CALIBRATION, GENERATED = 500, 64, 32  # pictures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is written, what it is held against, and what it may lose."""
    parser.epilog = (
        "examples:\n"
        "  vitrail export deit_tiny.safetensors deit.onnx --verify photos\n"
        "  vitrail export runs/photos-finetune-1 photos.xml --uint8            OpenVINO, with the normalisation inside\n"
        "  vitrail export deit_tiny.safetensors deit.onnx --dynamic-size       positions resampled inside the graph\n"
        "  vitrail export deit_tiny.safetensors fast.xml --merge 8 --verify photos\n"
        "  vitrail export runs/photos-finetune-1 small.onnx --int8 --verify photos   layers that int8 harms stay in float\n"
        "  vitrail export deit_tiny.safetensors deit.pt2                       PyTorch's own exported program\n"
    )
    parser.add_argument("model", metavar="MODEL", help="a file, a directory, a run, hf://owner/name")
    parser.add_argument("out", type=Path, metavar="OUT", help="a file: .onnx, .xml (with its .bin beside it), .pt2")
    parser.add_argument("--to", choices=tuple(ENDINGS), help="what is to run it; as OUT ends unless given")
    parser.add_argument("--json", action="store_true", help="the proof for machines")
    graph = parser.add_argument_group("the graph")
    graph.add_argument("--uint8", action="store_true", help="takes pixels as bytes, and normalises them inside")
    graph.add_argument(
        "--dynamic-size", action="store_true", help="takes pictures of every size that the patches divide"
    )
    graph.add_argument("--size", type=size, metavar="N|HxW", help="another size than the model's own")
    graph.add_argument("--merge", type=int, default=0, metavar="R", help="merge R tokens in each layer")
    narrow = graph.add_mutually_exclusive_group()
    narrow.add_argument("--int8", action="store_true", help="8-bit integers, calibrated on pictures (onnx, openvino)")
    narrow.add_argument("--fp16", action="store_true", help="weights in half precision")
    narrow.add_argument("--bf16", action="store_true", help="weights in bfloat16")
    proof = parser.add_argument_group("the proof")
    proof.add_argument(
        "--verify",
        metavar="DATA",
        help="pictures, with labels as for vitrail evaluate or without; generated ones unless given",
    )
    proof.add_argument("--split", metavar="NAME", help="of DATA (test, else validation, else all)")
    proof.add_argument(
        "--map", metavar="FILE", help="which class of DATA is which of the model, as for vitrail evaluate"
    )
    proof.add_argument("--label-from", metavar="REGEX", help="the class is what this finds in a file's name")
    proof.add_argument("--limit", type=int, default=LIMIT, metavar="N", help=f"pictures at most ({LIMIT})")
    proof.add_argument(
        "--calibrate",
        metavar="DATA",
        help="pictures for --int8 to measure ranges on (those of --verify that do not judge, or generated ones)",
    )
    proof.add_argument(
        "--calibration", type=int, default=CALIBRATION, metavar="N", help=f"how many of them ({CALIBRATION})"
    )
    proof.add_argument(
        "--tolerance", type=float, metavar="X", help="of logits in float (0.001); else points of accuracy (1)"
    )
    proof.add_argument("--force", action="store_true", help="put the file in its place, whatever the proof says")
    proof.add_argument("--threads", type=int, metavar="N", help="of model and file while they are compared")
    reading.add_arguments(parser.add_argument_group("of MODEL's file"))


def run(options: argparse.Namespace) -> int:
    """Exports, proves, and prints the proof, whether the file passed or not."""
    to = target(options)
    for name in ("limit", "calibration"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: at least 1 picture")
    if options.threads is not None and options.threads < 1:
        raise ValueError(f"--threads {options.threads}: at least 1")
    if options.calibrate is not None and not options.int8:
        raise ValueError("--calibrate is for --int8: add it, or leave this out")
    for name in ("split", "map", "label_from"):
        if getattr(options, name) is not None and options.verify is None:
            raise ValueError(f"--{name.replace('_', '-')} is of the pictures for --verify: give them, or leave it out")
    from vitrail.deploy.proving import Refused

    try:
        proof = proven(options, to)
    except Refused as refused:
        cleared()
        show(options, refused.proof)
        raise
    finally:
        cleared()
    show(options, proof)
    return 0


def target(options: argparse.Namespace) -> str:
    """What is to run the file: as it is said, or as its name ends."""
    known = {ending: name for name, ending in ENDINGS.items()}
    if options.to is None and options.out.suffix not in known:
        raise ValueError(f"{options.out} ends in none of {', '.join(known)}: give one of them, or --to")
    return options.to or known[options.out.suffix]


def proven(options: argparse.Namespace, to: str) -> Any:
    """The export with its proof."""
    import torch

    from vitrail.cli.shown import calibrating, shown
    from vitrail.deploy.opening import of_checkpoint
    from vitrail.deploy.proving import Asked, export_with_proof
    from vitrail.run.opening import weights_of

    told = counted()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    found = of_checkpoint(
        options.model,
        torch.device("cpu"),
        None,
        options.merge,
        options.size,
        reading.assumed(options),
        options.take,
        "fp32",
    )
    assert found.model is not None
    precision = next((name for name in ("int8", "fp16", "bf16") if getattr(options, name)), "fp32")
    asked = Asked(
        to,
        options.uint8,
        options.dynamic_size,
        options.merge,
        precision,
        options.tolerance,
        options.force,
        options.threads,
    )
    pictures, notes, names = shown(options, found, told)
    calibration = None
    if options.int8:
        calibration, more = calibrating(options, found, names, told)
        notes = [*notes, *more]
    for note in (*found.notes, *notes):
        print(f"note: {note}", file=sys.stderr)
    weights = weights_of(options.model)
    return export_with_proof(
        found.model,
        found.contract,
        options.out,
        asked,
        pictures,
        calibration=calibration,
        bytes_before=sum(file.stat().st_size for file in files_of(weights)),
        told=told,
    )


def files_of(path: Path) -> list[Path]:
    """The weights' files."""
    return [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]


def show(options: argparse.Namespace, proof: Any) -> None:
    """The proof, for a person or for machines."""
    if options.json:
        print(json.dumps(proof.as_dict(), indent=2, ensure_ascii=False))
        return
    from vitrail.cli.proof import text

    print(text(options.model, proof))
