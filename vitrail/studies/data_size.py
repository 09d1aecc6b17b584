"""Vision Transformer, hybrid and ResNet of the same compute as the set they are pre-trained on grows (figures 3 and 4, section
4.3).

    vitrail paper run data-size --scale laptop

Three models that cost the same for a picture, as counted by `vitrail describe` (parameters are not matched), and six sizes of
the set that they are pre-trained on: so many pictures of each class, others for every seed, the fewer among the more. What they
learnt is then scored on other classes in the paper's two ways: fine-tuned with a few labels, and by least squares on frozen
features with five pictures of each class.

The paper has other data to transfer to; here one data set is divided by its classes. Every other class, from the second on, is
pre-trained on; the ones between are held aside. So no picture and no class of the target was ever seen, and what is scored are
features, as in the paper; on the same classes it would be scored how well those very classes were learnt.

All pre-training has the same number of steps, so small sets are seen many times. At each size each family has as many rates
tried, for pre-training on validation pictures of its own classes (the best model of the first seed is kept, and not trained
again), and for fine-tuning on those of the target.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.engine.optim import SGD
from vitrail.engine.schedule import Cosine
from vitrail.recipe import Recipe
from vitrail.studies.accuracies import NONE_YET, judged_on, rate_of, series, told, told_difference
from vitrail.studies.base import recipe
from vitrail.studies.intervals import Difference, difference, grouped, points, shrunk
from vitrail.studies.matching import FAMILIES, HYBRID, RESNET, VIT, Tests, ends, matched, unmatched, weighed
from vitrail.studies.shots import five_shot_of
from vitrail.studies.study import Agreement, Answer, Cell, Chart, Result, Scale, Setting, Setup, Study
from vitrail.studies.tuning import best_rate, tuned
from vitrail.studies.unfinished import too_early

LEARNT, ASKED = (1, 2), (0, 2)  # the classes that are pre-trained on, and those that are held aside
Place = Mapping[str, Setting]
ROOT_ALONE = (
    "The hybrid of this scale is a Transformer on a ResNet's root alone: stages behind it would leave too few tokens of such "
    "small pictures."
)


def plan(setup: Setup, results: Sequence[Result]) -> list[Cell]:
    """Every family pre-trained at every size; fine-tuned, once its models of that size are there."""
    sizes, scale = setup.scale.sizes, setup.scale
    learnt, asked = halves(setup)
    models = matched(learnt, sizes["bit"], sizes["hybrid"])
    cells: list[Cell] = []
    ready: list[Place] = []
    begins: dict[tuple[Setting, ...], str] = {}
    for place in [{"family": family, "each class": many} for many in amounts(setup) for family in models]:
        model, many = models[str(place["family"])], int(str(place["each class"]))
        best = best_rate(place, sizes["base_rates"], results, "base")
        for seed in range(scale.seeds):
            # The first seed tries the rates, and the others have the one that was best.
            for rate in sizes["base_rates"] if seed == 0 else () if best is None else (best,):
                made = pretraining(learnt, model, many, rate, seed)
                cells.append(Cell({**place, "rate": rate, "seed": seed}, made, "base"))
        for result in results:
            whole = result.phase == "base" and "diverged" not in result.numbers
            if whole and result.at == {**place, "rate": best, "seed": result.at["seed"]}:
                begins[(*place.values(), result.at["seed"])] = str(setup.place / result.run / "model.safetensors")
        if all((*place.values(), seed) in begins for seed in range(scale.seeds)):
            ready.append(place)

    def tuning(place: Place, rate: float, seed: int) -> Recipe:
        few = replace(asked.data, per_class=sizes["labels"], drawn=seed)
        model = replace(models[str(place["family"])], classes=asked.facts.classes)
        return replace(
            recipe(asked, model, rate, seed, data=few),
            init=begins[(*place.values(), seed)],
            optimizer=SGD(lr=rate, momentum=0.9, weight_decay=0.0, clip=1.0),  # table 4
            schedule=Cosine(warmup=max(1, scale.steps // 10)),
        )

    return cells + tuned(setup, results, ready, tuning)


def halves(setup: Setup) -> tuple[Setup, Setup]:
    """The same for the classes that are pre-trained on, and for those that are held aside."""
    classes = setup.facts.classes
    if classes < 4:
        raise ValueError(
            f"{setup.data.where} has {classes} classes, and this study pre-trains on some and transfers to the others: use "
            "data with 4 or more"
        )
    found = [
        replace(
            setup,
            data=replace(setup.data, classes=every),
            facts=replace(setup.facts, classes=len(range(classes)[every[0] :: every[1]])),
        )
        for every in (LEARNT, ASKED)
    ]
    return found[0], found[1]


def pretraining(setup: Setup, model: Any, many: int, rate: float, seed: int) -> Recipe:
    """Training on so many pictures of each class."""
    sizes = setup.scale.sizes
    data = replace(setup.data, per_class=many, drawn=seed)
    batch = sizes.get("base_batch", setup.scale.batch)
    return recipe(setup, model, rate, seed, data=data, steps=sizes["base_steps"], batch_size=batch)


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
    """The few-shot score of what fine-tuning began with, and what the model has and costs."""
    if cell.phase != "final":
        return {}
    assert cell.recipe.init is not None
    return five_shot_of(cell.recipe.init, cell) | weighed(cell, run)


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
    steps, batch = scale.sizes["base_steps"], scale.sizes.get("base_batch", scale.batch)
    limits = (
        "The paper pre-trains on 9 to 300 million pictures, thousands of times more than here, and transfers to data of another "
        "kind; here both halves are of one small data set, so that even little pre-training may be of use. All pre-training has "
        f"{steps:,} steps of {batch:,}: small sets are seen many times, and of the largest each picture once or a few times, so "
        "that more data is also less of it learnt; longer training might help one family more. As accuracies near their ceiling, "
        "every gap shrinks."
    )
    if ends(tests, VIT, RESNET) is None or ends(shots, VIT, RESNET) is None:
        return too_early([f"{VIT} and {RESNET} at two sizes of the set"], limits)
    finding, agreement = found(tests, shots, pictures)
    rows = []
    for many in sorted({many for values in tests.values() for many in values}):
        for family in FAMILIES:
            if many in tests[family]:
                ahead = None
                if family != RESNET and many in tests[RESNET]:
                    ahead = difference(tests[family][many], tests[RESNET][many], pictures)
                place = {"family": family, "each class": many}
                rows.append(
                    (
                        f"{many:,}",
                        family,
                        f"{learnt_at(results, place)}, then {rate_of(results, place)}",
                        told(tests[family][many], pictures),
                        told_difference(ahead),
                        told(shots[family].get(many), pictures),
                    )
                )
    return Answer(
        finding=finding,
        agreement=agreement,
        columns=("pictures of each class", "family", "rates", "fine-tuned", "against the ResNet", "5-shot"),
        rows=tuple(rows),
        charts=tuple(
            Chart(
                title,
                "lines",
                tuple(series(family, {**values}, pictures) for family, values in what.items() if values),
                x_name="pictures of each class that were pre-trained on",
                y_name="top-1 on other classes",
                x_log=True,
            )
            for title, what in (
                (f"Fine-tuned with {scale.sizes['labels']} labels of each class", tests),
                ("5-shot accuracy of the frozen features", shots),
            )
        ),
        limits=limits,
        notes=(
            *unmatched(results),
            *hybrids(tests, pictures),
            *(() if scale.sizes["hybrid"]["stages"] else (ROOT_ALONE,)),
        ),
    )


def learnt_at(results: Sequence[Result], place: Place) -> str:
    """The rate of pre-training that was the best for a place."""
    rates = {r.at["rate"] for r in results if r.phase == "base" and all(r.at[n] == place[n] for n in place)}
    best = best_rate(place, sorted(float(str(rate)) for rate in rates), results, "base") if rates else None
    return NONE_YET if best is None else f"{best:g}"


def found(tests: Tests, shots: Tests, pictures: int | None) -> tuple[str, Agreement]:
    """Who leads after pre-training on the fewest pictures, and who after the most: fine-tuned, and by few shots."""
    sizes = ends(tests, VIT, RESNET)
    assert sizes is not None
    tuned_ends, shot_ends = (
        [difference(what[RESNET][size], what[VIT][size], pictures) for size in sizes] for what in (tests, shots)
    )
    (who, agreement), (_, other) = leader(*tuned_ends), leader(*shot_ends)
    told = (
        f"{who}: pre-trained on {sizes[0]:,} pictures of each class and fine-tuned, ResNet minus ViT is {points(tuned_ends[0])}, "
        f"on {sizes[1]:,} it is {points(tuned_ends[1])}; by 5 shots {points(shot_ends[0])} and {points(shot_ends[1])}"
    )
    opposed = any(a.clear and b.clear and a.mean * b.mean < 0 for a, b in zip(tuned_ends, shot_ends, strict=True))
    if opposed or {agreement, other} == {"agrees", "disagrees"}:
        return f"{told}, which contradicts it.", "unclear"
    behind = tuned_ends[1].clear and tuned_ends[1].mean > 0
    if behind and agreement == "agrees" and other != "agrees":  # half of the claim: both have to say so
        return f"{told}, where it does not clearly shrink.", "unclear"
    return f"{told}.", agreement


def leader(few: Difference, many: Difference) -> tuple[str, Agreement]:
    """What ResNet minus ViT says where there is little data and where there is most."""
    less = shrunk(few, many)
    if few.clear and few.mean < 0:
        return "The ViT leads already where there is little data", "disagrees"
    if few.clear and many.clear and many.mean < 0:
        return "The ResNet leads with few pictures and the ViT overtakes it", "agrees"
    if few.clear and not many.clear and less.clear and less.mean > 0:
        return "The ResNet leads with few pictures and the ViT catches up", "agrees"
    if few.clear and not many.clear:
        return "The ResNet leads with few pictures, and who leads with more cannot be told", "unclear"
    if few.clear and less.clear and less.mean > 0:
        return "The ResNet leads throughout, but by less with more pictures", "agrees"
    if few.clear and less.clear:
        return "The ResNet leads throughout, and by more with more pictures", "disagrees"
    if few.clear:
        return "The ResNet leads throughout, and its lead does not clearly change", "unclear"
    if many.clear and many.mean > 0 and less.clear:
        return "The two do not differ clearly with few pictures, and the ResNet leads with more", "disagrees"
    if many.clear:
        leads = "ResNet" if many.mean > 0 else "ViT"
        return f"The two do not differ clearly with few pictures, and the {leads} leads with more", "unclear"
    return "No difference at this scale", "no difference"


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
    question="When does a Vision Transformer overtake a ResNet of the same compute as the set they are pre-trained on grows?",
    where="figures 3 and 4, section 4.3",
    found=(
        "Pre-trained on ImageNet, ViTs are below ResNets after fine-tuning; with larger sets they overtake. By few-shot scores "
        "ViT-B/32 is much worse than ResNet50, which costs about as much, on 9 million pictures of JFT, and better on 90 million "
        "and more."
    ),
    scales={
        "test": Scale(
            "digits", 0.3, "one core", seeds=1, steps=3, batch=16, rates=(0.03,),
            sizes={
                "depth": 1, "heads": 2, "patch": 2, "per_class": (4, 16), "labels": 8, "base_rates": (1e-3,), "base_steps": 3,
                "bit": {"stages": (1,), "factor": 0.25, "root": "small"}, "hybrid": {"stages": (), "patch": 1},
            },
        ),
        # R14x0.5 on Fashion-MNIST costs 6.8 M multiply-adds a picture. On a free core all three train about 450 pictures/s,
        # 1,300/s without training. Pre-training 400 steps × 64 = 25,600: 57 s, + 3,000 validation pictures 3 s + 8 s to begin
        # = 68 s. Two rates and two more seeds at 18 places: 72 × 68 s = 4,900 s. Fine-tuning 200 steps × 64: 28 s, + 10 s; a
        # final run + 5,000 test pictures, again for 5-shot: 46 s. 18 × (2 × 38 + 3 × 46) = 3,850 s. Two at a time 73 min; with
        # one seed 39 min. Each seed draws other pictures: with fewer than three nobody knows how much that changes.
        "laptop": Scale(
            "fashion-mnist", 73, "two cores", seeds=3, steps=200, batch=64, rates=(0.05, 0.2),
            sizes={
                "depth": 4, "heads": 4, "patch": 4, "per_class": (10, 40, 150, 500, 1600, 5000), "labels": 100,
                "base_rates": (1e-3, 3e-3), "base_steps": 400,
                "bit": {"stages": (1, 1, 1, 1), "factor": 0.5}, "hybrid": {"stages": (), "patch": 1},
            },
        ),
        # R26x0.5 with the small root on CIFAR-10 costs 182 M multiply-adds; reckoned with 1,500 pictures/s. Pre-training 10,000
        # steps × 256 takes 1,710 s, and 30 s more, 72 such; fine-tuning 500 steps 85 s, and 30 s more, 90 such.
        "gpu": Scale(
            "cifar-10", 2_260, "one GPU", seeds=3, steps=500, batch=256, rates=(0.01, 0.03),
            sizes={
                "depth": 12, "heads": 4, "patch": 4, "per_class": (32, 96, 256, 768, 2048, 4400), "labels": 100,
                "base_rates": (3e-4, 1e-3), "base_steps": 10_000, "precision": "bf16", "warmup": 1_000,
                "bit": {"stages": (2, 2, 2, 2), "factor": 0.5, "root": "small"}, "hybrid": {"stages": (1, 1), "patch": 1},
            },
        ),
        # R50x2, and about B/16, at 224² on half of ImageNet-21k's classes: 102,500 steps of 4,096, 53 h, reckoned with 2,200
        # pictures/s on eight GPUs. 18 such, at the paper's rate. A class has about 530 pictures to learn from. Fine-tuning
        # 2,500 steps × 512 = 10 min, three tries and one run at 18 places.
        "cluster": Scale(
            "imagenet-21k", 58_000, "8 GPUs", seeds=1, steps=2_500, batch=512, rates=(0.003, 0.01, 0.03),
            sizes={
                "depth": 12, "heads": 12, "patch": 16, "image": 224, "per_class": (2, 6, 18, 54, 162, 486), "labels": 10,
                "base_rates": (1e-3,), "base_steps": 102_500, "base_batch": 4096,
                "weight_decay": 0.03, "dropout": 0.1, "precision": "bf16", "warmup": 10_000,
                "bit": {"stages": (3, 4, 6, 3), "factor": 2.0}, "hybrid": {"stages": (3, 4, 9), "patch": 1},
            },
        ),
    },
    plan=plan,
    read=read,
    measure=measure,
)  # fmt: skip
