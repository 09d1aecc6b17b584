"""One model over many data sets by the paper's fine-tuning, with VTAB's groups and their mean (table 2).

    vitrail paper run transfer --scale laptop
    vitrail paper run transfer --scale gpu --init vit_b16.npz --data DATA

Each data set is fine-tuned on as in the paper (`vitrail recipes paper-finetune`): SGD with momentum, cosine, no weight decay,
gradients clipped to 1, a new head that begins at zero; VTAB's tasks with its 1,000 pictures. Beside each stands the same model
begun at random. `--init` names the model, and `--data` a directory with a folder for each data set
(`vitrail/studies/vtab.py` lists them); without `--init` a model is first trained on `--data`, and then transferred to the
small data sets that every machine has.

VTAB's pictures are neither cropped nor mirrored: where a thing is, or which way it turns, is what some of the tasks ask.

The paper's premise is that such a model is worth having everywhere. It is contradicted if the weights cost accuracy clearly on
any data set, if on half of them or more they bring nothing clear, or if they surely bring less than a point on average.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean

from vitrail.checkpoints.loading import describe
from vitrail.data.crops import Fit
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources.vtab import asked as published
from vitrail.engine.optim import SGD
from vitrail.engine.schedule import Cosine
from vitrail.models.vit import ViTConfig
from vitrail.recipe import Data, Facts, Recipe
from vitrail.recipes import paper_finetune
from vitrail.studies import base
from vitrail.studies.accuracies import judged_on, rate_of, series, told, told_difference
from vitrail.studies.intervals import (
    Difference,
    Estimate,
    beyond_chance,
    difference,
    estimate,
    grouped,
    percent,
    points,
)
from vitrail.studies.study import DIVIDED, Agreement, Answer, Cell, Chart, Result, Scale, Setting, Setup, Study
from vitrail.studies.tuning import tuned
from vitrail.studies.unfinished import too_early
from vitrail.studies.vtab import GROUPS, SMALL, VTAB, Task, absent, located

PRETRAINED, SCRATCH = "pre-trained", "from scratch"
Length = tuple[int, tuple[float, ...]]  # steps, and the rates that are tried
FOUR = (0.001, 0.003, 0.01, 0.03)
TABLE_4: dict[str, Length] = {
    "imagenet": (20_000, (0.003, 0.01, 0.03, 0.06)),
    "cifar-10": (10_000, FOUR),
    "cifar-100, whole": (10_000, FOUR),
    "pets, whole": (500, FOUR),
    "flowers-102, whole": (500, FOUR),
    **{task.name: (2_500, (0.01,)) for task in VTAB},
}
PUBLISHED = {  # table 2: ViT-H/14 from JFT, ViT-L/16 from ImageNet-21k
    "imagenet": ("88.55 ± 0.04", "85.30 ± 0.02"),
    "cifar-10": ("99.50 ± 0.06", "99.15 ± 0.03"),
    "cifar-100, whole": ("94.55 ± 0.04", "93.25 ± 0.05"),
    "pets, whole": ("97.56 ± 0.03", "94.67 ± 0.15"),
    "flowers-102, whole": ("99.68 ± 0.02", "99.61 ± 0.02"),
}
VTAB_MEAN = ("77.63 ± 0.23", "72.72 ± 0.21")
WORTH = 0.01  # one point on average: what surely brings less is not worth having
LIMITS = (
    "The paper's numbers are of models trained on hundreds of millions of pictures; a model of one's own has its own. VTAB's 800 "
    "and 200 pictures of a task are drawn anew for each seed, where VTAB has fixed ones, and what its publisher does not divide "
    "is not divided into the same pictures as there. “From scratch” follows the same fine-tuning, which is not how one would "
    "train from scratch."
)


def plan(setup: Setup, results: Sequence[Result]) -> list[Cell]:
    """A model, where none is given; then every data set with it, and without it."""
    targets = data_sets(setup)
    if setup.init is not None:
        model, pipeline = opened(setup.init)
        return tuning(setup, results, targets, setup.init, model, pipeline)
    sizes, made = setup.scale.sizes, base.vit(setup)
    first = base.recipe(setup, made, sizes["base_rate"], 0, steps=sizes["base_steps"], batch_size=sizes["base_batch"])
    cell = Cell({"trained on": Path(setup.data.where).name, "seed": 0}, first, "base")
    done = [result for result in results if result.phase == "base"]
    if not done:
        return [cell]
    file = str(setup.place / done[0].run / "model.safetensors")
    return [cell, *tuning(setup, results, targets, file, made, first.preprocessing)]


def data_sets(setup: Setup) -> dict[Task, Data]:
    """What the model is transferred to."""
    where = setup.data.where
    if there := located(where):
        if setup.init is None:
            raise ValueError(f"{where} holds data sets to transfer to: give the model too, --init FILE")
        divided = replace(setup.data, fractions=setup.data.fractions or DIVIDED)
        # What a publisher does not divide is divided as VTAB does.
        return {
            task: replace(setup.data if published(where) else divided, where=where) for task, where in there.items()
        }
    if setup.init is not None and where != setup.scale.data:
        return {Task(Path(where).name, "whole", setup.facts.classes): setup.data}
    known = [task for task in SMALL if task.name in setup.scale.sizes["tasks"]]
    # A model is not transferred to what it was trained on, unless there is nothing else.
    others = [task for task in known if setup.init is not None or task.name != where] or known
    return {task: Data(task.where) for task in others}


@cache
def opened(init: str) -> tuple[ViTConfig, Preprocessing]:
    """What a checkpoint is, as its header tells; where it does not tell how pictures are normalised, plainly."""
    with describe(init) as checkpoint:
        config, pipeline = checkpoint.contract.config, checkpoint.contract.preprocessing
    if not isinstance(config, ViTConfig):
        raise ValueError(f"{init} is a ResNet: this study transfers Vision Transformers")
    half = (0.5,) * config.channels
    return config, pipeline if isinstance(pipeline, Preprocessing) else Preprocessing(mean=half, std=half)


def tuning(
    setup: Setup,
    results: Sequence[Result],
    targets: Mapping[Task, Data],
    init: str,
    model: ViTConfig,
    pipeline: Preprocessing,
) -> list[Cell]:
    """Fine-tuning on every data set, each for as long and at as many rates as the scale has for it."""
    lengths: Mapping[str, Length] = setup.scale.sizes.get("lengths", {})
    cells = []
    for task, data in targets.items():
        steps, rates = lengths.get(task.name, (setup.scale.steps, setup.scale.rates))
        at_length = replace(setup, scale=replace(setup.scale, steps=steps, rates=rates))
        source = replace(data, per_class=task.per_class, examples=task.examples)
        families = [{"task": task.name, "group": task.group, "begins": begins} for begins in (PRETRAINED, SCRATCH)]

        def made(
            place: Mapping[str, Setting],
            rate: float,
            seed: int,
            task: Task = task,
            data: Data = source,
            steps: int = steps,
        ) -> Recipe:
            recipe = finetuning(setup, task, replace(data, drawn=seed), model, pipeline, steps, rate, seed)
            return replace(recipe, init=init if place["begins"] == PRETRAINED else None)

        cells += tuned(at_length, results, families, made)
    return cells


def finetuning(
    setup: Setup,
    task: Task,
    data: Data,
    model: ViTConfig,
    pipeline: Preprocessing,
    steps: int,
    rate: float,
    seed: int,
) -> Recipe:
    """The recipe `paper-finetune` for a task, at the scale's size and batch."""
    side = setup.scale.sizes.get("side")
    size = model.image_size if side is None else (side // model.embed.stride * model.embed.stride,) * 2
    wishes = {"size": size, "steps": steps, "batch_size": setup.scale.batch}
    facts = Facts(
        images=setup.facts.images,
        classes=task.classes,
        several=False,
        side=size,
        channels=model.channels,
        several_sizes=True,
        init=model,
        init_preprocessing=pipeline,
        wishes=wishes,
    )
    made = paper_finetune.recipe(facts, data)
    whole = (Fit(size, interpolation="bilinear"),)
    return replace(
        made,
        augment=made.augment if task.group == "whole" else whole,
        optimizer=SGD(lr=rate, momentum=0.9, weight_decay=0.0, clip=1.0),
        schedule=Cosine(warmup=max(1, min(500, steps // 5))),  # 500 of 2,500 steps and more, 100 of 500
        ema=None,
        precision=setup.scale.sizes.get("precision", "fp32"),
        validate_every=float(steps),
        seed=seed,
    )


def look(data: Data) -> Facts | None:
    """A directory of data sets is not looked at as if it were one: what the tables say of each is enough."""
    if not located(data.where):
        return None
    return Facts(images=1_000, classes=2, several=False, side=(224, 224), channels=3, several_sizes=True)


def read(results: Sequence[Result], scale: Scale) -> Answer:
    tests = grouped(results, "task", "begins")
    groups = {str(r.at["task"]): str(r.at["group"]) for r in results if r.phase == "final"}
    both = [name for name in groups if (name, PRETRAINED) in tests and (name, SCRATCH) in tests]
    if not both:
        return too_early([PRETRAINED, SCRATCH], LIMITS)
    pictures = {name: judged_on([r for r in results if r.at.get("task") == name]) for name in both}
    whole = as_one(pictures.values())
    mean = estimate(averaged(tests, both, PRETRAINED), whole)
    gain = difference(averaged(tests, both, PRETRAINED), averaged(tests, both, SCRATCH), whole)
    of_groups = {
        group: estimate(averaged(tests, names, PRETRAINED), as_one(pictures[name] for name in names))
        for group in GROUPS
        if (names := [name for name in both if groups[name] == group])
    }
    gains = [difference(tests[name, PRETRAINED], tests[name, SCRATCH], pictures[name]) for name in both]
    finding, agreement = found(mean, gain, of_groups, gains)
    vtab = [name for name in both if groups[name] in GROUPS]
    rows: list[tuple[str, ...]] = [
        (
            name,
            groups[name],
            rate_of(results, {"task": name, "begins": PRETRAINED}),
            told(tests[name, PRETRAINED], pictures[name]),
            told(tests[name, SCRATCH], pictures[name]),
            told_difference(difference(tests[name, PRETRAINED], tests[name, SCRATCH], pictures[name])),
            *PUBLISHED.get(name, ("", "")),
        )
        for name in both
    ]
    rows += [("mean", group, "", percent(each), "", "", "", "") for group, each in of_groups.items()]
    if vtab:
        complete = VTAB_MEAN if len(vtab) == len(VTAB) else ("", "")
        average = told(averaged(tests, vtab, PRETRAINED), as_one(pictures[name] for name in vtab))
        rows.append(("mean", f"VTAB, {len(vtab)} of {len(VTAB)}", "", average, "", "", *complete))
    return Answer(
        finding=finding,
        agreement=agreement,
        columns=("data", "group", "rate", PRETRAINED, SCRATCH, "difference", "paper, H/14 JFT", "paper, L/16 I21k"),
        rows=tuple(rows),
        charts=(
            Chart(
                "Fine-tuned with the model's weights, and begun at random",
                "bars",
                tuple(
                    series(
                        begins,
                        {name: tests[name, begins] for name in both},
                        min(filter(None, pictures.values()), default=None),
                    )
                    for begins in (PRETRAINED, SCRATCH)
                ),
                y_name="top-1 on test pictures",
            ),
        ),
        limits=LIMITS,
        notes=(
            "The paper's table has no random beginning: agreement is with its premise, that a pre-trained model is worth having. "
            "It would disagree if the weights cost accuracy clearly on more data sets than chance explains, if on half of them "
            f"or more they brought nothing clear, or if what they clearly brought was surely less than "
            f"{100 * WORTH:.0f} point on average.",
            *(absent(vtab) if vtab else ["None of VTAB's 19 tasks is here: --data DATA takes a folder for each."]),
        ),
    )


def as_one(pictures: Iterable[int | None]) -> int | None:
    """Test pictures of one data set that would tell an accuracy as exactly as the mean over these does: the small ones count."""
    told = list(pictures)
    known = [each for each in told if each]
    return round(len(known) ** 2 / sum(1 / each for each in known)) if known and len(known) == len(told) else None


def averaged(tests: Mapping[tuple[Setting, ...], Sequence[float]], names: Sequence[str], begins: str) -> list[float]:
    """The mean over data sets, seed by seed, as far as all of them have the seed."""
    seeds = min(len(tests[name, begins]) for name in names)
    return [fmean(tests[name, begins][seed] for name in names) for seed in range(seeds)]


def found(
    mean: Estimate, gain: Difference, groups: Mapping[str, Estimate], gains: Sequence[Difference]
) -> tuple[str, Agreement]:
    """The mean over all data sets, what the weights bring, and on how many of them."""
    parts = ", ".join(f"{group} {percent(each)}" for group, each in groups.items())
    count, helped = len(gains), sum(each.clear and each.mean > 0 for each in gains)
    hurt = sum(each.clear and each.mean < 0 for each in gains)
    over = f"over {count} data sets" if count > 1 else "on one data set"
    has = f"Fine-tuned as in the paper, the model has {percent(mean)} {over}" + (f" ({parts})" if parts else "")
    on = f", clearly on {helped} of {count}" + (f", and clearly cost on {hurt}" if hurt else "") if count > 1 else ""
    harm = beyond_chance(hurt, count, 0.025)  # half of what chance makes clear seems to hurt
    if not gain.clear and not harm:
        return (
            f"{has}; its weights make no clear difference to a random beginning at this scale ({points(gain)}).",
            "no difference",
        )
    verb = "bring" if gain.mean > 0 else "cost"
    told = f"{has}; its weights {verb} {points(gain)} against a random beginning{on if gain.mean > 0 else ''}."
    if harm or gain.high < WORTH or 2 * helped <= count:
        return told, "disagrees"
    return told, "agrees"


STUDY = Study(
    name="transfer",
    question="How good is one pre-trained model on many data sets, each fine-tuned in the paper's way?",
    where="table 2, section 4.2",
    found=(
        "ViT-H/14 from JFT has 88.55 % on ImageNet, 99.50 % on CIFAR-10 and 77.63 % over the 19 tasks of VTAB; ViT-L/16 from "
        "ImageNet-21k has 85.30 %, 99.15 % and 72.72 %."
    ),
    scales={
        "test": Scale(
            "digits", 0.2, "one core", seeds=2, steps=4, batch=32, rates=(0.03,),
            sizes={
                "width": 16, "depth": 1, "heads": 2, "patch": 4, "base_rate": 1e-3, "base_steps": 6, "base_batch": 32,
                "tasks": ("digits",),
            },
        ),
        # Without --init: width 96, depth 4, 16 patches, 550 pictures/s on a core. 6,000 steps × 128 on CIFAR-10: 1,400 s,
        # while nothing else can be done. Then two data sets, with the model and without, three tries and three seeds: 24 runs
        # of 300 steps × 64, 35 s, and 20 s to begin and to judge: 1,320 s, on two cores 660 s. In all 34 min.
        "laptop": Scale(
            "cifar-10", 34, "two cores", seeds=3, steps=300, batch=64, rates=(0.003, 0.01, 0.03),
            sizes={
                "width": 96, "depth": 4, "heads": 3, "patch": 8, "base_rate": 1e-3, "base_steps": 6_000, "base_batch": 128,
                "tasks": ("digits", "fashion-mnist", "cifar-10"),
            },
        ),
        # B/16 at 224², about 500 pictures/s with bf16. A task of VTAB: 2,500 steps × 512 = 43 min, with the model and
        # without, three seeds: 19 × 6 × 43 min = 82 h. CIFAR-10 and -100: 2.8 h a run, 14 runs each; Pets and Flowers 9 min,
        # 14 each: 83 h.
        "gpu": Scale(
            "imagenet", 9_900, "one GPU", seeds=3, steps=2_500, batch=512, rates=(0.01,),
            sizes={
                "width": 384, "depth": 12, "heads": 6, "patch": 16, "image": 224, "base_rate": 1e-3, "base_steps": 100_000,
                "base_batch": 1024, "side": 224, "lengths": TABLE_4, "tasks": ("digits", "fashion-mnist", "cifar-10"),
                "precision": "bf16",
            },
        ),
        # L/16 at 384² on eight GPUs, about 900 pictures/s: 24 min a task of VTAB, 114 runs, 46 h; CIFAR 1.6 h, 28 runs; Pets
        # and Flowers 5 min, 28 runs; ImageNet 3.2 h, 14 runs. Without --init L/16 is first trained: 30 epochs, 102,500 steps,
        # 47 h.
        "cluster": Scale(
            "imagenet-21k", 11_000, "8 GPUs", seeds=3, steps=2_500, batch=512, rates=(0.01,),
            sizes={
                "width": 1024, "depth": 24, "heads": 16, "patch": 16, "image": 224, "dropout": 0.1, "weight_decay": 0.03,
                "base_rate": 1e-3, "base_steps": 102_500, "base_batch": 4096, "warmup": 10_000, "side": 384, "lengths": TABLE_4,
                "tasks": ("digits", "fashion-mnist", "cifar-10"), "precision": "bf16",
            },
        ),
    },
    plan=plan,
    read=read,
    look=look,
    takes_init=True,
)  # fmt: skip
