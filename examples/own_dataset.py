"""Train vitrail on a dataset of your own: a class with a length and samples, then train, load and predict.

    python examples/own_dataset.py
    python examples/own_dataset.py --epochs 3 --out my-run

`Crops` is the part to replace. `len(crops)` and `crops[index]`, an image and its label, are all that vitrail needs, so any
PyTorch dataset will do. Here it cuts two real photographs of scikit-learn into crops of 32×32 pixels, and the task is to
tell which photograph a crop is from. The left part of each photograph is for training, the right part for validation and
test. Expect a test accuracy near 90 % after ten seconds on one core, and a run directory with `model.safetensors` and
`report.html`.

Images that are files already need no class: give `vitrail.train` a folder of class folders, or a list of (path, label).
"""

import argparse
import tempfile
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_sample_images

import vitrail

SIDE = 32
PARTS = {"train": (0.0, 0.7), "validation": (0.7, 0.85), "test": (0.85, 1.0)}  # of the width


class Crops:
    """Crops of two photographs, of the part of the width that a split has."""

    classes = ("temple", "flower")  # names of the labels 0 and 1

    def __init__(self, split: str) -> None:
        self.photographs = load_sample_images().images  # uint8, [427, 640, 3] each
        height, width, _ = self.photographs[0].shape
        first, last = (part * width for part in PARTS[split])
        lefts = [left for left in range(0, width - SIDE + 1, SIDE) if first <= left < last]
        tops = range(0, height - SIDE + 1, SIDE)
        self.corners = [(label, top, left) for label in range(2) for left in lefts for top in tops]

    def __len__(self) -> int:
        return len(self.corners)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        label, top, left = self.corners[index]
        return Image.fromarray(self.photographs[label][top : top + SIDE, left : left + SIDE]), label


def print_record(record: dict) -> None:
    """Print the notes and the validations of a run."""
    if record["kind"] == "note":
        print(record["text"], flush=True)
    elif record["kind"] == "validation":
        print(f"step {record['step']:4d}  validation accuracy {record['top1']:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train vitrail on a dataset written in Python.")
    parser.add_argument("--epochs", type=float, default=8, help="passes over the training images (default 8)")
    parser.add_argument("--out", type=Path, help="new folder for the run (default: a temporary one)")
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="vitrail-"))

    data = {split: Crops(split) for split in PARTS}
    run, summary = vitrail.train(data, out=out / "run", epochs=args.epochs, batch_size=32, listeners=(print_record,))
    print(f"test accuracy {summary['top1']:.3f} on {summary['images']} images; see {run / 'report.html'}")

    model = vitrail.load(run / "model.safetensors")
    held_out = [data["test"][index] for index in range(0, len(data["test"]), 20)]
    rows = vitrail.predict(model, [image for image, _ in held_out])
    for (_, label), row in zip(held_out, rows, strict=True):
        print(f"{row.path}  label {Crops.classes[label]}  predicted {row.label} ({row.score:.2f})")


if __name__ == "__main__":
    main()
