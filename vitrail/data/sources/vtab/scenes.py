"""Pictures whose label is computed from what is in them: CLEVR's scenes, and KITTI's drives. The classes are VTAB's."""

import json
from pathlib import Path

import numpy as np

from vitrail.data.sources.vtab.found import Found, lines, needed, step
from vitrail.data.sources.vtab.lists import Listed, listed

COUNTS = tuple(str(count) for count in range(3, 11))  # objects in a scene of CLEVR
NEAR = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0)  # how far CLEVR's closest object is
DISTANCES = tuple(f"over {threshold:g}" for threshold in NEAR)
VEHICLES = frozenset({"Car", "Van", "Truck"})
METRES = (-100.0, 8.0, 20.0, 999.0)  # how far KITTI's closest vehicle is; the last is for none
DRIVES = ("near", "over 8 m", "over 20 m", "none")
NOWHERE = 1000.0


def clevr(folder: Path, task: str) -> Found:
    """images/train/… and scenes/CLEVR_train_scenes.json; val is what is tested on, since test has no scenes."""
    found: list[Listed] = []
    for split, part in (("train", "train"), ("test", "val")):
        path = needed(folder, f"scenes/CLEVR_{part}_scenes.json")
        try:
            for scene in json.loads(path.read_text(encoding="utf-8"))["scenes"]:
                label = str(len(scene["objects"]))
                if task == "distance":
                    label = DISTANCES[step(NEAR, min(each["pixel_coords"][2] for each in scene["objects"]))]
                found.append((folder / "images" / part / scene["image_filename"], label, split))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{path} has no scenes of CLEVR ({error!r}): get it again") from None
    return listed(found, order=COUNTS if task == "count" else DISTANCES)


def kitti(folder: Path) -> Found:
    """training/image_2/000000.png and training/label_2/000000.txt, an object a line: its type first, its place x, y, z at 11 to
    13. Whole drives are on one side where the devkit's mapping lies there: frames of one drive look alike."""
    drives = drives_of(folder)
    found: list[Listed] = []
    for path in sorted(needed(folder, "training/label_2").glob("*.txt")):
        try:
            objects = [line.split() for line in lines(path)]
            depths = [float(each[13]) for each in objects if each[0] in VEHICLES]
        except (ValueError, IndexError):
            raise ValueError(f"{path} is no list of KITTI's objects, 15 words a line: get it again") from None
        label = DRIVES[step(METRES, min([*depths, NOWHERE]))]
        split = None if drives is None else drives[int(path.stem)]
        found.append((folder / "training" / "image_2" / f"{path.stem}.png", label, split))
    if drives is not None:
        return listed(found, order=DRIVES)
    note = "frames of one drive may be on both sides: put the devkit's folder mapping beside training"
    return listed(found, order=DRIVES, fractions=(0.8, 0.1, 0.1), notes=(note,))


def drives_of(folder: Path) -> list[str] | None:
    """The split of each picture by its drive, a tenth of the drives for validation and for testing; None without mapping."""
    mapping, order = folder / "mapping" / "train_mapping.txt", folder / "mapping" / "train_rand.txt"
    if not mapping.is_file() or not order.is_file():
        return None
    frames = [line.split()[1] for line in lines(mapping)]
    names = sorted(set(frames))
    shuffled = [names[place] for place in np.random.default_rng(0).permutation(len(names))]
    tenth = max(1, round(len(names) / 10))
    sides = dict.fromkeys(names, "train") | dict.fromkeys(shuffled[:tenth], "validation")
    sides |= dict.fromkeys(shuffled[tenth : 2 * tenth], "test")
    return [
        sides[frames[int(number) - 1]] for number in order.read_text().replace("\n", ",").split(",") if number.strip()
    ]
