"""Speed of decoding and augmenting photographs with their masks in one process, against albumentations.

    python benchmarks/preparing_masks.py [DIRECTORY] [--profile]

The directory holds `images` and `masks` with equal names; the default is shared/data/pets/train beside the checkout. Every
contestant goes from the two files to a random resized crop of 224×224 (bilinear, the mask nearest), flipped half of the time,
with colour jitter of brightness, contrast and saturation, in a second row also of hue: uint8 [3, 224, 224] and [224, 224].
albumentations reads with OpenCV, and in a second contestant with Pillow. Files: as they are, and enlarged to 12 megapixels, as
cameras write them, where only the image can be decoded at a reduced scale; and decoded images in memory, as vitrail's loader
keeps small images after the first epoch. vitrail decodes with simplejpeg if it is installed. One thread; interleaved in one
process. `--profile` prints the processor time of every stage instead, in the order in which an image passes through them.
"""

import argparse
import random
import tempfile
import time
from collections import Counter
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


def build_contestants(pairs: list[tuple[Path, Path]], hue: float, decoded: bool) -> dict[str, Callable[[], None]]:
    """Return the function of each contestant that prepares all images once, with new random numbers at each call."""
    import albumentations as A
    import cv2

    from vitrail.data.decode import DecodedImage
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

    if decoded:
        images = [np.array(Image.open(path).convert("RGB")) for path, _ in pairs]
        masks = [np.array(Image.open(path)) for _, path in pairs]
        sources = [DecodedImage(torch.from_numpy(i), mask=mask) for i, mask in zip(images, masks, strict=True)]

        def run_vitrail_decoded() -> None:
            now = next(epoch)
            for index, source in enumerate(sources):
                ours.apply(source, SampleRandom(0, now, index))

        def run_decoded() -> None:
            for image, mask in zip(images, masks, strict=True):
                theirs(image=image, mask=mask)

        return {"vitrail": run_vitrail_decoded, "albumentations": run_decoded}
    return {
        "vitrail": run_vitrail,
        "albumentations, OpenCV": run_with_opencv,
        "albumentations, Pillow": run_with_pillow,
    }


def profile_stages(pairs: list[tuple[Path, Path]], rounds: int) -> dict[str, float]:
    """Return the processor time of every stage of preparing an image with hue, in microseconds."""
    from vitrail.data.decode import LazyImage, resize, resize_mask, start_decoding
    from vitrail.data.rng import SampleRandom
    from vitrail.data.transforms.augment import Flip, RandomResizedCrop
    from vitrail.data.transforms.operations import (
        rotate_hue,
        scale_brightness,
        scale_contrast,
        scale_saturation,
        to_bytes,
    )

    crop, flip = RandomResizedCrop((224, 224), interpolation="bilinear"), Flip()
    times: Counter[str] = Counter()
    last = 0.0

    def mark(stage: str) -> None:
        nonlocal last
        now = time.thread_time()
        times[stage] += now - last
        last = time.thread_time()

    for epoch in range(rounds + 2):
        if epoch == 2:  # the first two rounds warm up
            times.clear()
        for index, (path, mask_path) in enumerate(pairs):
            last, rng = time.thread_time(), SampleRandom(0, epoch, index)
            with Image.open(mask_path) as mask_image, Image.open(path) as image:
                mark("open both files, read headers")
                mask = np.asarray(mask_image)
                mark("decode the mask")
                source: LazyImage = start_decoding(image, 3, True, mask)
                box = crop.sample_box(*source.size, rng)
                mark("sample the crop")
                pixels, shown = source.read_region(box, crop.size)
                mark("decode the image")
            row = resize(pixels, crop.size, crop.interpolation)
            mark("resize the image")
            moved = resize_mask(mask, crop.size, (shown.top, shown.left, shown.height, shown.width))
            mark("resize the mask")
            row, moved = flip.apply(row, rng), flip.apply(torch.from_numpy(moved), rng)
            mark("flip both")
            values = row.float()
            mark("convert to float32")
            for name, operation, factor in (
                ("brightness", scale_brightness, 1.2),
                ("contrast", scale_contrast, 1.2),
                ("saturation", scale_saturation, 1.2),
                ("hue", rotate_hue, 0.05),
            ):
                operation(values, factor)
                mark(name)
            torch.cat((to_bytes(values), moved[None]))
            mark("convert to bytes, join")
    return {stage: 1e6 * seconds / rounds / len(pairs) for stage, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", default=PETS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--images", type=int, default=160)
    parser.add_argument(
        "--profile", action="store_true", help="print the processor time of every stage, and nothing else"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    stored, rows = find_pairs(options.directory, options.images), []
    if options.profile:
        for stage, each in profile_stages(stored, options.rounds).items():
            print(f"{stage:<32}{each:8.0f} µs")
        return
    with tempfile.TemporaryDirectory() as name:
        large = enlarge_pairs(stored[:: max(1, len(stored) // 8)], Path(name))
        for what, pairs in {"as stored": stored, "12 megapixels": large, "decoded": stored}.items():
            for jitter, hue in {"without hue": 0.0, "with hue": 0.1}.items():
                contestants = build_contestants(pairs, hue, what == "decoded")
                seconds = measure.interleave(contestants, options.rounds)
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
