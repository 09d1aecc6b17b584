"""`vitrail.predict` and `vitrail.embed` with loaded models, and with images in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.deploy.asked import images, model

Place = tuple[Path, vitrail.Model, list[str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("loaded")
    model(root / "model.safetensors")
    images(root / "photos")
    return root, vitrail.load(root / "model.safetensors"), sorted(map(str, (root / "photos").glob("*.png")))


def test_images_in_memory_have_the_predictions_of_their_files(place: Place) -> None:
    root, net, paths = place
    expected = [(row.label, row.score) for row in vitrail.predict(root / "model.safetensors", paths, runtime="torch")]
    opened = [Image.open(path).convert("RGB") for path in paths]
    arrays = [np.asarray(image) for image in opened]
    tensors = [torch.from_numpy(array.copy()).permute(2, 0, 1) for array in arrays]
    for given in (paths, root / "photos", opened, arrays, tensors, np.stack(arrays), torch.stack(tensors)):
        rows = list(vitrail.predict(net, given, workers=1))
        assert [row.label for row in rows] == [label for label, _ in expected]
        assert [row.score for row in rows] == pytest.approx([score for _, score in expected], rel=1e-4)
    assert [row.path for row in vitrail.predict(net, opened[:2])] == ["image[0]", "image[1]"]
    for single in (paths[0], Path(paths[0]), opened[0], arrays[0], tensors[0], Path(paths[0]).read_bytes()):
        (row,) = vitrail.predict(net, single, top=2)
        assert (row.label, len(row.predictions)) == (expected[0][0], 2)


def test_a_batch_of_grey_images_is_no_single_image() -> None:
    grey = vitrail.build(patch=4, width=16, depth=1, heads=2, classes=3, image_size=8, channels=1)
    grey.preprocessing = vitrail.Preprocessing((8, 8), (8, 8), mean=(0.5,), std=(0.5,))
    batch = np.random.default_rng(0).integers(0, 256, (5, 8, 8), dtype=np.uint8)
    for given in (batch, torch.from_numpy(batch)):
        assert [row.error for row in vitrail.predict(grey, given)] == [None] * 5
    assert len(list(vitrail.predict(grey, batch[0]))) == 1


def test_features_are_those_of_the_model(place: Place) -> None:
    root, net, paths = place
    rows = list(vitrail.embed(net, paths[:3]))
    with torch.inference_mode():
        expected = net.embed_images(net.preprocessing(paths[:3])).numpy()  # type: ignore[misc]
    assert np.allclose(np.stack([row.features for row in rows if row.features is not None]), expected, atol=1e-5)
    assert net.config.classes is not None
    assert [row.features is not None for row in vitrail.embed(root / "model.safetensors", paths[:2])] == [True, True]


def test_the_callers_model_is_not_changed(place: Place) -> None:
    _, net, paths = place
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    net.train()
    try:
        first, again = (next(iter(vitrail.predict(net, paths[0]))).score for _ in range(2))
        assert first == again
        next(iter(vitrail.predict(net, paths[0], size=(32, 32))))
        assert net.training
    finally:
        net.eval()
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_datasets_are_predicted_without_their_labels(place: Place) -> None:
    _, net, paths = place
    pairs = [(path, "unknown") for path in paths]
    labels = [row.label for row in vitrail.predict(net, {"test": pairs})]
    assert labels == [row.label for row in vitrail.predict(net, paths)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runtime": "onnx"}, "a loaded model runs on PyTorch: leave out runtime='onnx', or give its file"),
        ({"take": "student"}, "take= is for files: the model is loaded already"),
        ({"top": 0}, "top= must be >= 1, got 0"),
        ({"limit": 0}, "limit= must be >= 1, got 0"),
        ({"batch_size": 0}, "batch_size= must be >= 1, got 0"),
    ],
)
def test_bad_options_are_refused_at_once(place: Place, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        vitrail.predict(place[1], place[2][:1], **options)


def test_bad_images_are_refused_or_get_an_error_row(place: Place) -> None:
    _, net, paths = place
    with pytest.raises(ValueError, match=r"image\[1\] is of type int: give a path"):
        vitrail.predict(net, [np.zeros((4, 4, 3), np.uint8), 3])
    with pytest.raises(ValueError, match="no images in the list"):
        vitrail.predict(net, [*np.zeros((0, 4, 4, 3), np.uint8)])
    with pytest.raises(TypeError, match="unexpected keyword argument 'devices'"):
        vitrail.predict(net, paths, devices="cpu")  # type: ignore[call-arg]
    rows = list(vitrail.predict(net, [np.zeros((4, 4, 3), np.uint8), np.full((4, 4), 7.0)]))
    assert rows[0].label is not None
    assert rows[1].error is not None
    assert "floating-point values from 7 to 7" in rows[1].error


def test_a_model_without_preprocessing_or_classes_is_refused() -> None:
    bare = vitrail.build(patch=4, width=16, depth=1, heads=2, classes=3, image_size=8)
    with pytest.raises(ValueError, match="the loaded model has no preprocessing"):
        vitrail.predict(bare, np.zeros((8, 8, 3), np.uint8))
    bare.preprocessing = vitrail.Preprocessing((8, 8), (8, 8))
    (row,) = vitrail.predict(bare, np.zeros((8, 8, 3), np.uint8))
    assert row.label in ("0", "1", "2")
    with pytest.raises(ValueError, match=r"the loaded model has no classifier: use vitrail\.embed"):
        vitrail.predict(bare.replace_head(None), np.zeros((8, 8, 3), np.uint8))


def test_a_resized_model_prepares_images_at_its_own_size(place: Place) -> None:
    root, net, paths = place
    size = tuple(2 * side for side in net.config.image_size)
    resized = net.resize(size)  # type: ignore[arg-type]
    assert resized.preprocessing == net.preprocessing.with_size(size)  # type: ignore[union-attr]
    rows = list(vitrail.predict(resized, paths[:3]))
    expected = vitrail.predict(root / "model.safetensors", paths[:3], size=size, runtime="torch")
    assert [row.predictions for row in rows] == [((row.label, pytest.approx(row.score, rel=1e-4)),) for row in expected]
    assert net.adapt_channels(1).preprocessing.channels == 1  # type: ignore[union-attr]
    net = vitrail.build(patch=4, width=16, depth=1, heads=2, classes=3, image_size=8)
    net.preprocessing = len  # any function of an image may stand there
    assert net.resize((16, 16)).preprocessing is len
