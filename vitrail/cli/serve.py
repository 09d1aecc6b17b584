"""Serve models over HTTP, with a web page.

MODEL is a checkpoint of any known format (a file, a directory, a run of `vitrail train`, hf://owner/name) or a file of
`vitrail export`. Several models are served by name: NAME=MODEL. Send images to POST /predict (segmentation models: /segment),
/embed and /attention; GET / is the web page, /openapi.json the description, /metrics the metrics for Prometheus. A model of
clips takes videos, a model of sounds takes sound files, which POST /spectrogram draws.

The service listens on 127.0.0.1 unless --host is given. Concurrent requests are batched; a request that would wait too long is
refused at once (503 with Retry-After). SIGTERM finishes accepted requests; SIGHUP reloads the models' files.

examples:
  vitrail serve runs/photos-finetune-1                        then open http://127.0.0.1:8000
  curl --data-binary @cat.jpg -H 'Content-Type: image/jpeg' http://127.0.0.1:8000/predict
  curl --data-binary @seven.wav -H 'Content-Type: audio/wav' http://127.0.0.1:8000/predict
  curl -F images=@cat.jpg -F images=@dog.jpg 'http://127.0.0.1:8000/predict?top=3'
  vitrail serve small=deit.safetensors other=model.onnx       several: /predict?model=other
  vitrail serve model.safetensors --host 0.0.0.0 --token-file tokens.txt
  vitrail serve deit.safetensors --runtime auto --merge 8     fastest runtime, with token merging
  vitrail serve clip.safetensors --index photos.index         choose among your own words, and search by text
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from vitrail.cli.options import CommandParser, check_at_least, parse_assumptions


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `vitrail serve`."""
    served = "model to serve; the first is the default model"
    parser.add_argument("models", nargs="+", metavar="[NAME=]MODEL", help=served)
    parser.add_option("--host HOST", "address to listen on [127.0.0.1: this machine only]", default="127.0.0.1")
    parser.add_option("--port PORT", "port, 0 for a free one [8000]", int, default=8000)
    access = parser.add_group("access")
    tokens = "accepted tokens, one per line; clients send one as Authorization: Bearer"
    access.add_option("--token-file FILE", tokens, Path)
    token = "accepted token (repeatable); visible in the process list, unlike VITRAIL_TOKEN"
    access.add_option("--token TOKEN", token, action="append", default=[])
    host = "host name of the service (repeatable; * for any) [loopback names and the address it listens on]"
    access.add_option("--allow-host NAME", host, action="append", default=[])
    parser.add_shared("--names FILE")
    searched = "index of vitrail search, of a model with a text tower: GET /search and the page /find search it by text"
    parser.add_option("--index DIR", searched, Path)
    compute = parser.add_group("compute")
    compute.add_shared("--runtime", "--device auto|cpu|cuda|mps", "--merge R", "--size N|HxW")
    compute.add_shared("--precision", default="auto")
    compute.add_shared("--tolerance POINTS")
    compute.add_option("--workers N", "model threads [on a CPU one per core, at most 4]", int)
    compute.add_option("--threads N", "cores per model thread [cores / workers]", int)
    compute.add_option("--max-batch N", "images per batch [8]", int, default=8)
    compute.add_option("--batch-ms MS", "milliseconds to wait for a batch to fill [5]", float, default=5.0)
    limits = parser.add_group("limits")
    limits.add_option("--max-body MB", "maximum size of a request [32]", float, default=32.0)
    limits.add_option("--max-pixels MILLIONS", "maximum pixels of an image [50]", float, default=50.0)
    formats, known = "jpeg,png,webp,gif,bmp,tiff,avif", "accepted image formats; also ppm, jpeg2000"
    limits.add_option("--image-formats LIST", f"{known} [{formats}]", default=formats)
    limits.add_option("--max-images N", "maximum images per request [64]", int, default=64)
    limits.add_option("--max-frames N", "maximum frames of a video [20,000]", int, default=20_000)
    limits.add_option("--max-duration S", "maximum seconds of a video or sound [600]", float, default=600.0)
    limits.add_option("--queue N", "waiting images before requests get 503 [256]", int, default=256)
    limits.add_option("--timeout S", "seconds for a response [30]", float, default=30.0)
    limits.add_option("--body-timeout S", "seconds for a request body [30]", float, default=30.0)
    drain = "on SIGTERM, seconds to keep serving while /readyz reports 503 [1]"
    limits.add_option("--drain S", drain, float, default=1.0)
    parser.add_checkpoint_options()


def run(options: argparse.Namespace) -> int:
    """Load the models and serve them until a signal ends the process."""
    from vitrail.serve import check_installed

    check_installed()
    import logging

    from vitrail.data.decode import FORMATS
    from vitrail.deploy.runtimes.precision import describe_precision
    from vitrail.serve.auth import LOOPBACK_HOSTS, AllowedHosts, load_tokens
    from vitrail.serve.decoding import prepare_processes
    from vitrail.serve.limits import MEGABYTE, RequestLimits
    from vitrail.serve.models import ModelOpener, parse_model_sources
    from vitrail.serve.server import ServerOptions, bind_socket, create_server, create_service, format_address
    from vitrail.serve.texts import IndexSearch

    formats = tuple(name.strip().upper() for name in options.image_formats.split(","))
    for name in formats:
        if name not in FORMATS:
            raise ValueError(f"unknown image format {name!r}: --image-formats takes {', '.join(FORMATS).lower()}")
    limits = RequestLimits(
        body=int(options.max_body * MEGABYTE),
        pixels=int(options.max_pixels * 1e6),
        images=options.max_images,
        frames=options.max_frames,
        video_seconds=options.max_duration,
        formats=formats,
        queue=options.queue,
        seconds=options.timeout,
        body_seconds=options.body_timeout,
    )
    workers, threads = choose_workers(options)
    check_at_least(1, options.max_batch, "--max-batch")
    server_options = ServerOptions(workers, options.max_batch, options.batch_ms / 1000, options.drain, limits)
    models, tokens = parse_model_sources(options.models), load_tokens(options.token, options.token_file)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it warns of every malformed request
    settings = {
        name: getattr(options, name)
        for name in ("runtime", "device", "precision", "tolerance", "merge", "size", "take")
    }
    settings |= {"assume": parse_assumptions(options), "report": partial(print, file=sys.stderr, flush=True)}
    opener = ModelOpener(threads, settings, options.names)
    with bind_socket(options.host, options.port) as listening:
        address = format_address(listening)
        hosts = AllowedHosts(options.allow_host, options.host)
        service = create_service(models, opener, server_options, tokens, hosts)

        if options.index is not None:
            service.texts.index = IndexSearch(options.index)

        def report_ready() -> None:
            prepare_processes()
            for model in service.models.served.values():
                h, w = model.contract.preprocessing.size
                size = f"{h} mel bins × {w} frames" if model.contract.media == "sound" else f"{h}×{w} pixels"
                print(f"{model.name}: {model.where}, {size}, runtime {model.deployed.runtime.name}")
                for note in (*model.deployed.notes, *describe_precision(model.deployed)):
                    print(f"  {note}")
            if (searched := service.texts.index) is not None:
                print(f"{options.index}: {len(searched.index.images):,} images, searched by text at {address}/find")
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
    from vitrail.utils.devices import pick_device

    cores = os.cpu_count() or 1
    on_cpu = pick_device(options.device).type == "cpu"
    workers = options.workers if options.workers is not None else (min(4, cores) if on_cpu else 1)
    check_at_least(1, workers, "--workers")
    check_at_least(1, options.threads, "--threads")
    return workers, options.threads or (max(1, cores // workers) if on_cpu else None)
