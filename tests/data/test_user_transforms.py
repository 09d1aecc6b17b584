"""Functions of the user as augmentation: torchvision, albumentations, plain functions; seeds, records and refusals."""

import functools
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import nn

import vitrail
from vitrail.data.dataset import Images
from vitrail.data.loader import Loader
from vitrail.data.rng import SampleRandom
from vitrail.data.sources.arrays import ArrayStore
from vitrail.data.sources.files import FileStore
from vitrail.data.transforms.augment import Flip
from vitrail.data.transforms.crops import Fit
from vitrail.data.transforms.pipeline import TrainPipeline
from vitrail.data.transforms.user import (
    BoundTransform,
    UserTransform,
    bind_transforms,
    check_transform,
    describe_transform,
)
from vitrail.training.recipe import Machine
from vitrail.utils.json import to_json

SIZE = (16, 16)
TINY = {"steps": 2, "batch_size": 8}
PATIENT = {"steps": 4, "batch_size": 8}


def bind(function):
    return BoundTransform(describe_transform(function), function)


def noise(channels=3, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (channels, *SIZE), dtype=np.uint8))


def jitter(image: Image.Image) -> Image.Image:
    """Mirror, brighten and shift by the global generators of all three libraries."""
    if random.random() < 0.5:
        image = ImageOps.mirror(image)
    array = np.asarray(image).astype(int) + np.random.randint(-40, 40) + int(torch.randint(-9, 9, ()))  # noqa: NPY002
    return Image.fromarray(array.clip(0, 255).astype(np.uint8))


class Shift(nn.Module):
    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.roll(int(torch.randint(0, self.most, ())), -1)


class Quiet:
    """A callable without a repr of its own."""

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold

    def __call__(self, image):
        return ImageOps.solarize(image, self.threshold)


@pytest.fixture
def torchvision():
    return pytest.importorskip("torchvision.transforms.v2", reason="torchvision is not installed")


@pytest.fixture
def albumentations():
    return pytest.importorskip("albumentations", reason="albumentations is not installed")


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_plain_functions_take_images(channels):
    modes = []
    step = bind(lambda image: modes.append(image.mode) or ImageOps.mirror(image))
    assert torch.equal(step.apply(noise(channels), SampleRandom(0, 0, 0)), noise(channels).flip(-1))
    assert modes == [{1: "L", 3: "RGB", 4: "RGBA"}[channels]]


def test_torchvision_takes_tensors(torchvision):
    step = bind(
        torchvision.Compose([torchvision.RandomHorizontalFlip(1.0), torchvision.ToDtype(torch.float32, scale=True)])
    )
    assert torch.equal(step.apply(noise(), SampleRandom(0, 0, 0)), noise().flip(-1))
    whole = bind(torchvision.Compose([torchvision.ToImage(), torchvision.RandAugment()]))
    result = whole.apply(noise(), SampleRandom(0, 0, 0))
    assert type(result) is torch.Tensor
    assert result.dtype == torch.uint8


@pytest.mark.parametrize("channels", [1, 3])
def test_albumentations_takes_arrays(albumentations, channels):
    step = bind(albumentations.Compose([albumentations.HorizontalFlip(p=1.0)]))
    assert torch.equal(step.apply(noise(channels), SampleRandom(0, 0, 0)), noise(channels).flip(-1))
    assert torch.equal(
        bind(albumentations.VerticalFlip(p=1.0)).apply(noise(channels), SampleRandom(0, 0, 0)), noise(channels).flip(-2)
    )


def list_random_functions():
    functions = {"function": jitter, "module": Shift(9)}
    v2 = pytest.importorskip("torchvision.transforms.v2", reason="torchvision is not installed")
    functions["torchvision"] = v2.Compose([v2.RandomResizedCrop(16), v2.ColorJitter(0.4, 0.4), v2.RandomErasing()])
    albumentations = pytest.importorskip("albumentations", reason="albumentations is not installed")
    steps = [
        albumentations.HorizontalFlip(),
        albumentations.RandomBrightnessContrast(p=1),
        albumentations.GaussNoise(p=1),
    ]
    functions["albumentations"] = albumentations.Compose(steps)
    return functions


@pytest.mark.parametrize("name", ["function", "module", "torchvision", "albumentations"])
def test_results_are_a_function_of_seed_epoch_and_index(name):
    step = bind(list_random_functions()[name])
    keys = [(seed, epoch, index) for seed in (0, 1) for epoch in (0, 1) for index in range(6)]
    first = {key: step.apply(noise(), SampleRandom(*key, 1)) for key in keys}
    again = {key: step.apply(noise(), SampleRandom(*key, 1)) for key in reversed(keys)}
    assert all(torch.equal(first[key], again[key]) for key in keys)
    assert len({tensor.numpy().tobytes() for tensor in first.values()}) > 5


def test_global_generators_are_restored():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    bind(jitter).apply(noise(), SampleRandom(0, 0, 0))
    with pytest.raises(ZeroDivisionError):
        bind(lambda image: 1 // 0).apply(noise(), SampleRandom(0, 0, 0))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()  # noqa: NPY002


@pytest.mark.parametrize("name", ["function", "albumentations"])
@pytest.mark.parametrize("store", ["array", "files"])
def test_batches_are_identical_for_every_number_of_workers(name, store, tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (24, 20, 20, 3), dtype=np.uint8)
    if store == "files":
        paths = [str(tmp_path / f"{index}.png") for index in range(24)]
        for path, array in zip(paths, pixels, strict=True):
            Image.fromarray(array).save(path)
        images = Images(FileStore.from_paths(paths), np.arange(24), np.arange(24) % 3, ("a", "b", "c"))
    else:
        images = Images(ArrayStore(pixels, ((0, "made"),)), np.arange(24), np.arange(24) % 3, ("a", "b", "c"))
    pipeline = TrainPipeline((Fit(SIZE), bind(list_random_functions()[name]), Flip()), SIZE)
    epochs = []
    for workers in (0, 1, 2):
        loader = Loader(images, None, pipeline, batch_size=8, seed=3, workers=workers)
        epochs.append([batch.pixels for epoch in (0, 1) for batch in loader.iter_epoch(epoch)])
        loader.close()
    assert len(epochs[0]) == 6
    assert not torch.equal(epochs[0][0], epochs[0][3])
    for other in epochs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(epochs[0], other, strict=True))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda image: image.resize((8, 8)), "returns 3×8×8 values, expected 3×16×16"),
        (lambda image: "nothing", "returns str: return an image"),
        (lambda image: torch.randn(3, 16, 16) * 2, "expected 0 to 1: leave out its normalisation"),
        (lambda image: np.zeros((16, 16, 3), np.int64), r"returns torch\.int64: return uint8"),
    ],
)
def test_wrong_results_are_refused(function, message):
    with pytest.raises(ValueError, match=message):
        check_transform(bind(function), SIZE, 3)


def test_function_with_a_generator_of_its_own_is_refused():
    own = np.random.default_rng(0)
    step = bind(lambda image: ImageOps.solarize(image, int(own.integers(256))))
    with pytest.raises(ValueError, match="gives two results for one seed: it has a random generator of its own"):
        check_transform(step, SIZE, 3)
    check_transform(bind(jitter), SIZE, 3)


def test_descriptions_tell_functions_apart(albumentations, torchvision):
    def shifted(by):
        return lambda image: Image.fromarray(np.roll(np.asarray(image), by, 1))

    different = [
        jitter, shifted(1), shifted(2), functools.partial(jitter), Shift(1), Shift(2), Quiet(9), Quiet(10),
        albumentations.HorizontalFlip(p=0.1), albumentations.HorizontalFlip(p=0.2),
        torchvision.RandomErasing(0.1), torchvision.RandomErasing(0.2),
    ]  # fmt: skip
    digests = [describe_transform(function).digest for function in different]
    assert len(set(digests)) == len(different)
    assert describe_transform(Quiet(9)) == describe_transform(Quiet(9))
    assert describe_transform(Shift(2)) == describe_transform(Shift(2))
    assert "0x" not in describe_transform(Quiet(9)).description


def test_description_is_the_same_in_another_process():
    script = (
        "from tests.data.test_user_transforms import jitter, Quiet; "
        "from vitrail.data.transforms.user import describe_transform as d; print(d(jitter).digest, d(Quiet(9)).digest)"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
    assert result.stdout.split() == [describe_transform(jitter).digest, describe_transform(Quiet(9)).digest]


def test_recorded_function_that_is_not_given_is_refused():
    slot = describe_transform(jitter)
    with pytest.raises(ValueError, match="give that function again, in Python, with augment="):
        TrainPipeline((Fit(SIZE), slot), SIZE)
    with pytest.raises(ValueError, match="is another one: give the same function"):
        bind_transforms((slot,), [Quiet(9)])
    changed = UserTransform(slot.description, "0" * 32)
    with pytest.raises(ValueError, match="the function changed: give the same function"):
        bind_transforms((changed,), [jitter])


def test_run_with_a_function_records_it_and_gives_the_same_weights(tmp_path):
    runs = [
        vitrail.train("digits", augment=jitter, out=tmp_path / str(n), **TINY, machine=Machine(workers=n))[0]
        for n in (0, 1)
    ]
    recipe = json.loads((runs[0] / "recipe.json").read_text())
    slot = to_json(describe_transform(jitter))
    assert recipe["augment"][-1] == slot
    assert recipe["augment"][0]["type"] in ("Fit", "RandomResizedCrop")
    assert len(recipe["augment"]) == 2
    first, second = (vitrail.load(run / "model.safetensors").state_dict() for run in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)
    plain, _ = vitrail.train("digits", augment=[Fit((16, 16))], out=tmp_path / "plain", **TINY)
    other = vitrail.load(plain / "model.safetensors").state_dict()
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_resume_needs_the_function_again(tmp_path):
    vitrail.train("digits", augment=jitter, out=tmp_path / "whole", **PATIENT)

    def interrupt(record):
        if record.get("kind") == "train" and record.get("step", 0) >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vitrail.train(
            "digits", augment=jitter, out=tmp_path / "run", **PATIENT, listeners=(interrupt,),
            machine=Machine(save_seconds=0),
        )  # fmt: skip
    assert not (tmp_path / "run" / "summary.json").exists()
    with pytest.raises(ValueError, match=r"calls tests.data.test_user_transforms.jitter: give that function again"):
        vitrail.resume(tmp_path / "run")
    with pytest.raises(ValueError, match="is another one: give the same function"):
        vitrail.resume(tmp_path / "run", augment=Quiet(9))
    vitrail.resume(tmp_path / "run", augment=jitter)
    first, second = (vitrail.load(tmp_path / run / "model.safetensors").state_dict() for run in ("whole", "run"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_wrong_uses_are_refused_before_anything_is_written(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(ValueError, match="augment takes functions and steps of vitrail, got 'flip'"):
        vitrail.train("digits", augment=["flip"], out=out, **TINY)
    with pytest.raises(ValueError, match="expected 1×16×16: keep the size"):
        vitrail.train("digits", augment=lambda image: image.resize((4, 4)), out=out, **TINY)
    with pytest.raises(ValueError, match="Fit size 9×9 differs from the model's 16×16"):
        vitrail.train("digits", augment=[Fit((9, 9)), jitter], out=out, **TINY)
    with pytest.raises(ValueError, match="several crops of each image: augment= is for one"):
        vitrail.pretrain("digits", method="dino", augment=jitter, out=out, **TINY)
    assert not out.exists()
