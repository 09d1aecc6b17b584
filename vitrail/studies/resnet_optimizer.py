"""SGD or Adam for the ResNets that the Vision Transformer is compared with (appendix D.1).

    vitrail paper run resnet-optimizer --scale laptop

One BiT ResNet, trained with SGD with momentum and with Adam. Each optimiser has its own learning rates, the same number of them.
"""

from dataclasses import replace

from vitrail.studies import base
from vitrail.studies.intervals import Scores, format_points
from vitrail.studies.study import Answer, Cell, Chart, Finding, GridPoint, Results, Study, StudyScale, StudySetup
from vitrail.training.optim import SGD, AdamW
from vitrail.training.recipe import Recipe

ADAM_NAME, SGD_NAME = "Adam", "SGD"
SGD_WEIGHT_DECAY = 1e-4  # lower than Adam's 0.1, because SGD's learning rate is far larger
LIMITS = (
    "A small ResNet that is trained briefly and evaluated on the same data. The paper pre-trains on JFT by both and compares "
    "them after fine-tuning on other data; in short runs Adam's faster start counts for more."
)


def plan(setup: StudySetup, results: Results) -> list[Cell]:
    """Return the cells of both optimisers, each with its own learning rates."""
    scale = setup.scale
    model = base.configure_resnet(setup, scale.sizes["bit"], 1)

    def make_recipe(point: GridPoint, lr: float, seed: int) -> Recipe:
        adam = AdamW(lr=lr, weight_decay=scale.sizes.get("weight_decay", 0.1))
        sgd = SGD(lr=lr, momentum=0.9, weight_decay=SGD_WEIGHT_DECAY)
        return base.build_recipe(setup, model, lr, seed, optimizer=adam if point["optimizer"] == ADAM_NAME else sgd)

    lrs = {ADAM_NAME: scale.lrs, SGD_NAME: tuple(scale.sizes["sgd_rates"])}
    assert len(lrs[ADAM_NAME]) == len(lrs[SGD_NAME]), "both optimisers need the same number of learning rates"
    cells = []
    for name, tried in lrs.items():
        at_lrs = replace(setup, scale=replace(scale, lrs=tried))
        cells += base.plan_tuned(at_lrs, results, [{"optimizer": name}], make_recipe)
    return cells


def interpret_results(results: Results, scale: StudyScale) -> Answer:
    tests, shots = (Scores(results, "optimizer", number=number) for number in ("test", "five-shot"))
    if missing := tests.find_missing((ADAM_NAME, SGD_NAME)):
        return base.incomplete_answer(missing, LIMITS)
    series = (tests.series("test"), *((shots.series("5-shot"),) if shots else ()))
    return Answer(
        *formulate_finding(tests),
        columns=("optimiser", "learning rate", "test", "5-shot"),
        rows=tuple((name, tests.format_lr(name), tests.format(name), shots.format(name)) for name in tests),
        charts=(Chart("Test accuracy by optimiser", "dots", series, y_name="top-1"),),
        limits=LIMITS,
    )


def formulate_finding(tests: Scores) -> Finding:
    """Compare Adam with SGD on test images."""
    apart = tests.subtract(ADAM_NAME, SGD_NAME)
    by = format_points(apart)
    comparisons = {
        "no difference": f"No difference at this scale: Adam minus SGD is {by}",
        "agrees": f"Adam trains the ResNet better than SGD, by {by}",
        "disagrees": f"SGD trains the ResNet better than Adam: Adam minus SGD is {by}",
    }
    return f"{comparisons[apart.agreement]}, each at its best learning rate.", apart.agreement


STUDY = Study(
    name="resnet-optimizer",
    question="Is Adam a fair choice for the ResNets, which are usually trained by SGD?",
    reference="table 7, appendix D.1",
    paper_finding=(
        "Pre-trained on JFT by Adam, ResNets do slightly better after fine-tuning than pre-trained by SGD, on most datasets and "
        "on average: 89.33 against 88.79 for ResNet50, 94.01 against 93.72 for ResNet152x2 (table 7)."
    ),
    scales={
        "test": base.on_one_core(sizes={"bit": {"stages": (1,), "factor": 0.25, "root": "small"}, "sgd_rates": (0.1,)}),
        # A BiT of three stages on CIFAR-10, 20 M multiply-adds: 160 images/s on an idle core, 500/s without training. 800
        # steps × 64 = 51,200: 320 s. A tuning run: + 10,000 validation images 20 s + 8 s to start = 348 s. A final run: + 10,000
        # test images, again for 5-shot: 388 s. 2 optimisers × (3 × 348 + 3 × 388) = 4,416 s; two at a time 37 min.
        "laptop": base.on_two_cores(minutes=37, lrs=(3e-4, 1e-3, 3e-3), sizes={
            "bit": {"stages": (1, 1, 1), "factor": 0.25, "root": "small"}, "sgd_rates": (0.03, 0.1, 0.3)}),
        # R26x1 with the small root on CIFAR-10, estimated with 3,000 images/s: 10,000 steps × 256 take 853 s, and 40 s more.
        # 2 × 6 runs.
        "gpu": base.on_gpu(minutes=180, lrs=(3e-4, 1e-3, 3e-3), sizes={
            "bit": {"stages": (2, 2, 2, 2), "factor": 1.0, "root": "small"}, "sgd_rates": (0.03, 0.1, 0.3),
            "precision": "bf16", "warmup": 1_000}),
        # R50x1 with table 3's learning rate, on ImageNet-21k: 30 epochs of 14 M in batches of 4,096, 102,500 steps, 15 h,
        # estimated with 8,000 images/s on eight GPUs. 2 × (2 + 1) runs.
        "cluster": base.on_cluster(minutes=5_400, lrs=(3e-4, 1e-3), sizes={
            "bit": {"stages": (3, 4, 6, 3), "factor": 1.0}, "sgd_rates": (0.1, 0.5), "image": 224, "precision": "bf16",
            "warmup": 10_000}),
    },
    plan=plan, interpret=interpret_results, measure=base.measure_five_shot,
)  # fmt: skip
