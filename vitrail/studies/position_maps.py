"""Similarity maps of learned position embeddings under different training settings (figures 7 and 10; figure 9 in version 1).

    vitrail paper run position-maps --scale laptop --model deit-tiny

One model is trained with default settings, and again with one setting changed at a time. Compared are the learned position
embeddings: the cosine of every position with every other, as a grid of grids, and two numbers computed from it. `nearness` (key
"place") is the correlation of that cosine with the negative distance of the two patches on the grid. `lines` is the additional
cosine of two positions in the same row or column over two others at the same distance.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.analysis.weights import extract_positions
from vitrail.checkpoints.load import load
from vitrail.models.base import Model, refuse
from vitrail.studies import base
from vitrail.studies.intervals import Difference, Estimate, Scores, format_estimate, format_signed, is_beyond_chance
from vitrail.studies.study import Answer, Cell, Chart, Finding, Results, Series, Study, StudyScale, StudySetup
from vitrail.training.optim import AdamW
from vitrail.training.recipe import Data

DEFAULT = "as usual"
# Multiples of the default steps, learning rate and weight decay.
SETTINGS: dict[str, tuple[float, float, float]] = {
    DEFAULT: (1, 1, 1),
    "half as long": (0.5, 1, 1),
    "twice as long": (2, 1, 1),
    "a third of the rate": (1, 1 / 3, 1),
    "three times the rate": (1, 3, 1),
    "no weight decay": (1, 1, 0),
    "five times the weight decay": (1, 1, 5),
}
LIMITS = (
    "Small grids and short runs: the paper's maps are of ViT-L (L/32 in figure 7), trained on far more images. Weight decay is "
    "not applied to positions themselves here, so it can act on them only through the rest of the model."
)

GIVEN_NOTE = "Given models were trained elsewhere, on other data and for longer; the finding does not depend on them."
MAX_DRAWN_GRID = 7  # patches on a side: the grid of the paper's figure


def plan(setup: StudySetup, results: Results) -> list[Cell]:
    """Return every setting with every seed. Nothing is tuned, because hyper-parameters are what is compared."""
    scale, model = setup.scale, base.configure_study_vit(setup)
    cells = []
    for setting in scale.sizes.get("settings", SETTINGS):
        longer, faster, heavier = SETTINGS[setting]
        steps, lr = max(1, round(longer * scale.steps)), faster * scale.lrs[0]
        decay = heavier * scale.sizes.get("weight_decay", 0.1)
        for seed in range(scale.seeds):
            at = {"setting": setting, "steps": steps, "rate": lr, "weight decay": decay, "seed": seed}
            recipe = base.build_recipe(setup, model, lr, seed, steps=steps)
            cells.append(Cell(at, replace(recipe, optimizer=AdamW(lr=lr, weight_decay=decay))))
    return cells


def measure(cell: Cell, run: Path) -> dict[str, Any]:
    """Return the similarity maps of a trained model and the two numbers computed from them."""
    return measure_model(load(run / "model.safetensors"))


def measure_given(model: Model, data: Data) -> dict[str, Any]:
    """Return the same of a trained model; large grids are drawn smaller, with positions resampled as for other image sizes."""
    numbers = measure_model(model.require_tokens("the study of positions"))
    if max(len(numbers["similarity"]), len(numbers["similarity"][0])) > MAX_DRAWN_GRID:
        numbers["similarity"] = measure_model(model, (MAX_DRAWN_GRID, MAX_DRAWN_GRID))["similarity"]
    return numbers


def measure_model(model: Model, grid: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return the similarity maps of a model's positions on its grid or another, and the two numbers computed from them."""
    similarity = extract_positions(model, grid).similarity
    if similarity is None:
        raise refuse(model.config, "the study of positions", "use a model that adds its positions to the patches")
    nearness, lines = measure_structure(similarity)
    return {"place": nearness, "lines": lines, "similarity": np.round(similarity, 3).tolist()}


def measure_structure(similarity: np.ndarray) -> tuple[float, float]:
    """Return the correlation of similarity [h, w, h, w] with nearness, and the effect of a shared row or column."""
    h, w = similarity.shape[:2]
    y, x = (axis.reshape(-1) for axis in np.mgrid[:h, :w])
    down, across = np.abs(y[:, None] - y), np.abs(x[:, None] - x)
    other = (down + across) > 0  # pairs of different positions
    away = np.hypot(down, across)[other]
    alike = similarity.reshape(h * w, h * w)[other].astype(np.float64)
    nearness = float(np.corrcoef(alike, -away)[0, 1])
    line = ((down == 0) | (across == 0))[other]
    fitted = np.linalg.lstsq(np.stack((np.ones_like(away), away, line), 1), alike, rcond=None)[0]
    return nearness, float(fitted[2])


def interpret_results(results: Results, scale: StudyScale) -> Answer:
    nearness, lines = (Scores(results, "setting", number=number) for number in ("place", "lines"))
    if missing := nearness.find_missing([DEFAULT]):
        return base.incomplete_answer(missing, LIMITS)
    tests, changes = Scores(results, "setting"), nearness.compare(DEFAULT)
    shown = {str(result.at["setting"]): result for result in reversed(results) if result.phase == "final"}
    given = {f"{result.at['model']} (given)": result.numbers for result in results if result.phase == "given"}
    labels = {name: f"{name}: nearness {nearness.estimate(name).mean:.2f}" for name in SETTINGS if name in shown}
    maps = tuple(Series(label, maps=similarity_maps(shown[name].numbers)) for name, label in labels.items())
    maps += tuple(Series(f"{name}: nearness {n['place']:.2f}", maps=similarity_maps(n)) for name, n in given.items())
    share = f"{100 * (1 - 0.95 ** len(changes)):.0f} %"
    chance = f"Of {len(changes)} comparisons at least one is clear by chance alone in up to {share} of studies."
    title = "Cosine of every position with all others, as a grid of grids"
    dots = nearness.dots(
        "Correlation of position similarity and nearness", "nearness", "correlation of cosine and nearness"
    )
    return Answer(
        *formulate_finding(nearness.estimate(DEFAULT), changes),
        columns=("setting", "steps", "learning rate", "weight decay", "nearness", "change", "lines", "test"),
        rows=tuple(
            (
                setting,
                f"{shown[setting].at['steps']:,}",
                f"{shown[setting].at['rate']:.2g}",
                f"{shown[setting].at['weight decay']:.2g}",
                format_estimate(nearness.estimate(setting)),
                format_signed(changes[setting]) if setting in changes else "",
                format_estimate(lines.estimate(setting)),
                tests.format(setting),
            )
            for setting in nearness
        )
        + tuple((name, *3 * ("–",), f"{n['place']:.2f}", "", f"{n['lines']:.2f}", "–") for name, n in given.items()),
        charts=(Chart(title, "maps", maps, y_name="cosine similarity", percent=False), replace(dots, percent=False)),
        limits=LIMITS,
        notes=(
            describe_lines(lines.estimate(DEFAULT)),
            *([chance] if len(changes) > 1 else []),
            *([GIVEN_NOTE] if given else []),
        ),
    )


def describe_lines(lines: Estimate) -> str:
    """Return a note on the similarity of positions in one row or column."""
    apart, cosine = "two others that are as far apart", f"{format_estimate(lines)} of cosine"
    if lines.low > 0:
        return f"Positions of one row or column are more similar than {apart}, by {cosine}, as in the paper."
    return f"Rows and columns do not clearly stand out at this scale: {cosine} beyond {apart}."


def formulate_finding(default: Estimate, changes: Mapping[str, Difference]) -> Finding:
    """Report the correlation under default training, and the settings that clearly change it."""
    correlation = f"correlation of their cosine with nearness {format_estimate(default)}"
    if default.high < 0:
        return f"Closer positions are less similar: {correlation}.", "disagrees"
    if not default.low > 0:
        return f"Whether closer positions are more similar is unclear at this scale: {correlation}.", "unclear"
    similar = f"Closer positions are more similar ({correlation})"
    clear = [f"{setting} {format_signed(change)}" for setting, change in changes.items() if change.is_clear]
    if not clear:
        none = f"none of the {len(changes)} other settings clearly changes that: no difference at this scale"
        return f"{similar}, and {none}.", "no difference"
    if not is_beyond_chance(len(clear), len(changes)):
        return f"{similar}, and one setting of {len(changes)} changes that, which may be chance: {clear[0]}.", "unclear"
    rest = [setting for setting, change in changes.items() if not change.is_clear]
    unchanged = f"; {', '.join(rest)}: no clear change" if rest else ""
    return f"{similar}, and how much depends on the training: {'; '.join(clear)}{unchanged}.", "agrees"


def similarity_maps(numbers: Mapping[str, Any]) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Return the similarity map of each position, in row-major order."""
    grids = [grid for row in numbers["similarity"] for grid in row]
    return tuple(tuple(tuple(map(float, line)) for line in grid) for grid in grids)


STUDY = Study(
    name="position-maps",
    question="What do learned positions look like, and does that depend on how the model is trained?",
    reference="figure 7 (centre) and figure 10, section 4.5 and appendix D.4",
    paper_finding=(
        "Closer patches tend to have more similar position embeddings, a structure of rows and columns appears, and the specific "
        "pattern depends on the training's hyper-parameters (shown in figures; no number is given)."
    ),
    scales={
        "test": base.on_one_core(steps=6, sizes=base.vit_sizes(16, 1, 2, 2, settings=(DEFAULT, "twice as long"))),
        # 49 tokens at width 64, depth 4: 350 images/s on a core. As usual 800 steps × 128 = 102,400 images, 293 s, and 10
        # s to start and to evaluate. A seed: five settings of 303 s, one of 156 s, one of 595 s = 2,270 s. Three seeds on two
        # cores: 57 min.
        "laptop": base.on_two_cores(data="fashion-mnist", minutes=57, batch=128, sizes=base.vit_sizes(64, 4, 4, 4)),
        # Ti/16 at 224²: about 1,500 images/s with bf16. 20,000 steps × 256 = 5.1 M, 57 min; 7.5 such lengths × 3 seeds = 21 h.
        "gpu": base.on_gpu(data="imagenet", minutes=1_280, steps=20_000, sizes=base.vit_sizes(
            192, 12, 3, 16, image=224, precision="bf16", warmup=2_000)),
        # The paper's L/16 for 7 epochs of ImageNet-21k's 14 M images in batches of 4,096: 24,000 steps, with table 3's
        # hyper-parameters. 2,500 images/s on eight GPUs: 11 h a run; 7.5 such lengths × 3 seeds = 245 h.
        "cluster": base.on_cluster(minutes=14_700, seeds=3, steps=24_000, sizes=base.L16),
    },
    plan=plan, interpret=interpret_results, measure=measure, measure_given=measure_given,
)  # fmt: skip
