"""Accuracy against training compute for several sizes of Vision Transformers, hybrids and ResNets (figure 5, section 4.4).

    vitrail paper run compute --scale laptop

ResNets of several sizes, and for each of them a hybrid and a Vision Transformer that cost the same for a picture, as counted by
`vitrail describe`. All see the same number of pictures. Training compute is what a picture costs, three times (forward, and twice
as much backward), for every picture seen. Each model has its rate tuned by as many tries.
"""

from collections.abc import Mapping, Sequence

from vitrail.recipe import Recipe
from vitrail.studies.accuracies import NONE_YET, judged_on, rate_of, series, told, told_difference
from vitrail.studies.base import recipe, training_macs
from vitrail.studies.intervals import difference, grouped, points, shrunk
from vitrail.studies.matching import FAMILIES, HYBRID, RESNET, VIT, Tests, ends, matched, unmatched, weighed
from vitrail.studies.study import Agreement, Answer, Cell, Chart, Result, Scale, Setting, Setup, Study
from vitrail.studies.tuning import tuned
from vitrail.studies.unfinished import too_early

LIMITS = (
    "Small models that are trained from nothing for a short time on small data, where the paper pre-trains on JFT and averages "
    "over five datasets after fine-tuning: with so few pictures convolutions have the advantage that the paper's figures 3 and 4 "
    "show for small data. Multiply-adds are not time: on this kind of machine a convolution's take longer."
)


def plan(setup: Setup, results: Sequence[Result]) -> list[Cell]:
    """Every family at every size, each with its own tries."""
    sizes = [matched(setup, each["bit"], each["hybrid"]) for each in setup.scale.sizes["models"]]
    pictures = setup.scale.steps * setup.scale.batch
    places = [
        {"family": family, "size": number, "compute": training_macs(models[family], pictures)}
        for family in FAMILIES
        for number, models in enumerate(sizes, 1)
        if family in models
    ]

    def made(place: Mapping[str, Setting], rate: float, seed: int) -> Recipe:
        return recipe(setup, sizes[int(str(place["size"])) - 1][str(place["family"])], rate, seed)

    return tuned(setup, results, places, made)


def read(results: Sequence[Result], scale: Scale) -> Answer:
    pictures = judged_on(results)
    groups = grouped(results, "family", "size", "compute")
    tests: dict[str, dict[int, Sequence[float]]] = {family: {} for family in FAMILIES}
    spent: dict[tuple[str, int], float] = {}
    for (family, size, compute), values in sorted(groups.items(), key=lambda item: int(str(item[0][1]))):
        tests[str(family)][int(str(size))] = values
        spent[str(family), int(str(size))] = float(compute or 0)
    if ends(tests, VIT, RESNET) is None:
        return too_early([f"{VIT} and {RESNET} of two sizes"], LIMITS)
    finding, agreement = found(tests, pictures)
    return Answer(
        finding=finding,
        agreement=agreement,
        columns=("family", "size", "training compute, GMAC", "rate", "test", "against the ResNet"),
        rows=tuple(
            (
                family,
                str(size),
                f"{spent[family, size] / 1e9:,.0f}",
                rate_of(results, {"family": family, "size": size}),
                told(values, pictures),
                told_difference(difference(values, tests[RESNET][size], pictures))
                if family != RESNET and size in tests[RESNET]
                else NONE_YET,
            )
            for family in FAMILIES
            for size, values in tests[family].items()
        ),
        charts=(
            Chart(
                "Test accuracy against training compute",
                "lines",
                tuple(
                    series(family, {spent[family, size]: values for size, values in tests[family].items()}, pictures)
                    for family in FAMILIES
                    if tests[family]
                ),
                x_name="multiply-adds of the whole training",
                y_name="top-1",
                x_log=True,
            ),
        ),
        limits=LIMITS,
        notes=(*unmatched(results), *hybrids(tests, pictures)),
    )


def found(tests: Tests, pictures: int | None) -> tuple[str, Agreement]:
    """The Vision Transformer against the ResNet at the largest compute, and at the smallest."""
    sizes = ends(tests, VIT, RESNET)
    assert sizes is not None
    small, large = (difference(tests[VIT][size], tests[RESNET][size], pictures) for size in sizes)
    at_first = f"at the smallest, ViT minus ResNet is {points(small)}"
    if not large.clear:
        return (
            f"No difference at this scale: at the same training compute, ViT minus ResNet is {points(large)} for the largest "
            f"models; {at_first}.",
            "no difference",
        )
    if large.mean > 0:
        return (
            f"For the same training compute the largest ViT beats the ResNet by {points(large)}; {at_first}.",
            "agrees",
        )
    return f"For the same training compute the largest ResNet beats the ViT: {points(large)}; {at_first}.", "disagrees"


def hybrids(tests: Tests, pictures: int | None) -> tuple[str, ...]:
    """What hybrids have over pure ones, small and large."""
    sizes = ends(tests, HYBRID, VIT)
    if sizes is None:
        return ()
    small, large = (difference(tests[HYBRID][size], tests[VIT][size], pictures) for size in sizes)
    said = f"Hybrid minus ViT: {points(small)} for the smallest models, {points(large)} for the largest"
    less = shrunk(small, large)
    if small.clear and small.mean > 0 and not large.clear and less.clear and less.mean > 0:
        return (f"{said}: the hybrid leads only where compute is scarce, as in the paper.",)
    return (f"{said}.",)


STUDY = Study(
    name="compute",
    question="Which family is most accurate for the same training compute?",
    where="figure 5, section 4.4",
    found=(
        "Vision Transformers use about 2 to 4 times less pre-training compute than ResNets for the same performance (mean of 5 "
        "data sets); hybrids are slightly better than they are at small compute, and the difference vanishes for larger models."
    ),
    scales={
        "test": Scale(
            "digits", 0.3, "one core", seeds=1, steps=3, batch=32,
            sizes={
                "depth": 1, "heads": 2, "patch": 2,
                "models": (
                    {"bit": {"stages": (1,), "factor": 0.25, "root": "small"}, "hybrid": {"stages": (), "patch": 1}},
                    {"bit": {"stages": (1, 1), "factor": 0.25, "root": "small"}, "hybrid": {"stages": (), "patch": 1}},
                ),
            },
        ),
        # CIFAR-10, 5, 13 and 20 M multiply-adds a picture. Seconds for 1,000 pictures on a free core: ResNets 4.3, 6.7, 6.7;
        # hybrids 2.5, 3.3, 4.5; ViTs 2.0, 3.7, 5.3: 39 in all. 480 steps × 64 = 30,720 pictures, and validation and test cost
        # as much as 5,000 more: 35.7 × 39 × (2 tries + 3 seeds) = 6,960 s, and 45 × 8 s to begin = 7,320 s; two at a time 61
        # min.
        "laptop": Scale(
            "cifar-10", 61, "two cores", seeds=3, steps=480, batch=64, rates=(1e-3, 3e-3),
            sizes={
                "depth": 4, "heads": 4, "patch": 4,
                "models": (
                    {"bit": {"stages": (1,), "factor": 0.25, "root": "small"}, "hybrid": {"stages": (), "patch": 2}},
                    {"bit": {"stages": (1, 1), "factor": 0.25, "root": "small"}, "hybrid": {"stages": (1,), "patch": 2}},
                    {"bit": {"stages": (1, 1, 1), "factor": 0.25, "root": "small"}, "hybrid": {"stages": (1,), "patch": 2}},
                ),
            },
        ),
        # CIFAR-10, 28, 53 and 182 M multiply-adds a picture, reckoned with 6,000, 4,000 and 1,500 pictures/s: 10,000 steps ×
        # 256 take 430, 640 and 1,710 s. 3 families × 5 runs × 2,780 s.
        "gpu": Scale(
            "cifar-10", 695, "one GPU", seeds=3, steps=10_000, batch=256, rates=(3e-4, 1e-3),
            sizes={
                "depth": 8, "heads": 4, "patch": 4, "precision": "bf16", "warmup": 1_000,
                "models": (
                    {"bit": {"stages": (1, 1, 1, 1), "factor": 0.25, "root": "small"}, "hybrid": {"stages": (1,), "patch": 2}},
                    {"bit": {"stages": (2, 2, 2, 2), "factor": 0.25, "root": "small"}, "hybrid": {"stages": (1, 1), "patch": 1}},
                    {"bit": {"stages": (2, 2, 2, 2), "factor": 0.5, "root": "small"}, "hybrid": {"stages": (2, 2), "patch": 1}},
                ),
            },
        ),
        # R50x1, R101x1 and R50x2 at 224² and what matches them, on ImageNet-21k: 30 epochs of 14 M in batches of 4,096,
        # 102,500 steps; reckoned with 8,000, 4,500 and 2,200 pictures/s on eight GPUs: 15, 26 and 53 h. 3 families.
        "cluster": Scale(
            "imagenet-21k", 16_900, "8 GPUs", seeds=1, steps=102_500, batch=4096,
            sizes={
                "depth": 12, "heads": 12, "patch": 16, "image": 224, "weight_decay": 0.03, "dropout": 0.1, "precision": "bf16",
                "warmup": 10_000,
                "models": (
                    {"bit": {"stages": (3, 4, 6, 3), "factor": 1.0}, "hybrid": {"stages": (2, 2), "patch": 2}},
                    {"bit": {"stages": (3, 4, 23, 3), "factor": 1.0}, "hybrid": {"stages": (2, 2, 2), "patch": 1}},
                    {"bit": {"stages": (3, 4, 6, 3), "factor": 2.0}, "hybrid": {"stages": (3, 4, 9), "patch": 1}},
                ),
            },
        ),
    },
    plan=plan,
    read=read,
    measure=weighed,
)  # fmt: skip
