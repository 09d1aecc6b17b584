"""Kinds of position embedding and where they are added (table 8, appendix D.4).

    vitrail paper run positions --scale laptop

The same model without positions; with learned 1-D or 2-D positions, added at the stem, at every layer, or at every layer with
shared weights; and with relative positions. The learning rate of each kind is tuned with the same number of runs.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from vitrail.nn.position import Learned1D, Learned2D, NoPosition, PositionSlot, Relative
from vitrail.studies.base import build_recipe, configure_study_vit, incomplete_answer, measure_five_shot, plan_tuned
from vitrail.studies.intervals import (
    Difference,
    build_series,
    count_test_images,
    estimate_difference,
    find_lr,
    format_accuracy,
    format_difference,
    format_points,
    group_values,
)
from vitrail.studies.study import Agreement, Answer, Cell, CellResult, Chart, GridPoint, Study, StudyScale, StudySetup
from vitrail.training.recipe import Recipe

NONE = "none"
POSITIONS: dict[str, PositionSlot] = {
    NONE: NoPosition(),
    "1-D, stem": Learned1D("stem"),
    "1-D, every layer": Learned1D("every"),
    "1-D, shared": Learned1D("shared"),
    "2-D, stem": Learned2D("stem"),
    "2-D, every layer": Learned2D("every"),
    "2-D, shared": Learned2D("shared"),
    "relative": Relative("every"),
}
PAPER_SCORES = {  # table 8: ViT-B/16 on JFT, ImageNet 5-shot linear
    NONE: "0.61382",
    "1-D, stem": "0.64206",
    "1-D, every layer": "0.63964",
    "1-D, shared": "0.64292",
    "2-D, stem": "0.64001",
    "2-D, every layer": "0.64046",
    "2-D, shared": "0.64022",
    "relative": "0.64032",
}
LIMITS = (
    "A small model on small images, trained from scratch and evaluated on the same classes; the paper's numbers are "
    "5-shot scores "
    "on ImageNet of a B/16 that was pre-trained on 300 million other images. Relative positions are a learned number for each "
    "head and 2-D offset here; the authors' are vectors for 1-D offsets that the query is multiplied with. With few patches "
    "there are few positions to distinguish, and differences smaller than the intervals cannot be seen."
)
LARGE_SPREAD_RATIO = 0.5  # spread of the kinds relative to their gain over none; an eighth in the paper


def plan(setup: StudySetup, results: Sequence[CellResult]) -> list[Cell]:
    """Return the cells of every kind, each with its own tuning."""

    def make_recipe(point: GridPoint, lr: float, seed: int) -> Recipe:
        return build_recipe(setup, configure_study_vit(setup, position=POSITIONS[str(point["positions"])]), lr, seed)

    kinds = setup.scale.sizes.get("kinds", tuple(POSITIONS))
    return plan_tuned(setup, results, [{"positions": kind} for kind in kinds], make_recipe)


def interpret_results(results: Sequence[CellResult], scale: StudyScale) -> Answer:
    tests = {str(kind): values for (kind,), values in group_values(results, "positions").items()}
    shots = {str(kind): values for (kind,), values in group_values(results, "positions", number="five-shot").items()}
    tests, shots = ({kind: scores[kind] for kind in POSITIONS if kind in scores} for scores in (tests, shots))
    n_images = count_test_images(results)
    missing = [] if NONE in tests else [NONE]
    if missing := missing + (["two kinds of positions"] if len(tests.keys() - {NONE}) < 2 else []):
        return incomplete_answer(missing, LIMITS)
    finding, agreement = formulate_finding(tests, n_images)
    gaps = {kind: estimate_difference(v, tests[NONE], n_images) for kind, v in tests.items() if kind != NONE}
    return Answer(
        finding=finding,
        agreement=agreement,
        columns=("positions", "rate", "test", "more than none", "5-shot", "paper: 5-shot"),
        rows=tuple(
            (
                kind,
                find_lr(results, {"positions": kind}),
                format_accuracy(values, n_images),
                format_difference(gaps.get(kind)),
                format_accuracy(shots.get(kind), n_images),
                PAPER_SCORES[kind],
            )
            for kind, values in tests.items()
        ),
        charts=(
            Chart(
                "Test accuracy by kind of positions",
                "dots",
                (build_series("test", {**tests}, n_images),),
                y_name="top-1",
            ),
            *(
                (
                    Chart(
                        "5-shot accuracy of the features",
                        "dots",
                        (build_series("5-shot", {**shots}, n_images),),
                        y_name="5-shot",
                    ),
                )
                if shots
                else ()
            ),
        ),
        limits=LIMITS,
        notes=(
            "The best and the worst kind are picked after the fact, so that difference looks more certain than it is.",
            "The 5-shot score is of the same classes that the model was trained on: frozen features, least squares on five "
            "images per class, mean of five draws.",
        ),
    )


def formulate_finding(tests: Mapping[str, Sequence[float]], n_images: int | None) -> tuple[str, Agreement]:
    """Compare no positions with the mean of all kinds, paired by seed, and the best kind with the worst."""
    kinds = {kind: values for kind, values in tests.items() if kind != NONE}
    seeds = min(len(values) for values in tests.values())
    pooled = [fmean(values[seed] for values in kinds.values()) for seed in range(seeds)]
    gap = estimate_difference(pooled, tests[NONE][:seeds], n_images)
    if not gap.is_clear:
        return (
            f"No difference at this scale: positions change accuracy by {format_points(gap)}, the mean of {len(kinds)} "
            "kinds, which may "
            "be chance.",
            "no difference",
        )
    if gap.mean < 0:
        return f"Positions do harm at this scale: {format_points(gap)} on average over {len(kinds)} kinds.", "disagrees"
    first, *_, last = sorted(kinds, key=lambda kind: -fmean(kinds[kind]))
    spread = estimate_difference(kinds[first], kinds[last], n_images)
    return compare_kinds(
        f"Without positions accuracy changes by {format_points(gap.negated)} against the mean of the kinds",
        first,
        last,
        gap,
        spread,
    )


def compare_kinds(sentence: str, first: str, last: str, gap: Difference, spread: Difference) -> tuple[str, Agreement]:
    """Compare the spread of the kinds with their common gain."""
    apart = f"the best ({first}) and the worst ({last}) are apart by {format_points(spread)}"
    if spread.high < LARGE_SPREAD_RATIO * gap.mean:
        return f"{sentence}, and the kinds differ by less than half of that: {apart}.", "agrees"
    if spread.is_clear and spread.mean >= LARGE_SPREAD_RATIO * gap.mean:
        return f"{sentence}, but the kinds differ: {apart}.", "disagrees"
    return f"{sentence}, and whether the kinds differ as much is unclear: {apart}.", "unclear"


STUDY = Study(
    name="positions",
    question="How much do position embeddings matter, and which kind works best?",
    reference="table 8, appendix D.4",
    paper_finding=(
        "Without positions the model is clearly worse, and the kinds hardly differ: ViT-B/16 on JFT, ImageNet 5-shot: none "
        "0.61382; 1-D 0.64206 at the stem, 0.63964 at every layer, 0.64292 shared; 2-D 0.64001, 0.64046, 0.64022; relative "
        "0.64032."
    ),
    scales={
        "test": StudyScale(
            "digits", 0.2, "one core", seeds=2, steps=4, batch=32,
            sizes={"width": 16, "depth": 1, "heads": 2, "patch": 2, "kinds": (NONE, "1-D, stem", "2-D, shared", "relative")},
        ),
        # 49 tokens, width 64, depth 4: 350 images/s on an idle core, 1,000/s without training. 800 steps × 64 = 51,200: 146
        # s. A tuning run: + 12,000 validation images 12 s + 8 s to start = 166 s. A final run: + 10,000 test images, again
        # for 5-shot: 186 s. 8 kinds × (3 × 166 + 3 × 186) = 8,448 s; two at a time 70 min.
        "laptop": StudyScale(
            "fashion-mnist", 70, "two cores", seeds=3, steps=800, batch=64, lrs=(1e-3, 3e-3, 1e-2),
            sizes={"width": 64, "depth": 4, "heads": 4, "patch": 4},
        ),
        # 64 tokens of CIFAR-10, Ti's width and depth, estimated with 10,000 images/s: 10,000 steps × 256 take 256 s, and 30
        # s more. 8 kinds × 6 runs × 286 s = 229 min.
        "gpu": StudyScale(
            "cifar-10", 230, "one GPU", seeds=3, steps=10_000, batch=256, lrs=(3e-4, 1e-3, 3e-3),
            sizes={"width": 192, "depth": 12, "heads": 3, "patch": 4, "precision": "bf16", "warmup": 1_000},
        ),
        # B/16 as in table 3 for ImageNet-21k: 90 epochs of 14 M images, 307,600 steps, 58 h, estimated with 6,000 images/s on
        # eight GPUs. 8 runs, at the paper's learning rate.
        "cluster": StudyScale(
            "imagenet-21k", 28_000, "8 GPUs", seeds=1, steps=307_600, batch=4096,
            sizes={
                "width": 768, "depth": 12, "heads": 12, "patch": 16, "image": 224, "dropout": 0.1, "weight_decay": 0.03,
                "precision": "bf16", "warmup": 10_000,
            },
        ),
    },
    plan=plan,
    interpret=interpret_results,
    measure=measure_five_shot,
)  # fmt: skip
