"""The Vision Transformer's encoder against the Transformer of 2017, and what each of its three changes does (section 3).

    vitrail paper run original-transformer --scale laptop

Norms before each branch, GELU and learned positions, against norms after each sum, ReLU and fixed sinusoids; and between the two
the Vision Transformer with one of the three taken back. Each has its rate tuned by as many tries.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vitrail.nn.block import PostNorm, PreNorm
from vitrail.nn.mlp import GELU, ReLU
from vitrail.nn.position import Sinusoid1D
from vitrail.recipe import Recipe
from vitrail.studies.accuracies import judged_on, rate_of, series, told, told_difference
from vitrail.studies.base import recipe, vit
from vitrail.studies.intervals import Difference, difference, grouped, points
from vitrail.studies.study import Agreement, Answer, Cell, Chart, Result, Scale, Setting, Setup, Study
from vitrail.studies.tuning import tuned
from vitrail.studies.unfinished import lacking, too_early

VIT, ORIGINAL = "ViT", "Transformer of 2017"
ENCODERS: dict[str, dict[str, Any]] = {
    VIT: {},
    "ViT, norm after": {"block": PostNorm(mlp=GELU())},
    "ViT, ReLU": {"block": PreNorm(mlp=ReLU())},
    "ViT, sinusoid": {"position": Sinusoid1D()},
    ORIGINAL: {"block": PostNorm(mlp=ReLU()), "position": Sinusoid1D()},
}

LIMITS = (
    "A few layers, trained briefly, with a warm-up: norms after each sum are known to give trouble in deep models and without "
    "one, which this cannot show. Its rates are tuned too, so what is compared is each encoder at its best."
)


def plan(setup: Setup, results: Sequence[Result]) -> list[Cell]:
    """Every encoder with its own tries."""

    def made(place: Mapping[str, Setting], rate: float, seed: int) -> Recipe:
        return recipe(setup, vit(setup, **ENCODERS[str(place["encoder"])]), rate, seed)

    return tuned(
        setup, results, [{"encoder": each} for each in setup.scale.sizes.get("encoders", tuple(ENCODERS))], made
    )


def read(results: Sequence[Result], scale: Scale) -> Answer:
    tests = {str(each): values for (each,), values in grouped(results, "encoder").items()}
    tests = {each: tests[each] for each in ENCODERS if each in tests}
    if missing := lacking([(each,) for each in tests], (VIT, ORIGINAL)):
        return too_early(missing, LIMITS)
    pictures = judged_on(results)
    changes = {each: difference(v, tests[VIT], pictures) for each, v in tests.items() if each != VIT}
    finding, agreement = found(changes)
    return Answer(
        finding=finding,
        agreement=agreement,
        columns=("encoder", "rate", "test", "against ViT"),
        rows=tuple(
            (each, rate_of(results, {"encoder": each}), told(values, pictures), told_difference(changes.get(each)))
            for each, values in tests.items()
        ),
        charts=(Chart("Test accuracy by encoder", "dots", (series("test", {**tests}, pictures),), y_name="top-1"),),
        limits=LIMITS,
        notes=(
            "The paper publishes no comparison of the two: agreement is with the choice that its authors made.",
            *(
                f"One change taken back: {each.removeprefix('ViT, ')} {points(change)}, "
                + ("a clear difference." if change.clear else "no clear difference.")
                for each, change in changes.items()
                if each != ORIGINAL
            ),
        ),
    )


def found(changes: Mapping[str, Difference]) -> tuple[str, Agreement]:
    """The Transformer of 2017 against the Vision Transformer, and which single change makes a difference."""
    whole = changes[ORIGINAL]
    single = {each.removeprefix("ViT, "): change for each, change in changes.items() if each != ORIGINAL}
    telling = [f"{each} {points(change)}" for each, change in single.items() if change.clear]
    alone = f"; of single changes, these make a clear difference: {', '.join(telling)}" if telling else ""
    if single and not telling:
        alone = "; no single change makes a clear difference"
    if not whole.clear:
        return (
            f"No difference at this scale between the {ORIGINAL} and the ViT: {points(whole)}{alone}.",
            "no difference",
        )
    if whole.mean < 0:
        return f"The {ORIGINAL} is worse than the ViT: {points(whole)}{alone}.", "agrees"
    return f"The {ORIGINAL} is better than the ViT: {points(whole)}{alone}.", "disagrees"


STUDY = Study(
    name="original-transformer",
    question="What do the Vision Transformer's departures from the Transformer of 2017 change?",
    where="section 3",
    found=(
        "The authors follow the Transformer of 2017 as closely as possible, but with norms before each branch, GELU in place of "
        "ReLU and learned positions in place of sinusoids; they publish no numbers for this choice."
    ),
    scales={
        "test": Scale(
            "digits", 0.2, "one core", seeds=2, steps=4, batch=32,
            sizes={"width": 16, "depth": 2, "heads": 2, "patch": 4, "encoders": (VIT, "ViT, norm after", ORIGINAL)},
        ),
        # 16 tokens, width 64, depth 8 (norms after each sum matter in depth): 450 pictures/s on a free core, 1,300/s without
        # training. 800 steps × 64 = 51,200: 114 s. A try: + 12,000 validation pictures 9 s + 8 s to begin = 131 s. A final run: +
        # 10,000 test pictures = 139 s. 5 encoders × (4 × 131 + 3 × 139) = 4,705 s; two at a time 39 min.
        "laptop": Scale(
            "fashion-mnist", 39, "two cores", seeds=3, steps=800, batch=64, rates=(3e-4, 1e-3, 2e-3, 4e-3),
            sizes={"width": 64, "depth": 8, "heads": 4, "patch": 7},
        ),
        # 64 tokens of CIFAR-10, Ti's width and depth, reckoned with 10,000 pictures/s: 10,000 steps × 256 take 256 s, and 30
        # s more. 5 encoders × 7 runs × 286 s = 167 min.
        "gpu": Scale(
            "cifar-10", 167, "one GPU", seeds=3, steps=10_000, batch=256, rates=(1e-4, 3e-4, 1e-3, 3e-3),
            sizes={"width": 192, "depth": 12, "heads": 3, "patch": 4, "precision": "bf16", "warmup": 1_000},
        ),
        # B/16 as in table 3 for ImageNet-21k, 30 epochs of 14 M: 102,500 steps, 19 h, reckoned with 6,000 pictures/s. 5 × (2
        # + 1) runs.
        "cluster": Scale(
            "imagenet-21k", 17_500, "8 GPUs", seeds=1, steps=102_500, batch=4096, rates=(3e-4, 1e-3),
            sizes={
                "width": 768, "depth": 12, "heads": 12, "patch": 16, "image": 224, "dropout": 0.1, "weight_decay": 0.03,
                "precision": "bf16", "warmup": 10_000,
            },
        ),
    },
    plan=plan,
    read=read,
)  # fmt: skip
