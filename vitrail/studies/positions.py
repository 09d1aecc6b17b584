"""What positions are worth, and whether it matters of which kind they are and where they are added (table 8, appendix D.4).

    vitrail paper run positions --scale laptop

The same model with no positions; with learned ones for places in a row (1-D) or in a grid (2-D), added at the stem, at every
layer, or at every layer with shared weights; and with relative ones. Each kind has its rate tuned by as many tries.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from vitrail.nn.position import Learned1D, Learned2D, NoPosition, PositionSlot, Relative
from vitrail.recipe import Recipe
from vitrail.studies.accuracies import judged_on, rate_of, series, told, told_difference
from vitrail.studies.base import recipe, vit
from vitrail.studies.intervals import Difference, difference, grouped, points
from vitrail.studies.shots import five_shot
from vitrail.studies.study import Agreement, Answer, Cell, Chart, Result, Scale, Setting, Setup, Study
from vitrail.studies.tuning import tuned
from vitrail.studies.unfinished import too_early

NONE = "none"
KINDS: dict[str, PositionSlot] = {
    NONE: NoPosition(),
    "1-D, stem": Learned1D("stem"),
    "1-D, every layer": Learned1D("every"),
    "1-D, shared": Learned1D("shared"),
    "2-D, stem": Learned2D("stem"),
    "2-D, every layer": Learned2D("every"),
    "2-D, shared": Learned2D("shared"),
    "relative": Relative("every"),
}
PAPER = {  # table 8: ViT-B/16 on JFT, ImageNet 5-shot linear
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
    "A small model on small pictures, trained from nothing and judged on the same classes; the paper's numbers are 5-shot scores "
    "on ImageNet of a B/16 that was pre-trained on 300 million other pictures. Relative positions are a learned number for each "
    "head and 2-D offset here; the authors' are vectors for 1-D offsets that the query is multiplied with. With few patches "
    "there are few places to tell apart, and differences of less than the intervals cannot be seen."
)
LARGE = (
    0.5  # of the gap to none: from there on kinds differ by more than the paper's do, whose spread is an eighth of it
)


def plan(setup: Setup, results: Sequence[Result]) -> list[Cell]:
    """Every kind with its own tries."""

    def made(place: Mapping[str, Setting], rate: float, seed: int) -> Recipe:
        return recipe(setup, vit(setup, position=KINDS[str(place["positions"])]), rate, seed)

    kinds = setup.scale.sizes.get("kinds", tuple(KINDS))
    return tuned(setup, results, [{"positions": kind} for kind in kinds], made)


def read(results: Sequence[Result], scale: Scale) -> Answer:
    tests = {str(kind): values for (kind,), values in grouped(results, "positions").items()}
    shots = {str(kind): values for (kind,), values in grouped(results, "positions", number="five-shot").items()}
    tests, shots = ({kind: found[kind] for kind in KINDS if kind in found} for found in (tests, shots))
    pictures = judged_on(results)
    missing = [] if NONE in tests else [NONE]
    if missing := missing + (["two kinds of positions"] if len(tests.keys() - {NONE}) < 2 else []):
        return too_early(missing, LIMITS)
    finding, agreement = found(tests, pictures)
    gaps = {kind: difference(v, tests[NONE], pictures) for kind, v in tests.items() if kind != NONE}
    return Answer(
        finding=finding,
        agreement=agreement,
        columns=("positions", "rate", "test", "more than none", "5-shot", "paper: 5-shot"),
        rows=tuple(
            (
                kind,
                rate_of(results, {"positions": kind}),
                told(values, pictures),
                told_difference(gaps.get(kind)),
                told(shots.get(kind), pictures),
                PAPER[kind],
            )
            for kind, values in tests.items()
        ),
        charts=(
            Chart("Test accuracy by kind of positions", "dots", (series("test", {**tests}, pictures),), y_name="top-1"),
            *(
                (
                    Chart(
                        "5-shot accuracy of the features",
                        "dots",
                        (series("5-shot", {**shots}, pictures),),
                        y_name="5-shot",
                    ),
                )
                if shots
                else ()
            ),
        ),
        limits=LIMITS,
        notes=(
            "The best and the worst kind are picked after the fact, so that difference looks surer than it is.",
            "The 5-shot score is of the same classes that the model was trained on: frozen features, least squares on five "
            "pictures of each class, mean of five draws.",
        ),
    )


def found(tests: Mapping[str, Sequence[float]], pictures: int | None) -> tuple[str, Agreement]:
    """None against the mean of all kinds seed by seed, and the best kind against the worst."""
    kinds = {kind: values for kind, values in tests.items() if kind != NONE}
    seeds = min(len(values) for values in tests.values())
    pooled = [fmean(values[seed] for values in kinds.values()) for seed in range(seeds)]
    gap = difference(pooled, tests[NONE][:seeds], pictures)
    if not gap.clear:
        return (
            f"No difference at this scale: positions change accuracy by {points(gap)}, the mean of {len(kinds)} kinds, which may "
            "be chance.",
            "no difference",
        )
    if gap.mean < 0:
        return f"Positions do harm at this scale: {points(gap)} on average over {len(kinds)} kinds.", "disagrees"
    first, *_, last = sorted(kinds, key=lambda kind: -fmean(kinds[kind]))
    spread = difference(kinds[first], kinds[last], pictures)
    return among(
        f"Without positions accuracy changes by {points(gap.opposite)} against the mean of the kinds",
        first,
        last,
        gap,
        spread,
    )


def among(begun: str, first: str, last: str, gap: Difference, spread: Difference) -> tuple[str, Agreement]:
    """Whether the kinds differ among themselves, beside what they all gain."""
    apart = f"the best ({first}) and the worst ({last}) are apart by {points(spread)}"
    if spread.high < LARGE * gap.mean:
        return f"{begun}, and the kinds differ by less than half of that: {apart}.", "agrees"
    if spread.clear and spread.mean >= LARGE * gap.mean:
        return f"{begun}, but the kinds are not alike: {apart}.", "disagrees"
    return f"{begun}, and whether the kinds differ as much cannot be told: {apart}.", "unclear"


STUDY = Study(
    name="positions",
    question="How much do positions matter, and does their kind or place?",
    where="table 8, appendix D.4",
    found=(
        "Without positions the model is clearly worse, and the kinds hardly differ: ViT-B/16 on JFT, ImageNet 5-shot: none "
        "0.61382; 1-D 0.64206 at the stem, 0.63964 at every layer, 0.64292 shared; 2-D 0.64001, 0.64046, 0.64022; relative "
        "0.64032."
    ),
    scales={
        "test": Scale(
            "digits", 0.2, "one core", seeds=2, steps=4, batch=32,
            sizes={"width": 16, "depth": 1, "heads": 2, "patch": 2, "kinds": (NONE, "1-D, stem", "2-D, shared", "relative")},
        ),
        # 49 tokens, width 64, depth 4: 350 pictures/s on a free core, 1,000/s without training. 800 steps × 64 = 51,200: 146 s.
        # A try: + 12,000 validation pictures 12 s + 8 s to begin = 166 s. A final run: + 10,000 test pictures, again for 5-shot:
        # 186 s. 8 kinds × (3 × 166 + 3 × 186) = 8,448 s; two at a time 70 min.
        "laptop": Scale(
            "fashion-mnist", 70, "two cores", seeds=3, steps=800, batch=64, rates=(1e-3, 3e-3, 1e-2),
            sizes={"width": 64, "depth": 4, "heads": 4, "patch": 4},
        ),
        # 64 tokens of CIFAR-10, Ti's width and depth, reckoned with 10,000 pictures/s: 10,000 steps × 256 take 256 s, and 30
        # s more. 8 kinds × 6 runs × 286 s = 229 min.
        "gpu": Scale(
            "cifar-10", 230, "one GPU", seeds=3, steps=10_000, batch=256, rates=(3e-4, 1e-3, 3e-3),
            sizes={"width": 192, "depth": 12, "heads": 3, "patch": 4, "precision": "bf16", "warmup": 1_000},
        ),
        # B/16 as in table 3 for ImageNet-21k: 90 epochs of 14 M pictures, 307,600 steps, 58 h, reckoned with 6,000 pictures/s on
        # eight GPUs. 8 runs, at the paper's rate.
        "cluster": Scale(
            "imagenet-21k", 28_000, "8 GPUs", seeds=1, steps=307_600, batch=4096,
            sizes={
                "width": 768, "depth": 12, "heads": 12, "patch": 16, "image": 224, "dropout": 0.1, "weight_decay": 0.03,
                "precision": "bf16", "warmup": 10_000,
            },
        ),
    },
    plan=plan,
    read=read,
    measure=five_shot,
)  # fmt: skip
