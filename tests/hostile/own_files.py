"""Commands over damaged files that vitrail wrote: models, runs, checkpoints, exports, indexes, journals, caches, studies."""

import contextlib
import io
import os
import random
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.hostile.mutations import mutate_file
from vitrail.cli import main

FIXTURES = Path(__file__).parent.parent / "compatibility" / "fixtures"
WRITTEN_IN = "/opt/fixtures"  # the directory that the search index names
SECONDS = 60  # for one command


class TookTooLong(BaseException):
    """A command that did not end."""


@dataclass(frozen=True)
class Target:
    """Files to damage, and the commands that read them."""

    needs: tuple[str, ...]  # paths below the fixtures
    damages: tuple[str, ...]  # patterns below the working directory
    commands: tuple[tuple[str, ...], ...]
    prepare: Callable[[], None] = lambda: None


def train_study() -> None:
    run_quietly(["paper", "run", "positions", "--scale", "test", "--out", "study"])


def check_images() -> None:
    run_quietly(["check", "images"])


def open_index() -> None:
    index = Path("index/index.json")
    index.write_text(index.read_text(encoding="utf-8").replace(WRITTEN_IN, os.getcwd()), encoding="utf-8")


MODEL = "finished/vit/model.safetensors"
IMAGE = "images/0/00.png"
PREDICT = ("images/0", "--out", "out.csv", "--force")
TARGETS = {
    "model": Target(
        ("finished/vit", "images"),
        (MODEL,),
        (("describe", MODEL), ("predict", MODEL, *PREDICT), ("evaluate", MODEL, "digits")),
    ),
    "run": Target(
        ("finished/vit",),
        ("finished/vit/*.json", "finished/vit/*.jsonl", "finished/vit/evaluation/*"),
        (("report", "finished/vit"), ("evaluate", "finished/vit", "digits"), ("train", "--resume", "finished/vit")),
    ),
    "pretraining": Target(
        ("finished/dino",),
        ("finished/dino/*.json", "finished/dino/*.jsonl"),
        (("report", "finished/dino"), ("pretrain", "--resume", "finished/dino")),
    ),
    "checkpoint": Target(
        ("interrupted/adamw",),
        ("interrupted/adamw/*.json", "interrupted/adamw/*.jsonl", "interrupted/adamw/checkpoints/*/*"),
        (("train", "--resume", "interrupted/adamw"),),
    ),
    "adapter": Target(
        ("finished/vit", "finished/lora"),
        ("finished/lora/adapter/*",),
        (("convert", MODEL, "merged.safetensors", "--to", "vitrail", "--adapter", "finished/lora/adapter"),),
    ),
    "onnx": Target(("exported", "images"), ("exported/vit.onnx",), (("predict", "exported/vit.onnx", *PREDICT),)),
    "openvino": Target(
        ("exported", "images"), ("exported/vit.xml", "exported/vit.bin"), (("predict", "exported/vit.xml", *PREDICT),)
    ),
    "pt2": Target(("exported", "images"), ("exported/vit.pt2",), (("predict", "exported/vit.pt2", *PREDICT),)),
    "index": Target(
        ("index", "finished/vit", "images"), ("index/*",), (("search", "find", "index", IMAGE),), prepare=open_index
    ),
    "journal": Target(
        ("interrupted", "finished/vit", "images"),
        ("interrupted/predictions.jsonl.partial*", "interrupted/features.npy.partial*"),
        (
            ("predict", MODEL, "images", "--out", "interrupted/predictions.jsonl", "--resume", "--top", "3"),
            ("embed", MODEL, "images", "--out", "interrupted/features.npy", "--resume"),
        ),
    ),
    "check cache": Target(("images",), ("cache/vitrail/**/*",), (("check", "images"),), prepare=check_images),
    "study": Target(
        (),
        ("study/*.json", "study/**/*.json", "study/**/*.jsonl"),
        (("paper", "show", "study"), ("paper", "page", "study", "--out", "pages")),
        prepare=train_study,
    ),
}


@contextlib.contextmanager
def working_directory(root: Path, target: Target) -> Iterator[None]:
    """Work in a directory with the target's files, and with caches of its own."""
    for name in target.needs:
        copy = shutil.copytree if (FIXTURES / name).is_dir() else shutil.copy
        copy(FIXTURES / name, root / name)
    before, cache = os.getcwd(), os.environ.get("XDG_CACHE_HOME")
    os.chdir(root)
    os.environ["XDG_CACHE_HOME"] = str(root / "cache")
    try:
        target.prepare()
        yield
    finally:
        os.chdir(before)
        if cache is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = cache


def run_quietly(arguments: list[str]) -> tuple[int, str]:
    """Run a command in this process; return its code and what it printed to stderr. Exceptions pass through."""

    def stop(*_: object) -> None:
        raise TookTooLong(f"no end after {SECONDS} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            return main(arguments), errors.getvalue()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def attack(name: str, seeds: range, root: Path) -> list[str]:
    """Damage the files of a target once per seed and run its commands; return what went wrong, one text each."""
    target, failures = TARGETS[name], []
    with working_directory(root, target):
        pristine = root.parent / f"{root.name}-pristine"
        shutil.copytree(root, pristine, symlinks=True)
        for seed in seeds:
            rng = random.Random(f"{name} {seed}")
            files = sorted({path for pattern in target.damages for path in Path().glob(pattern) if path.is_file()})
            what = mutate_file(rng.choice(files), rng)
            for command in target.commands:
                try:
                    code, errors = run_quietly(list(command))
                except (Exception, SystemExit, TookTooLong) as error:
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    place = f"{Path(where.filename).name}:{where.lineno}"
                    failures.append(f"seed {seed}, {what}: {command[:2]}: {type(error).__name__}: {error} ({place})")
                    continue
                if (
                    code not in (0, 1, 2, 3)
                    or "Traceback" in errors
                    or (code and len(errors.strip().splitlines()) > 30)
                ):
                    failures.append(f"seed {seed}, {what}: {command[:2]} ended with {code}: {errors[-300:]}")
            os.chdir(root.parent)
            shutil.rmtree(root)
            shutil.copytree(pristine, root, symlinks=True)
            os.chdir(root)
    return failures
