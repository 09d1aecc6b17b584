"""Fine-tuning DeiT-Ti on masks of pets, against a plain PyTorch loop with timm's backbone: speed, accuracy, memory.

    python benchmarks/segmentation.py                                   speed, both precisions, interleaved
    python benchmarks/segmentation.py --train --minutes 10 --seeds 0 1 2
    python benchmarks/segmentation.py --train --steps 1000 700 --only plain --seeds 1 --runs DIR
    python benchmarks/segmentation.py --memory                          peak memory of inference

The same work for both: images of 224×224, random resized crops (scale 0.25 to 1, bicubic) and flips, batches of 16, AdamW,
cosine schedule with warm-up, and the same head: vitrail's UPerNet, with `--frozen` the linear decoder on a frozen backbone.
vitrail: the recipe `segment` without its colour jitter, that is with layer decay, Dice loss and an EMA of the weights.
Plain: timm's `features_only` model, cross-entropy, one learning rate for the backbone and one for the head, albumentations
with OpenCV, and a DataLoader with two workers.

Speed: both with their loading, a few steps at a time, after unmeasured ones. `--train` trains for as many steps as fit into the
minutes at the measured speed, which needs free cores. `--steps` gives these numbers instead: accuracy depends on them and not
on what else the machine does, so runs may share the cores, and a run that was stopped is resumed from its directory. Scores
are of the validation split at the size of the masks: mean IoU of pet, background and border, and IoU of the pet over the pixels
that are not border, between pet and background. `--border ignore` trains without the border, on two classes.

Memory: one image of 1024×1024 with 150 classes and fresh heads in float32, whole, and in windows of 512×512; beside it the same
model called on the whole image. Each in a process of its own.
"""

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import measure
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

SHARED = Path(__file__).resolve().parents[2] / "shared"
PETS, WEIGHTS = SHARED / "data" / "pets", SHARED / "weights" / "deit_tiny_patch16_224.safetensors"
SIZE, BATCH, SCALE = 224, 16, (0.25, 1.0)
TARGET = 1.3  # times the images per second of the plain loop
PLAIN_LR = (1e-3, 1e-4)  # of the head and of the backbone; chosen before any run, not tuned
BORDER, IGNORED = 3, 255  # stored value, and class of pixels that do not count
SAVE_EVERY = 50  # steps between checkpoints of the plain loop
MEMORY_SIDE, WINDOW, MEMORY_CLASSES = 1024, 512, 150
NAMES = ("vitrail", "plain")
Precision = Literal["fp32", "bf16"]
Predict = Callable[[Tensor], Tensor]  # of normalised images [B, 3, h, w] to logits [B, K, h, w]


def build_head(classes: int, frozen: bool) -> nn.Module:
    """Return the head that both contestants have, a module from feature maps to logits."""
    import vitrail
    from vitrail.models.registry import parse_decoder
    from vitrail.nn.decoder import UPerNet

    backbone = vitrail.load(str(WEIGHTS)).config.as_backbone()
    slot = parse_decoder("linear") if frozen else UPerNet(backbone.feature_shape(backbone.depth).channels // 2)
    return slot.build(backbone, classes)


class PlainSegmenter(nn.Module):
    """timm's backbone with the head."""

    def __init__(self, classes: int, frozen: bool) -> None:
        super().__init__()
        import timm
        from safetensors.torch import load_file

        layers = (11,) if frozen else (2, 5, 8, 11)
        self.backbone = timm.create_model("deit_tiny_patch16_224", features_only=True, out_indices=layers)
        missing, _ = self.backbone.model.load_state_dict(load_file(WEIGHTS), strict=False)  # pyright: ignore
        assert not missing, missing
        self.head, self.frozen = build_head(classes, frozen), frozen
        if frozen:
            self.backbone.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            maps = self.backbone(images)
        return F.interpolate(self.head(maps), size=images.shape[2:], mode="bilinear", align_corners=False)


class PetPairs(torch.utils.data.Dataset):
    """Images and masks, read by OpenCV and augmented by albumentations."""

    def __init__(self, folder: Path, ignore_border: bool) -> None:
        import albumentations as A
        import cv2
        from albumentations.pytorch import ToTensorV2

        masks = {path.stem: path for path in (folder / "masks").glob("*")}
        self.pairs = [(path, masks[path.stem]) for path in sorted((folder / "images").glob("*"))]
        self.ignore_border = ignore_border
        crop = A.RandomResizedCrop((SIZE, SIZE), scale=SCALE, interpolation=cv2.INTER_CUBIC)
        self.augment = A.Compose([crop, A.HorizontalFlip(), A.Normalize(), ToTensorV2()])

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        import cv2

        path, mask_path = self.pairs[index]
        mask = cv2.imread(str(mask_path), cv2.IMREAD_GRAYSCALE)
        row = self.augment(image=cv2.imread(str(path), cv2.IMREAD_COLOR_RGB), mask=to_classes(mask, self.ignore_border))
        return row["image"], row["mask"].long()


def to_classes(mask: np.ndarray, ignore_border: bool) -> np.ndarray:
    """Return the classes of stored values 1 (pet), 2 (background) and 3 (border)."""
    return np.where((mask == BORDER) & ignore_border, IGNORED, mask - 1).astype(np.uint8)


def seed_worker(_: int) -> None:
    """Seed the augmentation of a worker; without this, all workers have the same random numbers."""
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.augment.set_random_seed(info.seed % 2**32)  # pyright: ignore[reportAttributeAccessIssue]


class PlainLoop:
    """The plain training loop."""

    def __init__(self, options: argparse.Namespace, precision: Precision, steps: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        ignore = options.border == "ignore"
        self.model, self.precision, self.steps, self.done = (
            PlainSegmenter(3 - ignore, options.frozen),
            precision,
            steps,
            0,
        )
        head, backbone = PLAIN_LR if not options.frozen else (3e-3, 0.0)
        groups = [{"params": list(self.model.head.parameters()), "lr": head}]
        if not options.frozen:
            groups.append({"params": list(self.model.backbone.parameters()), "lr": backbone})
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.05)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.factor)
        self.loader = torch.utils.data.DataLoader(
            PetPairs(options.data / "train", ignore),
            BATCH,
            shuffle=True,
            drop_last=True,
            num_workers=2,
            persistent_workers=True,
            worker_init_fn=seed_worker,
        )
        self.batches = self.iterate()

    def factor(self, step: int) -> float:
        """Return the share of the learning rate: a tenth of warm-up, then a cosine."""
        warmup = max(1, self.steps // 10)
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, self.steps - warmup)))

    def iterate(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from self.loader

    def step(self) -> None:
        self.model.train()
        images, masks = next(self.batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16"):
            logits = self.model(images)
        loss = F.cross_entropy(logits.float(), masks, ignore_index=IGNORED)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.done += 1

    def train(self, path: Path) -> None:
        """Train to the end, from the checkpoint at the path if there is one."""
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        if path.is_file():
            stored = torch.load(path)
            self.done = stored.pop("done")
            torch.manual_seed(torch.initial_seed() + self.done)  # not the images of the first steps again
            for name, state in stored.items():
                parts[name].load_state_dict(state)
        while self.done < self.steps:
            self.step()
            if self.done % SAVE_EVERY == 0 or self.done == self.steps:
                partial = path.with_suffix(".partial")
                torch.save({name: part.state_dict() for name, part in parts.items()} | {"done": self.done}, partial)
                partial.replace(path)


def build_vitrail_step(options: argparse.Namespace, precision: Precision) -> Callable[[], None]:
    """Return a training step of the recipe with its loading."""
    import vitrail
    from vitrail.data.loader import Loader
    from vitrail.data.sources import load_dataset
    from vitrail.data.transforms.pipeline import TrainPipeline
    from vitrail.models.adapt import segment_from
    from vitrail.models.lora import tune
    from vitrail.objectives.base import LossInputs
    from vitrail.training.checkpointing import Checkpoints
    from vitrail.training.distributed import Team
    from vitrail.training.logging import MetricsLog
    from vitrail.training.recipe import Data, Facts
    from vitrail.training.recipes.segment import recipe as choose_recipe
    from vitrail.training.trainer import Plan, Trainer

    ignore, how = (BORDER,) if options.border == "ignore" else None, "head" if options.frozen else "full"
    images = load_dataset(str(options.data), ignore=ignore)["train"]
    source = vitrail.load(str(WEIGHTS))
    facts = Facts(len(images), len(images.classes), False, (SIZE, SIZE), 3, True, source.config, source.preprocessing)
    facts.overrides["tune"] = how
    recipe = choose_recipe(facts, Data(str(options.data)))
    model = segment_from(source, recipe.model.decoder, len(images.classes))
    tune(model, how)
    team = Team(0, 1, torch.device("cpu"))
    inputs = LossInputs(
        steps=10**6,
        preprocessing=recipe.preprocessing,
        class_weights=None,
        teacher=None,
        cached=False,
        group=None,
        parts={},
    )
    training = Trainer(
        loss_module=recipe.objective.build_loss(model, inputs),
        loader=Loader(images, None, TrainPipeline(list_steps(), masks=True), batch_size=recipe.batch_size, workers=1),
        normalise=recipe.preprocessing.normalise,
        optim=recipe.optimizer,
        schedule=recipe.schedule,
        plan=Plan(steps=10**6, validate_every=10**6, precision=precision),
        team=team,
        journal=MetricsLog(None),
        checkpoints=Checkpoints(Path(tempfile.mkdtemp()), team),
        validate=dict,
        on_best=lambda: None,
        ema=recipe.ema,
    )
    assert (recipe.batch_size, recipe.model.image_size) == (BATCH, (SIZE, SIZE))
    batches = training.batches()

    def step() -> None:
        number, epoch, batch = next(batches)
        training.train_step(number, epoch, batch)

    return step


def list_steps() -> tuple[Any, ...]:
    """Return the augmentation of both contestants, in vitrail's words."""
    from vitrail.data.transforms.augment import Flip, RandomResizedCrop

    return RandomResizedCrop((SIZE, SIZE), SCALE), Flip()


def measure_speed(options: argparse.Namespace, precisions: tuple[Precision, ...]) -> dict[str, float]:
    """Print and return the images per second of both contestants, by "name, precision"."""

    def repeat(step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(options.block):
                step()

        return run

    contestants: dict[str, Callable[[], None]] = {}
    for precision in precisions:
        contestants[f"vitrail, {precision}"] = repeat(build_vitrail_step(options, precision))
        contestants[f"plain, {precision}"] = repeat(PlainLoop(options, precision, 10**6).step)
    seconds = measure.interleave(contestants, options.rounds)
    rates = {name: options.block * BATCH / measure.median(taken) for name, taken in seconds.items()}
    for name, rate in rates.items():
        ratio = rate / rates[f"plain, {name.split(', ')[1]}"]
        print(f"{name:<20}{rate:8.1f} images/s{ratio:8.2f} × plain", flush=True)
    print(f"{'target':<20}{'':>17}{TARGET:8.2f}", flush=True)
    return rates


def train_vitrail(options: argparse.Namespace, steps: int, seed: int, run: Path) -> Predict:
    """Run or resume the recipe; return the finished model's prediction."""
    import vitrail

    if not (run / "recipe.json").is_file():
        vitrail.train(
            str(options.data),
            recipe="segment",
            init=str(WEIGHTS),
            tune="head" if options.frozen else None,
            steps=steps,
            seed=seed,
            precision=options.precision,
            augment=list(list_steps()),
            ignore=(BORDER,) if options.border == "ignore" else None,
            settings=["validate_every=1000000"],  # at the end only
            out=run,
        )
    elif not (run / "model.safetensors").is_file():
        vitrail.resume(run)
    return vitrail.load(str(run / "model.safetensors")).eval()


def train_plain(options: argparse.Namespace, steps: int, seed: int, run: Path) -> Predict:
    """Run or resume the plain loop; return the finished model's prediction."""
    run.mkdir(parents=True, exist_ok=True)
    loop = PlainLoop(options, options.precision, steps, seed)
    loop.train(run / "plain.pt")
    return loop.model.eval()


@torch.no_grad()
def evaluate(predict: Predict, options: argparse.Namespace) -> dict[str, float]:
    """Return the scores on the validation split, in percent; both contestants get the same pixels."""
    from vitrail.data.preprocessing import IMAGENET_STATS, Preprocessing

    prepare = Preprocessing(size=(SIZE, SIZE), resize=(SIZE, SIZE), fit="squash", **IMAGENET_STATS)
    classes = 2 if options.border == "ignore" else 3
    confusion, of_pet = np.zeros((classes, classes), np.int64), np.zeros((2, 2), np.int64)
    masks = {path.stem: path for path in (options.data / "validation" / "masks").glob("*")}
    for path in sorted((options.data / "validation" / "images").glob("*")):
        with Image.open(path) as image, Image.open(masks[path.stem]) as mask:
            pixels, target = prepare(image), np.asarray(mask).astype(np.int64) - 1
        logits = F.interpolate(predict(pixels[None]).float(), size=target.shape, mode="bilinear", align_corners=False)[
            0
        ]
        found, inner = logits.argmax(0).numpy(), target != BORDER - 1
        counted = target < classes
        confusion += np.bincount(classes * target[counted] + found[counted], minlength=classes**2).reshape(classes, -1)
        found = logits[:2].argmax(0).numpy()
        of_pet += np.bincount(2 * target[inner] + found[inner], minlength=4).reshape(2, 2)
    scores = {"IoU of the pet": 100 * float(intersect_over_union(of_pet)[0])}
    if classes == 3:
        scores["mean IoU of three classes"] = 100 * float(intersect_over_union(confusion).mean())
    return scores


def intersect_over_union(confusion: np.ndarray) -> np.ndarray:
    """Return the IoU of every class, [K], of a confusion matrix of pixels."""
    return confusion.diagonal() / (confusion.sum(0) + confusion.sum(1) - confusion.diagonal())


def compare_training(options: argparse.Namespace) -> None:
    """Train both for the minutes or the steps, with every seed, and print their scores."""
    if options.steps:
        lengths = dict(zip(NAMES, options.steps, strict=True))
    else:
        rates = measure_speed(options, (options.precision,))
        lengths = {name: int(60 * options.minutes * rates[f"{name}, {options.precision}"] / BATCH) for name in NAMES}
        print(f"steps in {options.minutes:g} minutes: {lengths}", flush=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for seed in options.seeds:
            for name in options.only:
                train = train_vitrail if name == "vitrail" else train_plain
                predict = train(options, lengths[name], seed, (options.runs or Path(temporary)) / f"{name}-{seed}")
                scores = evaluate(predict, options)
                rows.append({"contestant": name, "seed": seed, "steps": lengths[name], **scores})
                shown = ", ".join(f"{what} {score:.2f} %" for what, score in scores.items())
                print(f"{name}, seed {seed}: {lengths[name]:,} steps, {shown}", flush=True)
                settings = {key: str(getattr(options, key)) for key in ("precision", "frozen", "border")}
                measure.save("segmentation_training", {"settings": settings, "runs": rows})
    for name in options.only:
        mine = [row for row in rows if row["contestant"] == name]
        for what in (key for key in mine[0] if "IoU" in key):
            values = [row[what] for row in mine]
            spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            print(f"{name:<10}{what:<28}{statistics.mean(values):7.2f}{spread} %, {len(values)} seeds")


def use_memory(contestant: str, decoder: str, mode: str) -> None:
    """Predict the mask of one image, and print the peak memory of this process in MB, before and after."""
    import vitrail
    from vitrail.models.adapt import segment_from

    image = np.random.default_rng(0).integers(0, 256, (MEMORY_SIDE, MEMORY_SIDE, 3), dtype=np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    side = MEMORY_SIDE if mode == "whole" else WINDOW
    model = segment_from(vitrail.load(str(WEIGHTS)).resize((side, side)), decoder, MEMORY_CLASSES).eval()
    if contestant == "vitrail":
        model.labels = tuple(map(str, range(MEMORY_CLASSES)))
        assert model.preprocessing is not None
        model.preprocessing = replace(model.preprocessing, size=(side, side), resize=(side, side))
        scales = (MEMORY_SIDE / side,)  # windows see the image at its own size
        (row,) = vitrail.predict(model, [image], inference=mode, scales=scales, precision="fp32", workers=1)
        assert row.mask is not None, row.error
    else:  # the same model, called as plain PyTorch
        with torch.inference_mode():
            mask = model(torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255).softmax(1).argmax(1)
        assert mask.shape[1:] == image.shape[:2]
    print(json.dumps([before / 1024, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))


def measure_memory() -> None:
    """Print the peak memory of inference, each in a process of its own."""
    rows = []
    cases = [("vitrail", decoder, mode) for decoder in ("upernet", "eomt") for mode in ("whole", "sliding")]
    for contestant, decoder, mode in (
        *cases,
        ("model(images)", "upernet", "whole"),
        ("model(images)", "eomt", "whole"),
    ):
        command = [sys.executable, __file__, "--use-memory", contestant, decoder, mode]
        lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        before, peak = json.loads(lines.splitlines()[-1])
        rows.append({"contestant": contestant, "decoder": decoder, "mode": mode, "before_mb": before, "peak_mb": peak})
        what = f"{contestant}, {decoder}, {mode}"
        print(f"{what:<34}peak {peak:7,.0f} MB, of which {before:5,.0f} MB before the model is loaded", flush=True)
    print(f"written to {measure.save('segmentation_memory', rows)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", default=PETS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--block", type=int, default=4, help="steps of a contestant at a time [4]")
    parser.add_argument("--frozen", action="store_true", help="linear head on a frozen backbone")
    parser.add_argument(
        "--border", choices=("class", "ignore"), default="class", help="third class, or ignored [class]"
    )
    parser.add_argument("--train", action="store_true", help="train both and compare their scores")
    parser.add_argument("--minutes", type=float, default=10.0, help="training time of each run [10]")
    parser.add_argument(
        "--steps", type=int, nargs=2, metavar="N", help="steps of vitrail and plain, in place of timing"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16", help="of --train [bf16]")
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs, to resume them [temporary]")
    parser.add_argument("--memory", action="store_true", help="measure the peak memory of inference")
    parser.add_argument("--use-memory", nargs=3, help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args()
    if options.use_memory:
        use_memory(*options.use_memory)
        return
    if not WEIGHTS.is_file() or not (options.data / "train" / "masks").is_dir():
        raise SystemExit(f"{WEIGHTS} or {options.data / 'train' / 'masks'} is missing")
    if options.memory:
        measure_memory()
    elif options.train:
        compare_training(options)
    else:
        rates = measure_speed(options, ("bf16", "fp32"))
        rows = [{"contestant": name, "images_per_second": rate, "target": TARGET} for name, rate in rates.items()]
        print(f"written to {measure.save('segmentation', rows)}")


if __name__ == "__main__":
    main()
