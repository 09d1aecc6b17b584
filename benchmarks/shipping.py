"""Speed of prediction against other libraries: a folder of photographs, the time to the first prediction, and the service.

    python benchmarks/shipping.py                    everything
    python benchmarks/shipping.py --only predict     one comparison
    python benchmarks/shipping.py --rounds 5 --merge 8
    python benchmarks/shipping.py --only predict --int8 0 8     also int8 exports, with 0 and 8 tokens merged per layer

predict: a folder of JPEGs whose longer side is 500 pixels, to a CSV of predictions. `vitrail predict` with the runtime that
`auto` selected before, with PyTorch, and with token merging, against timm (its transforms, a DataLoader with two workers, the
eager model) and against transformers' image-classification pipeline: DeiT-Ti with its published weights, and S/16 with random
ones. Each is ready in a process of its own. --int8 adds int8 exports, calibrated on clothing; those of DeiT-Ti are verified on
the ImageNet samples, those of S/16 are measured for speed only, because its weights are random.

cold: from the command to the first prediction on the screen, in a fresh process each time: `vitrail predict` against
transformers' pipeline.

serve: 32 clients of `vitrail serve` against those of a plain FastAPI + timm server, DeiT-Ti; 64 clients for a minute; and an
overload (benchmarks/serving.py).

Contestants are interleaved in a rotating order; ratios are of medians.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import measure
import serving
from PIL import Image

import vitrail
from vitrail.cli import main as command

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
WEIGHTS = SHARED / "weights" / "deit_tiny_patch16_224.safetensors"
SAMPLES = SHARED / "data" / "imagenet-samples"
CLOTHING = SHARED / "data" / "clothing"
LONGER = 500  # pixels
TARGETS = {"timm": 2.0, "transformers": 2.0}  # vitrail over them
MERGED = 2.0  # vitrail with merged tokens over timm


def photographs(folder: Path, count: int) -> Path:
    """Write JPEGs whose longer side is 500 pixels, repeating the samples if there are too few."""
    folder.mkdir()
    sources = sorted(SAMPLES.iterdir())
    for number in range(count):
        with Image.open(sources[number % len(sources)]) as image:
            image = image.convert("RGB")
            scale = LONGER / max(image.size)
            size = tuple(max(1, round(side * scale)) for side in image.size)
            image.resize(size, Image.Resampling.LANCZOS).save(folder / f"{number:05d}.jpg", quality=90)
    return folder


def models(folder: Path, names: list[str]) -> dict[str, dict[str, str]]:
    """Return the files of each model: timm's, which vitrail reads, and transformers' directory."""
    import timm
    from safetensors.torch import save_file

    found: dict[str, dict[str, str]] = {}
    for name in names:
        called = {"DeiT-Ti": "deit_tiny_patch16_224", "S/16": "vit_small_patch16_224"}[name]
        file = WEIGHTS
        if name != "DeiT-Ti":
            file = folder / f"{called}.safetensors"
            save_file(dict(timm.create_model(called).state_dict()), file)
        directory = folder / f"hf-{called}"
        assert command(["convert", str(file), str(directory), "--to", "hf"]) == 0
        found[name] = {"model": str(file), "timm": called, "hf": str(directory)}
    return found


def in_int8(name: str, model: str, folder: Path, merge: int, form: str) -> str:
    """Export the model in int8, print the verification and return the file."""
    file = folder / f"{name.replace('/', '-')}-int8-{merge}.{form}"
    proof = ["--verify", str(SAMPLES), "--label-from", r"^(\d+)_", "--calibrate", str(CLOTHING / "train")]
    proof += [] if name == "DeiT-Ti" else ["--force"]
    assert command(["export", model, str(file), "--int8", "--uint8", "--merge", str(merge), *proof]) == 0
    return str(file)


@contextmanager
def contestant(name: str, **told: Any) -> Iterator[Callable[[], int]]:
    """Start a process of a contestant and yield the function that runs it over the folder."""
    script = Path(__file__).with_name("shipping_peers.py")
    process = subprocess.Popen(
        [sys.executable, str(script), name, json.dumps(told)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    asks, answers = process.stdin, process.stdout

    def run() -> int:
        print("go", file=asks, flush=True)
        said = answers.readline()
        assert said, f"{name} ended"
        return int(said)

    try:
        assert answers.readline().strip() == "ready", f"{name} did not start"
        yield run
    finally:
        asks.close()
        process.wait(60)


def agree(first: str, second: str) -> float:
    """Return the share of equal predictions in two CSVs."""

    def labels(path: str) -> list[str]:
        with open(path, newline="", encoding="utf-8") as file:
            return [row["label"].removeprefix("LABEL_") for row in csv.DictReader(file)]

    ours, theirs = labels(first), labels(second)
    assert len(ours) == len(theirs)
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def predict(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare batch prediction. Targets: 2 of timm and of transformers, with and without token merging."""
    from vitrail.deploy.runtimes.open import open_deployed_model
    from vitrail.deploy.runtimes.precision import describe_precision

    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = photographs(Path(place) / "photos", options.pictures)
        for name, files in models(Path(place), options.models).items():
            notes = {}
            for merge in (0, options.merge):  # measured once per machine, as by the first command with many images
                told = open_deployed_model(files["model"], merge=merge, threads=1)
                notes[f"merge {merge}"] = "; ".join((*told.notes, *describe_precision(told)))
            contests = {
                "vitrail": ("vitrail", {"runtime": "auto", "merge": 0}),
                "vitrail, PyTorch": ("vitrail", {"runtime": "torch", "merge": 0}),
                f"vitrail --merge {options.merge}": ("vitrail", {"runtime": "auto", "merge": options.merge}),
                "timm": ("timm", {"batch": options.batch}),
                "transformers": ("transformers", {"batch": options.batch}),
            }
            for merge in options.int8 or ():
                told = {"model": in_int8(name, files["model"], Path(place), merge, options.form)}
                contests["vitrail, int8" + (f", merged {merge}" if merge else "")] = (
                    "vitrail",
                    told | {"runtime": "auto", "merge": 0},
                )
            with ExitStack() as stack:
                outs = {each: str(Path(place) / f"{number}.csv") for number, each in enumerate(contests)}
                runs = {
                    each: stack.enter_context(contestant(who, folder=str(folder), out=outs[each], **(files | more)))
                    for each, (who, more) in contests.items()
                }
                seconds = measure.interleave(runs, options.rounds)
            speed = {each: options.pictures / measure.median(taken) for each, taken in seconds.items()}
            ratios = {
                ours: {theirs: speed[ours] / speed[theirs] for theirs in TARGETS}
                for ours in contests
                if "vitrail" in ours
            }
            same = {each: agree(outs["vitrail"], outs[each]) for each in contests if each != "vitrail"}
            print(f"{name}, {options.pictures} JPEGs of {LONGER} pixels, images/s")
            for each, value in speed.items():
                more = ", ".join(f"{r:.2f}× {theirs}" for theirs, r in ratios.get(each, {}).items())
                alike = f"   {100 * same[each]:.1f} % same predictions as vitrail" if each in same else ""
                print(f"  {each:<24}{value:8.1f}   {more}{alike}", flush=True)
            for note in notes.values():
                print(f"  {note}")
            rows.append(
                {
                    "model": name,
                    "pictures": options.pictures,
                    "pictures_per_second": speed,
                    "ratios": ratios,
                    "same": same,
                }
                | {"rounds": options.rounds, "notes": notes, "seconds": seconds}
            )
    return rows


FIRST = """
import sys
sys.path.insert(0, {here!r})
import measure
from transformers import pipeline
print(pipeline("image-classification", model={model!r}, device="cpu", top_k=1)({picture!r}), flush=True)
"""


def cold(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare the time to the first prediction. Target: half the time of transformers' pipeline."""
    with tempfile.TemporaryDirectory() as place:
        picture = photographs(Path(place) / "photos", 1) / "00000.jpg"
        files = models(Path(place), ["DeiT-Ti"])["DeiT-Ti"]
        script = FIRST.format(here=str(Path(__file__).parent), model=files["hf"], picture=str(picture))
        ours = [sys.executable, "-m", "vitrail", "predict", files["model"], str(picture), "--out", "-"]
        commands = {"vitrail": (ours, 2), "transformers": ([sys.executable, "-c", script], 1)}
        first: dict[str, list[float]] = {name: [] for name in commands}

        def process(name: str) -> Callable[[], None]:
            arguments, lines = commands[name]

            def run() -> None:
                begin = time.perf_counter()
                with subprocess.Popen(
                    arguments,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "HF_HUB_OFFLINE": "1"},
                ) as started:
                    assert started.stdout is not None
                    for _ in range(lines):  # the first line of a CSV is the header
                        assert started.stdout.readline(), f"{name} printed no prediction"
                    first[name].append(time.perf_counter() - begin)

            return run

        measure.interleave({name: process(name) for name in commands}, options.rounds)
    taken = {name: measure.median(times[2:]) for name, times in first.items()}  # without the two unmeasured rounds
    ratio = taken["transformers"] / taken["vitrail"]
    print(f"cold, DeiT-Ti: vitrail {taken['vitrail']:.2f} s, transformers {taken['transformers']:.2f} s: {ratio:.2f}×")
    return [{"work": "cold", "seconds": taken, "ratio": ratio, "target": 2.0, "rounds": options.rounds, "all": first}]


def serve(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare the service. Target: 1.5 times a plain FastAPI + timm server, 2 times with merging, at no worse p99."""
    return serving.contest(list(serving.SERVERS), rounds=options.rounds, merge=options.merge)


CONTESTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "predict": predict,
    "cold": cold,
    "serve": serve,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(CONTESTS), default=list(CONTESTS))
    parser.add_argument("--models", nargs="+", choices=("DeiT-Ti", "S/16"), default=["DeiT-Ti", "S/16"])
    parser.add_argument("--pictures", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32, help="batch size of timm and transformers [32]")
    parser.add_argument("--merge", type=int, default=8, metavar="R", help="tokens merged per layer [8]")
    parser.add_argument(
        "--int8",
        type=int,
        nargs="+",
        metavar="R",
        help="add int8 exports with R tokens merged per layer",
    )
    parser.add_argument(
        "--form", choices=("onnx", "xml"), default="xml", help="format of the int8 exports [xml, OpenVINO]"
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"vitrail {vitrail.__version__}")
    rows = [each for name in options.only for each in CONTESTS[name](options)]
    whole = set(options.only) == set(CONTESTS)
    print(f"written to {measure.save('shipping' if whole else 'shipping-' + '-'.join(options.only), rows)}")


if __name__ == "__main__":
    main()
