"""Recall of retrieval: counted one by one, several captions and images, ties."""

import numpy as np
import pytest

from vitrail.metrics import retrieval
from vitrail.metrics.intervals import wilson_interval


def unit(rows) -> np.ndarray:
    rows = np.asarray(rows, dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def count_slowly(queries: dict, others: dict, matches: set, k: int) -> float:
    """Return the recall at k by sorting the similarities of each query; matches come after others that are equally similar."""
    hits = 0
    for name, query in queries.items():
        ranked = sorted(others, key=lambda other: (-float(query @ others[other]), (name, other) in matches))
        hits += any((name, other) in matches for other in ranked[:k])
    return hits / len(queries)


@pytest.mark.parametrize("block", [1, 2**24])
def test_recall_is_that_of_sorting(monkeypatch, block) -> None:
    monkeypatch.setattr(retrieval, "BLOCK_VALUES", block)
    rng = np.random.default_rng(0)
    items, captions = rng.integers(0, 30, 80), rng.integers(0, 25, 80)
    pairs = np.unique(np.stack((items, captions), 1), axis=0)  # some images have several captions, and the reverse
    images, texts = unit(rng.normal(size=(30, 6))), unit(rng.normal(size=(25, 6)))
    found = retrieval.summarise_retrieval(images[pairs[:, 0]], texts[pairs[:, 1]], pairs[:, 0], pairs[:, 1])
    one = {int(i): images[i] for i in set(pairs[:, 0].tolist())}
    two = {int(t): texts[t] for t in set(pairs[:, 1].tolist())}
    matches = {(int(i), int(t)) for i, t in pairs}
    for k in (1, 5):
        assert found[f"image_to_text_{k}"] == pytest.approx(count_slowly(one, two, matches, k))
        back = count_slowly(two, one, {(t, i) for i, t in matches}, k)
        assert found[f"text_to_image_{k}"] == pytest.approx(back)
    hits = found["image_to_text_1"] * len(one)
    assert found["interval"] == pytest.approx(wilson_interval(hits, len(one)))
    assert (found["images"], found["captions"]) == (len(one), len(two))


def test_features_that_are_all_equal_find_nothing() -> None:
    same, numbers = unit(np.ones((10, 4))), np.arange(10)
    found = retrieval.summarise_retrieval(same, same, numbers, numbers, intervals=False)
    assert (found["image_to_text_1"], found["text_to_image_5"]) == (0, 0)
    assert "interval" not in found


def test_features_that_are_not_finite_are_refused() -> None:
    good, numbers = unit(np.eye(3)), np.arange(3)
    with pytest.raises(ValueError, match="not finite"):
        retrieval.summarise_retrieval(good * np.nan, good, numbers, numbers)
    with pytest.raises(ValueError, match="retrieval needs pairs, got 0 images"):
        retrieval.summarise_retrieval(good[:0], good[:0], numbers[:0], numbers[:0])
