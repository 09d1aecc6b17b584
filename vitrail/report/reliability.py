"""The reliability diagram: how sure the model was against how often it was right."""

from vitrail.evaluate.calibration import Bin, reliability
from vitrail.evaluate.intervals import wilson
from vitrail.evaluate.several import probabilities
from vitrail.report.charts import grid, plot, strip
from vitrail.report.markup import Markup, h
from vitrail.report.run import Evaluation
from vitrail.report.scale import Scale
from vitrail.report.words import count, percent

FEW = 10  # pictures in a bar that tell little
QUARTERS = Scale(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0))


def whole_percent(value: float) -> str:
    return percent(value, 0)


def reliability_chart(bins: list[Bin], title: str, what: str) -> Markup:
    """Bars of how often it was right, with intervals, against the diagonal; below, how many each bar stands for."""
    full = [bin for bin in bins if bin.count]
    drawn, over, histogram = [grid(QUARTERS)], [], []
    most = max(bin.count for bin in full)
    for bin in full:
        left, width = 1000 * bin.low + 6, 1000 * (bin.high - bin.low) - 12
        low, high = wilson(round(bin.right * bin.count), bin.count)
        middle = 500 * (bin.low + bin.high)
        drawn.append(
            h(
                "rect",
                x=f"{left:.1f}",
                y=f"{1000 - 1000 * bin.right:.1f}",
                width=f"{width:.1f}",
                height=f"{1000 * bin.right:.1f}",
                class_="block c1" if bin.count >= FEW else "block c1 few",
            )
        )
        drawn.append(h("path", d=f"M{middle:.1f} {1000 - 1000 * low:.1f}V{1000 - 1000 * high:.1f}", class_="error"))
        height = 100 * bin.count / most
        histogram.append(
            h("rect", x=f"{left:.1f}", y=f"{100 - height:.2f}", width=f"{width:.1f}", height=f"{height:.2f}")
        )
        rows = [
            h("b", f"{100 * bin.low:.0f}–{percent(bin.high, 0)} sure"),
            h("span", f"{count(bin.count)} {what}{'' if bin.count == 1 else 's'}"),
            h("span", f"sure {percent(bin.sure)}, right {percent(bin.right)}"),
        ]
        over.append(strip(bin.low, bin.high, (bin.low + bin.high) / 2, rows))
    drawn.append(h("path", d="M0 1000L1000 0", class_="diagonal"))
    said = f"{title}: " + "; ".join(
        f"{percent(bin.sure, 0)} sure, {percent(bin.right, 0)} right ({bin.count})" for bin in full
    )
    below = h("svg", histogram, viewBox="0 0 1000 100", preserveAspectRatio="none", aria_hidden="true")
    return h(
        "figure",
        h("figcaption", h("h3", title)),
        plot(drawn, QUARTERS, QUARTERS, whole_percent, whole_percent, said, over),
        h("div", below, class_="counts"),
        h("p", f"how sure it was; below, how many {what}s", class_="axis"),
        class_="chart square",
    )


def calibration(evaluation: Evaluation) -> list[Markup]:
    """The diagram, and what it comes to in words."""
    error = percent(evaluation.measures["calibration_error"])
    if evaluation.several:
        bins = reliability(probabilities(evaluation.logits).ravel(), (evaluation.targets > 0).ravel())
        words = (
            "Every label of every picture counts: of those that were given a probability, how many really are there. "
            f"The expected calibration error is {error}. A bar should end on the dashed line."
        )
        chart = reliability_chart(bins, "How many have the label, by the probability given", "label")
        return [h("div", h("p", words), chart, class_="beside")]
    verdicts = evaluation.verdicts
    sure, right = verdicts.sure.mean(), verdicts.right.mean()
    lean = "surer than it is right" if sure > right else "right more often than it is sure"
    words = (
        f"On average it was {percent(float(sure))} sure and {percent(float(right))} right: {lean}. The expected calibration "
        f"error is {error}. A bar should end on the dashed line; the thin lines are 95 % intervals."
    )
    bins = reliability(verdicts.sure, verdicts.right)
    chart = reliability_chart(bins, "How often it was right, by how sure it was", "picture")
    return [h("div", h("p", words), chart, class_="beside")]
