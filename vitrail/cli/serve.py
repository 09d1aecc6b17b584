"""A model as a service, with a page to try it on.

MODEL is a checkpoint of any known form (a file, a directory, a run of vitrail train, hf://owner/name) or a file that vitrail
export wrote. Several are served by name: NAME=MODEL. Pictures are sent to POST /predict, /embed and /attention; GET / is a page
for people, /openapi.json describes it all, /metrics is for Prometheus.

It listens on this machine alone unless --host says otherwise. Requests of many clients are answered together; what would wait too
long is refused at once (503, with Retry-After). SIGTERM finishes what was taken; SIGHUP opens the models' files anew.
"""

import argparse
import sys
from pathlib import Path

from vitrail.cli import reading
from vitrail.cli.describe import size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is served, where, to whom, and how much of it."""
    parser.epilog = (
        "examples:\n"
        "  vitrail serve runs/photos-finetune-1                        then open http://127.0.0.1:8000\n"
        "  curl --data-binary @cat.jpg -H 'Content-Type: image/jpeg' http://127.0.0.1:8000/predict\n"
        "  curl -F pictures=@cat.jpg -F pictures=@dog.jpg 'http://127.0.0.1:8000/predict?top=3'\n"
        "  vitrail serve small=deit.safetensors other=model.onnx       several: /predict?model=other\n"
        "  vitrail serve model.safetensors --host 0.0.0.0 --token-file tokens.txt\n"
        "  vitrail serve deit.safetensors --runtime auto --merge 8     as fast as this machine can\n"
    )
    parser.add_argument("models", nargs="+", metavar="[NAME=]MODEL", help="the first answers where none is named")
    parser.add_argument("--host", default="127.0.0.1", help="127.0.0.1 unless given: this machine alone")
    parser.add_argument("--port", type=int, default=8000, help="8000 unless given; 0 takes a free one")
    who = parser.add_argument_group("who may ask")
    who.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="tokens, one a line: requests must bring one as Authorization: Bearer",
    )
    who.add_argument(
        "--token",
        action="append",
        default=[],
        metavar="TOKEN",
        help="one more; others on this machine can see it, VITRAIL_TOKEN not",
    )
    how = parser.add_argument_group("how it is computed")
    how.add_argument(
        "--runtime",
        choices=("auto", "torch", "onnx", "openvino"),
        default="auto",
        help="auto: what is fastest here, measured once",
    )
    how.add_argument("--device", default="auto", metavar="auto|cpu|cuda|mps", help="auto unless given")
    how.add_argument(
        "--merge", type=int, default=0, metavar="R", help="merge R tokens in each layer: faster, a little less accurate"
    )
    how.add_argument("--size", type=size, metavar="N|HxW", help="of the pictures; positions are resampled")
    how.add_argument(
        "--workers", type=int, metavar="N", help="threads that run the model (on a CPU one for each core, up to 4)"
    )
    how.add_argument("--threads", type=int, metavar="N", help="cores for each of them (what is left over)")
    how.add_argument("--max-batch", type=int, default=8, metavar="N", help="pictures in a batch (8)")
    how.add_argument(
        "--batch-ms", type=float, default=5.0, metavar="MS", help="to wait for pictures that are on their way (5)"
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-body", type=float, default=32.0, metavar="MB", help="of a request (32)")
    limits.add_argument("--max-pixels", type=float, default=50.0, metavar="MILLIONS", help="of a picture (50)")
    limits.add_argument("--max-pictures", type=int, default=64, metavar="N", help="in a request (64)")
    limits.add_argument(
        "--queue", type=int, default=256, metavar="N", help="pictures that wait, before others are sent away (256)"
    )
    limits.add_argument("--timeout", type=float, default=30.0, metavar="S", help="for an answer (30)")
    limits.add_argument("--body-timeout", type=float, default=30.0, metavar="S", help="for a body to come (30)")
    limits.add_argument(
        "--drain", type=float, default=1.0, metavar="S", help="not ready, but still answering, before it ends (1)"
    )
    reading.add_arguments(parser.add_argument_group("of MODEL's file"))


def run(options: argparse.Namespace) -> int:
    """Opens the models and answers until it is told to stop."""
    from vitrail.serve.installed import check_installed

    check_installed()

    import logging

    from vitrail.serve.limits import MEGABYTE, Limits
    from vitrail.serve.models import named
    from vitrail.serve.opening import Opening
    from vitrail.serve.running import How, address, bound, server, service
    from vitrail.serve.tokens import tokens_from

    limits = Limits(
        body=int(options.max_body * MEGABYTE),
        pixels=int(options.max_pixels * 1e6),
        pictures=options.max_pictures,
        queue=options.queue,
        seconds=options.timeout,
        body_seconds=options.body_timeout,
    )
    workers, threads = shared(options)
    how = How(workers, at_least(1, options.max_batch, "--max-batch"), options.batch_ms / 1000, options.drain, limits)
    models, tokens = named(options.models), tokens_from(options.token, options.token_file)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # its warnings are of what strangers send, line after line
    opening = Opening(
        threads,
        {
            "runtime": options.runtime,
            "device": options.device,
            "merge": options.merge,
            "size": options.size,
            "assume": reading.assumed(options),
            "take": options.take,
            "tell": lambda line: print(line, file=sys.stderr, flush=True),
        },
    )
    with bound(options.host, options.port) as listening:
        served = service(models, opening, how, tokens)
        for each in served.models.served.values():
            h, w = each.contract.preprocessing.size
            print(f"{each.name}: {each.where}, {h}×{w} pixels, runs in {each.deployed.runtime.name}")
            for note in each.deployed.notes:
                print(f"  {note}")
        if options.host not in ("127.0.0.1", "localhost", "::1") and not tokens:
            print("Whoever reaches this address can use it: --token-file asks for tokens.", file=sys.stderr)
        print(f"{address(listening)} (Ctrl-C ends it)", flush=True)
        running = server(served, how)
        running.run([listening])
    return 0


def shared(options: argparse.Namespace) -> tuple[int, int | None]:
    """Workers, and cores for each: on a CPU, models of one thread each do more together than one of many threads."""
    import os

    cores = os.cpu_count() or 1
    on_cpu = options.device == "cpu" or (options.device == "auto" and not accelerated())
    workers = options.workers if options.workers is not None else (min(4, cores) if on_cpu else 1)
    at_least(1, workers, "--workers")
    if options.threads is not None:
        return workers, at_least(1, options.threads, "--threads")
    return workers, max(1, cores // workers) if on_cpu else None


def accelerated() -> bool:
    import torch

    return torch.cuda.is_available() or torch.backends.mps.is_available()


def at_least(least: int, value: int, name: str) -> int:
    if value < least:
        raise ValueError(f"{name} {value}: give at least {least}")
    return value
