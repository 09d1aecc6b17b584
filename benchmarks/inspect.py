"""Cost of `vitrail inspect`: memory of all views at 1024², and time of all attention maps at 224² against transformers (eager).

    python benchmarks/inspect.py

Memory: B/16 with fresh weights and an image of 1024² (4,097 tokens), in a process of its own; the peak resident set of the
whole inspection (every view, relevance included, figures, arrays and page), above the memory of the process with the model built.
Time: B/16 with the same fresh weights on both sides, one image of 224², the attention of every layer; both are interleaved in
one process, after a comparison of the maps.
"""

import os
import sys

if __name__ == "inspect":
    # The folder of a script is first in sys.path, so `import inspect` anywhere finds this file. Load Python's module instead.
    _path, _here = sys.path[:], os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in _path if os.path.abspath(folder) != _here]
    del sys.modules["inspect"]
    import inspect  # noqa: F401

    sys.path[:] = _path
else:
    import argparse
    import json
    import subprocess
    import tempfile
    from pathlib import Path
    from typing import Any

    import measure
    import torch

LIMIT = 2**30
MEMORY = """
import json, sys, tempfile, time
from pathlib import Path
import numpy as np
from PIL import Image
import vitrail
from vitrail.data.preprocessing import Preprocessing
from vitrail.analysis.inspect import ModelInspector, inspect_images
def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
size = int(sys.argv[1])
model = vitrail.build("B/16", image_size=size, init="deit").eval()
inspector = ModelInspector(model, Preprocessing((size, size), (size, size)), "B/16", at=(70, 60))
with tempfile.TemporaryDirectory() as folder:
    picture, out = Path(folder) / "picture.png", Path(folder) / "out"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)).save(picture)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak: building the model is not measured
    before, begin = resident("VmRSS"), time.perf_counter()
    written = inspect_images(inspector, [picture], out, 1)
    seconds, page = time.perf_counter() - begin, (out / "index.html").stat().st_size
assert not written.skipped, written.skipped
weights = sum(parameter.numel() * 4 for parameter in model.parameters())
print(json.dumps({"beyond": resident("VmHWM") - before, "weights": weights, "seconds": seconds, "page": page}))
"""


def memory(size: int) -> "dict[str, Any]":
    """Measure the peak resident set beyond the model, for all views with their figures and the page."""
    done = subprocess.run([sys.executable, "-c", MEMORY, str(size)], capture_output=True, text=True, check=True)
    tokens = (size // 16) ** 2 + 1
    row = {"size": size, "tokens": tokens, "maps": 12 * 12 * tokens**2 * 4, **json.loads(done.stdout)}
    print(f"{'all views, beyond the weights':<42}{row['beyond'] / 2**20:8.0f} MiB  target {LIMIT / 2**20:.0f} MiB")
    print(f"{'all attention maps together':<42}{row['maps'] / 2**20:8.0f} MiB")
    print(f"{'all views, drawn and written':<42}{row['seconds']:8.0f} s    at {size}²")
    print(f"{'the page':<42}{row['page'] / 2**20:8.0f} MiB")
    return row


def timing(rounds: int) -> "dict[str, Any]":
    """Measure the seconds for the attention of every layer of one image."""
    import transformers

    import vitrail
    from vitrail.analysis import record_attention, trace_image

    settings = transformers.ViTConfig(attn_implementation="eager", num_labels=1000)
    theirs = transformers.ViTForImageClassification(settings).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours: Any = vitrail.load(Path(folder))
    image = torch.randn(1, 3, 224, 224)

    def recorded() -> Any:
        with torch.inference_mode(), record_attention(ours) as maps:
            ours(image)
        return maps

    def rows_of_class_token() -> Any:
        with torch.inference_mode(), record_attention(ours, queries=[0]) as maps:
            ours(image)
        return maps

    def eager() -> Any:
        with torch.inference_mode():
            return theirs(image, output_attentions=True).attentions

    def unseen() -> Any:
        with torch.inference_mode():
            return ours(image)

    difference = max(float((recorded()[layer] - map).abs().max()) for layer, map in enumerate(eager(), start=1))
    contestants = {
        "transformers, eager, output_attentions": eager,
        "vitrail, record_attention": recorded,
        "vitrail, record_attention, class token": rows_of_class_token,
        "vitrail, the model alone": unseen,
        "vitrail, trace_image with every view": lambda: trace_image(ours, image, at=(3, 4)),
    }
    seconds = measure.interleave(contestants, rounds, at_least=60)
    medians = {who: measure.median(times) for who, times in seconds.items()}
    for who, value in medians.items():
        print(f"{who:<42}{1000 * value:8.1f} ms")
    peer = medians["transformers, eager, output_attentions"]
    ratio = peer / medians["vitrail, record_attention"]
    print(f"{'transformers / vitrail, same maps':<42}{ratio:8.2f}     (largest difference {difference:.1e})")
    return {
        "seconds": medians,
        "ratio": ratio,
        "difference": difference,
        "rounds": len(seconds["vitrail, record_attention"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="side in pixels of the image for the memory measurement")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=["timing", "memory"], help="part to measure; no file is written")
    options = parser.parse_args()
    parts = {"timing": lambda: timing(options.rounds), "memory": lambda: memory(options.size)}
    if options.only:
        parts[options.only]()
        return
    rows = {name: part() for name, part in parts.items()}
    print(f"written to {measure.save('inspect', rows)}")


if __name__ == "__main__":
    main()
