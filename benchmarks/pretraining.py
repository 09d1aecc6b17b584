"""Steps of pre-training beside their peers, images a second: forward, backward and AdamW on pictures that are in memory.

    python benchmarks/pretraining.py                 everything
    python benchmarks/pretraining.py --only mae      one contest
    python benchmarks/pretraining.py --rounds 5 --batch 8

mae: our masked autoencoder against transformers' ViTMAEForPreTraining with the same weights, once with our light decoder and
once with the published one (8 layers of 512); and against a supervised step of the same encoder, which sees every patch.

Everybody takes turns, round after round, in one process; the ratios are of medians.
"""

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import measure
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail
from vitrail.checkpoints.mae import Autoencoder, write_mae
from vitrail.models.decoder import Decoder, build_decoder
from vitrail.models.vit import ViT
from vitrail.objectives.draw import Draw
from vitrail.objectives.mae import MAE, NOISE

Step = Callable[[], float]


def trained(module: nn.Module, loss: Callable[[], Tensor]) -> Step:
    """One step of a module's own loss, with the same optimiser for everybody."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.05, betas=(0.9, 0.95), fused=True)
    module.train()

    def step() -> float:
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.item()

    return step


def row(work: str, runs: dict[str, Step], images: int, rounds: int, **notes: Any) -> dict[str, Any]:
    """Measures one row and prints it: ours is the first contestant, and the ratios are ours over the others."""
    seconds = measure.interleave(runs, rounds)
    speed = {name: images / measure.median(taken) for name, taken in seconds.items()}
    ours, *others = speed
    ratios = {name: speed[ours] / speed[name] for name in others}
    table = "  ".join(f"{name} {value:.1f}" for name, value in speed.items())
    print(f"{work:<44}{table} images/s   " + ", ".join(f"{r:.2f}× {name}" for name, r in ratios.items()), flush=True)
    return {"work": work, "images_per_second": speed, "ratios": ratios, "rounds": rounds, **notes}


def mae(size: str, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Targets: 1.2 of transformers, and with the light decoder 2.2 of the supervised step."""
    import transformers

    rows = []
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    for name, decoder in {"light decoder": Decoder(), "published decoder": Decoder(8, 512, 16)}.items():
        model = vitrail.build(size, classes=None)
        assert isinstance(model, ViT)
        auto = Autoencoder(model, build_decoder(model.config, decoder))
        with tempfile.TemporaryDirectory() as folder:
            write_mae(auto, f"{folder}/mae", "hf")
            theirs = transformers.ViTMAEForPreTraining.from_pretrained(f"{folder}/mae")
        task = MAE(decoder=decoder).build(model, 1, decoder=auto.decoder)
        same = Draw(0, 0, 0, batch, batch, images.device)
        first = {
            "vitrail": float(task(images, None, same)["loss"]),
            "transformers": float(theirs(images, noise=same.uniform(196, NOISE)).loss),
        }
        assert abs(first["vitrail"] - first["transformers"]) < 1e-4, f"the two have to compute the same: {first}"
        supervised = vitrail.build(size)
        steps = iter(range(10**9))

        def ours(task: nn.Module = task, steps: Any = steps) -> Tensor:
            return task(images, None, Draw(0, next(steps), 0, batch, batch, images.device))["loss"]

        def peer(theirs: nn.Module = theirs) -> Tensor:
            return theirs(images).loss

        def labelled(supervised: nn.Module = supervised) -> Tensor:
            return F.cross_entropy(supervised(images), labels)

        runs = {
            "vitrail": trained(task, ours),
            "transformers": trained(theirs, peer),
            "supervised": trained(supervised, labelled),
        }
        rows.append(row(f"MAE {size}, {name}, batch {batch}", runs, batch, rounds, first_loss=first))
    return rows


CONTESTS: dict[str, Callable[[str, int, int], list[dict[str, Any]]]] = {"mae": mae}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(CONTESTS), default=list(CONTESTS))
    parser.add_argument("--size", default="S/16", help="of the encoder, at 224²")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = [each for name in options.only for each in CONTESTS[name](options.size, options.batch, options.rounds)]
    whole = set(options.only) == set(CONTESTS)
    print(f"written to {measure.save('pretraining' if whole else 'pretraining-' + '-'.join(options.only), rows)}")


if __name__ == "__main__":
    main()
