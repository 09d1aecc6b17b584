"""What learned positions look like when a model is trained otherwise: longer, faster, with other weight decay (figures 7 and
10; figure 9 in the paper's first version).

    vitrail paper run position-maps --scale laptop

One model is trained as usual, and again with one thing changed at a time. What is compared is the table of positions that
comes out: the cosine of every position with every other, as a grid of grids, and two numbers computed from it. `place` is the
correlation of that cosine with nearness (minus the distance of the two patches on the grid): 1 where likeness tells distance.
`lines` is how much more alike two positions of one row or one column are than two others that are as far apart.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.analysis.positions import positions
from vitrail.checkpoints.loading import load
from vitrail.engine.optim import AdamW
from vitrail.studies.accuracies import judged_on, series
from vitrail.studies.accuracies import told as share
from vitrail.studies.base import recipe, vit
from vitrail.studies.intervals import Difference, Estimate, beyond_chance, difference, estimate, grouped
from vitrail.studies.quantities import number, signed
from vitrail.studies.study import Agreement, Answer, Cell, Chart, Result, Scale, Series, Setup, Study
from vitrail.studies.unfinished import lacking, too_early

USUAL = "as usual"
# One thing at a time, as multiples of the usual steps, rate and weight decay.
SETTINGS: dict[str, tuple[float, float, float]] = {
    USUAL: (1, 1, 1),
    "half as long": (0.5, 1, 1),
    "twice as long": (2, 1, 1),
    "a third of the rate": (1, 1 / 3, 1),
    "three times the rate": (1, 3, 1),
    "no weight decay": (1, 1, 0),
    "five times the weight decay": (1, 1, 5),
}

LIMITS = (
    "Small grids and short runs: the paper's maps are of ViT-L (L/32 in figure 7), trained on far more pictures. Weight decay is "
    "not applied to positions themselves here, so it can act on them only through the rest of the model."
)


def plan(setup: Setup, results: Sequence[Result]) -> list[Cell]:
    """Every setting with every seed. Nothing is tuned: what would be is what is compared."""
    scale, model = setup.scale, vit(setup)
    cells = []
    for setting in scale.sizes.get("settings", SETTINGS):
        longer, faster, heavier = SETTINGS[setting]
        steps, rate = max(1, round(longer * scale.steps)), faster * scale.rates[0]
        decay = heavier * scale.sizes.get("weight_decay", 0.1)
        for seed in range(scale.seeds):
            at = {"setting": setting, "steps": steps, "rate": rate, "weight decay": decay, "seed": seed}
            made = recipe(setup, model, rate, seed, steps=steps)
            cells.append(Cell(at, replace(made, optimizer=AdamW(lr=rate, weight_decay=decay))))
    return cells


def measure(cell: Cell, run: Path) -> dict[str, Any]:
    """The maps of a trained model, and what they say of places."""
    similarity = positions(load(run / "model.safetensors")).similarity
    assert similarity is not None, "learned positions are added"
    place, lines = told(similarity)
    return {"place": place, "lines": lines, "similarity": np.round(similarity, 3).tolist()}


def told(similarity: np.ndarray) -> tuple[float, float]:
    """How well likeness [h, w, h, w] tells distance, and how much rows and columns stand out of that."""
    h, w = similarity.shape[:2]
    y, x = (axis.reshape(-1) for axis in np.mgrid[:h, :w])
    down, across = np.abs(y[:, None] - y), np.abs(x[:, None] - x)
    other = (down + across) > 0  # a position is itself wherever it is
    away = np.hypot(down, across)[other]
    alike = similarity.reshape(h * w, h * w)[other].astype(np.float64)
    place = float(np.corrcoef(alike, -away)[0, 1])
    line = ((down == 0) | (across == 0))[other]
    fitted = np.linalg.lstsq(np.stack((np.ones_like(away), away, line), 1), alike, rcond=None)[0]
    return place, float(fitted[2])


def read(results: Sequence[Result], scale: Scale) -> Answer:
    place, lines = (grouped(results, "setting", number=number) for number in ("place", "lines"))
    if missing := lacking(place, [USUAL]):
        return too_early(missing, LIMITS)
    accuracy, pictures = grouped(results, "setting"), judged_on(results)
    usual = estimate(place[USUAL,])
    changes = {str(key[0]): difference(values, place[USUAL,]) for key, values in place.items() if key[0] != USUAL}
    finding, agreement = found(usual, changes)
    shown = {str(result.at["setting"]): result for result in reversed(results)}
    rows = []
    for setting in (str(key[0]) for key in place):
        at = shown[setting].at
        rows.append(
            (
                setting,
                f"{at['steps']:,}",
                f"{at['rate']:.2g}",
                f"{at['weight decay']:.2g}",
                number(estimate(place[setting,])),
                signed(changes[setting]) if setting in changes else "",
                number(estimate(lines[setting,])),
                share(accuracy.get((setting,)), pictures),
            )
        )
    structure = estimate(lines[USUAL,])
    apart = "two others that are as far apart"
    if structure.low > 0:
        note = f"Positions of one row or column are more alike than {apart}, by {number(structure)} of cosine, as in the paper."
    else:
        note = f"Rows and columns do not clearly stand out at this scale: {number(structure)} of cosine beyond {apart}."
    return Answer(
        finding=finding,
        agreement=agreement,
        columns=("setting", "steps", "rate", "weight decay", "place", "change", "lines", "test"),
        rows=tuple(rows),
        charts=(
            Chart(
                "Cosine of every position with all others, as a grid of grids",
                "maps",
                tuple(
                    Series(f"{setting}: place {estimate(place[setting,]).mean:.2f}", maps=grids(result))
                    for setting, result in sorted(shown.items(), key=lambda pair: list(SETTINGS).index(pair[0]))
                ),
                y_name="cosine similarity",
                percent=False,
            ),
            Chart(
                "How well likeness tells distance",
                "dots",
                (series("place", {str(key[0]): values for key, values in place.items()}, None),),
                y_name="correlation of cosine and nearness",
                percent=False,
            ),
        ),
        limits=LIMITS,
        notes=(note, *chance(len(changes))),
    )


def found(usual: Estimate, changes: dict[str, Difference]) -> tuple[str, Agreement]:
    """What the usual training gives, and what changes it clearly."""
    told = f"correlation of their cosine with nearness {number(usual)}"
    if not usual.low > 0 and not usual.high < 0:
        return f"Whether closer positions are more alike cannot be told at this scale: {told}.", "unclear"
    if usual.high < 0:
        return f"Closer positions are less alike: {told}.", "disagrees"
    clear = [f"{setting} {signed(change)}" for setting, change in changes.items() if change.clear]
    if not clear:
        return (
            f"Closer positions are more alike ({told}), and none of the {len(changes)} other settings changes that clearly: no "
            "difference at this scale.",
            "no difference",
        )
    told = f"Closer positions are more alike ({told})"
    if not beyond_chance(len(clear), len(changes)):
        return f"{told}, and one setting of {len(changes)} changes that, which may be chance: {clear[0]}.", "unclear"
    rest = [setting for setting, change in changes.items() if not change.clear]
    unchanged = f"; {', '.join(rest)}: no clear change" if rest else ""
    return (
        f"{told}, and how much depends on the training: {'; '.join(clear)}{unchanged}.",
        "agrees",
    )


def chance(comparisons: int) -> tuple[str, ...]:
    """How easily one of several comparisons is clear for no reason."""
    if comparisons < 2:
        return ()
    share = 1 - 0.95**comparisons
    return (
        f"Of {comparisons} comparisons at least one is clear by chance alone in up to {100 * share:.0f} % of studies.",
    )


def grids(result: Result) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """A map for each position in reading order, of its likeness to all."""
    return tuple(
        tuple(tuple(map(float, line)) for line in grid) for row in result.numbers["similarity"] for grid in row
    )


STUDY = Study(
    name="position-maps",
    question="What do learned positions look like, and does that depend on how the model is trained?",
    where="figure 7 (centre) and figure 10, section 4.5 and appendix D.4",
    found=(
        "Closer patches tend to have more similar position embeddings, a structure of rows and columns appears, and the specific "
        "pattern depends on the training's hyper-parameters (shown in figures; no number is given)."
    ),
    scales={
        "test": Scale(
            "digits", 0.2, "one core", seeds=2, steps=6, batch=32,
            sizes={"width": 16, "depth": 1, "heads": 2, "patch": 2, "settings": (USUAL, "twice as long")},
        ),
        # 49 tokens at width 64, depth 4: 350 pictures/s on a core. As usual 800 steps × 128 = 102,400 pictures, 293 s, and 10
        # s to begin and to judge. A seed: five settings of 303 s, one of 156 s, one of 595 s = 2,270 s. Three seeds on two
        # cores: 57 min.
        "laptop": Scale(
            "fashion-mnist", 57, "two cores", seeds=3, steps=800, batch=128,
            sizes={"width": 64, "depth": 4, "heads": 4, "patch": 4},
        ),
        # Ti/16 at 224²: about 1,500 pictures/s with bf16. 20,000 steps × 256 = 5.1 M, 57 min; 7.5 such lengths × 3 seeds = 21
        # h.
        "gpu": Scale(
            "imagenet", 1_280, "one GPU", seeds=3, steps=20_000, batch=256,
            sizes={
                "width": 192, "depth": 12, "heads": 3, "patch": 16, "image": 224, "precision": "bf16",
                "warmup": 2_000,
            },
        ),
        # The paper's L/16 for 7 epochs of ImageNet-21k's 14 M pictures in batches of 4,096: 24,000 steps, with table 3's
        # hyper-parameters. 2,500 pictures/s on eight GPUs: 11 h a run; 7.5 such lengths × 3 seeds = 245 h.
        "cluster": Scale(
            "imagenet-21k", 14_700, "8 GPUs", seeds=3, steps=24_000, batch=4096,
            sizes={
                "width": 1024, "depth": 24, "heads": 16, "patch": 16, "image": 224, "dropout": 0.1,
                "weight_decay": 0.03, "precision": "bf16", "warmup": 10_000,
            },
        ),
    },
    plan=plan,
    read=read,
    measure=measure,
)  # fmt: skip
