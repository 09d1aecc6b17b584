"""Accuracy on spoken digits: speakers mixed, and with two speakers held out, from scratch and from a model of images.

    python benchmarks/spoken_digits.py RECORDINGS --runs DIR --no-test
    python benchmarks/spoken_digits.py RECORDINGS --runs DIR
    python benchmarks/spoken_digits.py RECORDINGS --runs DIR --only held-out --init deit_tiny_patch16_224.safetensors

RECORDINGS holds the files of the Free Spoken Digit Dataset, DIGIT_SPEAKER_INDEX.wav, 20 or more of each digit and speaker. In
DIR, folders of links to them are made:

- mixed: indices 0 to 4 are the test part, as the authors of the data say, 5 and 6 validate, all others train.
- held-out: two speakers are the test part, all their recordings; of the other speakers, indices 5 and 6 validate.

With --no-test only the validation part is judged, to choose settings. Trainings that are in DIR are not repeated, so a second
command without it judges the same models once on the test part. OMP_NUM_THREADS sets the threads. CPU seconds are those of all
threads: on a machine that does other work they say more than the time that has passed.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import measure

import vitrail
from vitrail.training.runs.record import write_json

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEST_INDICES, VALIDATION_INDICES = range(5), (5, 6)


def link_parts(recordings: Path, folder: Path, held_out: frozenset[str]) -> Path:
    """Make train/WORD, validation/WORD and test/WORD with links to the recordings; return the folder."""
    files = sorted(recordings.glob("[0-9]_*_*.wav"))
    if not files:
        raise SystemExit(f"{recordings} has no files like 7_theo_12.wav: give the folder of the recordings")
    for file in files:
        digit, speaker, index = file.stem.split("_")
        is_test = speaker in held_out if held_out else int(index) in TEST_INDICES
        part = "test" if is_test else "validation" if int(index) in VALIDATION_INDICES else "train"
        link = folder / part / WORDS[int(digit)] / file.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(file.resolve())
    return folder


def train(data: Path, run: Path, **options: Any) -> dict[str, Any]:
    """Train, or read what an earlier training left; return its times and its accuracy on the validation part."""
    record = run / "benchmark.json"
    if record.is_file():
        return json.loads(record.read_text())
    begin, used = time.perf_counter(), time.process_time()
    _, summary = vitrail.train(vitrail.training.recipe.Data(str(data), test=False), out=run, workers=0, **options)
    result = {
        "steps": options["steps"],
        "seconds": round(time.perf_counter() - begin, 1),
        "cpu_seconds": round(time.process_time() - used, 1),
        "validation": summary["validation"]["top1"],
    }
    write_json(record, result)
    return result


def judge(run: Path, data: Path) -> dict[str, Any]:
    """Return the accuracy on the test part with its 95 % interval."""
    found = vitrail.evaluate(run, data, split="test", workers=0).as_dict()
    return {"test": found["top1"], "interval": found["interval"], "sounds": found["images"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path, help="folder of DIGIT_SPEAKER_INDEX.wav")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the links and runs, to go on from")
    parser.add_argument("--only", choices=("mixed", "held-out"), help="one of both [both]")
    parser.add_argument("--steps", type=int, default=450, help="steps of a training from scratch [450]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of the trainings from scratch [0]")
    parser.add_argument(
        "--init", type=Path, help="model of images to fine-tune with speakers held out, such as DeiT-Ti"
    )
    parser.add_argument("--tuning-steps", type=int, default=240, help="steps of the fine-tuning, with 32 sounds [240]")
    parser.add_argument("--speakers", nargs="+", default=["theo", "yweweler"], help="held out [theo yweweler]")
    parser.add_argument("--no-test", action="store_true", help="judge the validation part only")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for part, held_out in {"mixed": frozenset(), "held-out": frozenset(options.speakers)}.items():
        if options.only not in (None, part):
            continue
        data = link_parts(options.recordings, options.runs / part, held_out)
        arms: list[tuple[str, dict[str, Any]]] = [
            (f"scratch-{seed}", {"steps": options.steps, "seed": seed}) for seed in options.seeds
        ]
        if options.init is not None and part == "held-out":
            tuning = {"init": options.init, "steps": options.tuning_steps, "batch_size": 32, "size": (64, 80)}
            arms.append(("fine-tuned", tuning))
        for name, settings in arms:
            run = options.runs / f"{part}-{name}"
            row = {"part": part, "start": name, "threads": os.environ.get("OMP_NUM_THREADS")}
            row |= train(data, run, **settings)
            if not options.no_test:
                row |= judge(run, data)
            rows.append(row)
            print(json.dumps(row), flush=True)
            if not options.no_test:
                measure.save("spoken_digits", rows)


if __name__ == "__main__":
    main()
