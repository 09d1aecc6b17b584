"""Vision Transformer, hybrid and ResNet of the same compute as the training set grows (figures 3 and 4, section 4.3).

    vitrail paper run data-size --scale laptop

Three models that cost the same for a picture, as counted by `vitrail describe` (parameters are not matched), and six sizes of the
training set: so many pictures of each class, others for every seed, the fewer among the more. Every run has the same number of
steps, so small sets are seen many times. Each family has its rate tuned at each size by as many tries, on the same validation
pictures.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.recipe import Recipe
from vitrail.studies.accuracies import UNFINISHED, judged_on, rate_of, series, told, told_difference
from vitrail.studies.base import recipe
from vitrail.studies.intervals import Difference, difference, grouped, points
from vitrail.studies.matching import FAMILIES, HYBRID, RESNET, VIT, Tests, ends, matched, unmatched, weighed
from vitrail.studies.shots import five_shot
from vitrail.studies.study import Agreement, Answer, Cell, Chart, Result, Scale, Setting, Setup, Study
from vitrail.studies.tuning import tuned


def plan(setup: Setup, results: Sequence[Result]) -> list[Cell]:
    """Every family at every size of the training set, each with its own tries."""
    sizes = setup.scale.sizes
    models = matched(setup, sizes["bit"], sizes["hybrid"])
    places = [{"family": family, "each class": many} for many in amounts(setup) for family in FAMILIES]

    def made(place: Mapping[str, Setting], rate: float, seed: int) -> Recipe:
        few = replace(setup.data, per_class=int(str(place["each class"])), drawn=seed)
        return recipe(setup, models[str(place["family"])], rate, seed, data=few)

    return tuned(setup, results, places, made)


def amounts(setup: Setup) -> list[int]:
    """Pictures of each class to learn from: of the scale's sizes, those that the data has on average."""
    most = setup.facts.images / setup.facts.classes
    wanted = setup.scale.sizes["per_class"]
    found = [many for many in wanted if many <= most]
    if len(found) < 2:
        raise ValueError(
            f"{setup.data.where} has about {most:.0f} training pictures of each class, and this scale compares "
            f"{', '.join(map(str, wanted))}: use data with {wanted[1]} or more"
        )
    return found


def measure(cell: Cell, run: Path) -> dict[str, Any]:
    """The few-shot score, and what the model has and costs."""
    return five_shot(cell, run) | weighed(cell, run)


def by_size(results: Sequence[Result], number: str) -> Tests:
    """A number by family and size, in order."""
    found: dict[str, dict[int, Sequence[float]]] = {family: {} for family in FAMILIES}
    groups = grouped(results, "family", "each class", number=number)
    for (family, many), values in sorted(groups.items(), key=lambda item: int(str(item[0][1]))):
        found[str(family)][int(str(many))] = values
    return found


def read(results: Sequence[Result], scale: Scale) -> Answer:
    pictures = judged_on(results)
    tests, shots = by_size(results, "test"), by_size(results, "five-shot")
    finding, agreement = found(tests, pictures)
    rows = []
    for many in sorted({many for values in tests.values() for many in values}):
        for family in FAMILIES:
            if many in tests[family]:
                ahead = None
                if family != RESNET and many in tests[RESNET]:
                    ahead = difference(tests[family][many], tests[RESNET][many], pictures)
                rows.append(
                    (
                        f"{many:,}",
                        family,
                        rate_of(results, {"family": family, "each class": many}),
                        told(tests[family][many], pictures),
                        told_difference(ahead),
                        told(shots[family].get(many), pictures),
                    )
                )
    return Answer(
        finding=finding,
        agreement=agreement,
        columns=("pictures of each class", "family", "rate", "test", "against the ResNet", "5-shot"),
        rows=tuple(rows),
        charts=tuple(
            Chart(
                title,
                "lines",
                tuple(series(family, {**values}, pictures) for family, values in what.items() if values),
                x_name="training pictures of each class",
                y_name="top-1",
                x_log=True,
            )
            for title, what in (("Test accuracy", tests), ("5-shot accuracy of the features", shots))
            if any(what.values())
        ),
        limits=(
            "The paper's ViT overtakes between 14 and 300 million pictures, thousands of times more than here, and is "
            "fine-tuned on other data after pre-training; here all is trained and judged on one small dataset. Every run "
            f"has {scale.steps:,} steps of {scale.batch}, so with the most pictures each is seen a few times only, and "
            "longer training might help one family more. As accuracies near their ceiling, every gap shrinks."
        ),
        notes=(*unmatched(results), *hybrids(tests, pictures)),
    )


def found(tests: Tests, pictures: int | None) -> tuple[str, Agreement]:
    """Who leads with the fewest pictures, and who with the most."""
    sizes = ends(tests, VIT, RESNET)
    if sizes is None:
        return UNFINISHED
    few, many = (difference(tests[RESNET][size], tests[VIT][size], pictures) for size in sizes)
    at_few = f"with {sizes[0]:,} pictures of each class ResNet minus ViT is {points(few)}"
    at_many = f"with {sizes[1]:,} it is {points(many)}"
    both = f"{at_few}, {at_many}"
    less = shrunk(few, many)
    if few.clear and few.mean < 0:
        return f"The ViT leads already where there is little data: {both}.", "disagrees"
    if few.clear and many.clear and many.mean < 0:
        return f"The ResNet leads with few pictures and the ViT overtakes it: {both}.", "agrees"
    if few.clear and not many.clear:
        return f"The ResNet leads with few pictures and the ViT catches up: {both}.", "agrees"
    if few.clear and less.clear and less.mean > 0:
        return f"The ResNet leads throughout, but by less with more pictures: {both}.", "agrees"
    if few.clear and less.clear:
        return f"The ResNet leads throughout, and by more with more pictures: {both}.", "disagrees"
    if few.clear:
        return f"The ResNet leads throughout, and its lead does not clearly change: {both}.", "unclear"
    if many.clear and many.mean > 0:
        return f"The two are alike with few pictures, and the ResNet leads with more: {both}.", "disagrees"
    if many.clear:
        return f"The two are alike with few pictures, and the ViT leads with more: {both}.", "unclear"
    return f"No difference at this scale: {both}.", "no difference"


def shrunk(before: Difference, after: Difference) -> Difference:
    """How much smaller a difference became, as if both were independent."""
    mean = before.mean - after.mean
    down = math.hypot(before.mean - before.low, after.high - after.mean)
    up = math.hypot(before.high - before.mean, after.mean - after.low)
    return Difference(mean, mean - down, mean + up)


def hybrids(tests: Tests, pictures: int | None) -> tuple[str, ...]:
    """The hybrid against both at the ends."""
    sizes = ends(tests, HYBRID, VIT, RESNET)
    if sizes is None:
        return ()
    said = []
    for size in sizes:
        over = [difference(tests[HYBRID][size], tests[other][size], pictures) for other in (VIT, RESNET)]
        said.append(
            f"with {size:,} pictures of each class it has {points(over[0])} on the ViT and {points(over[1])} on the ResNet"
        )
    return (f"The hybrid: {'; '.join(said)}.",)


STUDY = Study(
    name="data-size",
    question="When does a Vision Transformer overtake a ResNet of the same compute as the training set grows?",
    where="figures 3 and 4, section 4.3",
    found=(
        "With little data ResNets do best: trained on ImageNet, ViTs are a few percentage points below ResNets of "
        "comparable size; pre-trained on larger sets ViTs catch up, and on JFT-300M they outperform ResNets."
    ),
    scales={
        "test": Scale(
            "digits", 0.3, "one core", seeds=1, steps=3, batch=16,
            sizes={
                "depth": 1, "heads": 2, "patch": 2, "per_class": (4, 16),
                "bit": {"stages": (1,), "factor": 0.25, "root": "small"}, "hybrid": {"stages": (), "patch": 1},
            },
        ),
        # R14x0.5 on Fashion-MNIST costs 6.8 M multiply-adds a picture. On a free core all three train about 450 pictures/s,
        # 1,300/s without training. 560 steps × 64 = 35,840: 80 s. A try: + 6,000 validation pictures 5 s + 8 s to begin = 93
        # s. A final run: + 10,000 test pictures, again for 5-shot: 108 s. 6 sizes × 3 families × (2 × 93 + 3 × 108) = 9,180
        # s; two at a time 77 min. Three seeds, since each draws other pictures: with two nobody knows how much that changes.
        "laptop": Scale(
            "fashion-mnist", 77, "two cores", seeds=3, steps=560, batch=64, rates=(1e-3, 3e-3),
            sizes={
                "depth": 4, "heads": 4, "patch": 4, "per_class": (8, 24, 72, 216, 648, 1944),
                "bit": {"stages": (1, 1, 1, 1), "factor": 0.5}, "hybrid": {"stages": (), "patch": 1},
            },
        ),
        # R26x0.5 with the small root on CIFAR-10 costs 182 M multiply-adds; reckoned with 1,500 pictures/s. 10,000 steps ×
        # 256 take 1,710 s, and 30 s more. 18 × 5 runs.
        "gpu": Scale(
            "cifar-10", 2_600, "one GPU", seeds=3, steps=10_000, batch=256, rates=(3e-4, 1e-3),
            sizes={
                "depth": 12, "heads": 4, "patch": 4, "per_class": (32, 96, 256, 768, 2048, 4400),
                "precision": "bf16", "warmup": 1_000,
                "bit": {"stages": (2, 2, 2, 2), "factor": 0.5, "root": "small"}, "hybrid": {"stages": (1, 1), "patch": 1},
            },
        ),
        # R50x2, and about B/16, at 224² on ImageNet-21k: 30 epochs of 14 M in batches of 4,096, 102,500 steps, 53 h, reckoned
        # with 2,200 pictures/s on eight GPUs. 18 runs, at the paper's rate. A class has about 530 pictures to learn from.
        "cluster": Scale(
            "imagenet-21k", 57_000, "8 GPUs", seeds=1, steps=102_500, batch=4096,
            sizes={
                "depth": 12, "heads": 12, "patch": 16, "image": 224, "per_class": (2, 6, 18, 54, 162, 486),
                "weight_decay": 0.03, "dropout": 0.1, "precision": "bf16", "warmup": 10_000,
                "bit": {"stages": (3, 4, 6, 3), "factor": 2.0}, "hybrid": {"stages": (3, 4, 9), "patch": 1},
            },
        ),
    },
    plan=plan,
    read=read,
    measure=measure,
)  # fmt: skip
