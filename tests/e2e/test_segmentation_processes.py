"""Segmentation models train on two processes as on one, whole or in micro-batches."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from tests.e2e.test_segmentation import PYRAMID, TINY, write_pair
from tests.training.runs import assert_same, environment, last, trained
from tests.training.test_distributed import run, torchrun, wait_for, workers

# SGD would show it if gradients were summed instead of averaged. The stem of the backbone has batch statistics too.
OPTIONS = (*TINY, "--set", "optimizer=SGD", "--set", "optimizer.lr=0.05", "--precision", "fp32", "--steps", "5")
EOMT = ("--set", "model.decoder=EoMT", "--set", "model.decoder.blocks=1", "--set", "model.decoder.queries=6")
MODELS = {  # with the number of micro-batches
    "linear": ("--set", "model.decoder=LinearDecoder", "--set", "accumulate=1"),
    "upernet": (*PYRAMID, "--set", "accumulate=2"),
    "eomt": (*EOMT, "--set", "accumulate=1"),
    "matched": (*EOMT, "--set", "objective=MaskMatching", "--set", "accumulate=2"),
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of different sizes, some of which have one class; the last batches would be smaller."""
    folder = tmp_path_factory.mktemp("processes")
    for split, count in (("train", 21), ("val", 7)):
        for number in range(count):
            write_pair(folder / "shapes" / split, f"{number:02}", 100 * count + number, (40 + number, 48))
            if number % 3 == 0:
                Image.new("L", (48, 40 + number)).save(folder / "shapes" / split / "masks" / f"{number:02}.png")
    return folder


def assert_near(tmp: Path, name: str, other: str) -> None:
    """Assert that weights, statistics and momentum differ by at most 1 % of the largest value of their tensor.

    The order of additions makes a difference of about 1e-6, and more where a ReLU is at 0; batch statistics of half a batch make
    one of 30 %, the masks of half a batch one of 3 % or more.
    """
    ours, theirs = last(tmp / name), last(tmp / other)
    assert set(ours) == set(theirs)
    for key in (key for key in ours if ours[key].numel()):
        difference, largest = (ours[key] - theirs[key]).abs().max(), theirs[key].abs().max()
        assert difference <= 0.01 * largest + 1e-6, f"{key}: {difference} of {largest}"


@pytest.mark.parametrize("model", MODELS)
def test_two_processes_give_the_result_of_one(tmp: Path, model: str) -> None:
    trained(tmp, "shapes", "--out", model, *OPTIONS, *MODELS[model])
    for parallel in ("ddp", "fsdp"):
        run(tmp, 2, "shapes", "--out", f"{model}-{parallel}", "--parallel", parallel, *OPTIONS, *MODELS[model])
        assert_near(tmp, f"{model}-{parallel}", model)


def test_matched_masks_give_the_same_result_in_micro_batches(tmp: Path) -> None:
    options = (*OPTIONS, *EOMT, "--set", "objective=MaskMatching", "--set", "model.backbone.embed=Patches")
    for parts in ("1", "2", "3"):
        trained(tmp, "shapes", "--out", f"parts-{parts}", *options, "--set", f"accumulate={parts}")
    assert_near(tmp, "parts-2", "parts-1")
    assert_near(tmp, "parts-3", "parts-1")


def test_killed_worker_is_restarted_and_the_run_ends_with_the_same_weights(tmp: Path) -> None:
    options = ("shapes", *OPTIONS, *PYRAMID, "--steps", "30", "--save-seconds", "0")
    run(tmp, 2, *options, "--out", "pair")
    with (tmp / "hurt.err").open("w") as errors:
        process = subprocess.Popen(
            torchrun(tmp, 2, *options, "--out", "hurt", restarts=1), cwd=tmp, env=environment(tmp), stderr=errors
        )
        wait_for(tmp / "hurt", 5, process)
        os.kill(workers(process)[1], signal.SIGKILL)
        assert process.wait(240) == 0, (tmp / "hurt.err").read_text()
    assert_same(tmp / "hurt", tmp / "pair")


def test_images_of_a_step_are_those_of_all_processes(tmp: Path) -> None:
    """UPerNet pools each image to one cell, which needs two images: one of each process is enough."""
    options = ("shapes", *OPTIONS, *PYRAMID, "--batch-size", "2", "--steps", "2", "--save-seconds", "0")
    run(tmp, 2, *options, "--out", "single")
    trained(tmp, *options, "--out", "both")
    assert_near(tmp, "single", "both")
