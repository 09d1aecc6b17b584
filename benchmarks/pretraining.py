"""Speed of pretraining steps against other libraries, in images per second: forward, backward and AdamW on images in memory.

    python benchmarks/pretraining.py                 everything
    python benchmarks/pretraining.py --only mae      one comparison
    python benchmarks/pretraining.py --rounds 5 --batch 8
    python benchmarks/pretraining.py --only mae --compiled      also vitrail with torch.compile

mae: vitrail's masked autoencoder against transformers' ViTMAEForPreTraining with the same weights: a named size with our light
decoder and with the published one (8 layers of 512), and the models of our recipes for photographs and for CIFAR-10; each also
against a supervised step of the same encoder, which sees every patch.

dino: student and teacher on two crops of each image, against vit-pytorch's Dino with the same weights, heads and crops (its own
augmentation is removed): for photographs, and for images of 32² with a small model. vit-pytorch resizes its small crops to the
full size, so small crops have no counterpart; the third number is our step with six of them.

All contestants are interleaved in one process; ratios are of medians.
"""

import argparse
import copy
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import measure
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitrail
from vitrail.checkpoints.formats import vit_pytorch as vit_pytorch_names
from vitrail.checkpoints.keys import import_state
from vitrail.checkpoints.mae import Autoencoder, write_mae
from vitrail.data.rng import StepRandom
from vitrail.models.mae_decoder import Decoder, build_decoder
from vitrail.models.registry import configure
from vitrail.models.vit import ViT
from vitrail.nn.block import PreNorm
from vitrail.nn.embed import Patches
from vitrail.objectives.dino import DINO, SelfDistillation
from vitrail.objectives.mae import MAE, MASK_STREAM
from vitrail.training.runs.run import compile_loss

Step = Callable[[], float]


def trained(
    module: nn.Module, loss: Callable[[], Tensor], after: Callable[[], None] = lambda: None, bf16: bool = False
) -> Step:
    """Return a training step of a module with its own loss; the optimiser is the same for all contestants."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.05, betas=(0.9, 0.95), fused=True)
    module.train()

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
        return value.item()

    return step


def row(work: str, runs: dict[str, Step], images: int, rounds: int, **notes: Any) -> dict[str, Any]:
    """Measure one row and print it: the first contestant is vitrail, the ratios are vitrail over the others."""
    seconds = measure.interleave(runs, rounds)
    speed = {name: images / measure.median(taken) for name, taken in seconds.items()}
    ours, *others = speed
    ratios = {name: speed[ours] / speed[name] for name in others}
    table = "  ".join(f"{name} {value:.1f}" for name, value in speed.items())
    print(f"{work:<44}{table} images/s   " + ", ".join(f"{r:.2f}× {name}" for name, r in ratios.items()), flush=True)
    if half := speed.get("vitrail, bf16"):
        peer = next(name for name in ("transformers", "vit-pytorch") if name in speed)
        notes["bf16_to_fp32"] = half / speed[peer]
        print(f"    vitrail in bf16: {notes['bf16_to_fp32']:.2f}× {peer} in fp32", flush=True)
    return {"work": work, "images_per_second": speed, "ratios": ratios, "rounds": rounds, **notes}


def masked(task: nn.Module, images: Tensor) -> Callable[[], Tensor]:
    """Return the loss of consecutive steps, each with other masked patches."""
    steps = iter(range(10**9))
    count = len(images)
    return lambda: task(images, None, StepRandom(0, next(steps), 0, count, count, images.device))["loss"]


def labelled(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], Tensor]:
    return lambda: F.cross_entropy(model(images), labels)


def mae(size: str, batch: int, rounds: int, compiled: bool) -> list[dict[str, Any]]:
    """Compare masked autoencoders. Targets: 1.2 of transformers; with the light decoder 2.2 of the supervised step."""
    import transformers

    small: dict[str, Any] = {"width": 192, "depth": 6, "heads": 6}
    contests: dict[str, tuple[dict[str, Any], Decoder, int]] = {
        f"{size}, light decoder": ({"name": size}, Decoder(), batch),
        f"{size}, published decoder": ({"name": size}, Decoder(8, 512, 16), batch),
        "recipe for photographs": ({"patch": 16, "image_size": 128, **small}, Decoder(depth=2), 4 * batch),
        "recipe for CIFAR-10": ({"patch": 4, "image_size": 32, **small}, Decoder(depth=2), 4 * batch),
    }
    rows = []
    for name, (slots, decoder, count) in contests.items():
        model = vitrail.build(**slots, classes=None)
        assert isinstance(model, ViT)
        images, labels = torch.randn(count, 3, *model.config.image_size), torch.randint(1000, (count,))
        auto = Autoencoder(model, build_decoder(model.config, decoder))
        with tempfile.TemporaryDirectory() as folder:
            write_mae(auto, f"{folder}/mae", "hf")
            theirs = transformers.ViTMAEForPreTraining.from_pretrained(f"{folder}/mae")
        task = MAE(decoder=decoder).build(model, 1, decoder=auto.decoder)
        same = StepRandom(0, 0, 0, count, count, images.device)
        with torch.no_grad():
            noise = same.uniform(model.config.shape.patches, MASK_STREAM)
            first = {
                "vitrail": task(images, None, same)["loss"].item(),
                "transformers": theirs(images, noise=noise).loss.item(),
            }
        assert abs(first["vitrail"] - first["transformers"]) < 1e-4, f"both must compute the same loss: {first}"
        runs = {
            "vitrail": trained(task, masked(task, images)),
            "transformers": trained(theirs, lambda theirs=theirs, images=images: theirs(images).loss),
            "supervised": trained(supervised := vitrail.build(**slots), labelled(supervised, images, labels)),
        }
        half = copy.deepcopy(task)
        runs["vitrail, bf16"] = trained(half, masked(half, images), bf16=True)
        if compiled:
            compile_loss(same_task := copy.deepcopy(task))
            runs["vitrail, compiled"] = trained(same_task, masked(same_task, images))
        rows.append(row(f"MAE {name}, batch {count}", runs, count, rounds, first_loss=first))
    return rows


def dino(size: str, batch: int, rounds: int, compiled: bool) -> list[dict[str, Any]]:
    """Compare DINO. Target: 1.2 of vit-pytorch."""
    rows = []
    photographs = configure(size, classes=None), batch, 96
    tiny = configure(patch=4, width=192, depth=6, heads=3, image_size=32, classes=None), 4 * batch, 16
    for config, batch, local in (photographs, tiny):
        side = config.image_size[0]
        large, small = torch.randn(batch, 2, 3, side, side), torch.randn(batch, 6, 3, local, local)
        none = small[:, :0]
        task, theirs = dino_pair(config, large)
        steps = iter(range(10**9))

        def ours(crops: Tensor, task: SelfDistillation = task, large: Tensor = large, steps: Any = steps) -> Tensor:
            return task((large, crops), None, StepRandom(0, next(steps), 0, len(large), len(large), large.device))[
                "loss"
            ]

        first = {"vitrail": ours(none).item(), "vit-pytorch": theirs(large).item()}
        assert abs(first["vitrail"] - first["vit-pytorch"]) < 1e-4, f"both must compute the same loss: {first}"

        def moved(task: SelfDistillation = task) -> None:
            task.after_step(0)

        runs = {
            "vitrail": trained(task, lambda ours=ours, none=none: ours(none), moved),
            "vit-pytorch": trained(theirs, lambda dino=theirs, x=large: dino(x), theirs.update_moving_average),
        }
        half = copy.deepcopy(task)
        runs["vitrail, bf16"] = trained(
            half,
            lambda ours=ours, half=half, none=none: ours(none, half),
            lambda half=half: half.after_step(0),
            bf16=True,
        )
        runs["vitrail, and small crops"] = trained(task, lambda ours=ours, small=small: ours(small), moved)
        if compiled:
            compile_loss(again := copy.deepcopy(task))
            runs["vitrail, compiled"] = trained(
                again,
                lambda ours=ours, again=again, none=none: ours(none, again),
                lambda again=again: again.after_step(0),
            )
        name = f"DINO {size if side == 224 else 'D=192 L=6'}, {side}², batch {batch}"
        rows.append(row(name, runs, batch, rounds, first_loss=first))
    return rows


def dino_pair(config: Any, large: Tensor) -> tuple[SelfDistillation, Any]:
    """Build vitrail's DINO, and vit-pytorch's with the same weights and given crops."""
    import vit_pytorch
    from vit_pytorch.dino import Dino

    s, side, patch = config.size, config.image_size[0], config.embed.stride
    config = replace(config, eps=1e-5, embed=Patches(patch, normed=True), block=PreNorm(qkv_bias=False))
    net = vit_pytorch.ViT(
        image_size=side,
        patch_size=patch,
        num_classes=2,
        dim=s.width,
        depth=s.depth,
        heads=s.heads,
        dim_head=s.width // s.heads,
        mlp_dim=s.mlp,
    )
    labelled = replace(config, classes=2)
    model = vitrail.build_from(config)
    assert isinstance(model, ViT)
    state = import_state(vit_pytorch_names.map_vit(labelled), net.state_dict())
    model.load_state_dict({name: tensor for name, tensor in state.items() if not name.startswith("head.")})
    spec = DINO(hidden=256, bottleneck=256, teacher_temperature=0.04, momentum=0.996, frozen=0.0)
    task = spec.build(model, 10**9)

    class Given(nn.Module):
        """Replacement of the random crop: one of the given crops."""

        def __init__(self, which: int) -> None:
            super().__init__()
            self.which = which

        def forward(self, crops: Tensor) -> Tensor:
            return crops[:, self.which] if crops.ndim == 5 else crops

    theirs = Dino(
        net,
        image_size=side,
        hidden_layer="to_latent",
        num_classes_K=spec.out,
        student_temp=0.1,
        teacher_temp=0.04,
        moving_average_decay=0.996,
        augment_fn=Given(0),
        augment_fn2=Given(1),
    )
    theirs.local_crop = theirs.global_crop = nn.Identity()
    with torch.no_grad():
        projector = theirs.student_encoder.projector.net
        projector[5] = nn.Identity()  # one GELU more than published, before the normalisation
        linears = [layer for layer in projector if isinstance(layer, nn.Linear)]
        for layer, weights in zip(linears[:-1], task.head.layers, strict=True):
            layer.load_state_dict(weights.state_dict())
        linears[-1].weight.copy_(F.normalize(task.head.prototypes.weight, dim=1))
        linears[-1].bias.zero_()
    theirs.reset_moving_average()  # copies these weights to the teacher
    theirs(large[:2])
    theirs.last_teacher_centers.zero_()
    return task, theirs


CONTESTS: dict[str, Callable[[str, int, int, bool], list[dict[str, Any]]]] = {"mae": mae, "dino": dino}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(CONTESTS), default=list(CONTESTS))
    parser.add_argument("--size", default="S/16", help="size of the encoder at 224² [S/16]")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compiled", action="store_true", help="add vitrail with torch.compile")
    options = parser.parse_args()
    torch.manual_seed(0)
    settings = (options.size, options.batch, options.rounds, options.compiled)
    rows = [each for name in options.only for each in CONTESTS[name](*settings)]
    whole = set(options.only) == set(CONTESTS)
    print(f"written to {measure.save('pretraining' if whole else 'pretraining-' + '-'.join(options.only), rows)}")


if __name__ == "__main__":
    main()
