"""Time and memory of listing a tree of a million images, against the file system itself.

    python benchmarks/listing.py --files 1000000

The tree has empty files in 1,000 class folders, in a temporary folder below the current one, and is removed afterwards. Each
method lists it in a process of its own: `scandir` alone, the lower bound; vitrail; and the method of torchvision's ImageFolder
(os.walk, sorted, a list of pairs), written out to exclude torchvision's import.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def scandir(root: str) -> int:
    count, folders = 0, [root]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    folders.append(entry.path)
                else:
                    count += 1
    return count


def ours(root: str) -> int:
    from vitrail.data.sources import load_dataset

    return len(load_dataset(root, fractions=(1.0, 0.0, 0.0))["train"])


def pairs(root: str) -> int:
    found = []
    for target, name in enumerate(sorted(entry.name for entry in os.scandir(root) if entry.is_dir())):
        for folder, _, files in sorted(os.walk(os.path.join(root, name), followlinks=True)):
            found += [(os.path.join(folder, file), target) for file in sorted(files) if file.lower().endswith(".jpg")]
    return len(found)


WAYS = {"scandir alone": scandir, "vitrail": ours, "a list of pairs": pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "listing.json")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--root", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        begin = time.perf_counter()
        count = WAYS[options.way](options.root)
        seconds = time.perf_counter() - begin
        print(json.dumps([count, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
        return
    root = tempfile.mkdtemp(prefix="listing-", dir=".")
    try:
        for number in range(1000):
            folder = os.path.join(root, f"n{number:08}")
            os.mkdir(folder)
            for file in range(options.files // 1000):
                os.close(os.open(os.path.join(folder, f"n{number:08}_{file:08}.JPEG.jpg"), os.O_CREAT))
        results: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way in WAYS:
                command = [sys.executable, __file__, "--way", way, "--root", root]
                results[way].append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    finally:
        shutil.rmtree(root)
    table = {
        way: {"files": rounds[0][0], "seconds": min(r[1] for r in rounds), "megabytes": max(r[2] for r in rounds)}
        for way, rounds in results.items()
    }
    for way, row in table.items():
        print(f"{way:16} {row['files']:>9,} files  {row['seconds']:6.2f} s  {row['megabytes']:6.0f} MB at most")
    print(f"vitrail / scandir alone: {table['vitrail']['seconds'] / table['scandir alone']['seconds']:.2f} times")
    options.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
