"""How training went: loss, score, learning rate, gradient."""

from vitrail.evaluate.intervals import wilson
from vitrail.report.charts import Line, line_chart, of_rows
from vitrail.report.markup import Markup
from vitrail.report.run import Run
from vitrail.report.words import percent


def curves(run: Run) -> list[Markup]:
    """The charts that the run's logs allow."""
    made = [
        line_chart(
            "Loss",
            [
                Line("training", of_rows(run.training, "epoch", "loss"), 2),
                Line("validation", of_rows(run.validation, "epoch", "loss"), 1, dots=True),
            ],
            x_name="epoch",
            note="Training’s is measured on augmented pictures, so it may lie above validation’s.",
        ),
        score_chart(run),
        line_chart("Learning rate", [Line("learning rate", of_rows(run.training, "epoch", "lr"), 3)], x_name="epoch"),
        line_chart("Gradient norm", [Line("norm", of_rows(run.training, "epoch", "grad_norm"), 5)], x_name="epoch"),
    ]
    return [chart for chart in made if chart]


def score_chart(run: Run) -> Markup | None:
    """The score on validation after each epoch, with the interval that so many pictures allow, and the best ringed."""
    points = of_rows(run.validation, "epoch", run.score_name)
    if not points:
        return None
    images, band = validation_images(run), []
    if images and not run.several:
        band = [(x, *wilson(y * images, images)) for x, y in points if 0 <= y <= 1]
    best = max(points, key=lambda point: point[1])
    title = "mAP on validation" if run.several else "Right on validation (top-1)"
    return line_chart(
        title,
        [Line("mAP" if run.several else "right", points, 1, dots=True, band=band)],
        x_name="epoch",
        value=percent_ticks,
        mark=(*best, f"best: {percent(best[1])} after epoch {best[0]:,.0f}"),
        note=f"The {'band' if len(band) > 1 else 'line'} is the 95 % interval for {images:,} pictures." if band else "",
    )


def percent_ticks(value: float) -> str:
    """One decimal where there is one."""
    return percent(value, 0 if abs(100 * value - round(100 * value)) < 1e-9 else 1)


def validation_images(run: Run) -> int | None:
    """How many pictures validation has."""
    if "validation" in run.evaluations:
        return len(run.evaluations["validation"].targets)
    images = ((run.part("data", "splits") or {}).get("validation") or {}).get("images")
    return images if isinstance(images, int) and images > 0 else None
