"""Zero-shot accuracy on classes that no caption names: breeds of pets, with DeiT-Ti as locked image tower.

    python benchmarks/zero_shot.py
    python benchmarks/zero_shot.py --seeds 1 --epochs 10

Captions are made from the file names of Oxford-IIIT Pets, "a photo of a beagle" for beagle_12.jpg. Every third breed in
alphabetical order is held out: none of its photographs and no caption with its name is trained on. A text tower is trained
from scratch for DeiT-Ti, whose weights do not change (LiT), with the defaults of the recipe. All photographs of the held-out
breeds are then classified among these breeds by the same text with their names. Nothing is chosen on them.

DeiT-Ti was trained on ImageNet, which has some of these breeds: the image tower has seen them, the text tower has not. What can
transfer are words that breeds share, such as "terrier".
"""

import argparse
import csv
import tempfile
from pathlib import Path
from typing import Any

import measure

import vitrail

SHARED = Path(__file__).resolve().parents[2] / "shared"
WEIGHTS = SHARED / "weights" / "deit_tiny_patch16_224.safetensors"
PETS = SHARED / "data" / "pets"
TEMPLATE = "a photo of a {}"


def list_breeds(data: Path) -> dict[str, list[tuple[Path, str]]]:
    """Return the photographs of each breed with their split; the breed is the file name up to its last underscore."""
    breeds: dict[str, list[tuple[Path, str]]] = {}
    for split in ("train", "validation"):
        for path in sorted((data / split / "images").iterdir()):
            name = path.stem.rpartition("_")[0].replace("_", " ").lower()
            breeds.setdefault(name, []).append((path, split))
    return dict(sorted(breeds.items()))


def write_pairs(path: Path, breeds: dict[str, list[tuple[Path, str]]]) -> None:
    """Write the table of photographs and captions."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "caption", "split"])
        for name, photos in breeds.items():
            writer.writerows([photo, TEMPLATE.format(name), split] for photo, split in photos)


def link_classes(folder: Path, breeds: dict[str, list[tuple[Path, str]]], splits: tuple[str, ...]) -> Path:
    """Return a folder of class folders with links to the photographs of these splits."""
    for name, photos in breeds.items():
        (folder / name).mkdir(parents=True)
        for photo, split in photos:
            if split in splits:
                (folder / name / photo.name).symlink_to(photo)
    return folder


def judge(model: Path, folder: Path) -> dict[str, Any]:
    """Return the zero-shot accuracy of a model on class folders, with its interval and that of chance."""
    names = sorted(path.name for path in folder.iterdir())
    classifier = vitrail.zero_shot(vitrail.load_towers(model), names, TEMPLATE)
    found = vitrail.evaluate(classifier, f"classes:{folder}", device="cpu").as_dict()
    return {"classes": len(names), "images": found["images"], "top1": found["top1"], "interval": found["interval"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, help="instead of the recipe's")
    options = parser.parse_args()
    breeds = list_breeds(PETS)
    held = {name: photos for index, (name, photos) in enumerate(breeds.items()) if index % 3 == 2}
    seen = {name: photos for name, photos in breeds.items() if name not in held}
    print(f"held out: {', '.join(held)}", flush=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        write_pairs(folder / "pairs.csv", seen)
        tests = {"held-out breeds": link_classes(folder / "held", held, ("train", "validation"))}
        tests["trained breeds, other photographs"] = link_classes(folder / "seen", seen, ("validation",))
        for seed in range(options.seeds):
            run, summary = vitrail.train(
                folder / "pairs.csv",
                objective="clip",
                init_image=WEIGHTS,
                tune="text",
                epochs=options.epochs,
                seed=seed,
                out=folder / f"run-{seed}",
            )
            for test, where in tests.items():
                found = judge(run / "model.safetensors", where)
                rows.append({"test": test, "seed": seed, "seconds": summary["seconds"], **found})
                low, high = found["interval"]
                chance = f"chance {100 / found['classes']:.1f} %"
                accuracy = f"{100 * found['top1']:.1f} % ({100 * low:.1f}–{100 * high:.1f})"
                count = f"{found['images']} images of {found['classes']} classes"
                print(f"seed {seed}, {test}: {accuracy} of {count}, {chance}", flush=True)
            measure.save("zero_shot", rows)


if __name__ == "__main__":
    main()
