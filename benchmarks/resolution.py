"""Cost by image size of Swin-T, whose attention stays in windows, and of ViT-S/16: counted multiply-adds and measured time.

    python benchmarks/resolution.py                    224² to 1024², about 3 minutes; writes docs/resolution.svg
    python benchmarks/resolution.py --sizes 224 448 --rounds 3 --out /tmp/chart.svg

Both are relative to 224² and divided by the pixels: a cost that grows linearly with the pixels is a horizontal line. Forward
passes of single images, all models and sizes interleaved in one process. Swin-T is built for the size, with windows of 7×7.
"""

import argparse
from pathlib import Path
from typing import Any

import measure
import torch

import vitrail
from vitrail.models.flops import count
from vitrail.models.registry import configure
from vitrail.reports.charts.canvas import Chart, Series
from vitrail.reports.charts.figure import render_svg

MODELS = {"Swin-T": "Swin-T", "S/16": "ViT-S/16"}
OUT = Path(__file__).parents[1] / "docs" / "resolution.svg"


def measure_sizes(sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return a row per model and size: multiply-adds, and the median and minimum of its seconds."""
    models = {(name, size): vitrail.build(name, image_size=size).eval() for name in MODELS for size in sizes}
    images = {size: torch.randn(1, 3, size, size) for size in sizes}
    runs = {f"{name} {size}": lambda m=m, x=images[size]: m(x) for (name, size), m in models.items()}
    with torch.inference_mode():
        seconds = measure.interleave(runs, rounds)
    rows = []
    for name, size in models:
        times = seconds[f"{name} {size}"]
        macs = count(configure(name, image_size=size)).macs
        rows.append({"model": name, "size": size, "macs": macs, "seconds": measure.median(times), "best": min(times)})
    return rows


def draw(rows: list[dict[str, Any]]) -> str:
    """Return the chart: cost per pixel relative to the smallest size."""
    series = []
    for name, title in MODELS.items():
        own = [row for row in rows if row["model"] == name]
        sizes = tuple(float(row["size"]) for row in own)
        for key, label in (("macs", "multiply-adds"), ("best", "time")):
            values = tuple(row[key] / own[0][key] * (own[0]["size"] / row["size"]) ** 2 for row in own)
            series.append(Series(f"{title}, {label}", sizes, values))
    title = "Cost per pixel by image size: windows keep it constant, attention between all patches does not"
    unit = f"cost per pixel, relative to {rows[0]['size']}²"
    return render_svg(Chart(title, "lines", tuple(series), "side of the image, pixels", unit, percent=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[224, 448, 672, 896, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = measure_sizes(options.sizes, options.rounds)
    for row in rows:
        print(f"{row['model']:<8}{row['size']:>6}²{row['macs'] / 1e9:>9.2f} G multiply-adds{row['best']:>9.3f} s")
    options.out.write_text(draw(rows))
    print(f"written to {options.out} and {measure.save('resolution', rows)}")


if __name__ == "__main__":
    main()
