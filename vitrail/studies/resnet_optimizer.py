"""SGD or Adam for the ResNets that the Vision Transformer is compared with (appendix D.1).

    vitrail paper run resnet-optimizer --scale laptop

One BiT ResNet, trained by gradient descent with momentum and by Adam. Each has its own rates, as many of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vitrail.engine.optim import SGD, AdamW, OptimizerSlot
from vitrail.recipe import Recipe
from vitrail.studies.accuracies import judged_on, rate_of, series, told
from vitrail.studies.base import recipe
from vitrail.studies.intervals import difference, grouped, points
from vitrail.studies.matching import resnet
from vitrail.studies.shots import five_shot
from vitrail.studies.study import Agreement, Answer, Cell, Chart, Result, Scale, Setting, Setup, Study
from vitrail.studies.tuning import tuned
from vitrail.studies.unfinished import lacking, too_early

ADAM, DESCENT = "Adam", "SGD"
LITTLE = 1e-4  # weight decay of SGD, where it is multiplied by a far larger rate than Adam's 0.1

LIMITS = (
    "A small ResNet that is trained briefly and judged on the same data. The paper pre-trains on JFT by both and compares them "
    "after fine-tuning on other data; in short runs Adam's faster start counts for more."
)


def plan(setup: Setup, results: Sequence[Result]) -> list[Cell]:
    """Both optimisers with as many tries: their rates are not of one size."""
    scale = setup.scale
    model = resnet(setup, scale.sizes["bit"], 1)

    def optimizer(name: str, rate: float) -> OptimizerSlot:
        if name == ADAM:
            return AdamW(lr=rate, weight_decay=scale.sizes.get("weight_decay", 0.1))
        return SGD(lr=rate, momentum=0.9, weight_decay=LITTLE)

    def made(place: Mapping[str, Setting], rate: float, seed: int) -> Recipe:
        return recipe(setup, model, rate, seed, optimizer=optimizer(str(place["optimizer"]), rate))

    rates = {ADAM: scale.rates, DESCENT: tuple(scale.sizes["sgd_rates"])}
    assert len(rates[ADAM]) == len(rates[DESCENT]), "both have as many tries"
    cells = []
    for name, tried in rates.items():
        cells += tuned(replace(setup, scale=replace(scale, rates=tried)), results, [{"optimizer": name}], made)
    return cells


def read(results: Sequence[Result], scale: Scale) -> Answer:
    pictures = judged_on(results)
    tests = {str(name): values for (name,), values in grouped(results, "optimizer").items()}
    shots = {str(name): values for (name,), values in grouped(results, "optimizer", number="five-shot").items()}
    if missing := lacking([(name,) for name in tests], (ADAM, DESCENT)):
        return too_early(missing, LIMITS)
    finding, agreement = found(tests, pictures)
    return Answer(
        finding=finding,
        agreement=agreement,
        columns=("optimiser", "rate", "test", "5-shot"),
        rows=tuple(
            (name, rate_of(results, {"optimizer": name}), told(values, pictures), told(shots.get(name), pictures))
            for name, values in tests.items()
        ),
        charts=(
            Chart(
                "Test accuracy by optimiser",
                "dots",
                (series("test", {**tests}, pictures), *((series("5-shot", {**shots}, pictures),) if shots else ())),
                y_name="top-1",
            ),
        ),
        limits=LIMITS,
    )


def found(tests: Mapping[str, Sequence[float]], pictures: int | None) -> tuple[str, Agreement]:
    """Adam against SGD on test pictures."""
    apart = difference(tests[ADAM], tests[DESCENT], pictures)
    if not apart.clear:
        return (
            f"No difference at this scale: Adam minus SGD is {points(apart)}, each at its best rate.",
            "no difference",
        )
    if apart.mean > 0:
        return f"Adam trains the ResNet better than SGD, by {points(apart)}, each at its best rate.", "agrees"
    return (
        f"SGD trains the ResNet better than Adam: Adam minus SGD is {points(apart)}, each at its best rate.",
        "disagrees",
    )


STUDY = Study(
    name="resnet-optimizer",
    question="Is Adam a fair choice for the ResNets, which are usually trained by SGD?",
    where="table 7, appendix D.1",
    found=(
        "Pre-trained on JFT by Adam, ResNets do slightly better after fine-tuning than pre-trained by SGD, on most data sets and "
        "on average: 89.33 against 88.79 for ResNet50, 94.01 against 93.72 for ResNet152x2 (table 7)."
    ),
    scales={
        "test": Scale(
            "digits", 0.2, "one core", seeds=2, steps=4, batch=32,
            sizes={"bit": {"stages": (1,), "factor": 0.25, "root": "small"}, "sgd_rates": (0.1,)},
        ),
        # A BiT of three stages on CIFAR-10, 20 M multiply-adds: 160 pictures/s on a free core, 500/s without training. 800
        # steps × 64 = 51,200: 320 s. A try: + 10,000 validation pictures 20 s + 8 s to begin = 348 s. A final run: + 10,000
        # test pictures, again for 5-shot: 388 s. 2 optimisers × (3 × 348 + 3 × 388) = 4,416 s; two at a time 37 min.
        "laptop": Scale(
            "cifar-10", 37, "two cores", seeds=3, steps=800, batch=64, rates=(3e-4, 1e-3, 3e-3),
            sizes={"bit": {"stages": (1, 1, 1), "factor": 0.25, "root": "small"}, "sgd_rates": (0.03, 0.1, 0.3)},
        ),
        # R26x1 with the small root on CIFAR-10, reckoned with 3,000 pictures/s: 10,000 steps × 256 take 853 s, and 40 s more.
        # 2 × 6 runs.
        "gpu": Scale(
            "cifar-10", 180, "one GPU", seeds=3, steps=10_000, batch=256, rates=(3e-4, 1e-3, 3e-3),
            sizes={
                "bit": {"stages": (2, 2, 2, 2), "factor": 1.0, "root": "small"}, "sgd_rates": (0.03, 0.1, 0.3),
                "precision": "bf16", "warmup": 1_000,
            },
        ),
        # R50x1 with table 3's rate for ResNets, on ImageNet-21k: 30 epochs of 14 M in batches of 4,096, 102,500 steps, 15 h,
        # reckoned with 8,000 pictures/s on eight GPUs. 2 × (2 + 1) runs.
        "cluster": Scale(
            "imagenet-21k", 5_400, "8 GPUs", seeds=1, steps=102_500, batch=4096, rates=(3e-4, 1e-3),
            sizes={
                "bit": {"stages": (3, 4, 6, 3), "factor": 1.0}, "sgd_rates": (0.1, 0.5), "image": 224, "precision": "bf16",
                "warmup": 10_000,
            },
        ),
    },
    plan=plan,
    read=read,
    measure=five_shot,
)  # fmt: skip
