"""Segmentation metrics against scikit-learn, torchmetrics, and definitions written out."""

import json
import tracemalloc

import numpy as np
import pytest

from vitrail.data import dataset
from vitrail.metrics import segmentation
from vitrail.metrics.segmentation import (
    IGNORED,
    compare_masks,
    compute_image_iou,
    compute_mask_metrics,
    count_boundary,
    count_confusion,
    find_worst_images,
    sum_pixels,
)

sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed: pip install 'vitrail[dev]'")


def make_masks(n=12, classes=5, seed=0, skill=0.7, size=(24, 32)):
    """True masks of blocks with ignored pixels, and predictions that are right with a probability; the last class is absent."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(classes - 1, size=(n, size[0] // 8, size[1] // 8)).astype(np.uint8)
    target = blocks.repeat(8, 1).repeat(8, 2)
    noise = generator.integers(classes - 1, size=target.shape).astype(np.uint8)
    predicted = np.where(generator.random(target.shape) < skill, target, noise)
    target[generator.random(target.shape) < 0.1] = IGNORED
    return predicted, target


def confuse(predicted, target, classes=5):
    """Return the confusion matrix of each image."""
    return np.stack([count_confusion(p, t, classes) for p, t in zip(predicted, target, strict=True)])


def count_pixels(predicted, target, classes=5):
    """Return the pixels of each class that are hit, true and predicted, of each image."""
    return sum_pixels(confuse(predicted, target, classes))


def test_ignored_is_the_value_of_the_data() -> None:
    assert IGNORED == dataset.IGNORED


@pytest.mark.parametrize("block", [segmentation.BLOCK, 100])
@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_confusion_equals_scikit_learn(block, dtype, monkeypatch) -> None:
    monkeypatch.setattr(segmentation, "BLOCK", block)
    predicted, target = make_masks()
    valid = target != IGNORED
    theirs = sklearn.confusion_matrix(target[valid], predicted[valid], labels=range(5))
    ours = count_confusion(predicted.astype(dtype), target, 5)
    assert ours.dtype == np.int64
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(confuse(predicted, target).sum(0), theirs)


@pytest.mark.parametrize("seed", range(3))
def test_metrics_equal_scikit_learn(seed) -> None:
    predicted, target = make_masks(seed=seed)
    metrics = compute_mask_metrics(count_pixels(predicted, target), intervals=False)
    truth, found = target[target != IGNORED], predicted[target != IGNORED]
    assert metrics["images"] == 12
    assert metrics["pixels"] == truth.size
    assert metrics["miou"] == pytest.approx(sklearn.jaccard_score(truth, found, average="macro"), abs=1e-12)
    assert metrics["iou"][:4] == pytest.approx(sklearn.jaccard_score(truth, found, average=None), abs=1e-12)
    assert metrics["iou"][4] is None
    assert metrics["dice"] == pytest.approx(sklearn.f1_score(truth, found, average="macro"), abs=1e-12)
    assert metrics["pixel_accuracy"] == pytest.approx(sklearn.accuracy_score(truth, found), abs=1e-12)
    assert metrics["mean_class_accuracy"] == pytest.approx(sklearn.balanced_accuracy_score(truth, found), abs=1e-12)
    assert metrics["class_accuracy"][:4] == pytest.approx(sklearn.recall_score(truth, found, average=None), abs=1e-12)
    assert metrics["support"] == np.bincount(truth, minlength=5).tolist()
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics


def test_metrics_equal_torchmetrics() -> None:
    peers = pytest.importorskip("torchmetrics.classification", reason="torchmetrics is not installed")
    import torch

    predicted, target = (torch.from_numpy(mask).long() for mask in make_masks())
    metrics = compute_mask_metrics(count_pixels(*make_masks()), intervals=False)
    options = {"num_classes": 5, "ignore_index": IGNORED}
    jaccard = peers.MulticlassJaccardIndex(**options, average="macro")(predicted, target)
    assert metrics["miou"] == pytest.approx(float(jaccard), abs=1e-6)
    accuracy = peers.MulticlassAccuracy(**options, average="micro")(predicted, target)
    assert metrics["pixel_accuracy"] == pytest.approx(float(accuracy), abs=1e-6)


def test_a_class_that_is_only_predicted_counts_as_zero() -> None:
    target, predicted = np.zeros((4, 4), np.uint8), np.zeros((4, 4), np.uint8)
    predicted[0, 0] = 1
    metrics = compute_mask_metrics(count_pixels([predicted], [target], 3))
    assert metrics["iou"] == [15 / 16, 0.0, None]
    assert metrics["miou"] == pytest.approx(15 / 32)
    assert metrics["mean_class_accuracy"] == pytest.approx(15 / 16)  # of the classes in the true masks
    assert "miou_interval" not in metrics  # one image


def test_intervals_equal_those_of_resampling_images() -> None:
    predicted, target = make_masks(n=30)
    pixels = count_pixels(predicted, target)
    boundary = np.stack([count_boundary(p, t, 5) for p, t in zip(predicted, target, strict=True)])
    metrics = compute_mask_metrics(pixels, boundary=boundary)
    assert metrics == compute_mask_metrics(pixels, boundary=boundary)
    generator, drawn = np.random.default_rng(9), []
    names = ("miou", "pixel_accuracy", "mean_class_accuracy", "dice", "boundary_iou")
    for _ in range(400):
        rows = generator.integers(30, size=30)
        again = compute_mask_metrics(pixels[rows], boundary=boundary[rows], intervals=False)
        drawn.append([again[name] for name in names])
    for name, values in zip(names, np.array(drawn).T, strict=True):
        low, high = metrics[f"{name}_interval"]
        assert low < metrics[name] < high
        assert (low, high) == pytest.approx(np.percentile(values, [2.5, 97.5]), abs=0.01), name


def boundary_by_erosion(mask: np.ndarray, distance: int) -> np.ndarray:
    """Boundary of one class as Cheng et al. compute it: the mask without its erosion, in a frame of zeros."""
    from scipy.ndimage import binary_erosion

    return mask & ~binary_erosion(np.pad(mask, 1), np.ones((3, 3)), iterations=distance)[1:-1, 1:-1]


@pytest.mark.parametrize(("size", "distance"), [((24, 32), 1), ((96, 128), 3), ((8, 160), 3)])
def test_boundary_counts_equal_erosion_of_each_class(size, distance) -> None:
    predicted, target = make_masks(n=1, size=size, skill=0.98)
    target[target == IGNORED] = 0
    counts = count_boundary(predicted[0], target[0], 5)
    for k in range(5):
        one, two = (boundary_by_erosion(mask[0] == k, distance) for mask in (predicted, target))
        assert counts[k].tolist() == [(one & two).sum(), (one | two).sum()]


def test_ignored_pixels_belong_to_no_boundary_and_make_none() -> None:
    target = np.zeros((100, 100), np.uint8)
    target[40:60, 40:60] = IGNORED
    predicted = np.zeros_like(target)
    predicted[45:55, 45:55] = 1  # all of it is ignored
    frame = 100**2 - 94**2  # within 3 pixels of the outside: 2 % of the diagonal
    assert count_boundary(predicted, target, 2).tolist() == [[frame, frame], [0, 0]]


def test_boundary_iou_falls_faster_than_iou_when_a_large_object_is_too_large() -> None:
    target, predicted = np.zeros((2, 200, 200), np.uint8)
    target[50:150, 50:150] = 1
    predicted[47:153, 47:153] = 1
    boundary = count_boundary(predicted, target, 2)[None]
    metrics = compute_mask_metrics(count_pixels([predicted], [target], 2), boundary=boundary)
    inside, outside = 100**2 - 94**2, 106**2 - 94**2  # d = 6: rings of 6 pixels, 3 of which are shared
    assert metrics["class_boundary_iou"][1] == pytest.approx(inside / (outside + 94**2 - 88**2))
    assert metrics["class_boundary_iou"][1] < metrics["iou"][1]


def test_worst_images_come_first_and_ignored_ones_not_at_all() -> None:
    predicted, target = make_masks(n=4)
    predicted[2], predicted[1] = target[2], (target[1] + 1) % 4
    target[3] = IGNORED
    pixels = count_pixels(predicted % 5, target)
    scores = compute_image_iou(pixels)
    assert np.isnan(scores[3])
    assert scores[2] == 1
    assert find_worst_images(pixels, 9).tolist() == [1, 0, 2]
    assert find_worst_images(pixels, 2).tolist() == [1, 0]


def test_a_better_model_is_significantly_better() -> None:
    _, target = make_masks(n=30)
    weak, strong = (count_pixels(make_masks(n=30, skill=skill)[0], target) for skill in (0.6, 0.7))
    test = compare_masks(weak, strong)
    scores = [compute_mask_metrics(pixels)["miou"] for pixels in (weak, strong)]
    assert test.difference == pytest.approx(scores[1] - scores[0])
    assert test.interval[0] < test.difference < test.interval[1]
    assert test.is_significant
    assert (test.images, test.first_only + test.second_only) == (30, 30)
    mirrored = compare_masks(strong, weak)
    assert (mirrored.difference, mirrored.first_only) == (pytest.approx(-test.difference), test.second_only)
    assert not compare_masks(weak, weak).is_significant


def test_models_on_different_masks_are_not_compared() -> None:
    one, two = (count_pixels(*make_masks(seed=seed)) for seed in (0, 1))
    with pytest.raises(ValueError, match="not evaluated on the same masks"):
        compare_masks(one, two)


@pytest.mark.parametrize(
    ("predicted", "target", "message"),
    [
        ([[0, 5]], [[0, 1]], "a predicted mask has the value 5: classes are 0 to 4"),
        ([[0, 255]], [[0, 1]], "a predicted mask has the value 255"),
        ([[0, 1]], [[0, 9]], "a true mask has the value 9"),
        ([[0, 256]], [[0, 1]], "a predicted mask must have integers from 0 to 255"),
        ([[0, 0.5]], [[0, 1]], "a predicted mask must have integers"),
        ([[0, 1]], [[0], [1]], r"the predicted mask is \[1, 2\] but the true one \[2, 1\]"),
    ],
)
def test_values_that_are_no_classes_are_refused(predicted, target, message) -> None:
    with pytest.raises(ValueError, match=message):
        count_confusion(np.array(predicted), np.array(target), 5)


def test_predictions_for_ignored_pixels_may_be_anything() -> None:
    assert count_confusion(np.array([7, 1]), np.array([IGNORED, 1]), 2).tolist() == [[0, 0], [0, 1]]


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.zeros((0, 3, 3), np.int64), "no images"),
        (np.zeros((2, 3, 3), np.int64), "none of the 2 masks has a pixel that counts"),
        (
            np.zeros((2, 4, 4), np.int64),
            r"expected pixels that are hit, true and predicted, \[n, 3, K\], got \[2, 4, 4\]",
        ),
    ],
)
def test_nothing_to_evaluate_is_an_error(pixels, message) -> None:
    with pytest.raises(ValueError, match=message):
        compute_mask_metrics(pixels)


def test_memory_does_not_grow_with_the_number_of_classes() -> None:
    mask = np.zeros((2048, 2048), np.uint8)
    tracemalloc.start()
    count_confusion(mask, mask, 200)
    count_boundary(mask, mask, 200)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * mask.size  # a one-hot encoding has 200 values per pixel
