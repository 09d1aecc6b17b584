"""Confident learning: thresholds, confident joint, estimated noise, suspects; compared with cleanlab if it is installed."""

import numpy as np
import pytest

from vitrail.metrics.label_noise import compute_margins, compute_thresholds, estimate_joint, find_suspects


def make_noisy(n: int = 600, classes: int = 4, noise: float = 0.1, seed: int = 0):
    """Return labels with noise, probabilities of a good classifier, and which labels are wrong."""
    generator = np.random.default_rng(seed)
    truth = generator.integers(classes, size=n)
    logits = generator.normal(size=(n, classes))
    logits[np.arange(n), truth] += 4
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = truth.copy()
    flipped = generator.permutation(n)[: round(noise * n)]
    labels[flipped] = (truth[flipped] + generator.integers(1, classes, len(flipped))) % classes
    return labels, probabilities, labels != truth


def test_the_threshold_of_a_class_is_its_mean_probability_over_its_own_labels():
    probabilities = np.array([[0.9, 0.1], [0.5, 0.5], [0.2, 0.8]])
    np.testing.assert_allclose(compute_thresholds(np.array([0, 0, 1]), probabilities), [0.7, 0.8])


def test_a_class_without_labels_has_no_threshold_and_no_noise():
    probabilities = np.array([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]])
    joint = estimate_joint(np.array([0, 1, 1]), probabilities)
    assert np.isnan(joint.thresholds[2])
    assert np.isnan(joint.class_noise[2])
    assert joint.joint[2].sum() == 0


def test_the_joint_of_a_small_example_is_that_of_the_paper():
    """Of 4 labels a, 3 are confidently a and 1 confidently b: a quarter of them is wrong."""
    sure_a, sure_b = [0.9, 0.1], [0.1, 0.9]
    labels = np.array([0, 0, 0, 0, 1, 1])
    joint = estimate_joint(labels, np.array([sure_a] * 3 + [sure_b] * 3))
    assert joint.counts.tolist() == [[3, 1], [0, 2]]
    np.testing.assert_allclose(joint.joint, np.array([[3, 1], [0, 2]]) / 6)
    assert joint.noise_rate == pytest.approx(1 / 6)
    np.testing.assert_allclose(joint.class_noise, [0.25, 0])


def test_the_noise_rate_is_near_the_true_one_and_the_list_has_most_wrong_labels():
    labels, probabilities, wrong = make_noisy(2000)
    joint = estimate_joint(labels, probabilities)
    suspected = find_suspects(labels, probabilities, joint)
    assert joint.noise_rate == pytest.approx(0.1, abs=0.03)
    assert (suspected & wrong).sum() / wrong.sum() > 0.9
    assert (suspected & wrong).sum() / suspected.sum() > 0.8


def test_a_label_that_is_the_most_probable_class_is_never_suspected():
    labels, probabilities, _ = make_noisy()
    suspected = find_suspects(labels, probabilities, estimate_joint(labels, probabilities))
    assert (probabilities.argmax(1)[suspected] != labels[suspected]).all()


def test_margins_compare_with_the_best_other_class():
    probabilities = np.array([[0.6, 0.3, 0.1], [0.2, 0.7, 0.1]])
    np.testing.assert_allclose(compute_margins(np.array([0, 0]), probabilities), [0.3, -0.5])


@pytest.mark.parametrize(
    ("labels", "probabilities", "message"),
    [
        ([0, 2], [[0.5, 0.5], [0.5, 0.5]], "labels must be 0 to 1"),
        ([0], [[1.0]], "2 classes or more"),
        ([], np.zeros((0, 2)), "no labels"),
        ([0, 1], [[np.nan, 0.5], [0.5, 0.5]], "not finite"),
    ],
)
def test_bad_input_is_an_error(labels, probabilities, message):
    with pytest.raises(ValueError, match=message):
        estimate_joint(np.array(labels, dtype=np.int64), np.asarray(probabilities, dtype=float))


@pytest.mark.parametrize("seed", range(3))
def test_joint_and_list_agree_with_cleanlab(seed):
    count = pytest.importorskip("cleanlab.count", reason="cleanlab is not installed: pip install cleanlab")
    labels, probabilities, _ = make_noisy(seed=seed)
    joint = estimate_joint(labels, probabilities)
    # Of several classes above their threshold, cleanlab takes the most probable of all classes, the paper of those.
    reached = probabilities >= joint.thresholds - 1e-6
    several = reached.sum(1) > 1
    assert reached[several, probabilities[several].argmax(1)].all(), "the data must not tell both rules apart"
    theirs = count.compute_confident_joint(labels, probabilities, calibrate=False)
    np.testing.assert_array_equal(joint.counts, theirs)
    np.testing.assert_allclose(joint.thresholds, count.get_confident_thresholds(labels, probabilities))
    np.testing.assert_allclose(
        joint.joint, count.estimate_joint(labels, probabilities), atol=0.002
    )  # theirs is rounded
    from cleanlab.filter import find_label_issues

    listed = find_label_issues(labels, probabilities, filter_by="both", n_jobs=1)
    suspected = find_suspects(labels, probabilities, joint)
    assert (listed != suspected).mean() < 0.02  # cleanlab rounds counts by class, and keeps five labels of each
