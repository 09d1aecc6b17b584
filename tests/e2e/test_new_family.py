"""A model family defined in this file alone goes through the ordinary commands: the seam of the model interface."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vitrail
from vitrail.cli import main
from vitrail.models.base import Layer, Model, ModelConfig, Unsupported, check_common, image_sides
from vitrail.models.registry import Family, register, unregister

NAME = re.compile(r"Pyramid-(\d+)")


@dataclass(frozen=True)
class PyramidConfig(ModelConfig):
    """Two convolutions of stride 2: the smallest network with a feature map."""

    family: ClassVar[str] = "pyramid"
    title: ClassVar[str] = "pyramid networks"

    width: int = 8
    classes: int | None = 10
    image_size: tuple[int, int] = (16, 16)
    channels: int = 1
    init: str = "vit"

    def __post_init__(self) -> None:
        check_common(self)

    @property
    def depth(self) -> int:
        return 2

    @property
    def stride(self) -> int:
        return 4

    def describe(self) -> str:
        return f"Pyramid-{self.width}"

    def input_weight(self) -> str:
        return "first.weight"


class Pyramid(Model):
    STEM: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: PyramidConfig) -> None:
        super().__init__()
        self.config = config
        self.first = nn.Conv2d(config.channels, config.width, 2, stride=2)
        self.second = nn.Conv2d(config.width, config.width, 2, stride=2)
        self.head = nn.Identity() if config.classes is None else nn.Linear(config.width, config.classes)

    def forward_features(self, images: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(images))))

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        y = features.mean((2, 3))
        return y if pre_logits else self.head(y)

    @property
    def feature_dim(self) -> int:
        return self.second.out_channels

    def layers(self) -> list[Layer]:
        return [Layer("first", self.first), Layer("second", self.second)]


def configure_pyramid(name: str | None = None, *, image_size: int | tuple[int, int] = 16, **options: object):
    width = 8 if name is None else int(NAME.fullmatch(name)[1])
    return PyramidConfig(width=width, image_size=image_sides(image_size), **options)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    options = frozenset({"classes", "image_size", "channels"})
    register(
        Family(
            "pyramid",
            PyramidConfig,
            Pyramid,
            configure_pyramid,
            lambda name: NAME.fullmatch(name) is not None,
            options,
            "Pyramid-8",
        )
    )
    yield
    unregister("pyramid")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("family") / "run"
    arguments = [
        "train",
        "digits",
        "--model",
        "Pyramid-8",
        "--size",
        "16",
        "--steps",
        "6",
        "--batch-size",
        "32",
        "--out",
    ]
    assert main([*arguments, str(run), "--quiet"]) == 0
    return run


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from PIL import Image

    folder = tmp_path_factory.mktemp("images")
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (16, 16), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def test_train_writes_a_model_that_loads(trained: Path) -> None:
    model = vitrail.load(trained / "model.safetensors")
    assert isinstance(model, Pyramid)
    assert model.config == PyramidConfig(classes=10)
    assert model.labels is not None
    assert len(model.labels) == 10


def test_save_and_load_are_bit_exact(tmp_path: Path) -> None:
    model = vitrail.build("Pyramid-4", classes=3).eval()
    vitrail.save(model, tmp_path / "model.safetensors")
    again = vitrail.load(tmp_path / "model.safetensors")
    images = torch.rand(2, 1, 16, 16)
    assert torch.equal(model(images), again(images))


def test_describe_counts_a_name_and_reads_a_file(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "Pyramid-8", "--channels", "1", "--size", "16", "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)
    assert cost["params"] == (4 + 1) * 8 + (8 * 4 + 1) * 8 + 9 * 1000
    assert main(["describe", str(trained / "model.safetensors")]) == 0
    assert "Pyramid-8" in capsys.readouterr().out


def test_evaluate_and_predict(trained: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(trained), "digits", "--json"]) == 0
    assert 0 <= json.loads(capsys.readouterr().out)["top1"] <= 1
    out = tmp_path / "rows.jsonl"
    assert main(["predict", str(trained), str(images), "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [Path(row["path"]).name for row in rows] == ["0.png", "1.png", "2.png", "3.png"]


@pytest.mark.parametrize("name", ["model.onnx", "model.pt2"])
def test_export_is_verified_and_predicts(trained: Path, images: Path, tmp_path: Path, name: str) -> None:
    if name.endswith("onnx"):
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install 'vitrail[onnx]'")
    file, out = tmp_path / name, tmp_path / "rows.jsonl"
    assert main(["export", str(trained), str(file), "--json"]) == 0
    assert main(["predict", str(file), str(images), "--out", str(out)]) == 0
    assert len(out.read_text().splitlines()) == 4


def test_service_answers(trained: Path, images: Path) -> None:
    pytest.importorskip("fastapi", reason="fastapi is not installed: pip install 'vitrail[serve]'")
    from tests.serve import made as service

    with service.serving(f"toy={trained}") as client:
        predictions = client.predicted((images / "0.png").read_bytes())
        assert len(predictions) == 3
        status, facts, _ = client.ask("GET", "/models")
        assert status == 200
        assert facts["models"][0]["attention"] is False


def test_what_the_family_lacks_is_refused_by_name(
    trained: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Unsupported, match="does not support pyramid networks"):
        vitrail.build("Pyramid-8").require_tokens("mae")
    for arguments in (
        ["train", "digits", "--recipe", "deit", "--model", "Pyramid-8"],
        ["pretrain", "digits", "--method", "mae", "--model", "Pyramid-8"],
        ["inspect", str(trained), str(images), "--terminal"],
        ["predict", str(trained), str(images), "--merge", "4", "--out", str(images / "rows.csv")],
    ):
        assert main(arguments) != 0
        lines = capsys.readouterr().err.strip().splitlines()
        assert "does not support pyramid networks" in lines[-1], arguments
