"""Measure the map of `vitrail embed --plot` at 50,000 points: time and size of the page, and frame times in Chromium.

    python benchmarks/embedding_map.py [--points 50000] [--neighbours 0] [--out map.html]

Vectors of 192 values in 1,000 classes and images of 96 pixels are generated. A frame is `drawMap`, all that the page computes for
one step of a zoom or pan: `drawn` is elapsed time, `cpu` processor time. `shown` is the time between two frames on the screen.
"""

import argparse
import json
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitrail.deploy.map.columns import text_column
from vitrail.deploy.map.features import MapPoints
from vitrail.deploy.map.write import MapOptions, write_map

CLASSES, WIDTH = 1000, 192
STEPS = """async (zoom) => {
  const drawn = [], shown = [];
  let last = performance.now();
  for (let k = 0; k < 60; k++) {
    if (zoom) zoomAt(view.width / 2, view.height / 2, k < 30 ? zoom : 1 / zoom);
    else panBy(k < 30 ? 9 : -9, k < 30 ? 4 : -4);
    const start = performance.now();
    drawMap();
    drawn.push(performance.now() - start);
    await new Promise(requestAnimationFrame);
    shown.push(performance.now() - last);
    last = performance.now();
  }
  return { drawn, shown, thumbnails: drawnThumbnails };
}"""


class Pictures:
    """A store of images of noise with a coarse structure."""

    media = "image"

    def __init__(self, count: int) -> None:
        self.count, self.pixels = count, np.random.default_rng(1).integers(0, 256, (64, 12, 12, 3), dtype=np.uint8)

    def __len__(self) -> int:
        return self.count

    def name(self, item: int) -> str:
        return f"photos/class {item % CLASSES:03d}/{item:06d}.jpg"

    def open(self, item: int) -> Image.Image:
        return Image.fromarray(self.pixels[item % 64]).resize((96, 96), Image.Resampling.BICUBIC)


def write_page(count: int, neighbours: int, path: Path) -> dict[str, float]:
    """Write a map of generated vectors; return its size and the time and memory that it took."""
    generator = np.random.default_rng(0)
    centres, store = generator.standard_normal((CLASSES, WIDTH), dtype=np.float32), Pictures(count)
    features = centres[np.arange(count) % CLASSES] + 0.8 * generator.standard_normal((count, WIDTH), dtype=np.float32)
    names = [store.name(item) for item in range(count)]
    points = MapPoints(names, features, store, np.arange(count), "image", "generated", (), count)  # type: ignore[arg-type]
    classes = text_column("class", [f"class {item % CLASSES:03d}" for item in range(count)])
    start = time.perf_counter()
    summary = write_map(points, [classes], path, "Generated", MapOptions(nearest=neighbours))
    seconds = time.perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": round(seconds, 1), "MiB": round(summary.nbytes / 2**20, 1), "peak_MiB": round(memory)}


def measure_frames(path: Path) -> dict[str, dict[str, float]]:
    """Return the best, median and 95th percentile of frame times in milliseconds: the whole map, a zoom, and zoomed in."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("google-chrome")
    results = {}
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        start = time.perf_counter()
        page.goto(path.resolve().as_uri())
        page.wait_for_function("image !== null && colours !== null")
        results["load"] = {"seconds": round(time.perf_counter() - start, 2)}
        for name, zoom, before in (
            ("pan of all points", 0, "fitView()"),
            ("zoom to 300 times and back", 1.21, "fitView()"),
            ("pan with thumbnails", 0, "zoomAt(view.width / 2, view.height / 2, 40)"),
        ):
            page.evaluate(before)
            page.wait_for_timeout(1500)  # sheets are decoded
            before_steps = read_script_seconds(session)
            found = page.evaluate(STEPS, zoom)
            values = {"cpu_mean": 1000 * (read_script_seconds(session) - before_steps) / len(found["drawn"])}
            for key in ("drawn", "shown"):
                times = np.array(found[key])
                values |= {
                    f"{key}_best": times.min(),
                    f"{key}_median": np.median(times),
                    f"{key}_p95": np.percentile(times, 95),
                }
            results[name] = {key: round(float(value), 1) for key, value in values.items()}
            results[name]["thumbnails"] = found["thumbnails"]
        browser.close()
    return results


def read_script_seconds(session: Any) -> float:
    """Return the processor time of the page's script so far, which other programs do not lengthen."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(metric["value"] for metric in metrics if metric["name"] == "ScriptDuration")


def main() -> None:
    """Write a page, measure it, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=50_000)
    parser.add_argument("--neighbours", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "embedding-map.html")
    given = parser.parse_args()
    written = write_page(given.points, given.neighbours, given.out)
    print(json.dumps({"points": given.points, "page": written, "frames": measure_frames(given.out)}, indent=2))


if __name__ == "__main__":
    main()
