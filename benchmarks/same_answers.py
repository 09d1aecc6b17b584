"""Agreement of every runtime and of the service with PyTorch, image by image.

    python benchmarks/same_answers.py deit_tiny_patch16_224.safetensors imagenet-samples
    python benchmarks/same_answers.py runs/clothing-finetune-1 clothing/validation
    python benchmarks/same_answers.py deit_tiny_patch16_224.safetensors imagenet-samples clothing/validation --limit 10

All images of the folders are preprocessed once and go through PyTorch, ONNX Runtime and OpenVINO; the logits are compared. Then
`vitrail serve` runs the model on a free port, with each of the three runtimes, and receives the files: for each image, the
score of the top class is compared with PyTorch's for that class. The exit code is 1 if a top-1 prediction differs.
"""

import argparse
import json
import urllib.request
from pathlib import Path
from typing import Any

import measure
import numpy as np
from serving import Server

from vitrail.deploy import RUNTIMES
from vitrail.deploy.predict.inputs import collect_inputs, sample_evenly
from vitrail.deploy.predict.predict import top_predictions
from vitrail.deploy.runtimes.base import ModelContract
from vitrail.deploy.runtimes.open import open_deployed_model
from vitrail.inference import load_pixels, run_pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="checkpoint or run")
    parser.add_argument("data", nargs="+", metavar="DATA", help="folders of images")
    parser.add_argument("--limit", type=int, default=10**9, metavar="N", help="images per folder, evenly spaced")
    given = parser.parse_args()
    rows = compared(given.model, given.data, given.limit)
    print(measure.save("same_answers", rows))
    raise SystemExit(any(row["same_top1"] < row["pictures"] for row in rows))


def compared(model: str, data: list[str], limit: int) -> list[dict[str, Any]]:
    """Print and return a row for each folder and runtime."""
    plain = open_deployed_model(model, runtime="torch")
    shown = {where: prepared(where, plain.contract, limit) for where in data}
    wanted = {where: run_pixels(plain.runtime, pixels) for where, (pixels, _) in shown.items()}
    rows = []
    print(f"{'':22}{'pictures':>9}{'same top-1':>12}{'largest difference':>20}")
    for runtime in RUNTIMES[1:]:
        running = open_deployed_model(model, runtime=runtime).runtime
        for where, (pixels, _) in shown.items():
            found = run_pixels(running, pixels)
            same = int((found.argmax(1) == wanted[where].argmax(1)).sum())
            rows.append(row(runtime, where, len(pixels), same, float(np.abs(found - wanted[where]).max()), "logits"))
    for runtime in RUNTIMES:
        server = Server(f"served, {runtime}", ["--runtime", runtime], f"model={model}")
        try:
            server.wait(next(iter(shown.values()))[1][0].read_bytes())
            for where, (_, files) in shown.items():
                same, apart = served(server.port, files, wanted[where], plain.contract)
                rows.append(row(server.name, where, len(files), same, apart, "score"))
        finally:
            server.stop()
    return rows


def prepared(where: str, contract: ModelContract, limit: int) -> tuple[np.ndarray, list[Path]]:
    """Return the readable images of a folder, preprocessed, and their files."""
    inputs = collect_inputs([where])
    images = inputs.select(sample_evenly(inputs, limit))
    pixels, read = load_pixels(images, contract.preprocessing)
    return pixels, [Path(images.name(index)) for index in read.tolist()]


def served(port: int, files: list[Path], wanted: np.ndarray, contract: ModelContract) -> tuple[int, float]:
    """Return the number of images with the same top-1 class as PyTorch, and the largest difference of their scores."""
    same, apart = 0, 0.0
    for path, logits in zip(files, wanted, strict=True):
        headers = {"Content-Type": "application/octet-stream"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/predict?top=1", path.read_bytes(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            (found,) = json.load(answer)["predictions"][0]["answers"]
        ours = top_predictions(logits, contract, len(logits))
        same += found["label"] == ours[0][0]
        apart = max(apart, abs(found["score"] - dict(ours)[found["label"]]))
    return same, apart


def row(who: str, where: str, pictures: int, same: int, apart: float, what: str) -> dict[str, Any]:
    """Print one result and return it."""
    print(f"{who:22}{pictures:9,}{same:12,}{apart:20.2g}   {what}, {where}")
    named = {"who": who, "data": where, "pictures": pictures, "same_top1": same}
    return named | {"largest_difference": apart, "of": what}


if __name__ == "__main__":
    main()
