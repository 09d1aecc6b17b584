"""Contestants of benchmarks/shipping.py, each in a process of its own with its own threads and memory.

    python benchmarks/shipping_peers.py NAME JSON

The process prints "ready" and then, for every line on standard input, runs once and prints the number of images. Every
contestant reads the same folder and writes a CSV of path, class and score.
"""

import csv
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import measure  # noqa: F401 (names the operators that torchvision's import needs)
import torch

Run = Callable[[], int]


def written(out: str, rows: Iterable[tuple[str, int | str, float]]) -> int:
    """Write rows to a CSV and return their number."""
    count = 0
    with open(out, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("path", "label", "score"))
        for row in rows:
            table.writerow(row)
            count += 1
    return count


def by_vitrail(told: dict[str, Any]) -> Run:
    """Return `vitrail predict` without its start: the model is loaded and the runtime is selected."""
    from vitrail.deploy.predict.formats import LabelsCSV
    from vitrail.deploy.predict.inputs import collect_inputs
    from vitrail.deploy.predict.predict import InferenceOptions, open_pool
    from vitrail.deploy.predict.write import write_outputs

    how = InferenceOptions(runtime=told["runtime"], merge=told["merge"])
    model = open_pool(told["model"], "logits", how, 10**9)

    def run() -> int:
        inputs = collect_inputs([told["folder"]])
        return write_outputs(model, inputs, told["out"], LabelsCSV(), force=True).images

    return run


def by_timm(told: dict[str, Any]) -> Run:
    """Return timm's model and transforms with a DataLoader of two workers."""
    import timm
    from PIL import Image
    from safetensors.torch import load_file
    from torch.utils.data import DataLoader, Dataset

    model = timm.create_model(told["timm"]).eval()
    model.load_state_dict(load_file(told["model"]))
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))
    paths = sorted(map(str, Path(told["folder"]).iterdir()))

    class Folder(Dataset):
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, index: int) -> Any:
            with Image.open(paths[index]) as image:
                return transform(image.convert("RGB"))

    def rows() -> Iterable[tuple[str, int, float]]:
        done = 0
        with torch.inference_mode():
            for batch in DataLoader(Folder(), batch_size=told["batch"], num_workers=2):
                scores, labels = model(batch).softmax(1).max(1)
                for label, score in zip(labels.tolist(), scores.tolist(), strict=True):
                    yield paths[done], label, score
                    done += 1

    return lambda: written(told["out"], rows())


def by_transformers(told: dict[str, Any]) -> Run:
    """Return transformers' image-classification pipeline."""
    from transformers import pipeline

    ask = pipeline("image-classification", model=told["hf"], top_k=1, device="cpu")
    paths = sorted(map(str, Path(told["folder"]).iterdir()))

    def rows() -> Iterable[tuple[str, str, float]]:
        for path, (answer,) in zip(paths, ask(paths, batch_size=told["batch"]), strict=True):
            yield path, answer["label"], answer["score"]

    return lambda: written(told["out"], rows())


CONTESTANTS: dict[str, Callable[[dict[str, Any]], Run]] = {
    "vitrail": by_vitrail,
    "timm": by_timm,
    "transformers": by_transformers,
}


def main() -> None:
    name, told = sys.argv[1:]
    run = CONTESTANTS[name](json.loads(told))
    answers = sys.stdout
    sys.stdout = sys.stderr
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        print(run(), file=answers, flush=True)


if __name__ == "__main__":
    main()
