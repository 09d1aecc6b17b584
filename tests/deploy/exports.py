"""Tiny models, images for them, and files exported once for all tests."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vitrail
from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.export.export import export, write_fp32_onnx
from vitrail.deploy.runtimes.base import ModelContract
from vitrail.models.bit import BiT
from vitrail.models.vit import ViT
from vitrail.utils.json import to_json

TINY: dict[str, Any] = {"patch": 8, "width": 32, "depth": 1, "heads": 2, "image_size": (16, 24), "classes": 5}
LABELS = ("ant", "bee", "cow", "dog", "été")


def shaken(model: ViT | BiT) -> ViT | BiT:
    """Randomise all tensors, so that each affects the output."""
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.15 * torch.randn_like(tensor))
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 2.0)
            elif name.endswith("running_mean"):
                buffer.normal_(0.0, 0.2)
    return model.eval()


def tiny(**slots: Any) -> ViT | BiT:
    torch.manual_seed(0)
    return shaken(vitrail.build(**(TINY | slots)))


def contract_of(model: ViT | BiT) -> ModelContract:
    config = model.config
    pipeline = Preprocessing(config.image_size, config.image_size).with_channels(config.channels)
    labels = None if config.classes is None else LABELS[: config.classes]
    return ModelContract(pipeline, labels, config=to_json(config), name="tiny", checksum="0" * 64)


def pixels(model: ViT | BiT, count: int = 3, size: tuple[int, int] | None = None) -> np.ndarray:
    shape = (count, model.config.channels, *(size or model.config.image_size))
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def by_pytorch(model: Any, contract: ModelContract, images: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return model(contract.preprocessing.normalise(torch.from_numpy(images))).flatten(1).numpy()


def saved(model: ViT | BiT, path: Path) -> Path:
    contract = contract_of(model)
    vitrail.save(model, path, labels=contract.labels, preprocessing=contract.preprocessing)
    return path


@cache
def shared() -> Path:
    """Return a directory with `tiny()` as model.onnx and model.pt2, exported once."""
    root = Path(tempfile.mkdtemp(prefix="vitrail-tests-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    model = tiny()
    write_fp32_onnx(model, contract_of(model), root / "model.onnx", uint8=False)
    export(model, contract_of(model), root / "model.pt2", target="torch")
    return root
