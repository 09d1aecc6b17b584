"""Speed and memory of the models against other libraries.

    python benchmarks/models.py                       everything, about 35 minutes on two cores
    python benchmarks/models.py --only forward train  some of: forward precision compiled train memory families
    python benchmarks/models.py --only families       Swin-T, MViTv2-T and DINOv3 S/16 alone, about 10 minutes
    python benchmarks/models.py --sizes Ti S --rounds 15

Each row interleaves all contestants in one process and prints images per second (median of the rounds), the ratio of vitrail to
the fastest other library, and the share of the matrix-product throughput of this machine in the same minute.

precision: the forward pass as `--precision auto` runs it (packed weights, bf16 where it is native), against timm in fp32 and
under bf16 autocast, and vitrail's packed fp32 against timm's fp32.
"""

import argparse
import copy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import measure
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail
from vitrail.checkpoints.formats import vit_pytorch as vit_pytorch_names
from vitrail.checkpoints.keys import import_state
from vitrail.models.flops import count
from vitrail.models.registry import build_from, configure
from vitrail.models.sizes import SIZES
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches
from vitrail.nn.packing import can_pack, pack_module
from vitrail.utils.precision import torch_dtype

NAMES = {"Ti": "tiny", "S": "small", "B": "base"}


def contestants(size: str) -> dict[str, nn.Module]:
    """Build the same architecture in every library, at patch 16 and 224²."""
    import timm
    import torchvision
    import transformers
    import vit_pytorch

    s = SIZES[size]
    settings = transformers.ViTConfig(
        hidden_size=s.width,
        num_hidden_layers=s.depth,
        num_attention_heads=s.heads,
        intermediate_size=s.mlp,
        num_labels=1000,
    )
    return {
        "vitrail": vitrail.build(f"{size}/16"),
        "timm": timm.create_model(f"vit_{NAMES[size]}_patch16_224"),
        "transformers": Logits(transformers.ViTForImageClassification(settings)),
        "vit-pytorch": vit_pytorch.ViT(
            image_size=224,
            patch_size=16,
            num_classes=1000,
            dim=s.width,
            depth=s.depth,
            heads=s.heads,
            dim_head=s.width // s.heads,
            mlp_dim=s.mlp,
        ),
        "torchvision": torchvision.models.VisionTransformer(224, 16, s.depth, s.heads, s.width, s.mlp),
    }


class Logits(nn.Module):
    """Wrapper that returns the logits of a transformers model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        return self.model(image).logits


def row(
    work: str, runs: dict[str, Callable[[], Any]], images: int, macs: int, rounds: int, unit: str = "images"
) -> dict[str, Any]:
    """Measure one row, print it and return it."""
    seconds = measure.interleave(runs, rounds, at_least=20.0)
    best = measure.ceiling()
    speed = {name: images / measure.median(times) for name, times in seconds.items()}
    peers = {
        name: value for name, value in speed.items() if name != "vitrail" and not name.endswith((" eager", " bf16"))
    }
    eager = [value for name, value in speed.items() if name.endswith(" eager")]
    fastest = max(peers, key=lambda name: peers[name])
    ratios = [theirs / ours for ours, theirs in zip(seconds["vitrail"], seconds[fastest], strict=True)]
    result = {
        "work": work,
        f"{unit}_per_second": speed,
        "fastest_peer": fastest,
        "ratio": speed["vitrail"] / peers[fastest],
        "ratio_by_round": measure.median(ratios),
        "share_of_ceiling": macs / measure.median(seconds["vitrail"]) / best,
        "ceiling_gflops": 2 * best / 1e9,
        **({"ratio_to_fastest_eager": speed["vitrail"] / max(eager)} if eager else {}),
        "rounds": len(seconds["vitrail"]),
    }
    note = f", {result['ratio_to_fastest_eager']:.2f} to the fastest eager" if eager else ""
    if ours := speed.get("vitrail bf16"):
        theirs = max(value for name, value in speed.items() if name.endswith(" bf16") and name != "vitrail bf16")
        result |= {"bf16_to_fp32": ours / peers[fastest], "bf16_to_bf16": ours / theirs}
        note += f", bf16 {result['bf16_to_fp32']:.2f} to it and {result['bf16_to_bf16']:.2f} to others in bf16"
    table = "  ".join(f"{name} {value:.{1 if unit == 'images' else 3}f}" for name, value in speed.items())
    print(
        f"{work:<44}{table}   ratio {result['ratio']:.2f} to {fastest}{note}   "
        f"{result['share_of_ceiling']:.0%} of {result['ceiling_gflops']:.0f} GFLOP/s",
        flush=True,
    )
    return result


def forward(sizes: list[str], rounds: int, compiled: bool) -> list[dict[str, Any]]:
    """Measure images per second of the forward pass, eager or compiled."""
    rows = []
    for size in sizes:
        models = {name: model.eval() for name, model in contestants(size).items()}
        for batch in (1, 16):
            image = torch.randn(batch, 3, 224, 224)
            macs = count(configure(f"{size}/16"), batch).macs
            runs: dict[str, Callable[[], Any]] = {}
            for name, model in models.items():
                call = torch.compile(model, dynamic=False) if compiled else model
                runs[name] = lambda call=call, image=image: call(image)
            if compiled:  # eager peers too: a compiled model should beat them
                for name, model in models.items():
                    if name != "vitrail":
                        runs[f"{name} eager"] = lambda model=model, image=image: model(image)
            with torch.inference_mode():
                rows.append(
                    row(f"forward{' compiled' if compiled else ''} {size}/16, batch {batch}", runs, batch, macs, rounds)
                )
            torch.compiler.reset()
    return rows


def precision(sizes: list[str], rounds: int) -> list[dict[str, Any]]:
    """Measure images per second of the forward pass in fp32 and bf16, packed or not, against timm."""
    import timm

    rows, targets = [], {"auto / timm fp32": 1.7, "packed bf16 / timm bf16": 1.05, "packed fp32 / timm fp32": 1.05}
    for size in sizes:
        ours = vitrail.build(f"{size}/16").eval()
        theirs = timm.create_model(f"vit_{NAMES[size]}_patch16_224").eval()
        packed = {
            name: pack_module(ours, torch_dtype(name)) for name in ("fp32", "bf16") if can_pack(torch_dtype(name))
        }
        for batch in (1, 16):
            image = torch.randn(batch, 3, 224, 224)
            half = image.bfloat16()
            runs: dict[str, Callable[[], Any]] = {"fp32": partial(ours, image), "timm fp32": partial(theirs, image)}
            runs["timm bf16"] = autocast_run(theirs, image)
            if "fp32" in packed:
                runs["packed fp32"] = partial(packed["fp32"], image)
            if "bf16" in packed:
                runs["packed bf16"] = partial(packed["bf16"], half)
            with torch.inference_mode():
                seconds = measure.interleave(runs, rounds, at_least=10.0)
            speed = {name: batch / measure.median(times) for name, times in seconds.items()}
            speed["auto"] = max(value for name, value in speed.items() if not name.startswith("timm"))
            pairs = {pair: pair.split(" / ") for pair in targets}
            ratios = {pair: speed[a] / speed[b] for pair, (a, b) in pairs.items() if a in speed}
            rows.append({"work": f"forward {size}/16, batch {batch}", "images_per_second": speed, "ratios": ratios})
            table = "  ".join(f"{name} {value:.1f}" for name, value in speed.items())
            shown = "  ".join(f"{pair} {ratio:.2f} (target {targets[pair]})" for pair, ratio in ratios.items())
            print(f"{rows[-1]['work']:<28}{table}\n    {shown}", flush=True)
    return rows


def autocast_run(model: nn.Module, image: Tensor) -> Callable[[], Any]:
    """Return a forward pass under bf16 autocast."""

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(image)

    return run


def step(model: nn.Module, image: Tensor, label: Tensor, bf16: bool = False) -> Callable[[], float]:
    """Return a training step: forward, under autocast with `bf16`, loss, backward, AdamW."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05)

    def run() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(image)
        loss = F.cross_entropy(logits.float(), label)
        loss.backward()
        optimizer.step()
        return loss.item()

    return run


def train(rounds: int) -> list[dict[str, Any]]:
    """Measure images per second of whole training steps."""
    image, label = torch.randn(16, 3, 224, 224), torch.randint(1000, (16,))
    runs = {name: step(model, image, label) for name, model in contestants("S").items()}
    both = contestants("S")
    runs |= {f"{name} bf16": step(both[name], image, label, bf16=True) for name in ("vitrail", "timm")}
    cost = count(configure("S/16"), 16)
    rows = [row("train S/16, batch 16", runs, 16, 3 * cost.macs, rounds)]

    ours, theirs = small_pair()
    image, label = torch.randn(128, 1, 28, 28), torch.randint(10, (128,))
    runs = {"vitrail": step(ours, image, label), "vit-pytorch": step(theirs, image, label)}
    again, theirs_again = copy.deepcopy(ours), copy.deepcopy(theirs)
    losses = {name: [run() for _ in range(20)][-1] for name, run in runs.items()}
    macs = 3 * count(ours.config, 128).macs
    runs |= {
        "vitrail bf16": step(again, image, label, True),
        "vit-pytorch bf16": step(theirs_again, image, label, True),
    }
    rows.append(row("train D=128 L=6 H=4, 49 patches, batch 128", runs, 128, macs, rounds))
    rows[-1]["loss_after_20_steps"] = losses
    print(f"    same weights and mathematics, loss after 20 steps: {losses}")
    assert abs(losses["vitrail"] - losses["vit-pytorch"]) < 1e-3, "both must compute the same loss"
    runs["vit-pytorch"] = step(small_vit_pytorch(head_width=64), image, label)
    rows.append(row("the same, vit-pytorch's heads 64 wide", runs, 128, macs, rounds))
    return rows


def family_contestants(family: str) -> dict[str, nn.Module]:
    """Build a model of another family in every library that has it, at 224²."""
    import timm
    import torchvision
    import transformers

    if family == "Swin-T":
        return {
            "vitrail": vitrail.build("Swin-T"),
            "timm": timm.create_model("swin_tiny_patch4_window7_224"),
            "transformers": Logits(transformers.SwinForImageClassification(transformers.SwinConfig(num_labels=1000))),
            "torchvision": torchvision.models.swin_t(),
        }
    if family == "MViTv2-T":
        return {"vitrail": vitrail.build("MViTv2-T"), "timm": timm.create_model("mvitv2_tiny")}
    settings = transformers.DINOv3ViTConfig(hidden_size=384, num_hidden_layers=12, num_attention_heads=6)
    settings.intermediate_size, settings.num_register_tokens = 1536, 4
    return {
        "vitrail": build_from(DINOV3),
        "timm": timm.create_model("vit_small_patch16_dinov3"),
        "transformers": Pooled(transformers.DINOv3ViTModel(settings)),
    }


class Pooled(Logits):
    """Wrapper that returns the pooled features of a transformers model."""

    def forward(self, image: Tensor) -> Tensor:
        return self.model(image).pooler_output


FAMILIES = ("Swin-T", "MViTv2-T", "DINOv3-S/16")
DINOV3 = configure(
    "S/16", position="rotary-dinov3", registers=4, layer_scale=1e-5, eps=1e-5, key_bias=False, classes=None
)


def families(names: list[str], rounds: int) -> list[dict[str, Any]]:
    """Measure images per second of forward passes and whole training steps of other families."""
    rows = []
    for name in names:
        models = family_contestants(name)
        image, config = torch.randn(8, 3, 224, 224), models["vitrail"].config
        runs: dict[str, Callable[[], Any]] = {k: partial(model.eval(), image) for k, model in models.items()}
        with torch.inference_mode():
            rows.append(row(f"forward {name}, batch 8", runs, 8, count(config, 8).macs, rounds))
        label = torch.zeros(8, dtype=torch.long)
        runs = {k: step(model, image, label) for k, model in models.items()}
        rows.append(row(f"train {name}, batch 8", runs, 8, 3 * count(config, 8).macs, rounds))
    return rows


def small_vit_pytorch(head_width: int) -> nn.Module:
    """Build vit-pytorch's small ViT for 28² images. Its heads are 64 wide by default, whatever D is."""
    import vit_pytorch

    return vit_pytorch.ViT(
        image_size=28,
        patch_size=4,
        num_classes=10,
        dim=128,
        depth=6,
        heads=4,
        dim_head=head_width,
        mlp_dim=512,
        channels=1,
    )


def small_pair() -> tuple[nn.Module, nn.Module]:
    """Build vit-pytorch's small ViT, and vitrail's with the same mathematics and the same weights."""
    theirs = small_vit_pytorch(head_width=32)
    config = configure(
        patch=4,
        width=128,
        depth=6,
        heads=4,
        channels=1,
        image_size=28,
        classes=10,
        eps=1e-5,
        embed=Patches(4, normed=True),
        block=PreNorm(qkv_bias=False),
    )
    ours = vitrail.build_from(config)
    ours.load_state_dict(import_state(vit_pytorch_names.map_vit(config), theirs.state_dict()))
    return ours, theirs


def memory() -> list[dict[str, Any]]:
    """Measure the peak memory of B/16 at 1024² beyond the weights, in a process of its own."""
    script = (
        "import resource, torch, vitrail\n"
        "from pathlib import Path\n"
        "model = vitrail.build('B/16', image_size=1024).eval()\n"
        "image = torch.randn(1, 3, 1024, 1024)\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = int(Path('/proc/self/statm').read_text().split()[1]) * resource.getpagesize()\n"
        "with torch.inference_mode(): model(image)\n"
        "print(peak() - before)\n"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    beyond = int(answer.stdout)
    print(f"{'memory B/16 at 1024², batch 1':<44}{beyond / 2**30:.2f} GiB beyond the weights")
    return [{"work": "forward B/16 at 1024², batch 1", "bytes_beyond_weights": beyond}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=("forward", "precision", "compiled", "train", "memory", "families")
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--sizes", nargs="+", choices=tuple(NAMES), default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    wanted = options.only or ["forward", "precision", "compiled", "train", "memory", "families"]
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    if "memory" in wanted:
        rows += memory()
    if "forward" in wanted:
        rows += forward(options.sizes, options.rounds, compiled=False)
    if "precision" in wanted:
        rows += precision(options.sizes, options.rounds)
    if "train" in wanted:
        rows += train(options.rounds)
    if "families" in wanted:
        rows += families(options.families, options.rounds)
    if "compiled" in wanted:
        rows += forward(options.sizes, options.rounds, compiled=True)
    print(f"written to {measure.save('models' if not options.only else 'models-' + '-'.join(wanted), rows)}")


if __name__ == "__main__":
    main()
