"""Speed of fine-tuning DeiT-Ti on photographs, in images per second: decoding, augmentation and training.

    pip install accelerate   # required by transformers' Trainer
    python benchmarks/training.py

The same work for all: random resized crops of 224×224 (scale 0.35 to 1, bicubic), flips, batches of 32, AdamW, ViT-Ti/16,
32-bit floats. timm: its own dataset, loader (two workers) and model. transformers: its Trainer with two workers on its own
model and torchvision's transforms. vitrail: its loader and loop, with the same mathematics, with half of the patches dropped,
and both in bf16, which `--precision auto` chooses where it pays. All are interleaved in one process, a few steps at a time,
after unmeasured ones: the start of the workers, and vitrail's first decoding of photographs that stay in memory, are not
counted. The last lines print that cost.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import measure
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared"
PHOTOGRAPHS = SHARED / "data" / "clothing"
SCALE, BATCH, RATE = (0.35, 1.0), 32, 1e-4


def of_timm() -> Callable[[], None]:
    import timm
    from timm.data import create_dataset, create_loader
    from timm.optim import create_optimizer_v2

    dataset = create_dataset("", root=str(PHOTOGRAPHS / "train"))
    loader = create_loader(
        dataset,
        input_size=(3, 224, 224),
        batch_size=BATCH,
        is_training=True,
        use_prefetcher=False,
        scale=SCALE,
        hflip=0.5,
        color_jitter=0.0,
        interpolation="bicubic",
        num_workers=2,
        persistent_workers=True,
        device=torch.device("cpu"),
    )
    model = timm.create_model("deit_tiny_patch16_224", num_classes=10)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=RATE, weight_decay=0.05)
    criterion = torch.nn.CrossEntropyLoss()

    def endless() -> Any:
        while True:
            yield from loader

    batches = endless()

    def step() -> None:
        images, targets = next(batches)
        loss = criterion(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


class Photographs(torch.utils.data.Dataset):
    """Folder dataset for transformers' Trainer, with torchvision's transforms as in its examples."""

    def __init__(self) -> None:
        from torchvision import transforms
        from torchvision.datasets import ImageFolder

        self.folder = ImageFolder(
            str(PHOTOGRAPHS / "train"),
            transforms.Compose(
                [
                    transforms.RandomResizedCrop(224, scale=SCALE, interpolation=transforms.InterpolationMode.BICUBIC),
                    transforms.RandomHorizontalFlip(),
                    transforms.ToTensor(),
                    transforms.Normalize((0.5,) * 3, (0.5,) * 3),
                ]
            ),
        )

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self.folder[index]
        return {"pixel_values": image, "labels": label}


def of_transformers(steps: int, rounds: int) -> Callable[[], None]:
    """Return a step of the Trainer, which runs in a generator that pauses between steps."""
    import tempfile
    import threading

    from transformers import Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768, num_labels=10
    )
    go, done = threading.Semaphore(0), threading.Semaphore(0)

    class Turns(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            go.acquire()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            done.release()

    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=BATCH,
        max_steps=steps * (rounds + 3),
        learning_rate=RATE,
        weight_decay=0.05,
        dataloader_num_workers=2,
        dataloader_persistent_workers=True,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = Trainer(ViTForImageClassification(config), arguments, train_dataset=Photographs(), callbacks=[Turns()])
    threading.Thread(target=trainer.train, daemon=True).start()

    def step() -> None:
        go.release()
        done.acquire()

    return step


def of_vitrail(patch_dropout: float, precision: Literal["fp32", "bf16"] = "fp32") -> Callable[[], None]:
    import tempfile

    import vitrail
    from vitrail.data.loader import Loader
    from vitrail.data.preprocessing import IMAGENET_STATS, Preprocessing
    from vitrail.data.sources import load_dataset
    from vitrail.data.transforms.augment import Flip
    from vitrail.data.transforms.crops import RandomResizedCrop
    from vitrail.data.transforms.pipeline import TrainPipeline as Augmentation
    from vitrail.objectives.classification import Classification
    from vitrail.training.checkpointing import Checkpoints
    from vitrail.training.distributed import Team
    from vitrail.training.logging import MetricsLog
    from vitrail.training.optim import AdamW
    from vitrail.training.schedule import Constant
    from vitrail.training.trainer import Plan, Trainer

    pictures = load_dataset(str(PHOTOGRAPHS))["train"]
    team = Team(0, 1, torch.device("cpu"))
    folder = Path(tempfile.mkdtemp())
    training = Trainer(
        loss_module=Classification(patch_dropout=patch_dropout).build(vitrail.build("Ti/16", classes=10)),
        loader=Loader(
            pictures,
            None,
            Augmentation((RandomResizedCrop((224, 224), scale=SCALE), Flip())),
            batch_size=BATCH,
            workers=1,
        ),
        normalise=Preprocessing(**IMAGENET_STATS).normalise,
        optim=AdamW(lr=RATE, weight_decay=0.05, clip=None),
        schedule=Constant(),
        plan=Plan(steps=10**6, validate_every=10**6, precision=precision),
        team=team,
        journal=MetricsLog(None),
        checkpoints=Checkpoints(folder, team),
        validate=dict,
        on_best=lambda: None,
    )
    batches = training.batches()

    def step() -> None:
        number, epoch, batch = next(batches)
        training.train_step(number, epoch, batch)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps per contestant and round")
    options = parser.parse_args()
    if not PHOTOGRAPHS.is_dir():
        raise SystemExit(f"no photographs in {PHOTOGRAPHS}")

    started: dict[str, float] = {}

    def repeated(name: str, make: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        step = make()
        begin = time.perf_counter()
        step()
        started[name] = time.perf_counter() - begin

        def run() -> None:
            for _ in range(options.steps):
                step()

        return run

    contestants = {
        name: repeated(name, make)
        for name, make in {
            "vitrail": lambda: of_vitrail(0.0),
            "vitrail, half of the patches": lambda: of_vitrail(0.5),
            "vitrail, bf16": lambda: of_vitrail(0.0, "bf16"),
            "vitrail, bf16, half of the patches": lambda: of_vitrail(0.5, "bf16"),
            "timm": of_timm,
            "transformers": lambda: of_transformers(options.steps, options.rounds),
        }.items()
    }
    seconds = measure.interleave(contestants, options.rounds)
    rates = {name: options.steps * BATCH / measure.median(taken) for name, taken in seconds.items()}
    better = max(rates["timm"], rates["transformers"])
    rows = []
    for name, rate in rates.items():
        print(
            f"{name:<36}{rate:7.1f} images/s   {rate / better:.2f}× the better peer   first step {started[name]:.1f} s"
        )
        rows.append(
            {"contestant": name, "images_per_second": rate, "ratio": rate / better, "first_step": started[name]}
        )
    print("targets: 1.05 with the same mathematics; 3 with bf16 and half of the patches, where bf16 is native")
    measure.save("training", rows)


if __name__ == "__main__":
    main()
