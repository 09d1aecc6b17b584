"""Serve models over HTTP, with a web page.

MODEL is a checkpoint of any known format (a file, a directory, a run of `vitrail train`, hf://owner/name) or a file of
`vitrail export`. Several models are served by name: NAME=MODEL. Send images to POST /predict, /embed and /attention; GET / is
the web page, /openapi.json the description, /metrics the metrics for Prometheus.

The service listens on 127.0.0.1 unless --host is given. Concurrent requests are batched; a request that would wait too long is
refused at once (503 with Retry-After). SIGTERM finishes accepted requests; SIGHUP reloads the models' files.
"""

import argparse
import sys
from pathlib import Path

from vitrail.cli.options import (
    RUNTIMES,
    add_checkpoint_options,
    add_device_option,
    add_size_option,
    check_at_least,
    parse_assumptions,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vitrail serve`."""
    parser.epilog = (
        "examples:\n"
        "  vitrail serve runs/photos-finetune-1                        then open http://127.0.0.1:8000\n"
        "  curl --data-binary @cat.jpg -H 'Content-Type: image/jpeg' http://127.0.0.1:8000/predict\n"
        "  curl -F pictures=@cat.jpg -F pictures=@dog.jpg 'http://127.0.0.1:8000/predict?top=3'\n"
        "  vitrail serve small=deit.safetensors other=model.onnx       several: /predict?model=other\n"
        "  vitrail serve model.safetensors --host 0.0.0.0 --token-file tokens.txt\n"
        "  vitrail serve deit.safetensors --runtime auto --merge 8     fastest runtime, with token merging\n"
    )
    parser.add_argument(
        "models", nargs="+", metavar="[NAME=]MODEL", help="model to serve; the first is the default model"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on [127.0.0.1: this machine only]")
    parser.add_argument("--port", type=int, default=8000, help="port, 0 for a free one [8000]")
    access = parser.add_argument_group("access")
    access.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="accepted tokens, one per line; clients send one as Authorization: Bearer",
    )
    access.add_argument(
        "--token",
        action="append",
        default=[],
        metavar="TOKEN",
        help="accepted token (repeatable); visible in the process list, unlike VITRAIL_TOKEN",
    )
    access.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name of the service (repeatable; * for any) [loopback names and the address it listens on]",
    )
    compute = parser.add_argument_group("compute")
    compute.add_argument(
        "--runtime", choices=RUNTIMES, default="auto", help="inference runtime [auto: the fastest here, measured once]"
    )
    add_device_option(compute)
    compute.add_argument(
        "--merge", type=int, default=0, metavar="R", help="tokens merged per layer: faster, slightly less accurate [0]"
    )
    add_size_option(compute)
    compute.add_argument("--workers", type=int, metavar="N", help="model threads [on a CPU one per core, at most 4]")
    compute.add_argument("--threads", type=int, metavar="N", help="cores per model thread [cores / workers]")
    compute.add_argument("--max-batch", type=int, default=8, metavar="N", help="images per batch [8]")
    compute.add_argument(
        "--batch-ms", type=float, default=5.0, metavar="MS", help="milliseconds to wait for a batch to fill [5]"
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-body", type=float, default=32.0, metavar="MB", help="size of a request [32]")
    limits.add_argument("--max-pixels", type=float, default=50.0, metavar="MILLIONS", help="pixels of an image [50]")
    limits.add_argument(
        "--image-formats",
        default="jpeg,png,webp,gif,bmp,tiff,avif",
        metavar="LIST",
        help="accepted image formats; also ppm, jpeg2000 [%(default)s]",
    )
    limits.add_argument("--max-pictures", type=int, default=64, metavar="N", help="images per request [64]")
    limits.add_argument(
        "--queue", type=int, default=256, metavar="N", help="waiting images before requests get 503 [256]"
    )
    limits.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds for a response [30]")
    limits.add_argument("--body-timeout", type=float, default=30.0, metavar="S", help="seconds for a request body [30]")
    limits.add_argument(
        "--drain", type=float, default=1.0, metavar="S", help="seconds of reporting not ready before the end [1]"
    )
    add_checkpoint_options(parser.add_argument_group("checkpoint"))


def run(options: argparse.Namespace) -> int:
    """Load the models and serve them until a signal ends the process."""
    from vitrail.serve import check_installed

    check_installed()

    import logging

    from vitrail.data.decode import FORMATS
    from vitrail.serve.auth import LOOPBACK_HOSTS, AllowedHosts, load_tokens
    from vitrail.serve.decoding import prepare_processes
    from vitrail.serve.limits import MEGABYTE, RequestLimits
    from vitrail.serve.models import ModelOpener, parse_model_sources
    from vitrail.serve.server import ServerOptions, bind_socket, create_server, create_service, format_address

    formats = tuple(name.strip().upper() for name in options.image_formats.split(","))
    for name in formats:
        if name not in FORMATS:
            raise ValueError(f"unknown image format {name!r}: --image-formats takes {', '.join(FORMATS).lower()}")
    limits = RequestLimits(
        body=int(options.max_body * MEGABYTE),
        pixels=int(options.max_pixels * 1e6),
        images=options.max_pictures,
        formats=formats,
        queue=options.queue,
        seconds=options.timeout,
        body_seconds=options.body_timeout,
    )
    workers, threads = choose_workers(options)
    max_batch = check_at_least(1, options.max_batch, "--max-batch")
    server_options = ServerOptions(workers, max_batch, options.batch_ms / 1000, options.drain, limits)
    models, tokens = parse_model_sources(options.models), load_tokens(options.token, options.token_file)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it warns of every malformed request
    opener = ModelOpener(
        threads,
        {
            "runtime": options.runtime,
            "device": options.device,
            "merge": options.merge,
            "size": options.size,
            "assume": parse_assumptions(options),
            "take": options.take,
            "report": lambda line: print(line, file=sys.stderr, flush=True),
        },
    )
    with bind_socket(options.host, options.port) as listening:
        address = format_address(listening)
        hosts = AllowedHosts(options.allow_host, options.host)
        service = create_service(models, opener, server_options, tokens, hosts)

        def report_ready() -> None:
            prepare_processes()
            for model in service.models.served.values():
                h, w = model.contract.preprocessing.size
                print(f"{model.name}: {model.where}, {h}×{w} pixels, runtime {model.deployed.runtime.name}")
                for note in model.deployed.notes:
                    print(f"  {note}")
            if options.host not in LOOPBACK_HOSTS and not tokens:
                print("warning: anyone who reaches this address can use the service: see --token-file", file=sys.stderr)
            print(f"{address} (stop with Ctrl-C)", flush=True)

        server = create_server(service, server_options, report_ready)
        server.run([listening])
    if server.failure is not None:
        raise server.failure
    return 0


def choose_workers(options: argparse.Namespace) -> tuple[int, int | None]:
    """Return the number of workers and the cores of each: on a CPU, several single-threaded models are the fastest."""
    import os

    cores = os.cpu_count() or 1
    on_cpu = options.device == "cpu" or (options.device == "auto" and not has_accelerator())
    workers = options.workers if options.workers is not None else (min(4, cores) if on_cpu else 1)
    check_at_least(1, workers, "--workers")
    if options.threads is not None:
        return workers, check_at_least(1, options.threads, "--threads")
    return workers, max(1, cores // workers) if on_cpu else None


def has_accelerator() -> bool:
    """Return whether PyTorch sees a GPU."""
    import torch

    return torch.cuda.is_available() or torch.backends.mps.is_available()
