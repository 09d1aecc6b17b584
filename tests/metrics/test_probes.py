"""Probes of features against references written here in a few lines, and against scikit-learn called directly."""

import numpy as np
import pytest

from vitrail.metrics import knn as knn_module
from vitrail.metrics.knn import predict_knn
from vitrail.metrics.linear import (
    C_GRID,
    PENALTY,
    evaluate_few_shot,
    fit_linear_probe,
    predict_least_squares,
    sample_shots,
    split_held_out,
)

Split = tuple[np.ndarray, np.ndarray]


def clouds(count: int, classes: int = 7, width: int = 24, seed: int = 0, spread: float = 1.6) -> Split:
    """Features around a centre for each class, wide enough that no probe is always right."""
    centres = np.random.default_rng(99).normal(size=(classes, width))
    chance = np.random.default_rng(seed)
    labels = chance.integers(0, classes, count)
    return (centres[labels] + spread * chance.normal(size=(count, width))).astype(np.float32), labels


TRAIN, TEST = clouds(600, seed=1), clouds(211, seed=2)


def dino(train: Split, queries: np.ndarray, k: int, temperature: float, classes: int) -> np.ndarray:
    """Class by weighted vote as DINO's eval_knn.py counts it, with every similarity in one matrix."""
    unit = [
        x.astype(np.float64) / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True) for x in (train[0], queries)
    ]
    similarity = unit[1] @ unit[0].T
    order = np.argsort(-similarity, axis=1, kind="stable")[:, :k]
    votes = np.zeros((len(queries), classes))
    for row, neighbours in enumerate(order):
        for place in neighbours:
            votes[row, train[1][place]] += np.exp(similarity[row, place] / temperature)
    return votes.argmax(1)


@pytest.mark.parametrize("k", [1, 10, 20, 100, 200, 600])
@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_knn_predictions_equal_those_of_dino(k: int, temperature: float) -> None:
    ours = predict_knn(*TRAIN, TEST[0], 7, k, temperature).argmax(1)
    assert np.array_equal(ours, dino(TRAIN, TEST[0], k, temperature, 7))
    assert 0.3 < (ours == TEST[1]).mean() < 1


def test_one_neighbour_equals_scikit_learn() -> None:
    from sklearn.neighbors import KNeighborsClassifier

    theirs = KNeighborsClassifier(1, metric="cosine", algorithm="brute").fit(TRAIN[0].astype(np.float64), TRAIN[1])
    assert np.array_equal(predict_knn(*TRAIN, TEST[0], 7, 1).argmax(1), theirs.predict(TEST[0].astype(np.float64)))


def test_block_size_does_not_change_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = predict_knn(*TRAIN, TEST[0], 7)
    monkeypatch.setattr(knn_module, "QUERIES", 10)
    monkeypatch.setattr(knn_module, "CHUNK", 7)
    np.testing.assert_allclose(predict_knn(*TRAIN, TEST[0], 7), whole, atol=1e-12)


def test_of_equally_near_images_the_first_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knn_module, "CHUNK", 2)
    same = np.ones((5, 3), dtype=np.float32)
    votes = predict_knn(same, np.array([2, 2, 0, 1, 1]), same[:1], 3, neighbours=3)
    np.testing.assert_allclose(votes, [[1 / 3, 0, 2 / 3]])


def test_more_neighbours_than_images_use_all() -> None:
    np.testing.assert_allclose(predict_knn(*TRAIN, TEST[0], 7, 10_000), predict_knn(*TRAIN, TEST[0], 7, 600))


def test_multilabel_neighbours_vote_for_each_label() -> None:
    train = np.eye(2, dtype=np.float32)
    votes = predict_knn(train, np.array([[1, 1, 0], [0, 1, 0]]), train[:1], 3, neighbours=2, temperature=1.0)
    near, far = np.e / (np.e + 1), 1 / (np.e + 1)
    np.testing.assert_allclose(votes, [[near, near + far, 0]])


@pytest.mark.parametrize(("neighbours", "temperature"), [(0, 0.07), (5, 0.0)])
def test_neighbours_and_temperature_must_be_positive(neighbours: int, temperature: float) -> None:
    with pytest.raises(ValueError, match="must be > 0"):
        predict_knn(*TRAIN, TEST[0], 7, neighbours, temperature)


# --- linear ---


def by_hand(train: Split, queries: np.ndarray, c: float) -> np.ndarray:
    """scikit-learn called directly, with the features standardised by hand."""
    from sklearn.linear_model import LogisticRegression

    wide = train[0].astype(np.float64)
    mean, deviation = wide.mean(0), wide.std(0)
    model = LogisticRegression(C=c, max_iter=1000).fit((wide - mean) / deviation, train[1])
    return model.predict((queries.astype(np.float64) - mean) / deviation)


def test_linear_probe_equals_scikit_learn_called_directly() -> None:
    probe = fit_linear_probe(*TRAIN, TEST[0], 7)
    fitted, held = split_held_out(TRAIN[1], 0)
    scores = {}
    for c in C_GRID:
        predicted = by_hand((TRAIN[0][fitted], TRAIN[1][fitted]), TRAIN[0][held], c)
        scores[c] = (predicted == TRAIN[1][held]).mean()
    assert probe.score_by_c == pytest.approx(scores)
    assert probe.c == max(C_GRID, key=lambda c: (scores[c], -c))
    assert np.array_equal(probe.logits.argmax(1), by_hand(TRAIN, TEST[0], probe.c))
    assert 0.5 < (probe.logits.argmax(1) == TEST[1]).mean() < 1


def test_a_fifth_of_every_class_is_held_out() -> None:
    fitted, held = split_held_out(TRAIN[1], 0)
    assert sorted([*fitted, *held]) == list(range(600))
    shares = np.bincount(TRAIN[1][held], minlength=7) / np.bincount(TRAIN[1], minlength=7)
    assert np.abs(shares - 0.2).max() < 0.02


def test_the_choice_of_c_does_not_use_the_queries() -> None:
    one = fit_linear_probe(*TRAIN, TEST[0], 7)
    other = fit_linear_probe(*TRAIN, -5 * TEST[0][:9], 7)
    assert (one.c, one.score_by_c) == (other.c, other.score_by_c)


def test_two_classes_and_classes_without_images_have_logits() -> None:
    two = TRAIN[1] < 2
    probe = fit_linear_probe(TRAIN[0][two], TRAIN[1][two], TEST[0], 7)
    assert probe.logits.shape == (211, 7)
    assert np.isfinite(probe.logits).all()
    assert set(probe.logits.argmax(1)) == {0, 1}
    assert np.array_equal(probe.logits.argmax(1), by_hand((TRAIN[0][two], TRAIN[1][two]), TEST[0], probe.c))


def test_parameters_equal_those_of_scikit_learn() -> None:
    two = TRAIN[1] < 2
    assert fit_linear_probe(TRAIN[0][two], TRAIN[1][two], TEST[0], 2, grid=(1.0,)).parameters == 25
    assert fit_linear_probe(*TRAIN, TEST[0], 7, grid=(1.0,)).parameters == 7 * 25
    several = np.stack([TRAIN[1] == k for k in range(7)], 1).astype(np.uint8)
    several[:, 3] = 0  # nobody has it: there is nothing to fit
    assert fit_linear_probe(TRAIN[0], several, TEST[0], 7, grid=(1.0,)).parameters == 6 * 25


def test_a_class_with_one_image_is_fitted() -> None:
    labels = TRAIN[1].copy()
    labels[labels == 6] = 5
    labels[17] = 6
    fitted, held = split_held_out(labels, 0)
    assert 17 in fitted
    assert 17 not in held


def test_multilabel_probe_is_one_against_rest() -> None:
    from sklearn.linear_model import LogisticRegression

    several = np.stack([TRAIN[1] == k for k in range(7)], 1).astype(np.uint8)
    several[:, 0] |= several[:, 3]
    probe = fit_linear_probe(TRAIN[0], several, TEST[0], 7)
    wide = TRAIN[0].astype(np.float64)
    mean, deviation = wide.mean(0), wide.std(0)
    for k in range(7):
        alone = LogisticRegression(C=probe.c, max_iter=1000).fit((wide - mean) / deviation, several[:, k])
        expected = alone.decision_function((TEST[0].astype(np.float64) - mean) / deviation)
        np.testing.assert_allclose(probe.logits[:, k], expected, rtol=1e-6, atol=1e-8)


def test_one_class_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 2 classes"):
        fit_linear_probe(TRAIN[0], np.zeros(600, dtype=np.int64), TEST[0], 7)


# --- few shots ---


def primal(train: Split, queries: np.ndarray, classes: int) -> np.ndarray:
    """(XᵀX + λI)⁻¹ XᵀY on standardised features with a column of 100 and targets of -1 and 1."""
    wide = train[0].astype(np.float64)
    mean, deviation = wide.mean(0), wide.std(0) + 1e-5
    x, q = (
        np.hstack([(f.astype(np.float64) - mean) / deviation, np.full((len(f), 1), 100.0)]) for f in (wide, queries)
    )
    w = np.linalg.inv(x.T @ x + 2**10 * np.eye(x.shape[1])) @ x.T @ (2.0 * np.eye(classes)[train[1]] - 1)
    return (q @ w).argmax(1)


@pytest.mark.parametrize("shots", [1, 2, 5, 10, 25])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_least_squares_predictions_equal_the_primal_solution(shots: int, seed: int) -> None:
    chosen = sample_shots(TRAIN[1], 7, shots, seed)
    few = TRAIN[0][chosen], TRAIN[1][chosen]
    assert np.array_equal(predict_least_squares(*few, TEST[0], 7).argmax(1), primal(few, TEST[0], 7))


def test_primal_and_dual_solutions_are_equal() -> None:
    chosen = sample_shots(TRAIN[1], 7, 3, 0)  # 21 images of 25 values with the bias: the dual solution
    few = TRAIN[0][chosen], TRAIN[1][chosen]
    twice = np.concatenate([few[0], few[0]]), np.concatenate([few[1], few[1]])  # 42: by the other
    halved = predict_least_squares(*few, TEST[0], 7, PENALTY / 2)
    np.testing.assert_allclose(predict_least_squares(*twice, TEST[0], 7, PENALTY), halved, atol=1e-9)


def test_samples_are_nested_balanced_and_deterministic() -> None:
    five, ten = sample_shots(TRAIN[1], 7, 5, 3), sample_shots(TRAIN[1], 7, 10, 3)
    assert set(five) < set(ten)
    assert np.bincount(TRAIN[1][ten]).tolist() == [10] * 7
    assert np.array_equal(ten, sample_shots(TRAIN[1], 7, 10, 3))
    assert not np.array_equal(ten, sample_shots(TRAIN[1], 7, 10, 4))


def test_more_shots_are_better_and_the_interval_is_students_t() -> None:
    from scipy import stats

    found = [evaluate_few_shot(*TRAIN, *TEST, 7, shots, draws=6) for shots in (1, 5, 25)]
    assert [one.shots for one in found] == [1, 5, 25]
    assert found[0].mean < found[1].mean < found[2].mean
    for one in found:
        assert len(set(one.accuracies)) > 1
        low, high = stats.t.interval(0.95, 5, loc=one.mean, scale=stats.sem(one.accuracies))
        assert one.interval == pytest.approx((low, high))


def test_classes_with_fewer_images_use_all_of_them() -> None:
    keep = np.sort(np.concatenate([np.flatnonzero(TRAIN[1] == 4)[:3], np.flatnonzero(TRAIN[1] != 4)]))
    one = evaluate_few_shot(TRAIN[0][keep], TRAIN[1][keep], *TEST, 7, 10, draws=2)
    assert one.scarce_classes == (4,)
    assert one.images == 63


def test_one_sample_has_no_interval() -> None:
    one = evaluate_few_shot(*TRAIN, *TEST, 7, 5, draws=1)
    assert one.interval is None


def test_equal_samples_are_evaluated_once_without_an_interval() -> None:
    most = int(np.bincount(TRAIN[1]).max())
    every = evaluate_few_shot(*TRAIN, *TEST, 7, most)
    assert (every.interval, len(every.accuracies), every.images) == (None, 1, 600)
    fewer = evaluate_few_shot(*TRAIN, *TEST, 7, most - 1)
    assert fewer.interval is not None
    assert len(fewer.accuracies) == 5


@pytest.mark.parametrize("temperature", [1e-2, 1e-5, 1e-300, 5e-324])
def test_at_a_small_temperature_the_nearest_decides(temperature: float) -> None:
    votes = predict_knn(*TRAIN, -TRAIN[0][:50], 7, 20, temperature)  # far from all: every cosine is small
    assert np.isfinite(votes).all()
    np.testing.assert_allclose(votes.sum(1), 1)
    if temperature < 1e-5:
        np.testing.assert_array_equal(votes, predict_knn(*TRAIN, -TRAIN[0][:50], 7, 1))


@pytest.mark.parametrize(("shots", "draws"), [(0, 5), (5, 0)])
def test_shots_and_draws_must_be_positive(shots: int, draws: int) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        evaluate_few_shot(*TRAIN, *TEST, 7, shots, draws)


def test_few_shot_needs_single_label_targets() -> None:
    with pytest.raises(ValueError, match="single-label targets"):
        evaluate_few_shot(TRAIN[0], np.ones((600, 7), dtype=np.uint8), *TEST, 7, 5)
