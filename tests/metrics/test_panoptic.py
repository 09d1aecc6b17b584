"""Panoptic quality against its definition, written out segment by segment, and cases worked out by hand."""

import json

import numpy as np
import pytest

from vitrail.metrics.panoptic import compute_panoptic_quality, count_segments


def plain_counts(predicted, predicted_classes, target, target_classes, classes, crowds=()):
    """Return sums of IoU, TP, FP, FN by comparing the pixels of every pair of segments."""
    result = np.zeros((classes, 4))
    void = target == 0
    found, hit = set(), set()
    for mine in predicted_classes:
        for true in target_classes:
            if true in crowds or predicted_classes[mine] != target_classes[true]:
                continue
            a, b = (predicted == mine) & ~void, target == true
            if not (predicted == mine).any() or not b.any():
                continue
            iou = (a & b).sum() / (a | b).sum()
            if iou > 0.5:
                result[target_classes[true]] += [iou, 1, 0, 0]
                found.add(true)
                hit.add(mine)
    for mine, label in predicted_classes.items():
        pixels = predicted == mine
        excused = void.copy()
        for crowd in crowds:
            if target_classes[crowd] == label:
                excused |= target == crowd
        if pixels.any() and mine not in hit and (pixels & excused).sum() <= 0.5 * pixels.sum():
            result[label, 2] += 1
    for true, label in target_classes.items():
        if (target == true).any() and true not in found and true not in crowds:
            result[label, 3] += 1
    return result


def make_maps(seed, classes=4):
    """Return a true map of rectangles with void between them, and a shifted copy in which some are relabelled or lost."""
    rng = np.random.default_rng(seed)
    target, labels = np.zeros((40, 50), np.int64), {}
    for number in range(9):
        top, left = rng.integers(0, 34), rng.integers(0, 42)
        identifier = int(rng.integers(1, 10**6)) + number
        target[top : top + rng.integers(4, 18), left : left + rng.integers(4, 18)] = identifier
        labels[identifier] = int(rng.integers(classes - 1))  # the last class is absent
    labels = {key: value for key, value in labels.items() if (target == key).any()}
    predicted, mine = np.zeros_like(target), {}
    for number, (identifier, label) in enumerate(labels.items(), start=1):
        if rng.random() < 0.15:
            continue
        pixels = np.roll(target == identifier, rng.integers(-2, 3, size=2), (0, 1))
        predicted[pixels & (rng.random(target.shape) < 0.95)] = number
        mine[number] = label if rng.random() < 0.8 else int(rng.integers(classes - 1))
    predicted[:3, :6], mine[99] = 99, 0  # often in void
    mine = {key: value for key, value in mine.items() if (predicted == key).any()}
    crowds = [key for key in labels if rng.random() < 0.2]
    return predicted, mine, target, labels, classes, crowds


@pytest.mark.parametrize("seed", range(12))
def test_counts_are_those_of_the_definition(seed: int) -> None:
    made = make_maps(seed)
    np.testing.assert_allclose(count_segments(*made), plain_counts(*made), rtol=0, atol=1e-12)


def test_the_maps_have_all_kinds_of_segments() -> None:
    total = sum(plain_counts(*make_maps(seed)) for seed in range(12))
    assert (total[:3] > 0).all()
    assert not total[3].any()
    assert any(made[5] for made in map(make_maps, range(12)))


def test_quality_is_that_of_the_paper() -> None:
    total = sum(count_segments(*make_maps(seed)) for seed in range(12))
    found = compute_panoptic_quality(total, things=(True, False, True, True))
    iou, tp, fp, fn = total[:3].T
    pq = iou / (tp + fp / 2 + fn / 2)  # equation 1
    assert found["pq"] == pytest.approx(pq.mean())
    assert found["sq"] == pytest.approx((iou / tp).mean())
    assert found["rq"] == pytest.approx((tp / (tp + fp / 2 + fn / 2)).mean())
    assert found["things"]["pq"] == pytest.approx(pq[[0, 2]].mean())
    assert found["stuff"]["pq"] == pytest.approx(pq[1])
    assert found["classes"][3] is None, "the last class does not occur"
    assert [item["pq"] for item in found["classes"][:3]] == pytest.approx(pq.tolist())
    json.dumps(found)


def test_a_worked_example() -> None:
    target = np.repeat([[1, 1, 1, 1, 2, 2, 0, 0]], 2, 0)
    predicted = np.repeat([[7, 7, 7, 8, 9, 9, 9, 5]], 2, 0)
    counts = count_segments(predicted, {7: 0, 8: 0, 9: 1, 5: 1}, target, {1: 0, 2: 1}, 2)
    # 7 matches 1 with 6 of 8 pixels; 8 is wrong; 9 matches 2 wholly, as its void does not count; 5 is in void
    np.testing.assert_array_equal(counts, [[0.75, 1, 1, 0], [1.0, 1, 0, 0]])
    assert compute_panoptic_quality(counts)["pq"] == pytest.approx((0.75 / 1.5 + 1) / 2)


def test_half_an_overlap_is_no_match() -> None:
    target, predicted = np.array([[1, 1, 1, 2]]), np.array([[3, 4, 4, 4]])
    counts = count_segments(predicted, {3: 0, 4: 0}, target, {1: 0, 2: 0}, 1)
    np.testing.assert_array_equal(counts, [[0, 0, 2, 2]])


def test_perfect_and_empty_maps() -> None:
    ids, labels = np.arange(6).reshape(2, 3), {number: number % 2 for number in range(1, 6)}
    found = compute_panoptic_quality(count_segments(ids, labels, ids, labels, 2))
    assert (found["pq"], found["sq"], found["rq"]) == (1, 1, 1)
    nothing = np.zeros((2, 3), int)
    counts = count_segments(nothing, {}, ids, labels, 2)
    assert counts[:, 3].tolist() == [2, 3]
    assert compute_panoptic_quality(counts)["pq"] == 0
    assert compute_panoptic_quality(count_segments(nothing, {}, nothing, {}, 2), (True, True)) == {
        **dict.fromkeys(("pq", "sq", "rq")),
        "things": dict.fromkeys(("pq", "sq", "rq")),
        "stuff": dict.fromkeys(("pq", "sq", "rq")),
        "classes": [None, None],
    }


def test_wrong_maps_are_one_line() -> None:
    ids = np.ones((2, 2), int)
    with pytest.raises(ValueError, match="the true segment 1 needs a class from 0 to 1, got None"):
        count_segments(ids, {1: 0}, ids, {}, 2)
    with pytest.raises(ValueError, match="the predicted segment 1 needs a class from 0 to 1, got 2"):
        count_segments(ids, {1: 2}, ids, {1: 0}, 2)
    with pytest.raises(ValueError, match=r"the predicted map is \[2, 2\] and the true one \[3, 3\]"):
        count_segments(ids, {1: 0}, np.ones((3, 3), int), {1: 0}, 2)
