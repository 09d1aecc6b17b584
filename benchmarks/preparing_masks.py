"""Speed of decoding and augmenting photographs with their masks in one process, against albumentations.

    python benchmarks/preparing_masks.py [DIRECTORY]

The directory holds `images` and `masks` with equal names; the default is shared/data/pets/train beside the checkout. Every
contestant goes from the two files to a random resized crop of 224×224 (bilinear, the mask nearest), flipped half of the time,
with colour jitter of brightness, contrast and saturation, in a second row also of hue: uint8 [3, 224, 224] and [224, 224].
albumentations reads with OpenCV, and in a second contestant with Pillow. Files: as they are, and enlarged to 12 megapixels, as
cameras write them, where only the image can be decoded at a reduced scale. One thread; interleaved in one process.
"""

import argparse
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import measure
import numpy as np
import torch
from PIL import Image

PETS = Path(__file__).resolve().parents[2] / "shared" / "data" / "pets" / "train"
TARGET = 1.2  # times the speed of the faster albumentations


def find_pairs(directory: Path, count: int) -> list[tuple[Path, Path]]:
    """Return some of the images, each with its mask."""
    masks = {path.stem: path for path in (directory / "masks").glob("*")}
    pairs = [(path, masks[path.stem]) for path in sorted((directory / "images").glob("*")) if path.stem in masks]
    if not pairs:
        raise SystemExit(f"no images with masks in {directory}: give a directory with images/ and masks/")
    return pairs[:: max(1, len(pairs) // count)][:count]


def enlarge_pairs(pairs: list[tuple[Path, Path]], folder: Path) -> list[tuple[Path, Path]]:
    """Write the images and masks enlarged to 12 megapixels."""
    large = []
    for path, mask_path in pairs:
        paths = folder / f"{path.stem}.jpg", folder / f"{path.stem}.png"
        with Image.open(path) as image, Image.open(mask_path) as mask:
            size = (3000, 4000) if image.height > image.width else (4000, 3000)
            image.convert("RGB").resize(size, Image.Resampling.BICUBIC).save(paths[0], quality=90)
            mask.resize(size, Image.Resampling.NEAREST).save(paths[1])
        large.append(paths)
    return large


def build_contestants(pairs: list[tuple[Path, Path]], hue: float) -> dict[str, Callable[[], None]]:
    """Return the function of each contestant that prepares all files once, with new random numbers at each call."""
    import albumentations as A
    import cv2

    from vitrail.data.rng import SampleRandom
    from vitrail.data.transforms.augment import ColourJitter, Flip, RandomResizedCrop
    from vitrail.data.transforms.pipeline import TrainPipeline

    cv2.setNumThreads(1)
    theirs = A.Compose(
        [
            A.RandomResizedCrop((224, 224), interpolation=cv2.INTER_LINEAR, mask_interpolation=cv2.INTER_NEAREST),
            A.HorizontalFlip(),
            A.ColorJitter((0.6, 1.4), (0.6, 1.4), (0.6, 1.4), (-hue, hue), p=1.0),
        ]
    )
    crop = RandomResizedCrop((224, 224), interpolation="bilinear")
    ours = TrainPipeline((crop, Flip(), ColourJitter(0.4, 0.4, 0.4, hue)), masks=True)
    epoch = iter(range(1_000_000))

    def run_vitrail() -> None:
        now = next(epoch)
        for index, (path, mask_path) in enumerate(pairs):
            with Image.open(mask_path) as mask, Image.open(path) as image:
                ours(image, SampleRandom(0, now, index), np.asarray(mask))

    def run_with_opencv() -> None:
        for path, mask_path in pairs:
            image = cv2.imread(str(path), cv2.IMREAD_COLOR_RGB)
            theirs(image=image, mask=cv2.imread(str(mask_path), cv2.IMREAD_GRAYSCALE))

    def run_with_pillow() -> None:
        for path, mask_path in pairs:
            with Image.open(mask_path) as mask, Image.open(path) as image:
                theirs(image=np.array(image.convert("RGB")), mask=np.array(mask))

    return {
        "vitrail": run_vitrail,
        "albumentations, OpenCV": run_with_opencv,
        "albumentations, Pillow": run_with_pillow,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=PETS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--images", type=int, default=160)
    options = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    stored, rows = find_pairs(options.directory, options.images), []
    with tempfile.TemporaryDirectory() as name:
        large = enlarge_pairs(stored[:: max(1, len(stored) // 8)], Path(name))
        for what, pairs in {"as stored": stored, "12 megapixels": large}.items():
            for jitter, hue in {"without hue": 0.0, "with hue": 0.1}.items():
                seconds = measure.interleave(build_contestants(pairs, hue), options.rounds)
                took = {who: 1e3 * measure.median(times) / len(pairs) for who, times in seconds.items()}
                ratios = {who: each / took["vitrail"] for who, each in took.items() if who != "vitrail"}
                rows.append({"files": what, "jitter": jitter, "images": len(pairs), "milliseconds": took})
                rows[-1] |= {"ratio": ratios, "target": TARGET}
                for who, each in took.items():
                    ratio = f"{ratios[who]:8.2f} × vitrail" if who in ratios else ""
                    print(f"{what:<16}{jitter:<14}{who:<26}{each:8.2f} ms per image{ratio}")
                print(f"{what:<16}{jitter:<14}{'target':<26}{TARGET:30.2f}")
    print(f"written to {measure.save('preparing_masks', rows)}")


if __name__ == "__main__":
    main()
