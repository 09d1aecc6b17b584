"""Whether every runtime and the service answer as PyTorch does, picture by picture.

    python benchmarks/same_answers.py deit_tiny_patch16_224.safetensors imagenet-samples
    python benchmarks/same_answers.py runs/clothing-finetune-1 clothing/validation
    python benchmarks/same_answers.py deit_tiny_patch16_224.safetensors imagenet-samples clothing/validation --limit 10

All pictures of the folders are prepared once and go through PyTorch, ONNX Runtime and OpenVINO: logits are compared. Then
`vitrail serve` runs the model on a free port, with each of the three in turn, and is sent the files as they are: of each picture
the score of the surest class is compared with PyTorch's for that class. Exits with 1 where a top-1 differs.
"""

import argparse
import json
import urllib.request
from pathlib import Path
from typing import Any

import measure
import numpy as np
from serving import Server

from vitrail.deploy.gate import answers
from vitrail.deploy.inputs import gathered
from vitrail.deploy.opening import opened
from vitrail.deploy.predicting import surest
from vitrail.deploy.runtime import RUNTIMES, Contract
from vitrail.deploy.unlabelled import pixels_of, spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a checkpoint or a run")
    parser.add_argument("data", nargs="+", metavar="DATA", help="folders of pictures")
    parser.add_argument("--limit", type=int, default=10**9, metavar="N", help="pictures of each folder, evenly spread")
    given = parser.parse_args()
    rows = compared(given.model, given.data, given.limit)
    print(measure.save("same_answers", rows))
    raise SystemExit(any(row["same_top1"] < row["pictures"] for row in rows))


def compared(model: str, data: list[str], limit: int) -> list[dict[str, Any]]:
    """A row for each folder and whatever answers, printed as well."""
    plain = opened(model, runtime="torch")
    shown = {where: prepared(where, plain.contract, limit) for where in data}
    wanted = {where: answers(plain.runtime, pixels) for where, (pixels, _) in shown.items()}
    rows = []
    print(f"{'':22}{'pictures':>9}{'same top-1':>12}{'largest difference':>20}")
    for runtime in RUNTIMES[1:]:
        running = opened(model, runtime=runtime).runtime
        for where, (pixels, _) in shown.items():
            found = answers(running, pixels)
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


def prepared(where: str, contract: Contract, limit: int) -> tuple[np.ndarray, list[Path]]:
    """The pictures of a folder that can be read, as the model takes them, and their files."""
    inputs = gathered([where])
    pixels, read = pixels_of(inputs, spread(inputs, limit), contract.preprocessing)
    return pixels, [Path(inputs.name(place)) for place in read]


def served(port: int, files: list[Path], wanted: np.ndarray, contract: Contract) -> tuple[int, float]:
    """Pictures whose surest class is PyTorch's, and how far their scores are apart at most."""
    same, apart = 0, 0.0
    for path, logits in zip(files, wanted, strict=True):
        headers = {"Content-Type": "application/octet-stream"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/predict?top=1", path.read_bytes(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            (found,) = json.load(answer)["predictions"][0]["answers"]
        ours = surest(logits, contract, len(logits))
        same += found["label"] == ours[0][0]
        apart = max(apart, abs(found["score"] - dict(ours)[found["label"]]))
    return same, apart


def row(who: str, where: str, pictures: int, same: int, apart: float, what: str) -> dict[str, Any]:
    """What was found, printed and for machines."""
    print(f"{who:22}{pictures:9,}{same:12,}{apart:20.2g}   {what}, {where}")
    named = {"who": who, "data": where, "pictures": pictures, "same_top1": same}
    return named | {"largest_difference": apart, "of": what}


if __name__ == "__main__":
    main()
