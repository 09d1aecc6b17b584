"""The shared inference path: probabilities, the order of classes, batches of a dataset."""

import numpy as np
import pytest
import torch

from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.predict.predict import top_predictions as predict_top
from vitrail.deploy.runtimes.base import ModelContract
from vitrail.inference import TorchRuntime, load_pixels, probabilities, rank_classes, run_batches, run_pixels
from vitrail.serve.models import top_predictions as serve_top
from vitrail.utils.text import format_table

PREPROCESSING = Preprocessing((8, 8), mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize(
    "logits",
    [
        [38.0, 700.0, 45.0, 60.0, 61.0, 499.0, 501.0],  # sigmoid is exactly 1 in float64 from about 37 on
        [-800.0, -61.0, -1e4, -60.0, -501.0, -500.0, -745.0],
        [0.5, -1.0, 0.5, 3.0, -1.0, 0.0, 2.0],  # ties keep the class order
    ],
)
def test_serve_and_predict_rank_classes_alike(logits, multilabel):
    labels = tuple("abcdefg")
    row = np.array(logits, np.float32)
    contract = ModelContract(PREPROCESSING, labels, multilabel)
    predicted = [label for label, _ in predict_top(row, contract, 7)]
    served = [entry["label"] for entry in serve_top(row, labels, multilabel, 7)]
    expected = [labels[k] for k in sorted(range(7), key=lambda k: -row[k])]
    assert predicted == served == expected


def test_serve_and_predict_give_the_same_scores():
    row = np.array([4.0, -3.0, 0.25, 30.0], np.float32)
    for multilabel in (False, True):
        contract = ModelContract(PREPROCESSING, tuple("abcd"), multilabel)
        predicted = [score for _, score in predict_top(row, contract, 4)]
        served = [entry["score"] for entry in serve_top(row, tuple("abcd"), multilabel, 4)]
        assert served == [float(f"{score:.7g}") for score in predicted]


def test_probabilities_match_torch_and_do_not_overflow():
    logits = np.random.default_rng(0).normal(0, 20, (5, 7)).astype(np.float32)
    wide = torch.from_numpy(logits).double()
    np.testing.assert_allclose(probabilities(logits, multilabel=False), wide.softmax(1).numpy(), rtol=1e-12)
    np.testing.assert_allclose(probabilities(logits, multilabel=True), wide.sigmoid().numpy(), rtol=1e-12)
    np.testing.assert_allclose(probabilities(logits[0], multilabel=False), wide[0].softmax(0).numpy(), rtol=1e-12)
    with np.errstate(all="raise", under="ignore"):
        assert probabilities(np.array([1e4, -1e4]), multilabel=True).tolist() == [1.0, 0.0]
        assert probabilities(np.array([1e4, -1e4]), multilabel=False).tolist() == [1.0, 0.0]
    assert rank_classes(np.array([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]]), 2).tolist() == [[1, 2], [0, 2]]


def test_run_batches_yields_every_readable_image_in_order(tmp_path):
    from PIL import Image

    from vitrail.data.sources import load_dataset

    colours = {"red": (255, 0, 0), "blue": (0, 0, 255)}
    for name, colour in colours.items():
        (tmp_path / name).mkdir()
        for number in range(4):
            Image.new("RGB", (8, 8), tuple(max(0, value - number) for value in colour)).save(
                tmp_path / name / f"{number}.png"
            )
    images = load_dataset(str(tmp_path), fractions=(1.0, 0.0, 0.0)).splits["train"]
    broken = next(index for index in range(len(images)) if images.name(index).endswith("blue/2.png"))
    (tmp_path / "blue" / "2.png").write_bytes(b"not an image")
    unreadable, stages = {}, []
    batches = [
        *run_batches(
            lambda pixels: pixels.astype(np.float32).mean((2, 3)),
            images,
            PREPROCESSING,
            unreadable,
            batch_size=3,
            workers=0,
            progress=lambda *progress: stages.append(progress),
            stage="means",
        )
    ]
    indices = np.concatenate([batch.indices for batch in batches])
    assert indices.tolist() == [index for index in range(8) if index != broken]
    means = np.concatenate([batch.outputs for batch in batches])
    assert sorted(means[:, 0].tolist(), reverse=True)[:4] == [255, 254, 253, 252]
    assert [name.rpartition("/")[2] for name in unreadable] == ["2.png"]
    assert stages[-1] == ("means", 8, 8)
    with pytest.raises(ValueError, match="batch size must be >= 1, got 0"):
        next(run_batches(np.copy, images, PREPROCESSING, {}, batch_size=0))


def test_load_pixels_skips_any_number_of_unreadable_images(tmp_path):
    from PIL import Image

    from vitrail.deploy.predict.inputs import collect_inputs

    for number in range(12):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number:02d}.png")
    inputs = collect_inputs([tmp_path])
    for number in range(10):
        (tmp_path / f"{number:02d}.png").write_bytes(b"not an image")
    stages = []
    pixels, read = load_pixels(inputs.select(range(12)), PREPROCESSING, lambda *progress: stages.append(progress))
    assert read.tolist() == [10, 11]
    assert pixels.shape == (2, 3, 8, 8)
    assert pixels[:, 0, 0, 0].tolist() == [10, 11]
    assert stages[-1] == ("preparing", 12, 12)
    with pytest.raises(ValueError, match="none of the 10 images can be read"):
        load_pixels(inputs.select(range(10)), PREPROCESSING)


def test_run_pixels_equals_one_call_per_batch():
    pixels = np.random.default_rng(0).integers(0, 256, (7, 3, 8, 8), dtype=np.uint8)
    runtime = TorchRuntime(lambda images: images.flatten(1)[:, :5], PREPROCESSING)
    outputs = run_pixels(runtime, pixels, batch_size=3)
    expected = np.concatenate([runtime(pixels[:3]), runtime(pixels[3:6]), runtime(pixels[6:])])
    assert (outputs == expected).all()
    assert outputs.dtype == np.float32
    with pytest.raises(ValueError, match="unknown precision 'fp64'"):
        TorchRuntime(torch.nn.Identity(), PREPROCESSING, precision="fp64")


def test_format_table_pads_columns():
    assert format_table([["name", "n"], ["a", "10"]], right=[1]) == ["name   n", "a     10"]
