"""Train a dense head of your own on the feature maps of a frozen backbone.

    python examples/frozen_backbone.py
    python examples/frozen_backbone.py --backbone runs/digits-scratch-small-1/model.safetensors

`vitrail.train` trains a backbone to classify single digits, unless `--backbone` gives one. Then the backbone is frozen,
and its feature maps feed a head of one convolution, trained for another task on larger images: which of the nine cells
of a sheet hold a digit, and which digit. Expect an accuracy over cells above 90 % after ten seconds on one core; half of
the cells are empty.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail
from vitrail.data.sources import load_dataset

CELLS = 3  # rows and columns of a sheet
EMPTY = 10  # the target of a cell without a digit; 0 to 9 are the digits
LAYERS = (2, -1)  # after which the feature maps are read: fine strokes in the middle, whole digits at the end


def train_backbone(folder: Path, steps: int) -> Path:
    """Train a classifier of single digits and return its model file."""

    def print_validation(record: dict) -> None:
        if record["kind"] == "validation":
            print(f"backbone: step {record['step']:4d}  validation accuracy {record['top1']:.3f}", flush=True)

    run, _ = vitrail.train("digits", out=folder / "backbone", steps=steps, listeners=(print_validation,))
    return run / "model.safetensors"


@torch.no_grad()
def extract_features(backbone: vitrail.Model, sheets: Tensor) -> Tensor:
    """Return the feature maps of several layers, one above the other: [B, len(LAYERS)·D, h, w]."""
    return torch.cat(backbone.feature_maps(sheets, LAYERS), dim=1)


def load_digits(backbone: vitrail.Model, split: str) -> tuple[Tensor, Tensor]:
    """Return the images [n, 1, S, S] and targets [n] of a split, preprocessed as the backbone expects them."""
    data = load_dataset("digits")[split]
    if backbone.preprocessing is None:
        raise SystemExit("the backbone has no preprocessing: save it with vitrail.save(…, preprocessing=…)")
    images = torch.stack([backbone.preprocessing(data.open(index)) for index in range(len(data))])
    return images, torch.from_numpy(data.targets)


def compose_sheets(images: Tensor, targets: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return sheets of 3×3 cells, half of them empty, [count, 1, 3·S, 3·S], and a target for each cell, [count, 3, 3]."""
    chosen = torch.randint(len(images), (count, CELLS, CELLS))
    filled = torch.rand(count, CELLS, CELLS) < 0.5
    paper = images.min()  # the colour of an empty cell
    cells = torch.where(filled[..., None, None, None], images[chosen], paper)  # [count, 3, 3, 1, S, S]
    sheets = cells.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)  # [count, 1, 3·S, 3·S]
    return sheets, torch.where(filled, targets[chosen], EMPTY)


def train_head(features: Tensor, targets: Tensor, steps: int) -> nn.Module:
    """Train a head from feature maps [B, C, h, w] to logits [B, 11, 3, 3] for each cell.

    The feature maps of a frozen backbone never change: they were extracted once, and a step costs next to nothing.
    """
    patches = features.shape[-1] // CELLS  # along a cell
    head = nn.Conv2d(features.shape[1], EMPTY + 1, kernel_size=patches, stride=patches)
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        batch = torch.randint(len(features), (32,))
        loss = F.cross_entropy(head(features[batch]), targets[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % 25 == 0 or step + 1 == steps:
            print(f"head: step {step + 1:4d}  loss {loss.item():.3f}", flush=True)
    return head


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a dense head on the feature maps of a frozen backbone.")
    parser.add_argument("--backbone", type=Path, help="model file of a ViT for grey images (default: train one)")
    parser.add_argument("--backbone-steps", type=int, default=60, help="steps to train the backbone (default 60)")
    parser.add_argument("--steps", type=int, default=100, help="steps to train the head (default 100)")
    parser.add_argument("--out", type=Path, help="folder for the backbone and the head (default: a temporary one)")
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="vitrail-"))
    out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    backbone = vitrail.load(args.backbone or train_backbone(out, args.backbone_steps), classes=None)
    if not isinstance(backbone, vitrail.Model):
        raise SystemExit(f"{args.backbone} is not a Vision Transformer")
    backbone.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}

    sheets, targets = compose_sheets(*load_digits(backbone, "train"), 256)
    test_sheets, test_targets = compose_sheets(*load_digits(backbone, "test"), 64)
    features, test_features = extract_features(backbone, sheets), extract_features(backbone, test_sheets)
    print(f"sheets {list(sheets.shape)} → feature maps {list(features.shape)}")

    head = train_head(features, targets, args.steps)
    with torch.no_grad():
        predicted = head(test_features).argmax(1)
    accuracy = (predicted == test_targets).float().mean().item()
    empty = (test_targets == EMPTY).float().mean().item()
    unchanged = all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())
    print(f"accuracy over cells {accuracy:.3f} (always empty: {empty:.3f}); backbone unchanged: {unchanged}")
    torch.save(head.state_dict(), out / "head.pt")
    print(f"saved {out / 'head.pt'}")


if __name__ == "__main__":
    main()
