"""Speed of decoding and augmenting photographs in one process, against timm's transforms.

    python benchmarks/preparing.py

Every contestant goes from the file to a random resized crop of 224×224 (bicubic), flipped half of the time, with RandAugment
of two layers and magnitude 9: uint8 [3, 224, 224]. timm uses its own transforms (`rand-m9-n2`, pixels left as bytes for its
prefetcher; in a second row normalised by the worker). Files: photographs of about 400×534, and the same enlarged to 4000×3000,
smooth, and with sensor noise, which gives larger files that take longer to decode. One thread; interleaved in one process.
"""

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
from PIL import Image

PHOTOGRAPHS = Path(__file__).resolve().parents[2] / "shared" / "data" / "clothing" / "train"
TARGETS = {"400×534": 1.5, "12 megapixels": 4.0, "12 megapixels, grain": 4.0}


def photographs(count: int) -> list[Path]:
    """Return some of the photographs, of every class."""
    found = sorted(PHOTOGRAPHS.glob("*/*"))
    if not found:
        raise SystemExit(f"no photographs in {PHOTOGRAPHS}")
    return found[:: max(1, len(found) // count)][:count]


def enlarged(paths: list[Path], folder: Path, grain: float) -> list[Path]:
    """Write the photographs enlarged to 12 megapixels, with noise of standard deviation `grain`."""
    made, noise = [], np.random.default_rng(0)
    folder.mkdir()
    for path in paths:
        with Image.open(path) as image:
            upright = image.height > image.width
            large = image.convert("RGB").resize((3000, 4000) if upright else (4000, 3000), Image.Resampling.BICUBIC)
        if grain:
            values = np.asarray(large) + noise.normal(0, grain, (large.height, large.width, 3))
            large = Image.fromarray(values.clip(0, 255).astype(np.uint8))
        made.append(folder / f"{path.stem}.jpg")
        large.save(made[-1], quality=90)
    return made


def contestants(paths: list[Path]) -> dict[str, Any]:
    """Return the function of each contestant that prepares all files once, with new random numbers at each call."""
    from timm.data import create_transform

    from vitrail.data.rng import SampleRandom
    from vitrail.data.transforms.augment import Flip, RandAugment, RandomResizedCrop
    from vitrail.data.transforms.pipeline import TrainPipeline

    def of_timm(prefetcher: bool) -> Any:
        transform = create_transform(
            224, is_training=True, auto_augment="rand-m9-n2", interpolation="bicubic", use_prefetcher=prefetcher
        )

        def run() -> None:
            for path in paths:
                with Image.open(path) as image:
                    transform(image.convert("RGB"))

        return run

    prepare = TrainPipeline((RandomResizedCrop((224, 224)), Flip(), RandAugment(2, 9)))
    epoch = iter(range(1_000_000))

    def vitrail() -> None:
        now = next(epoch)
        for index, path in enumerate(paths):
            with Image.open(path) as image:
                prepare(image, SampleRandom(0, now, index))

    return {"vitrail": vitrail, "timm, bytes": of_timm(True), "timm, normalised": of_timm(False)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pictures", type=int, default=160)
    options = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        chosen = photographs(options.pictures)
        few = chosen[:: max(1, len(chosen) // 12)]
        sets = {
            "400×534": chosen,
            "12 megapixels": enlarged(few, Path(name) / "smooth", 0),
            "12 megapixels, grain": enlarged(few, Path(name) / "grain", 5),
        }
        for what, paths in sets.items():
            seconds = measure.interleave(contestants(paths), options.rounds)
            took = {who: measure.median(times) / len(paths) for who, times in seconds.items()}
            row = {
                "pictures": what,
                "files": len(paths),
                "bytes": sum(path.stat().st_size for path in paths),
                "milliseconds": {who: 1e3 * s for who, s in took.items()},
            }
            row["ratio"] = {who: took[who] / took["vitrail"] for who in took if who != "vitrail"}
            row["target"] = TARGETS[what]
            rows.append(row)
            for who, each in took.items():
                ratio = "" if who == "vitrail" else f"{row['ratio'][who]:8.2f} × vitrail"
                print(f"{what:<22}{who:<20}{1e3 * each:8.2f} ms per image{ratio}")
            print(f"{what:<22}{'target':<20}{TARGETS[what]:24.2f}")
    print(f"written to {measure.save('preparing', rows)}")


if __name__ == "__main__":
    main()
