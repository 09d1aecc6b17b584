"""Draw the chart at the top of docs/benchmarks.md from the results that the other scripts left in benchmarks/results.

    python benchmarks/chart.py

Each bar is the speed of vitrail, as `--precision auto` runs it, relative to the fastest other library as its users run it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure

from vitrail.reports.charts.canvas import Chart, Series
from vitrail.reports.charts.figure import render_svg

OUT = Path(__file__).parents[1] / "docs" / "benchmarks.svg"


def read_rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of a result file; none if the script has not run."""
    path = measure.RESULTS / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.is_file() else []


def find_ratio(name: str, matches: Callable[[dict[str, Any]], bool], ratio: Callable[[dict[str, Any]], float]) -> Any:
    """Return the ratio of the first row that matches; None without one."""
    return next((ratio(row) for row in read_rows(name) if matches(row)), None)


def list_ratios() -> dict[str, float]:
    """Return the bars by label."""
    found = {
        "forward, S/16, batch 16": find_ratio(
            "models-precision",
            lambda row: row["work"] == "forward S/16, batch 16",
            lambda row: row["ratios"]["auto / timm fp32"],
        ),
        "predict, a folder of JPEGs": find_ratio(
            "shipping-predict-cold",
            lambda row: "pictures_per_second" in row,
            lambda row: row["ratios"]["vitrail"]["timm"],
        ),
        "first prediction, from the shell": find_ratio(
            "shipping-predict-cold", lambda row: "cold" in row.get("work", ""), lambda row: row["ratio"]
        ),
        "training step, S/16": find_ratio(
            "models-train", lambda row: row["work"].startswith("train S/16"), lambda row: row["bf16_to_fp32"]
        ),
        "training step, small model": find_ratio(
            "models-train",
            lambda row: row["work"].startswith("train D=128"),
            lambda row: max(row["ratio"], row["bf16_to_fp32"]),
        ),
        "fine-tuning DeiT-Ti, half of the patches": find_ratio(
            "training",
            lambda row: row["contestant"] == "vitrail, bf16, half of the patches",
            lambda row: row["ratio"],
        ),
    }
    return {label: ratio for label, ratio in found.items() if ratio is not None}


def main() -> None:
    ratios = list_ratios()
    if not ratios:
        raise SystemExit("no results: run the other benchmarks first")
    title = "Speed with defaults, relative to the fastest other library in fp32"
    ours = Series("vitrail", tuple(ratios), tuple(ratios.values()))
    others = Series("fastest other library", tuple(ratios), (1.0,) * len(ratios))
    OUT.write_text(render_svg(Chart(title, "bars", (ours, others), "", "speed", percent=False)))
    print(f"written to {OUT}: " + ", ".join(f"{label} {ratio:.2f}" for label, ratio in ratios.items()))


if __name__ == "__main__":
    main()
