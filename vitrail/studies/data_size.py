"""Vision Transformer, hybrid and ResNet of the same compute by size of the pre-training set (figures 3 and 4, section 4.3).

    vitrail paper run data-size --scale laptop

Three models with the same multiply-adds per image, as counted by `vitrail describe` (parameters are not matched), are pre-trained
on six set sizes. Subsets have a fixed number of images per class, are nested, and differ by seed. The models are then scored on
other classes in the paper's two ways: fine-tuned with a few labels, and by least squares on frozen features with five images per
class.

The paper transfers to other data; here one dataset is divided by class: every other class, from the second on, is pre-trained on,
and the rest are held out. So no image and no class of the target was seen in pre-training.

Pre-training always has the same number of steps, so small sets are repeated many times. At each size each family tries the same
number of learning rates: for pre-training on validation images of the pre-training classes (the best model of the first seed is
kept), and for fine-tuning on those of the target classes.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.studies import base
from vitrail.studies.base import FAMILIES, HYBRID, RESNET, VIT, select_lr, size_range
from vitrail.studies.intervals import NO_VALUE, Difference, Scores, estimate_reduction, format_points
from vitrail.studies.study import Answer, Cell, Finding, GridPoint, Results, Study, StudyScale, StudySetup
from vitrail.training.optim import SGD
from vitrail.training.recipe import Recipe
from vitrail.training.schedule import Cosine

PRETRAINING_CLASSES, HELD_OUT_CLASSES = (1, 2), (0, 2)  # (start, step) of the class indices
ROOT_ONLY_NOTE = (
    "The hybrid of this scale is a Transformer on a ResNet's root alone: stages behind it would leave too few tokens of such "
    "small images."
)


def plan(setup: StudySetup, results: Results) -> list[Cell]:
    """Return pre-training cells of every family and size, and fine-tuning cells of those whose models are finished."""
    sizes, scale = setup.scale.sizes, setup.scale
    source, target = split_classes(setup)
    models = base.match_cost(source, sizes["bit"], sizes["hybrid"])
    cells: list[Cell] = []
    ready: list[GridPoint] = []
    begins: dict[tuple[Any, ...], str] = {}
    for point in [{"family": family, "each class": many} for many in subset_sizes(setup) for family in models]:
        model, many = models[str(point["family"])], int(str(point["each class"]))
        best = select_lr(point, sizes["base_rates"], results, "base")
        for seed in range(scale.seeds):
            # The first seed tuning runs all learning rates, the others use the best one.
            for lr in sizes["base_rates"] if seed == 0 else () if best is None else (best,):
                recipe = pretraining_recipe(source, model, many, lr, seed)
                cells.append(Cell({**point, "rate": lr, "seed": seed}, recipe, "base"))
        for result in results:
            whole = result.phase == "base" and "diverged" not in result.numbers
            if whole and result.at == {**point, "rate": best, "seed": result.at["seed"]}:
                begins[(*point.values(), result.at["seed"])] = str(setup.directory / result.run / "model.safetensors")
        if all((*point.values(), seed) in begins for seed in range(scale.seeds)):
            ready.append(point)

    def tuning(point: GridPoint, lr: float, seed: int) -> Recipe:
        few = replace(target.data, per_class=sizes["labels"], drawn=seed)
        model = replace(models[str(point["family"])], classes=target.facts.classes)
        return replace(
            base.build_recipe(target, model, lr, seed, data=few),
            init=begins[(*point.values(), seed)],
            optimizer=SGD(lr=lr, momentum=0.9, weight_decay=0.0, clip=1.0),  # table 4
            schedule=Cosine(warmup=max(1, scale.steps // 10)),
        )

    return cells + base.plan_tuned(setup, results, ready, tuning)


def split_classes(setup: StudySetup) -> tuple[StudySetup, StudySetup]:
    """Return the setup restricted to the pre-training classes, and to the held-out classes."""
    classes = setup.facts.classes
    if classes < 4:
        needed = "but this study pre-trains on half and transfers to the rest: use data with 4 or more"
        raise ValueError(f"{setup.data.where} has {classes} classes, {needed}")

    def restrict(every: tuple[int, int]) -> StudySetup:
        facts = replace(setup.facts, classes=len(range(classes)[every[0] :: every[1]]))
        return replace(setup, data=replace(setup.data, classes=every), facts=facts)

    return restrict(PRETRAINING_CLASSES), restrict(HELD_OUT_CLASSES)


def pretraining_recipe(setup: StudySetup, model: Any, per_class: int, lr: float, seed: int) -> Recipe:
    """Return the recipe of pre-training on `per_class` images per class."""
    sizes = setup.scale.sizes
    data = replace(setup.data, per_class=per_class, drawn=seed)
    batch = sizes.get("base_batch", setup.scale.batch)
    return base.build_recipe(setup, model, lr, seed, data=data, steps=sizes["base_steps"], batch_size=batch)


def subset_sizes(setup: StudySetup) -> list[int]:
    """Return the scale's numbers of images per class that the data has on average."""
    most = setup.facts.images / setup.facts.classes
    wanted = setup.scale.sizes["per_class"]
    available = [many for many in wanted if many <= most]
    if len(available) < 2:
        needed = f"this scale compares {', '.join(map(str, wanted))}: use data with {wanted[1]} or more"
        raise ValueError(f"{setup.data.where} has about {most:.0f} training images per class, and {needed}")
    return available


def measure(cell: Cell, run: Path) -> dict[str, Any]:
    """Return the few-shot accuracy of the pre-trained model, its parameters and its cost."""
    if cell.phase != "final":
        return {}
    assert cell.recipe.init is not None
    return base.measure_five_shot_of(cell.recipe.init, cell) | base.measure_cost(cell, run)


def interpret_results(results: Results, scale: StudyScale) -> Answer:
    known = {(str(r.at["family"]), int(str(r.at["each class"]))) for r in results if r.phase == "final"}
    points = sorted(known, key=lambda point: (point[1], FAMILIES.index(point[0])))
    tests, shots = (Scores(results, "family", "each class", number=n, order=points) for n in ("test", "five-shot"))
    steps, batch = scale.sizes["base_steps"], scale.sizes.get("base_batch", scale.batch)
    limits = (
        "The paper pre-trains on 9 to 300 million images, thousands of times more than here, and transfers to data of another "
        "kind; here both halves are of one small dataset, so that even little pre-training may be of use. All pre-training has "
        f"{steps:,} steps of {batch:,}: small sets are seen many times, and of the largest each image once or a few times, so "
        "that more data is also less of it learned; longer training might help one family more. As accuracies near their "
        "ceiling, every gap shrinks."
    )
    if size_range(tests, VIT, RESNET) is None or size_range(shots, VIT, RESNET) is None:
        return base.incomplete_answer([f"{VIT} and {RESNET} at two sizes of the set"], limits)
    root_only = () if scale.sizes["hybrid"]["stages"] else (ROOT_ONLY_NOTE,)
    titles = (f"Fine-tuned with {scale.sizes['labels']} labels per class", "5-shot accuracy of the frozen features")
    return Answer(
        *formulate_finding(tests, shots),
        columns=("images per class", "family", "learning rates", "fine-tuned", "against the ResNet", "5-shot"),
        rows=tuple(
            (
                f"{many:,}",
                family,
                f"{format_pretraining_lr(results, family, many)}, then {tests.format_lr((family, many))}",
                tests.format((family, many)),
                tests.format_change((family, many), (RESNET, many)),
                shots.format((family, many)),
            )
            for family, many in tests
        ),
        charts=tuple(
            scores.lines(
                title,
                {family: {point: point[1] for point in scores if point[0] == family} for family in FAMILIES},
                "images per class that were pre-trained on",
                "top-1 on other classes",
            )
            for title, scores in zip(titles, (tests, shots), strict=True)
        ),
        limits=limits,
        notes=(*base.describe_parameters(results), *compare_hybrids(tests), *root_only),
    )


def format_pretraining_lr(results: Results, family: str, per_class: int) -> str:
    """Return the best pre-training learning rate of a grid point, as text."""
    point = {"family": family, "each class": per_class}
    lrs = {float(str(r.at["rate"])) for r in results if r.phase == "base" and point.items() <= r.at.items()}
    best = select_lr(point, sorted(lrs), results, "base") if lrs else None
    return NO_VALUE if best is None else f"{best:g}"


def formulate_finding(tests: Scores, shots: Scores) -> Finding:
    """Compare ResNet and ViT after pre-training on the fewest and on the most images, fine-tuned and by few-shot accuracy."""
    sizes = size_range(tests, VIT, RESNET)
    assert sizes is not None
    (few, many), (few_shot, many_shot) = (
        [scores.subtract((RESNET, size), (VIT, size)) for size in sizes] for scores in (tests, shots)
    )
    (lead, agreement), (_, other) = compare_ends(few, many), compare_ends(few_shot, many_shot)
    fine_tuned = f"ResNet minus ViT is {format_points(few)}, on {sizes[1]:,} it is {format_points(many)}"
    by_shots = f"by 5 shots {format_points(few_shot)} and {format_points(many_shot)}"
    finding = f"{lead}: pre-trained on {sizes[0]:,} images per class and fine-tuned, {fine_tuned}; {by_shots}"
    pairs = ((few, few_shot), (many, many_shot))
    opposed = any(a.is_clear and b.is_clear and a.mean * b.mean < 0 for a, b in pairs)
    if opposed or {agreement, other} == {"agrees", "disagrees"}:
        return f"{finding}, which contradicts it.", "unclear"
    if many.is_gain and agreement == "agrees" and other != "agrees":  # a shrinking lead must show in both measures
        return f"{finding}, where it does not clearly shrink.", "unclear"
    return f"{finding}.", agreement


def compare_ends(smallest: Difference, largest: Difference) -> Finding:
    """Return sentence and verdict from ResNet minus ViT with the fewest and with the most images."""
    less = estimate_reduction(smallest, largest)
    if smallest.is_loss:
        return "The ViT leads already with few images", "disagrees"
    if smallest.is_clear and largest.is_loss:
        return "The ResNet leads with few images and the ViT overtakes it", "agrees"
    if smallest.is_clear and not largest.is_clear:
        if less.is_gain:
            return "The ResNet leads with few images and the ViT catches up", "agrees"
        return "The ResNet leads with few images, and which leads with more is unclear", "unclear"
    if smallest.is_clear:
        if less.is_gain:
            return "The ResNet leads throughout, but by less with more images", "agrees"
        if less.is_clear:
            return "The ResNet leads throughout, and by more with more images", "disagrees"
        return "The ResNet leads throughout, and its lead does not clearly change", "unclear"
    if largest.is_clear:
        leads = "ResNet" if largest.mean > 0 else "ViT"
        finding = f"The two do not differ clearly with few images, and the {leads} leads with more"
        return finding, "disagrees" if largest.mean > 0 and less.is_clear else "unclear"
    return "No difference at this scale", "no difference"


def compare_hybrids(tests: Scores) -> tuple[str, ...]:
    """Return a note that compares the hybrid with both at the smallest and the largest size."""
    parts = []
    for size in size_range(tests, HYBRID, VIT, RESNET) or ():
        vit, resnet = (format_points(tests.subtract((HYBRID, size), (other, size))) for other in (VIT, RESNET))
        parts.append(f"with {size:,} images per class it has {vit} on the ViT and {resnet} on the ResNet")
    return (f"The hybrid: {'; '.join(parts)}.",) if parts else ()


STUDY = Study(
    name="data-size",
    question="When does a Vision Transformer overtake a ResNet of the same compute as the set they are pre-trained on grows?",
    reference="figures 3 and 4, section 4.3",
    paper_finding=(
        "Pre-trained on ImageNet, ViTs are below ResNets after fine-tuning; with larger sets they overtake. By few-shot scores "
        "ViT-B/32 is much worse than ResNet50, which costs about as much, on 9 million images of JFT, and better on 90 million "
        "and more."
    ),
    scales={
        "test": base.on_one_core(minutes=0.3, seeds=1, steps=3, batch=16, lrs=(0.03,), sizes={
            "depth": 1, "heads": 2, "patch": 2, "per_class": (4, 16), "labels": 8, "base_rates": (1e-3,),
            "base_steps": 3, "bit": {"stages": (1,), "factor": 0.25, "root": "small"},
            "hybrid": {"stages": (), "patch": 1}}),
        # R14x0.5 on Fashion-MNIST costs 6.8 M multiply-adds per image. On an idle core all three train about 450 images/s,
        # 1,300/s without training. Pre-training 400 steps × 64 = 25,600: 57 s, + 3,000 validation images 3 s + 8 s to start
        # = 68 s. Two learning rates and two more seeds at 18 points: 72 × 68 s = 4,900 s. Fine-tuning 200 steps: 28 s, + 10 s; a
        # final run + 5,000 test images, again for 5-shot: 46 s. 18 × (2 × 38 + 3 × 46) = 3,850 s. Two at a time 73 min; with
        # one seed 39 min. Each seed draws other images, so three seeds are needed to measure that effect.
        "laptop": base.on_two_cores(data="fashion-mnist", minutes=73, steps=200, lrs=(0.05, 0.2), sizes={
            "depth": 4, "heads": 4, "patch": 4, "per_class": (10, 40, 150, 500, 1600, 5000), "labels": 100,
            "base_rates": (1e-3, 3e-3), "base_steps": 400, "bit": {"stages": (1, 1, 1, 1), "factor": 0.5},
            "hybrid": {"stages": (), "patch": 1}}),
        # R26x0.5 with the small root on CIFAR-10 costs 182 M multiply-adds; estimated with 1,500 images/s. Pre-training 10,000
        # steps × 256 takes 1,710 s, and 30 s more, 72 such; fine-tuning 500 steps 85 s, and 30 s more, 90 such.
        "gpu": base.on_gpu(minutes=2_260, steps=500, lrs=(0.01, 0.03), sizes={
            "depth": 12, "heads": 4, "patch": 4, "per_class": (32, 96, 256, 768, 2048, 4400), "labels": 100,
            "base_rates": (3e-4, 1e-3), "base_steps": 10_000, "precision": "bf16", "warmup": 1_000,
            "bit": {"stages": (2, 2, 2, 2), "factor": 0.5, "root": "small"}, "hybrid": {"stages": (1, 1), "patch": 1}}),
        # R50x2, and about B/16, at 224² on half of ImageNet-21k's classes: 102,500 steps of 4,096, 53 h, estimated with 2,200
        # images/s on eight GPUs. 18 such, at the paper's learning rate. A class has about 530 images to learn from. Fine-tuning
        # 2,500 steps × 512 = 10 min, three tuning runs and one final run at 18 points.
        "cluster": base.on_cluster(minutes=58_000, steps=2_500, batch=512, lrs=(0.003, 0.01, 0.03), sizes={
            "depth": 12, "heads": 12, "patch": 16, "per_class": (2, 6, 18, 54, 162, 486), "labels": 10,
            "base_rates": (1e-3,), "base_steps": 102_500, "base_batch": 4096, **base.TABLE_3,
            "bit": {"stages": (3, 4, 6, 3), "factor": 2.0}, "hybrid": {"stages": (3, 4, 9), "patch": 1}}),
    },
    plan=plan, interpret=interpret_results, measure=measure,
)  # fmt: skip
