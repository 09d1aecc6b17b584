"""`vitrail label suspects`: wrong labels are found, the files say so, bad input is one line."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest

import vitrail
from tests.labelling.made import COLOURS, WRONG, label, place, refused, result, save_image  # noqa: F401
from vitrail.labelling.folds import assign_folds, join_groups
from vitrail.labelling.neighbours import choose_neighbours, predict_from_neighbours
from vitrail.labelling.suspects import find_judged, score_labels

MODEL = ("--model", "model.safetensors")


def test_wrong_labels_are_listed_first_with_the_right_suggestion(place, capsys):  # noqa: F811
    found = result(capsys, "suspects", "photos", *MODEL, "--out", "out.csv")
    assert found["labels"] == 30
    first = {"/".join(Path(each["path"]).parts[-2:]): each["suggested_label"] for each in found["suspects"][:2]}
    assert first == WRONG
    assert found["files"] == ["out.csv", "out.html"]
    assert 0 < found["noise_rate"] < 0.3
    rows = list(csv.DictReader(Path("out.csv").read_text().splitlines()))
    assert [row["rank"] for row in rows] == [str(n) for n in range(1, len(rows) + 1)]
    assert (rows[0]["path"], rows[0]["given_label"]) == (
        found["suspects"][0]["path"],
        found["suspects"][0]["given_label"],
    )
    for row in rows:
        own, margin, score = (float(row[name]) for name in ("self_confidence", "margin", "score"))
        assert score == pytest.approx((1 - own + (1 - margin) / 2) / 2, abs=1e-5)
        assert own == pytest.approx(
            (float(row["neighbour_agreement"]) + float(row["classifier_confidence"])) / 2, abs=1e-5
        )


def test_the_terminal_says_how_many_labels_are_suspected(place, capsys):  # noqa: F811
    code, out, _ = label(capsys, "suspects", "photos", *MODEL, "--cards", 0)
    assert code == 0
    assert "of 30 labels are suspected; estimated noise" in out
    assert out.splitlines()[-1] == "suspects.csv"
    assert not Path("suspects.html").exists()


def test_unreadable_images_are_named_and_classes_of_one_image_are_not_judged(place, capsys):  # noqa: F811
    Path("photos/red/broken.png").write_bytes(b"no image")
    save_image(Path("photos/single/1.png"), "red", 77)
    code, _, error = label(capsys, "suspects", "photos", *MODEL)
    assert code == 0
    assert "left out: photos/red/broken.png" in error
    assert "note: 1 labels are not checked" in error
    assert "photos/single" not in Path("suspects.csv").read_text()


def test_two_images_of_each_class_are_enough(place, capsys):  # noqa: F811
    for name in COLOURS:
        for index in range(2, 10):
            Path("photos", name, f"{index}.png").unlink()
    assert result(capsys, "suspects", "photos", *MODEL)["labels"] == 6


def test_bad_input_is_one_line(place, capsys):  # noqa: F811
    assert "--out out.txt: the name of a table must end in .csv" in refused(
        capsys, "suspects", "photos", *MODEL, "--out", "out.txt"
    )
    assert "--out no/out.csv: there is no directory no" in refused(
        capsys, "suspects", "photos", *MODEL, "--out", "no/out.csv"
    )
    assert "has no test split: it has train" in refused(capsys, "suspects", "photos", *MODEL, "--split", "test")
    assert "--folds" in refused(capsys, "suspects", "photos", *MODEL, "--folds", "none")
    assert "folds must be >= 2" in refused(capsys, "suspects", "photos", *MODEL, "--folds", 1)
    Path("empty").mkdir()
    assert "empty" in refused(capsys, "suspects", "empty", *MODEL)
    shutil.rmtree("photos/red")
    shutil.rmtree("photos/green")
    save_image(Path("photos/blue/10.png"), "blue", 1)
    assert "has only one class, 'blue'" in refused(capsys, "suspects", "photos", *MODEL)
    Path("one.csv").write_text("path,label\nmore/red-0.png,a\nmore/red-1.png,b\n")
    assert "fewer than 2 classes of 2 images" in refused(capsys, "suspects", "one.csv", *MODEL)
    Path("several.csv").write_text("path,label\nmore/red-0.png,a|b\nmore/red-1.png,b\n")
    assert "one class per image" in refused(capsys, "suspects", "several.csv", *MODEL)
    Path("header.csv").write_text("foo,bar\nmore/red-0.png,a\n")
    assert "the first line must name the columns" in refused(capsys, "suspects", "header.csv", *MODEL)


def test_data_that_is_not_files_is_refused(place, capsys):  # noqa: F811
    assert "images inside other files" in refused(capsys, "suspects", "digits", *MODEL)


def test_the_table_never_replaces_the_data(place, capsys):  # noqa: F811
    Path("labels.csv").write_text(
        "path,label\n" + "".join(f"photos/{n}/{i}.png,{n}\n" for n in COLOURS for i in range(4))
    )
    message = refused(capsys, "suspects", "labels.csv", *MODEL, "--out", "labels.csv")
    assert "is an input, which is never changed" in message
    assert "--out" in message


def test_the_python_function_returns_the_scores_of_all_labels(place):  # noqa: F811
    errors = vitrail.find_label_errors("photos", "model.safetensors")
    assert errors.scores is not None
    assert errors.scores.mean.shape == (30, 3)
    np.testing.assert_allclose(errors.scores.mean.sum(1), 1)
    assert len(errors.paths) == 30


# --- the parts ---


def test_near_duplicates_are_in_one_fold_and_classes_in_all():
    labels = np.repeat([0, 1, 2], [20, 10, 3])
    groups = join_groups(33, np.array([[0, 1], [1, 2], [25, 26]]))
    fold = assign_folds(labels, 5, groups, seed=3)
    assert fold[0] == fold[1] == fold[2]
    assert fold[25] == fold[26]
    assert set(fold[labels == 0]) == set(range(5))
    assert len(set(fold[labels == 2])) == 3
    np.testing.assert_array_equal(fold, assign_folds(labels, 5, groups, seed=3))


def test_a_copy_does_not_vote_for_its_copy():
    """Images 0 and 1 are copies with a wrong label: without grouping they agree with each other."""
    features = np.array([[1, 0], [1, 0], [1, 0.01], [1, 0.02], [1, 0.03], [0, 1], [0.01, 1], [0.02, 1.0]])
    labels = np.array([1, 1, 0, 0, 0, 1, 1, 1])
    alone = predict_from_neighbours(features, labels, 2, np.arange(8), 3)
    grouped = predict_from_neighbours(features, labels, 2, np.array([0, 0, 2, 3, 4, 5, 6, 7]), 3)
    assert alone[0, 1] > 0.3
    assert grouped[0, 1] == 0
    np.testing.assert_allclose(grouped.sum(1), 1)


def test_nothing_but_copies_still_gives_votes():
    votes = predict_from_neighbours(np.ones((3, 2)), np.array([0, 0, 1]), 2, np.zeros(3, int), 2)
    np.testing.assert_allclose(votes.sum(1), 1)


def test_the_number_of_neighbours_follows_the_classes():
    assert choose_neighbours(np.repeat([0, 1], 200)) == 20
    assert choose_neighbours(np.repeat([0, 1], 11)) == 5
    assert choose_neighbours(np.array([0, 1])) == 3


def test_classes_of_one_group_are_not_judged():
    judged = find_judged(np.array([0, 0, 1, 1, 2]), np.array([0, 1, 2, 2, 4]))
    assert judged.tolist() == [True, True, False, False, False]


def test_flipped_labels_of_separate_clusters_are_suspected():
    generator = np.random.default_rng(0)
    truth = np.repeat(np.arange(3), 40)
    features = np.eye(3)[truth] * 5 + generator.normal(0, 0.3, (120, 3))
    labels = truth.copy()
    labels[[3, 50, 100]] = [1, 2, 0]
    scores = score_labels(features.astype(np.float32), labels, 3)
    assert np.flatnonzero(scores.suspected).tolist() == [3, 50, 100]
    assert set(np.argsort(-scores.score)[:3].tolist()) == {3, 50, 100}
    assert scores.joint.noise_rate == pytest.approx(3 / 120, abs=0.01)
