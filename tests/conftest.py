"""What all tests share: a quiet machine, fixed seeds, and a torchvision that imports beside a CPU build of PyTorch."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch

# A CPU build of PyTorch lacks two operators that torchvision's import registers gradients for: name them first.
_TORCHVISION = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _TORCHVISION.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
