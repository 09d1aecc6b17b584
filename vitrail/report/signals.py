"""How a run without labels went: a chart for each of its signals, saying what is good and what is bad."""

from vitrail.evaluate.intervals import wilson
from vitrail.report.charts import Line, line_chart, of_rows
from vitrail.report.curves import percent_ticks
from vitrail.report.markup import Markup
from vitrail.report.run import Run
from vitrail.report.words import is_number

LOSS = {
    "mae": "The lower the better. With normalised patches, 1 is what a flat grey guess gets: it should be well below.",
    "mpp": "The lower the better. Where it levels off at once, only how common each colour is was learnt.",
    "dino": "How far the student is from its teacher. The teacher moves too, so it may rise for a while; a fall to "
    "almost nothing means that every picture gets the same answer.",
    "features": "How far its features point from the teacher’s: 0 is the same way, 1 a right angle. It falls quickly to what all "
    "of the teacher’s have in common; what follows tells pictures apart. Where the teacher was asked beforehand, training is "
    "held against what it said of whole pictures, validation against the crops.",
}
SIGNALS = {  # in words, the colour, and what to make of it
    "spread": (
        "Spread of the features",
        1,
        "How far pictures lie apart: at 0 they all look alike, at 1 they point everywhere. It often falls at first; a fall "
        "to almost nothing of where it began is bad.",
    ),
    "rank": (
        "Effective rank",
        3,
        "In how many directions pictures differ. It often falls at first; rising later is good, a fall to a few is bad.",
    ),
    "teacher_entropy": (
        "Undecidedness of the teacher",
        5,
        "The entropy of its answer to one picture. It rises as training begins, and should fall from there; staying at 1, "
        "which is no answer at all, is bad.",
    ),
    "teacher_diversity": (
        "Diversity of the teacher",
        4,
        "The entropy of its answers over all pictures. High is good; near 0, every picture gets the same answer. What it has "
        "above the undecidedness is what answers tell of their pictures.",
    ),
}


def signals(run: Run) -> list[Markup]:
    """The charts that the run's logs allow."""
    made = [
        _neighbours(run),
        line_chart(
            "Loss",
            [
                Line("training", of_rows(run.training, "epoch", "loss"), 2),
                Line("validation", of_rows(run.validation, "epoch", "loss"), 1, dots=True),
            ],
            x_name="epoch",
            note=LOSS.get(run.method, ""),
        ),
        *(_signal(run, key) for key in SIGNALS),
        line_chart("Learning rate", [Line("learning rate", of_rows(run.training, "epoch", "lr"), 3)], x_name="epoch"),
        line_chart("Gradient norm", [Line("norm", of_rows(run.training, "epoch", "grad_norm"), 5)], x_name="epoch"),
    ]
    return [chart for chart in made if chart]


def _signal(run: Run, key: str) -> Markup | None:
    title, colour, note = SIGNALS[key]
    points = of_rows(run.validation, "epoch", key)
    return line_chart(
        title, [Line(title.lower(), points, colour, dots=True)], x_name="epoch", note=note, mark=fallen(run, points)
    )


def fallen(run: Run, points: list[tuple[float, float]]) -> tuple[float, float, str] | None:
    """The point where the alarm went off."""
    if not run.collapse:
        return None
    epochs = [row.get("epoch") for row in run.validation if row.get("step") == run.collapse.get("step")]
    found = [point for point in points if point[0] in epochs]
    return (*found[0], "the alarm") if found else None


def _neighbours(run: Run) -> Markup | None:
    """k-NN accuracy over the run, with what needs no training as lines to be above."""
    points = of_rows(run.validation, "epoch", "knn")
    if not points:
        return None
    summary = run.summary or {}
    images, first, last = summary.get("images"), points[0][0], points[-1][0]
    band = []
    if is_number(images) and images > 0:
        band = [(x, *wilson(y * images, images)) for x, y in points if 0 <= y <= 1]
    levels = [("raw pixels", summary.get("knn_pixels"), 2, "7 4"), ("untrained", summary.get("knn_random"), 6, "2 4")]
    lines = [
        Line("learnt", points, 1, dots=True, band=band),
        *(
            Line(label, [(first, float(level)), (last, float(level))], colour, dashes=dashes)
            for label, level, colour, dashes in levels
            if is_number(level)
        ),
    ]
    said = "Right answers of a vote among the nearest training pictures. Rising is good; it should leave the others behind."
    told = f" The band is the 95 % interval for {images:,} pictures." if len(band) > 1 else ""
    return line_chart("Right by nearest neighbours", lines, x_name="epoch", value=percent_ticks, note=said + told)
