"""Zero-shot accuracy on classes that no caption names: breeds of pets, with DeiT-Ti as locked image tower.

    python benchmarks/zero_shot.py
    python benchmarks/zero_shot.py --captions species --seeds 1 --epochs 10

Captions are made from the file names of Oxford-IIIT Pets, "a photo of a beagle" for beagle_12.jpg. With the species, "a photo of
a beagle dog": names with a capital letter are those of cats. Every third breed in
alphabetical order is held out: none of its photographs and no caption with its name is trained on. A text tower is trained
from scratch for DeiT-Ti, whose weights do not change (LiT), with the model, the optimiser and the length of the recipe
`contrastive`. The features of a locked tower are computed once, without crops at random, so a run takes a minute. All
photographs of the held-out breeds are then classified among these breeds by the same text with their names. Nothing is chosen
on them.

DeiT-Ti was trained on ImageNet, which has some of these breeds: the image tower has seen them, the text tower has not. What can
transfer are words that breeds share: "terrier", and with the species "cat" and "dog".
"""

import argparse
import time
from pathlib import Path
from typing import Any

import measure
import torch
import torch.nn.functional as F
from torch import Tensor

import vitrail
from vitrail.data.bpe import train_tokenizer
from vitrail.metrics.intervals import wilson_interval
from vitrail.models.registry import build_from
from vitrail.models.sizes import Size
from vitrail.models.text import TextConfig
from vitrail.models.two_towers import TwoTowers, TwoTowersConfig
from vitrail.objectives.contrastive import softmax_loss
from vitrail.training.schedule import Cosine

SHARED = Path(__file__).resolve().parents[2] / "shared"
WEIGHTS = SHARED / "weights" / "deit_tiny_patch16_224.safetensors"
PETS = SHARED / "data" / "pets"
TEMPLATE = "a photo of a {}"
BATCH = 32

Breeds = dict[str, list[tuple[Path, str]]]  # photographs of a breed with their split


def list_breeds(data: Path, with_species: bool) -> Breeds:
    """Return the photographs of each breed with their split; the breed is the file name up to its last underscore."""
    breeds: Breeds = {}
    for split in ("train", "validation"):
        for path in sorted((data / split / "images").iterdir()):
            breed = path.stem.rpartition("_")[0]
            species = (" cat" if breed[0].isupper() else " dog") if with_species else ""
            name = breed.replace("_", " ").lower() + species
            breeds.setdefault(name, []).append((path, split))
    return dict(sorted(breeds.items()))


@torch.inference_mode()
def compute_features(tower: vitrail.Model, breeds: Breeds) -> dict[Path, Tensor]:
    """Return the features of all photographs as unit vectors [F]."""
    paths, features = [path for photos in breeds.values() for path, _ in photos], {}
    for start in range(0, len(paths), BATCH):
        part = paths[start : start + BATCH]
        found = tower.embed_images(torch.stack([tower.preprocessing(path) for path in part]))
        features |= zip(part, F.normalize(found, dim=-1).clone(), strict=True)
        print(f"\rfeatures of {len(features)} of {len(paths)} photographs", end="", flush=True)
    print(flush=True)
    return features


def train(tower: vitrail.Model, features: Tensor, captions: list[str], epochs: float) -> TwoTowers:
    """Return both towers after training the text tower for the features [n, F] of photographs and their captions."""
    tokenizer = train_tokenizer(captions)
    text = TextConfig(Size(4, 128, 512, 4), features.shape[1], tokenizer.vocabulary, tokenizer.context)
    towers = build_from(TwoTowersConfig(tower.config, text))
    assert isinstance(towers, TwoTowers)
    towers.image.load_state_dict(tower.state_dict())
    towers.tokenizer = tokenizer
    trained = {name: p for name, p in towers.named_parameters() if not name.startswith("image.")}
    decayed = [p for name, p in trained.items() if towers.decays(name, p)]
    others = [p for name, p in trained.items() if not towers.decays(name, p)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    steps = round(epochs * (len(captions) // BATCH))
    schedule = Cosine(warmup=max(1, steps // 10))
    tokens, order = tokenizer(captions), torch.empty(0, dtype=torch.long)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * schedule.factor(step, steps)
        if len(order) < BATCH:
            order = torch.randperm(len(captions))
        batch, order = order[:BATCH], order[BATCH:]
        loss = softmax_loss(towers.logits, features[batch], towers.encode_texts(tokens[batch]), torch.arange(BATCH))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
    return towers.eval()


@torch.inference_mode()
def judge(towers: TwoTowers, features: dict[Path, Tensor], breeds: Breeds, splits: tuple[str, ...]) -> dict[str, Any]:
    """Return the zero-shot accuracy on the photographs of these splits, with its interval."""
    classifier = vitrail.zero_shot(towers, list(breeds), TEMPLATE)
    right, count = 0, 0
    for index, photos in enumerate(breeds.values()):
        for path, split in photos:
            if split in splits:
                right += int(classifier.classify(features[path][None]).argmax()) == index
                count += 1
    return {"classes": len(breeds), "images": count, "top1": right / count, "interval": wilson_interval(right, count)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captions", nargs="+", default=["breed", "species"], choices=("breed", "species"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=40, help="the recipe's for so few pairs [40]")
    options = parser.parse_args()
    tower = vitrail.load(WEIGHTS, classes=None)
    features = compute_features(tower, list_breeds(PETS, False))
    rows: list[dict[str, Any]] = []
    for captions in options.captions:
        breeds = list_breeds(PETS, captions == "species")
        held = {name: photos for index, (name, photos) in enumerate(breeds.items()) if index % 3 == 2}
        seen = {name: photos for name, photos in breeds.items() if name not in held}
        print(f"held out: {', '.join(held)}", flush=True)
        pairs = [
            (path, TEMPLATE.format(name)) for name, photos in seen.items() for path, part in photos if part == "train"
        ]
        inputs = torch.stack([features[path] for path, _ in pairs])
        tests = {"held-out breeds": (held, ("train", "validation"))}
        tests["trained breeds, other photographs"] = (seen, ("validation",))
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            begin = time.process_time()
            towers = train(tower, inputs, [caption for _, caption in pairs], options.epochs)
            seconds = time.process_time() - begin
            for test, (classes, splits) in tests.items():
                found = judge(towers, features, classes, splits)
                rows.append({"captions": captions, "test": test, "seed": seed, "seconds": seconds, **found})
                low, high = found["interval"]
                chance = f"chance {100 / found['classes']:.1f} %"
                accuracy = f"{100 * found['top1']:.1f} % ({100 * low:.1f}–{100 * high:.1f})"
                count = f"{found['images']} images of {found['classes']} classes"
                print(f"captions with {captions}, seed {seed}, {test}: {accuracy} of {count}, {chance}", flush=True)
            measure.save("zero_shot", rows)


if __name__ == "__main__":
    main()
