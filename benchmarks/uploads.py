"""Send 10,000 malformed uploads to a service with default options (except --body-timeout 3 and all image formats).

    python benchmarks/uploads.py
    python benchmarks/uploads.py --count 1000

Fuzzed headers and images, truncated files, decompression bombs of 50,000×50,000, wrong types, wrong lengths, thousands of parts;
between them slow bodies and bodies of 100 MB. Required: no status 5xx except 503, the process stays alive, valid images are
answered all the time, and memory returns to its level.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import measure
from serving import WEIGHTS, Server

from tests.serve.made import picture, tiny
from tests.serve.mutated import Upload, files, large, request, status, uploads
from vitrail.data.decode import FORMATS

CLIENTS = 8
SLACK = 100 * 2**20  # bytes that memory may be above what it was


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = WEIGHTS if WEIGHTS.exists() else tiny(Path(folder) / "tiny.safetensors")
        options_given = ["--runtime", "torch", "--body-timeout", "3", "--image-formats", ",".join(FORMATS)]
        server = Server("attacked", options_given, f"m={model}")
        try:
            server.wait(picture())
            raise SystemExit(attacked(server, options.count, options.seed))
        finally:
            server.stop()


def attacked(server: Server, count: int, seed: int) -> int:
    """Send the uploads, print the result and return 1 if a requirement failed."""
    honest = request("/predict", picture())
    with ThreadPoolExecutor(CLIENTS) as pool:  # an ordinary load, after which its memory is what it is
        asked = [request(path, data) for path in ("/predict", "/embed", "/attention") for data in files().values()]
        assert set(pool.map(lambda each: status(server.port, iter([each])), asked * 4)) <= {200, 503}
    before, begin, most = server.resident(), time.monotonic(), 0
    codes: dict[str, Counter[str]] = {}

    def send(numbered: tuple[int, Upload]) -> tuple[str, int | None]:
        number, upload = numbered
        if number % 500 == 250:
            return "100 MB", status(server.port, large(told=number % 1000 == 250))
        if number % 200 == 100:
            head = request("/predict", bytes(1000))[:-1000]
            return "dripping", status(server.port, iter([head, *[b"x"] * 8]), pause=0.5)
        if number % 100 == 50:
            return "honest", status(server.port, iter([honest]))
        return upload.what, status(server.port, iter([upload.request]))

    with ThreadPoolExecutor(CLIENTS) as pool:
        for done, (what, code) in enumerate(pool.map(send, enumerate(uploads(count, seed)))):
            codes.setdefault(what, Counter())[str(code)] += 1
            if done % 250 == 0:
                most = max(most, server.resident())
                print(f"\r{done:,} of {count:,}", end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - begin
    alive = server.process.poll() is None and status(server.port, iter([honest])) == 200
    time.sleep(8)  # memory is given back every few seconds
    status(server.port, iter([honest]))
    after = server.resident()
    every = sum((Counter(found) for found in codes.values()), Counter())
    faults = {code: number for code, number in every.items() if code.startswith("5") and code != "503"}
    fair = codes.get("honest", Counter())
    held = alive and not faults and after - before < SLACK and set(fair) <= {"200"}
    rows: dict[str, Any] = {
        "uploads": count,
        "seconds": round(seconds, 1),
        "codes": dict(every.most_common()),
        "by_kind": {what: dict(found) for what, found in sorted(codes.items())},
        "alive": alive,
        "memory_before_mb": round(before / 2**20, 1),
        "memory_most_mb": round(most / 2**20, 1),
        "memory_after_mb": round(after / 2**20, 1),
        "held": held,
    }
    print("\r" + json.dumps(rows, indent=2))
    print(measure.save("uploads", rows))
    return 0 if held else 1


if __name__ == "__main__":
    main()
