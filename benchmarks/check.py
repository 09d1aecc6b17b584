"""Time of `vitrail check`: 3,000 photographs of ImageNet's size, without and with the cache; near-duplicates in a million.

    python benchmarks/check.py

The photographs are crops, some of them mirrored, of those in ../shared/data/imagenet-samples, about 500×375 and 110 KB each,
written to a temporary folder and therefore in the page cache. Each round is a process of its own, from the start of Python to
the printed table. A plain script, interleaved with it, only decodes the same files in as many processes. Near-duplicates are
searched among mixtures of real photographs' grey values, 1 % of which are slightly changed copies.
"""

import argparse
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measure
import numpy as np
from PIL import Image, ImageOps

PHOTOGRAPHS = Path(__file__).parents[2] / "shared" / "data" / "imagenet-samples"
PLAIN = """
import sys
from multiprocessing import Pool
from pathlib import Path
from PIL import Image
def decode(path):
    Image.open(path).load()
if __name__ == "__main__":
    with Pool(int(sys.argv[2])) as pool:
        for _ in pool.imap_unordered(decode, Path(sys.argv[1]).rglob("*.jpg"), 32):
            pass
"""


def photographs(root: Path, count: int) -> float:
    """Write the photographs, ten classes in two splits, and return their mean size in bytes."""
    sources = sorted(PHOTOGRAPHS.iterdir())
    random = np.random.default_rng(0)
    total = 0
    for number in range(count):
        picture = Image.open(sources[number % len(sources)]).convert("RGB")
        scale = max(500 / picture.width, 375 / picture.height) * random.uniform(1.05, 1.3)
        picture = picture.resize(
            (round(picture.width * scale), round(picture.height * scale)), Image.Resampling.BICUBIC
        )
        left, top = random.integers(0, picture.width - 499), random.integers(0, picture.height - 374)
        picture = picture.crop((left, top, left + 500, top + 375))
        picture = ImageOps.mirror(picture) if random.random() < 0.5 else picture
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=95, subsampling=0)
        folder = root / ("validation" if number % 5 == 0 else "train") / f"class {number % 10}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:06}.jpg").write_bytes(file.getvalue())
        total += len(file.getvalue())
    return total / count


def timed(command: list[str], environment: dict[str, str]) -> tuple[float, float, float]:
    """Return wall-clock seconds, processor seconds, and the peak memory in MB of the largest process so far."""
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL, env=environment)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    processors = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, processors, after.ru_maxrss / 1024


def checking(count: int, rounds: int) -> dict[str, Any]:
    """Measure a first run, a second run with the cache, and the plain script."""
    workers = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        root, caches = Path(name) / "photographs", Path(name) / "cache"
        size = photographs(root, count)
        script = Path(name) / "plain.py"
        script.write_text(PLAIN)
        environment = {**os.environ, "XDG_CACHE_HOME": str(caches)}
        check = [sys.executable, "-m", "vitrail", "check", str(root)]
        plain = [sys.executable, str(script), str(root), str(workers)]
        commands = {"first": check, "again": check, "decoding alone": plain}
        seconds: dict[str, list[float]] = {what: [] for what in commands}
        processors: dict[str, list[float]] = {what: [] for what in commands}
        peak = 0.0
        for _ in range(rounds):
            shutil.rmtree(caches, ignore_errors=True)
            for what, command in commands.items():
                took, worked, peak = timed(command, environment)
                seconds[what].append(took)
                processors[what].append(worked)
        remembered = sum(file.stat().st_size for file in caches.rglob("*") if file.is_file())
    middle = {what: measure.median(times) for what, times in seconds.items()}
    for what, took in middle.items():
        print(
            f"{count:,} photographs of {size / 1024:.0f} KB, {what:<15}{took:7.2f} s {count / took:8,.0f} images/s"
            f"   {measure.median(processors[what]):7.2f} s processor time"
        )
    print(
        f"target: 3,000 in 10 s; here {3000 * middle['first'] / count:.2f} s, {workers} processes, {peak:.0f} MB at most"
    )
    return {
        "photographs": count,
        "bytes": size,
        "processes": workers,
        "seconds": middle,
        "worst": {what: max(times) for what, times in seconds.items()},
        "processor_seconds": {what: measure.median(times) for what, times in processors.items()},
        "a_second": {what: count / took for what, took in middle.items()},
        "megabytes": peak,
        "cache_bytes": remembered,
    }


def looking_alike(count: int) -> dict[str, Any]:
    """Measure the search for near-duplicates and the share of the changed copies it finds."""
    from vitrail.data.audit.duplicates import find_near_pairs
    from vitrail.data.audit.image import inspect_bytes

    random = np.random.default_rng(0)
    thumbs = [inspect_bytes(path.read_bytes()).thumb for path in sorted(PHOTOGRAPHS.iterdir())]
    real = np.stack([np.frombuffer(thumb, np.uint8) for thumb in thumbs]).astype(np.float32)
    one, two, three = random.integers(0, len(real), (3, count))
    share = random.dirichlet((1, 1, 1), count).astype(np.float32)
    mixed = share[:, :1] * real[one] + share[:, 1:2] * real[two][:, ::-1] + share[:, 2:] * (255 - real[three])
    mixed = (mixed + random.normal(0, 4, mixed.shape)).clip(0, 255).astype(np.uint8)
    copies = count // 100
    noise = random.integers(-2, 3, (copies, mixed.shape[1]))
    mixed[-copies:] = (mixed[:copies].astype(int) + noise).clip(0, 255)
    begin = time.perf_counter()
    pairs = find_near_pairs(mixed)
    seconds = time.perf_counter() - begin
    found = {tuple(pair) for pair in pairs[:, :2].tolist()}
    recall = sum((place, count - copies + place) in found for place in range(copies)) / copies
    print(f"near-duplicates among {count:>9,}: {seconds:6.2f} s, {recall:.1%} of the copies found")
    return {"pictures": count, "seconds": seconds, "copies_found": recall, "pairs": len(pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photographs", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alike", type=int, nargs="*", default=[100_000, 1_000_000], metavar="N")
    options = parser.parse_args()
    if not PHOTOGRAPHS.is_dir():
        raise SystemExit(f"the photographs are not beside this checkout: {PHOTOGRAPHS}")
    rows = {
        "checking": checking(options.photographs, options.rounds),
        "looking_alike": [looking_alike(count) for count in options.alike],
    }
    print(json.dumps(rows["checking"]["worst"]))
    print(f"written to {measure.save('check', rows)}")


if __name__ == "__main__":
    main()
