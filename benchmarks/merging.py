"""Speed and accuracy of DeiT-Ti with token merging, for each r, in PyTorch, interleaved.

    python benchmarks/merging.py --weights deit_tiny_patch16_224.safetensors --pictures imagenet-samples

Speed: the model alone, images of noise, in batches of 1, 8 and 32, with one thread unless --threads is given.
Accuracy: a flat folder of photographs whose names begin with the index of their ImageNet class; also the agreement with the
unmerged model and the mean Kullback-Leibler divergence between both distributions, in nats. --after 0 merges from the first
layer on, as in the paper.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import measure
import torch
from PIL import Image

import vitrail
from vitrail.models.token_merging import Merged, merge_model
from vitrail.models.vit import ViT

RS = (0, 4, 8, 12, 16, 20)


def speed(models: dict[int, Merged], vit: ViT, batches: list[int], rounds: int) -> list[dict[str, Any]]:
    """Measure milliseconds per image for each r and batch size, and the speed-up over the plain model."""
    rows = []
    for batch in batches:
        image = torch.randn(batch, 3, *vit.config.image_size)
        contestants = {"plain": partial(vit, image), **{str(r): partial(model, image) for r, model in models.items()}}
        with torch.inference_mode():
            seconds = measure.interleave(contestants, rounds)
        medians = {who: measure.median(times) for who, times in seconds.items()}
        for who, value in medians.items():
            # Each round is one comparison under the same conditions: the median of the ratios, not the ratio of medians.
            ratio = measure.median([p / s for p, s in zip(seconds["plain"], seconds[who], strict=True)])
            rows.append({"batch": batch, "r": who, "ms": 1000 * value / batch, "times_plain": ratio})
            print(f"batch {batch:>3}  r {who:>5}  {rows[-1]['ms']:7.2f} ms a picture  {ratio:5.2f}×")
    return rows


@torch.inference_mode()
def answers(models: dict[int, Merged], vit: ViT, folder: Path) -> list[dict[str, Any]]:
    """Measure the accuracy of each r on the photographs, and the agreement with the unmerged model."""
    files = sorted(path for path in folder.iterdir() if path.name[:4].isdecimal())
    truth = torch.tensor([int(path.name.split("_")[0]) for path in files])
    assert vit.preprocessing is not None
    images = [vit.preprocessing(Image.open(path)) for path in files]
    batches = [torch.stack(images[start : start + 50]) for start in range(0, len(images), 50)]
    plain = torch.cat([vit(batch) for batch in batches])
    rows = []
    for r, model in models.items():
        logits = torch.cat([model(batch) for batch in batches])
        rows.append(
            {
                "r": r,
                "right": int((logits.argmax(1) == truth).sum()),
                "of": len(files),
                "kl": float((plain.softmax(1) * (plain.log_softmax(1) - logits.log_softmax(1))).sum(1).mean()),
                "as_plain": int((logits.argmax(1) == plain.argmax(1)).sum()),
                "tokens": model.tokens_per_layer(),
            }
        )
        row = rows[-1]
        share = sum(row["tokens"]) / (len(row["tokens"]) * row["tokens"][0])
        print(
            f"r {r:>3}  right {row['right']} of {row['of']}  as plain {row['as_plain']}  KL {row['kl']:.4f}  "
            f"{100 * share:.0f} % of the tokens  {row['tokens']}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True, help="checkpoint of DeiT-Ti or another ViT")
    parser.add_argument("--pictures", type=Path, help="folder of photographs named by their class index")
    parser.add_argument("--r", type=int, nargs="+", default=list(RS))
    parser.add_argument("--after", type=int, help="first layers without merging [a quarter]")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    vit = vitrail.load(options.weights).eval()
    assert isinstance(vit, ViT)
    models = {r: merge_model(vit, r, options.after) for r in options.r}
    found = {"answers": answers(models, vit, options.pictures) if options.pictures else []}
    found["speed"] = speed(models, vit, options.batch, options.rounds)
    print(measure.save("merging" if options.after is None else f"merging_after_{options.after}", found))


if __name__ == "__main__":
    main()
