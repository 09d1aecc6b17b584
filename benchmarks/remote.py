"""Cost of reading images from remote tar shards, against the same shards as local files.

    python benchmarks/remote.py --images 1000 --kilobytes 100

A server of the benchmark's own, a process on the loopback interface, serves the shards. Every way reads the bytes of all images
in random order, in turns: local files, remote with all blocks in the cache, remote without a cache (a request for each image).
Time is also given as processor time of the reading process, which other work on the machine changes less. The network has no
latency here.
"""

import argparse
import io
import json
import multiprocessing
import os
import random
import re
import statistics
import tarfile
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

SHARDS = 4


def write_shards(folder: Path, images: int, size: int) -> None:
    """Write shards of incompressible members."""
    generator = np.random.default_rng(0)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"train-{shard}.tar", "w") as tar:
            for image in range(images // SHARDS):
                for name, data in ((f"{image:06}.jpg", generator.bytes(size)), (f"{image:06}.cls", b"cat")):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


class RangeHandler(BaseHTTPRequestHandler):
    """Serve ranges of the files in the current folder."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = Path(self.path.lstrip("/"))
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if found is None or not path.is_file():
            return self.send_error(404)
        size, start = path.stat().st_size, int(found[1])
        stop = min(int(found[2]) + 1, size)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", f'"{size}"')
        self.end_headers()
        with path.open("rb") as file:
            self.wfile.write(os.pread(file.fileno(), stop - start, start))
        return None


def serve(folder: str, pipe: Any) -> None:
    os.chdir(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), RangeHandler)
    pipe.send(server.server_address[1])
    server.serve_forever()


def read_all(where: str, cache: str) -> dict[str, float]:
    """Load the dataset and read all images in random order; return seconds and processor seconds of both."""
    from vitrail.data.sources import load_dataset

    os.environ["VITRAIL_CACHE_SIZE"] = cache
    start = time.perf_counter(), time.process_time()
    train = load_dataset(where, fractions=(1.0, 0.0, 0.0))["train"]
    listed = time.perf_counter(), time.process_time()
    items = train.items.tolist()
    random.Random(0).shuffle(items)
    for item in items:
        train.store.data(item)
    end = time.perf_counter(), time.process_time()
    return {
        "list_seconds": listed[0] - start[0],
        "read_ms": 1000 * (end[0] - listed[0]) / len(items),
        "read_processor_ms": 1000 * (end[1] - listed[1]) / len(items),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--kilobytes", type=int, default=100, help="of an image")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        write_shards(Path(folder), options.images, 1000 * options.kilobytes)
        ours, theirs = multiprocessing.Pipe()
        server = multiprocessing.Process(target=serve, args=(folder, theirs), daemon=True)
        server.start()
        url = f"http://127.0.0.1:{ours.recv()}/train-{{0..{SHARDS - 1}}}.tar"
        ways = {"local": (f"{folder}/train-*.tar", "0"), "cached": (url, "20GB"), "no cache": (url, "0")}
        first = read_all(url, "20GB")
        rounds = [{name: read_all(*way) for name, way in ways.items()} for _ in range(options.rounds)]
        server.terminate()
    result = {
        name: {key: statistics.median(each[name][key] for each in rounds) for key in rounds[0][name]} for name in ways
    } | {"first time": first}
    print(f"{options.images} images of {options.kilobytes} kB in {SHARDS} shards; median of {options.rounds} rounds")
    print(f"{'':12}{'listing, s':>12}{'ms an image':>14}{'processor ms':>14}")
    for name, row in result.items():
        print(f"{name:12}{row['list_seconds']:12.2f}{row['read_ms']:14.2f}{row['read_processor_ms']:14.2f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
