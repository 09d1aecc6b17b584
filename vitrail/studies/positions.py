"""Kinds of position embedding and where they are added (table 8, appendix D.4).

    vitrail paper run positions --scale laptop

The same model without positions; with learned 1-D or 2-D positions, added at the stem, at every layer, or at every layer with
shared weights; and with relative positions. The learning rate of each kind is tuned with the same number of runs.
"""

from statistics import fmean

from vitrail.nn.position import Learned1D, Learned2D, NoPosition, PositionSlot, Relative1D
from vitrail.studies import base
from vitrail.studies.intervals import Difference, Scores, estimate_difference, format_points
from vitrail.studies.study import Answer, Cell, Finding, Results, Study, StudyScale, StudySetup

NONE = "none"
POSITIONS: dict[str, tuple[PositionSlot, str]] = {  # and table 8: ViT-B/16 on JFT, ImageNet 5-shot linear
    NONE: (NoPosition(), "0.61382"),
    "1-D, stem": (Learned1D("stem"), "0.64206"),
    "1-D, every layer": (Learned1D("every"), "0.63964"),
    "1-D, shared": (Learned1D("shared"), "0.64292"),
    "2-D, stem": (Learned2D("stem"), "0.64001"),
    "2-D, every layer": (Learned2D("every"), "0.64046"),
    "2-D, shared": (Learned2D("shared"), "0.64022"),
    "relative": (Relative1D("every"), "0.64032"),
}
LIMITS = (
    "A small model on small images, trained from scratch and evaluated on the same classes; the paper's numbers are 5-shot "
    "scores on ImageNet of a B/16 that was pre-trained on 300 million other images. The paper does not say how relative "
    "positions treat the class token, which has vectors of its own here. With few patches there are few positions to "
    "distinguish, and differences smaller than the intervals cannot be seen."
)
NOTES = (
    "The best and the worst kind are picked after the fact, so that difference looks more certain than it is.",
    "The 5-shot score is of the same classes that the model was trained on: frozen features, least squares on five "
    "images per class, mean of five draws.",
)
LARGE_SPREAD_RATIO = 0.5  # spread of the kinds relative to their gain over none; an eighth in the paper


def plan(setup: StudySetup, results: Results) -> list[Cell]:
    """Return the cells of every kind, each with its own tuning."""
    kinds = setup.scale.sizes.get("kinds", tuple(POSITIONS))
    models = [({"positions": kind}, base.configure_study_vit(setup, position=POSITIONS[kind][0])) for kind in kinds]
    return base.plan_models(setup, results, models)


def interpret_results(results: Results, scale: StudyScale) -> Answer:
    tests, shots = (Scores(results, "positions", number=n, order=POSITIONS) for n in ("test", "five-shot"))
    missing = tests.find_missing([NONE])
    if missing := missing + (["two kinds of positions"] if len(tests.keys() - {NONE}) < 2 else []):
        return base.incomplete_answer(missing, LIMITS)
    shot_charts = (shots.dots("5-shot accuracy of the features", "5-shot", "5-shot"),) if shots else ()
    return Answer(
        *formulate_finding(tests),
        columns=("positions", "learning rate", "test", "more than none", "5-shot", "paper: 5-shot"),
        rows=tuple((kind, *tests.format_row(kind, NONE), shots.format(kind), POSITIONS[kind][1]) for kind in tests),
        charts=(tests.dots("Test accuracy by kind of positions"), *shot_charts),
        limits=LIMITS,
        notes=NOTES,
    )


def formulate_finding(tests: Scores) -> Finding:
    """Compare no positions with the mean of all kinds, paired by seed, and the best kind with the worst."""
    kinds = sorted((kind for kind in tests if kind != NONE), key=lambda kind: -fmean(tests[kind]))
    seeds = min(len(values) for values in tests.values())
    pooled = [fmean(tests[kind][seed] for kind in kinds) for seed in range(seeds)]
    gap = estimate_difference(pooled, tests[NONE][:seeds], tests.n_images)
    by, n_kinds = format_points(gap), f"{len(kinds)} kinds"
    if not gap.is_clear:
        chance = f"positions change accuracy by {by}, the mean of {n_kinds}, which may be chance"
        return f"No difference at this scale: {chance}.", "no difference"
    if gap.is_loss:
        return f"Positions do harm at this scale: {by} on average over {n_kinds}.", "disagrees"
    return compare_kinds(kinds[0], kinds[-1], gap, tests.subtract(kinds[0], kinds[-1]))


def compare_kinds(first: str, last: str, gap: Difference, spread: Difference) -> Finding:
    """Compare the spread of the kinds with their common gain."""
    worse = f"Without positions accuracy changes by {format_points(gap.negated)} against the mean of the kinds"
    apart = f"the best ({first}) and the worst ({last}) are apart by {format_points(spread)}"
    if spread.high < LARGE_SPREAD_RATIO * gap.mean:
        return f"{worse}, and the kinds differ by less than half of that: {apart}.", "agrees"
    if spread.is_clear and spread.mean >= LARGE_SPREAD_RATIO * gap.mean:
        return f"{worse}, but the kinds differ: {apart}.", "disagrees"
    return f"{worse}, and whether the kinds differ as much is unclear: {apart}.", "unclear"


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
        "test": base.on_one_core(sizes=base.vit_sizes(
            16, 1, 2, 2, kinds=(NONE, "1-D, stem", "2-D, shared", "relative"))),
        # 49 tokens, width 64, depth 4: 350 images/s on an idle core, 1,000/s without training. 800 steps × 64 = 51,200: 146
        # s. A tuning run: + 12,000 validation images 12 s + 8 s to start = 166 s. A final run: + 10,000 test images, again
        # for 5-shot: 186 s. 8 kinds × (3 × 166 + 3 × 186) = 8,448 s; two at a time 70 min.
        "laptop": base.on_two_cores(data="fashion-mnist", minutes=70, lrs=(1e-3, 3e-3, 1e-2), sizes=base.vit_sizes(
            64, 4, 4, 4)),
        # 64 tokens of CIFAR-10, Ti's width and depth, estimated with 10,000 images/s: 10,000 steps × 256 take 256 s, and 30
        # s more. 8 kinds × 6 runs × 286 s = 229 min.
        "gpu": base.on_gpu(minutes=230, lrs=(3e-4, 1e-3, 3e-3), sizes=base.TI_CIFAR),
        # B/16 as in table 3 for ImageNet-21k: 90 epochs of 14 M images, 307,600 steps, 58 h, estimated with 6,000 images/s on
        # eight GPUs. 8 runs, at the paper's learning rate.
        "cluster": base.on_cluster(minutes=28_000, steps=307_600, sizes=base.B16),
    },
    plan=plan, interpret=interpret_results, measure=base.measure_five_shot,
)  # fmt: skip
