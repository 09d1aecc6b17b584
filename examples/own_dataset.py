"""Train vitrail on a dataset of your own: write the images and one CSV, then train, load and predict.

    python examples/own_dataset.py
    python examples/own_dataset.py --epochs 3 --out my-run

`iterate_samples` is the part to replace: it yields an image, its label and its split, from wherever your data are. Here
it cuts two real photographs of scikit-learn into crops of 32×32 pixels, and the task is to tell which photograph a crop
is from. The left part of each photograph is for training, the right part for validation and test. Expect a test
accuracy near 90 % after ten seconds on one core, and a run directory with `model.safetensors` and `report.html`.

Images that are files already need no copy: let the CSV name them, or give `vitrail.train` a folder of class folders.
"""

import argparse
import csv
import tempfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_sample_images

import vitrail

SIDE = 32


def iterate_samples() -> Iterator[tuple[Image.Image, str, str]]:
    """Yield image, label and split of every sample."""
    photographs = dict(zip(("temple", "flower"), load_sample_images().images, strict=True))
    for label, pixels in photographs.items():  # uint8, [427, 640, 3]
        height, width, _ = pixels.shape
        for left in range(0, width - SIDE + 1, SIDE):
            split = "train" if left < 0.7 * width else "validation" if left < 0.85 * width else "test"
            for top in range(0, height - SIDE + 1, SIDE):
                yield Image.fromarray(pixels[top : top + SIDE, left : left + SIDE]), label, split


def write_dataset(folder: Path) -> Path:
    """Write every sample as PNG, and the CSV with the columns path, label and split; return the CSV."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    table = folder / "labels.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("path", "label", "split"))
        for index, (image, label, split) in enumerate(iterate_samples()):
            path = f"images/{index:05d}.png"  # relative to the CSV
            image.save(folder / path)
            rows.writerow((path, label, split))
    return table


def print_record(record: dict) -> None:
    """Print the notes and the validations of a run."""
    if record["kind"] == "note":
        print(record["text"], flush=True)
    elif record["kind"] == "validation":
        print(f"step {record['step']:4d}  validation accuracy {record['top1']:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train vitrail on images and labels written from Python.")
    parser.add_argument("--epochs", type=float, default=8, help="passes over the training images (default 8)")
    parser.add_argument("--out", type=Path, help="new folder for the data and the run (default: a temporary one)")
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="vitrail-"))

    table = write_dataset(out / "data")
    run, summary = vitrail.train(
        str(table), out=out / "run", overrides={"epochs": args.epochs, "batch_size": 32}, listeners=(print_record,)
    )
    print(f"test accuracy {summary['top1']:.3f} on {summary['images']} images; see {run / 'report.html'}")

    with table.open(newline="", encoding="utf-8") as file:
        held_out = [row for row in csv.DictReader(file) if row["split"] == "test"][::20]
    rows = vitrail.predict(run / "model.safetensors", [table.parent / row["path"] for row in held_out])
    for expected, row in zip(held_out, rows, strict=True):
        print(f"{expected['path']}  label {expected['label']}  predicted {row.label} ({row.score:.2f})")


if __name__ == "__main__":
    main()
