"""Fixtures of all tests: offline mode, fixed seeds, a browser, and a torchvision that imports with a CPU build of PyTorch."""

import os
import shutil

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch

# A CPU build of PyTorch lacks two operators that torchvision registers gradients for on import: define them first.
_TORCHVISION = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _TORCHVISION.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

CAMERA = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def browser():
    """Start Chromium with a fake camera."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install 'vitrail[dev]'"
    )
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium is installed: apt install chromium")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu", *CAMERA])
        yield opened
        opened.close()
