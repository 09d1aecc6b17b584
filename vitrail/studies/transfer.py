"""Transfer of one model to many datasets by the paper's fine-tuning, with VTAB's groups and their mean (table 2).

    vitrail paper run transfer --scale laptop
    vitrail paper run transfer --scale gpu --init vit_b16.npz --data DATA

Each dataset is fine-tuned on as in the paper (`vitrail recipes paper-finetune`): SGD with momentum, cosine, no weight decay,
gradients clipped to 1, a new head initialised to zero; VTAB's tasks with its 1,000 images. Each is compared with the same model
from random initialisation. `--init` gives the model, and `--data` a directory with a folder for each dataset
(`vitrail/studies/vtab.py` lists them). Without `--init` a model is first trained on `--data`, then transferred to the built-in
small datasets.

VTAB's images are neither cropped nor flipped: some tasks ask for position or orientation.

The paper's premise is that pre-training helps on every dataset. The result disagrees if the weights clearly reduce accuracy on
more datasets than chance explains, if they do not clearly help on half of the datasets or more, or if they clearly gain less
than a point on average.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean

from vitrail.checkpoints.load import inspect_checkpoint
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources.vtab import parse_source
from vitrail.data.transforms.crops import Fit
from vitrail.models.base import TokenConfig
from vitrail.studies import base, intervals, study
from vitrail.studies.intervals import Difference, Estimate, Scores, format_percent, format_points
from vitrail.studies.study import Answer, Cell, Chart, Finding, GridPoint, Results, Study, StudyScale, StudySetup
from vitrail.studies.vtab import GROUPS, SMALL_TASKS, VTAB_TASKS, TransferTask, describe_missing_tasks, locate_tasks
from vitrail.training.optim import SGD
from vitrail.training.recipe import Data, Facts, Recipe
from vitrail.training.recipes import paper_finetune
from vitrail.training.schedule import Cosine

PRETRAINED, SCRATCH = "pre-trained", "from scratch"
PretrainedModel = tuple[str, TokenConfig, Preprocessing]  # file, configuration, preprocessing
StepsAndLRs = tuple[int, tuple[float, ...]]  # steps, and the learning rates that are tried
DEFAULT_LRS = (0.001, 0.003, 0.01, 0.03)
PAPER_STEPS_AND_LRS: dict[str, StepsAndLRs] = {
    "imagenet": (20_000, (0.003, 0.01, 0.03, 0.06)),
    "cifar-10": (10_000, DEFAULT_LRS),
    "cifar-100, whole": (10_000, DEFAULT_LRS),
    "pets, whole": (500, DEFAULT_LRS),
    "flowers-102, whole": (500, DEFAULT_LRS),
    **{task.name: (2_500, (0.01,)) for task in VTAB_TASKS},
}
PAPER_SCORES = {  # table 2: ViT-H/14 from JFT, ViT-L/16 from ImageNet-21k
    "imagenet": ("88.55 ± 0.04", "85.30 ± 0.02"),
    "cifar-10": ("99.50 ± 0.06", "99.15 ± 0.03"),
    "cifar-100, whole": ("94.55 ± 0.04", "93.25 ± 0.05"),
    "pets, whole": ("97.56 ± 0.03", "94.67 ± 0.15"),
    "flowers-102, whole": ("99.68 ± 0.02", "99.61 ± 0.02"),
}
SMALL_NAMES = tuple(task.name for task in SMALL_TASKS)
PAPER_VTAB_MEAN = ("77.63 ± 0.23", "72.72 ± 0.21")
MIN_GAIN = 0.01  # one point on average
LIMITS = (
    "The paper's numbers are of models trained on hundreds of millions of images; a model of one's own has its own. VTAB's 800 "
    "and 200 images of a task are drawn again for each seed, where VTAB has fixed ones, and what its publisher does not divide "
    "is not divided into the same images as there. “From scratch” follows the same fine-tuning, which is not how one would "
    "train from scratch."
)


def plan(setup: StudySetup, results: Results) -> list[Cell]:
    """Return the training cell of the model unless one is given, then fine-tuning on every dataset with and without it."""
    targets = list_tasks(setup)
    if setup.init is not None:
        return plan_fine_tuning(setup, results, targets, (setup.init, *read_checkpoint_config(setup.init)))
    sizes, model = setup.scale.sizes, base.configure_study_vit(setup)
    changes = {"steps": sizes["base_steps"], "batch_size": sizes["base_batch"]}
    first = base.build_recipe(setup, model, sizes["base_rate"], 0, **changes)
    cell = Cell({"trained on": Path(setup.data.where).name, "seed": 0}, first, "base")
    done = [result for result in results if result.phase == "base"]
    if not done:
        return [cell]
    file = str(setup.directory / done[0].run / "model.safetensors")
    return [cell, *plan_fine_tuning(setup, results, targets, (file, model, first.preprocessing))]


def list_tasks(setup: StudySetup) -> dict[TransferTask, Data]:
    """Return the tasks to transfer to, each with its data."""
    data, where = setup.data, setup.data.where
    if there := locate_tasks(where):
        if setup.init is None:
            raise ValueError(f"{where} holds datasets to transfer to: give the model with --init FILE")
        divided = replace(data, fractions=data.fractions or study.DEFAULT_FRACTIONS)
        # Data without published splits is split as in VTAB.
        return {task: replace(data if parse_source(where) else divided, where=where) for task, where in there.items()}
    if setup.init is not None and where != setup.scale.data:
        return {TransferTask(Path(where).name, "whole", setup.facts.classes): data}
    known = [task for task in SMALL_TASKS if task.name in setup.scale.sizes["tasks"]]
    # The data that the model was trained on is left out, unless there is no other.
    others = [task for task in known if setup.init is not None or task.name != where] or known
    return {task: Data(task.folder_name) for task in others}


@cache
def read_checkpoint_config(init: str) -> tuple[TokenConfig, Preprocessing]:
    """Return configuration and preprocessing from a checkpoint's header; mean and std 0.5 if it has no preprocessing."""
    with inspect_checkpoint(init) as checkpoint:
        config, pipeline = checkpoint.contract.config, checkpoint.contract.preprocessing
    config = config.require_tokens("the study of transfer (--init)")
    half = (0.5,) * config.channels
    return config, pipeline if isinstance(pipeline, Preprocessing) else Preprocessing(mean=half, std=half)


def plan_fine_tuning(
    setup: StudySetup, results: Results, targets: Mapping[TransferTask, Data], pretrained: PretrainedModel
) -> list[Cell]:
    """Return the fine-tuning cells of every dataset, with the scale's steps and learning rates for it."""
    init, model, pipeline = pretrained
    lengths: Mapping[str, StepsAndLRs] = setup.scale.sizes.get("lengths", {})
    cells = []
    for task, data in targets.items():
        steps, lrs = lengths.get(task.name, (setup.scale.steps, setup.scale.lrs))
        at_length = replace(setup, scale=replace(setup.scale, steps=steps, lrs=lrs))
        source = replace(data, per_class=task.per_class, examples=task.examples)
        families = [{"task": task.name, "group": task.group, "begins": begins} for begins in (PRETRAINED, SCRATCH)]
        recipe = fine_tuning_recipe(at_length, task, source, model, pipeline)

        def make_recipe(point: GridPoint, lr: float, seed: int, recipe: Recipe = recipe) -> Recipe:
            start = init if point["begins"] == PRETRAINED else None
            optimizer = SGD(lr=lr, momentum=0.9, weight_decay=0.0, clip=1.0)
            return replace(recipe, data=replace(recipe.data, drawn=seed), init=start, optimizer=optimizer, seed=seed)

        cells += base.plan_tuned(at_length, results, families, make_recipe)
    return cells


def fine_tuning_recipe(
    setup: StudySetup, task: TransferTask, data: Data, model: TokenConfig, pipeline: Preprocessing
) -> Recipe:
    """Return the recipe `paper-finetune` for a task, with the scale's image size, steps and batch size."""
    steps, side, stride = setup.scale.steps, setup.scale.sizes.get("side"), model.embed.stride
    size = model.image_size if side is None else (side // stride * stride,) * 2
    facts = Facts(
        images=setup.facts.images,
        classes=task.classes,
        several=False,
        side=size,
        channels=model.channels,
        several_sizes=True,
        init=model,
        init_preprocessing=pipeline,
        overrides={"size": size, "steps": steps, "batch_size": setup.scale.batch},
    )
    recipe = paper_finetune.recipe(facts, data)
    return replace(
        recipe,
        augment=recipe.augment if task.group == "whole" else (Fit(size, interpolation="bilinear"),),
        schedule=Cosine(warmup=max(1, min(500, steps // 5))),  # 500 steps from 2,500 on, 100 of 500
        ema=None,
        precision=setup.scale.sizes.get("precision", "fp32"),
        validate_every=float(steps),
    )


def inspect_data(data: Data) -> Facts | None:
    """Return placeholder facts for a directory of datasets; None for a single dataset."""
    if not locate_tasks(data.where):
        return None
    return Facts(images=1_000, classes=2, several=False, side=(224, 224), channels=3, several_sizes=True)


def interpret_results(results: Results, scale: StudyScale) -> Answer:
    groups = {str(r.at["task"]): str(r.at["group"]) for r in results if r.phase == "final"}
    tasks = {name: Scores([r for r in results if r.at.get("task") == name], "begins") for name in groups}
    tasks = {name: scores for name, scores in tasks.items() if not scores.find_missing((PRETRAINED, SCRATCH))}
    if not tasks:
        return base.incomplete_answer([PRETRAINED, SCRATCH], LIMITS)
    n_images, trained = average_tasks(tasks.values(), PRETRAINED)
    gain = intervals.estimate_difference(trained, average_tasks(tasks.values(), SCRATCH)[1], n_images)
    gains = {name: scores.subtract(PRETRAINED, SCRATCH) for name, scores in tasks.items()}
    of_groups = {
        group: estimate_average(members)
        for group in GROUPS
        if (members := [scores for name, scores in tasks.items() if groups[name] == group])
    }
    rows: list[tuple[str, ...]] = [
        (
            name,
            groups[name],
            scores.format_lr(PRETRAINED),
            scores.format(PRETRAINED),
            scores.format(SCRATCH),
            format_points(gains[name]),
            *PAPER_SCORES.get(name, ("", "")),
        )
        for name, scores in tasks.items()
    ]
    rows += [("mean", group, "", format_percent(mean), "", "", "", "") for group, mean in of_groups.items()]
    vtab = [name for name in tasks if groups[name] in GROUPS]
    missing = ["No VTAB task was found: --data DATA takes a folder for each."]
    if vtab:
        missing = describe_missing_tasks(vtab)
        average = format_percent(estimate_average([tasks[name] for name in vtab]))
        paper = ("", "") if missing else PAPER_VTAB_MEAN
        rows.append(("mean", f"VTAB, {len(vtab)} of {len(VTAB_TASKS)}", "", average, "", "", *paper))
    fewest = min(filter(None, (scores.n_images for scores in tasks.values())), default=None)
    bars = tuple(
        intervals.build_series(begins, {name: scores[begins] for name, scores in tasks.items()}, fewest)
        for begins in (PRETRAINED, SCRATCH)
    )
    title = "Fine-tuned with the model's weights, and from random initialisation"
    from_paper = ("paper, H/14 JFT", "paper, L/16 I21k")
    return Answer(
        *formulate_finding(intervals.estimate_mean(trained, n_images), gain, of_groups, list(gains.values())),
        columns=("data", "group", "learning rate", PRETRAINED, SCRATCH, "difference", *from_paper),
        rows=tuple(rows),
        charts=(Chart(title, "bars", bars, y_name="top-1 on test images"),),
        limits=LIMITS,
        notes=(
            "The paper's table has no random initialisation: agreement is with its premise, that pre-training helps. It would "
            "disagree if the weights clearly reduced accuracy on more datasets than chance explains, if they did not clearly "
            f"help on half of them or more, or if the mean gain was clearly below {100 * MIN_GAIN:.0f} point.",
            *missing,
        ),
    )


def effective_n_images(n_images: Iterable[int | None]) -> int | None:
    """Return the number of test images of one dataset with the same variance as the mean over these datasets."""
    counts = list(n_images)
    known = [count for count in counts if count]
    return round(len(known) ** 2 / sum(1 / count for count in known)) if known and len(known) == len(counts) else None


def average_tasks(tasks: Iterable[Scores], begins: str) -> tuple[int | None, list[float]]:
    """Return the effective number of test images, and the mean over datasets for each seed that all of them have."""
    scores = list(tasks)
    by_seed = zip(*(task[begins] for task in scores), strict=False)
    return effective_n_images(task.n_images for task in scores), [fmean(values) for values in by_seed]


def estimate_average(tasks: Iterable[Scores]) -> Estimate:
    """Return the mean accuracy of the pre-trained model over datasets."""
    n_images, values = average_tasks(tasks, PRETRAINED)
    return intervals.estimate_mean(values, n_images)


def formulate_finding(
    mean: Estimate, gain: Difference, groups: Mapping[str, Estimate], gains: Sequence[Difference]
) -> Finding:
    """Report the mean over all datasets, the gain of the weights, and the number of datasets on which they help."""
    parts = ", ".join(f"{group} {format_percent(estimate)}" for group, estimate in groups.items())
    count, helped, hurt = len(gains), sum(g.is_gain for g in gains), sum(g.is_loss for g in gains)
    over = f"over {count} datasets" if count > 1 else "on one dataset"
    has = f"Fine-tuned as in the paper, the model has {format_percent(mean)} {over}" + (f" ({parts})" if parts else "")
    on = f", clearly on {helped} of {count}" + (f", and clearly cost on {hurt}" if hurt else "") if count > 1 else ""
    harm = intervals.is_beyond_chance(hurt, count, 0.025)  # half of the false positives are negative
    if not gain.is_clear and not harm:
        same = "make no clear difference compared with random initialisation at this scale"
        return f"{has}; its weights {same} ({format_points(gain)}).", "no difference"
    effect = f"{'bring' if gain.mean > 0 else 'cost'} {format_points(gain)} over random initialisation"
    finding = f"{has}; its weights {effect}{on if gain.mean > 0 else ''}."
    return finding, "disagrees" if harm or gain.high < MIN_GAIN or 2 * helped <= count else "agrees"


STUDY = Study(
    name="transfer",
    question="How good is one pre-trained model on many datasets, each fine-tuned in the paper's way?",
    reference="table 2, section 4.2",
    paper_finding=(
        "ViT-H/14 from JFT has 88.55 % on ImageNet, 99.50 % on CIFAR-10 and 77.63 % over the 19 tasks of VTAB; ViT-L/16 from "
        "ImageNet-21k has 85.30 %, 99.15 % and 72.72 %."
    ),
    scales={
        "test": base.on_one_core(lrs=(0.03,), sizes=base.vit_sizes(
            16, 1, 2, 4, base_rate=1e-3, base_steps=6, base_batch=32, tasks=("digits",))),
        # Without --init: width 96, depth 4, 16 patches, 550 images/s on a core. 6,000 steps × 128 on CIFAR-10: 1,400 s, while
        # nothing else can be done. Then two datasets, with the model and without, three tuning runs and three seeds: 24 runs
        # of 300 steps × 64, 35 s, and 20 s to start and to evaluate: 1,320 s, on two cores 660 s. In all 34 min.
        "laptop": base.on_two_cores(minutes=34, steps=300, lrs=(0.003, 0.01, 0.03), sizes=base.vit_sizes(
            96, 4, 3, 8, base_rate=1e-3, base_steps=6_000, base_batch=128, tasks=SMALL_NAMES)),
        # B/16 at 224², about 500 images/s with bf16. A task of VTAB: 2,500 steps × 512 = 43 min, with the model and
        # without, three seeds: 19 × 6 × 43 min = 82 h. CIFAR-10 and -100: 2.8 h a run, 14 runs each; Pets and Flowers 9 min,
        # 14 each: 83 h.
        "gpu": base.on_gpu(data="imagenet", minutes=9_900, steps=2_500, batch=512, lrs=(0.01,), sizes=base.vit_sizes(
            384, 12, 6, 16, image=224, base_rate=1e-3, base_steps=100_000, base_batch=1024, side=224,
            lengths=PAPER_STEPS_AND_LRS, tasks=SMALL_NAMES, precision="bf16")),
        # L/16 at 384² on eight GPUs, about 900 images/s: 24 min a task of VTAB, 114 runs, 46 h; CIFAR 1.6 h, 28 runs; Pets and
        # Flowers 5 min, 28 runs; ImageNet 3.2 h, 14 runs. Without --init L/16 is first trained: 30 epochs, 102,500 steps, 47 h.
        "cluster": base.on_cluster(minutes=11_000, seeds=3, steps=2_500, batch=512, lrs=(0.01,), sizes=base.vit_sizes(
            1024, 24, 16, 16, base_rate=1e-3, base_steps=102_500, base_batch=4096, side=384,
            lengths=PAPER_STEPS_AND_LRS, tasks=SMALL_NAMES, **base.TABLE_3)),
    },
    plan=plan, interpret=interpret_results, inspect_data=inspect_data, takes_init=True,
)  # fmt: skip
