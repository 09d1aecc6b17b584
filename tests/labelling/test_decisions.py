"""`vitrail label apply`, `propose` and `next`: new tables, counts, refusals."""

import csv
from pathlib import Path

import numpy as np
import pytest

import vitrail
from tests.labelling.made import COLOURS, label, place, refused, result, save_image  # noqa: F401
from vitrail.data.sources import load_dataset
from vitrail.labelling.propose import explain_refusal, fit_thresholds
from vitrail.labelling.selection import METHODS, choose_images
from vitrail.labelling.tables import NEXT_COLUMNS

MODEL = ("--model", "model.safetensors")


def write(name: str, *rows: str) -> str:
    """Write a CSV."""
    Path(name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    return name


def read(name: str) -> dict[str, dict[str, str]]:
    """Return the rows of a CSV by path."""
    return {row["path"]: row for row in csv.DictReader(Path(name).read_text(encoding="utf-8").splitlines())}


HEADER = "path,given_label,suggested_label,decision,label"


def test_decisions_give_a_manifest_that_train_reads_and_leave_the_photos(place, capsys):  # noqa: F811
    before = {path: path.read_bytes() for path in Path("photos").rglob("*.png")}
    decisions = write(
        "decisions.csv",
        HEADER,
        f"{Path('photos/blue/9.png').absolute()},blue,red,accept,red",  # a page saves absolute paths
        "photos/green/9.png,green,red,correct,blue",
        "photos/red/0.png,red,blue,dismiss,red",
        "photos/red/1.png,red,blue,remove,",
        "photos/red/2.png,red,blue,,",
        "more/red-0.png,,red,accept,red",
    )
    counts = result(capsys, "apply", "photos", decisions, "--out", "new.csv")
    names = ("corrected", "confirmed", "removed", "added", "undecided")
    assert [counts[name] for name in names] == [2, 1, 1, 1, 1]
    assert counts["images"] == 30
    rows = read("new.csv")
    assert rows["photos/blue/9.png"]["label"] == "red"
    assert rows["photos/green/9.png"]["label"] == "blue"
    assert "photos/red/1.png" not in rows
    assert rows["more/red-0.png"] == {"path": "more/red-0.png", "label": "red", "split": "train"}
    # The split is the one that training on the folder has.
    folder, manifest = load_dataset("photos"), load_dataset("new.csv")
    held = {Path(folder["validation"].name(i)).resolve() for i in range(len(folder["validation"]))}
    kept = {Path(manifest["validation"].name(i)).resolve() for i in range(len(manifest["validation"]))}
    assert kept == held - {Path("photos/red/1.png").resolve()}
    assert {path: path.read_bytes() for path in Path("photos").rglob("*.png")} == before


@pytest.mark.parametrize(("what", "corrected", "removed"), [("keep", 0, 0), ("accept", 2, 0), ("remove", 0, 2)])
def test_suspects_without_decisions(place, capsys, what, corrected, removed):  # noqa: F811
    table = write(
        "suspects.csv",
        "rank,path,given_label,suggested_label,score",
        "1,photos/blue/9.png,blue,red,0.9",
        "2,photos/green/9.png,green,blue,0.8",
    )
    counts = result(capsys, "apply", "photos", table, "--undecided", what, "--out", "new.csv")
    assert (counts["corrected"], counts["removed"], counts["undecided"]) == (corrected, removed, 2 * (what == "keep"))


def test_decisions_about_files_that_are_gone_or_for_other_labels_are_left_out(place, capsys):  # noqa: F811
    decisions = write(
        "decisions.csv",
        HEADER,
        "photos/blue/99.png,blue,red,accept,red",
        "photos/red/0.png,green,blue,accept,blue",
        "photos/blue/9.png,blue,red,accept,red",
    )
    code, out, error = label(capsys, "apply", "photos", decisions, "--out", "new.csv")
    assert code == 0
    assert "1 corrected" in out
    assert "note: 1 decisions are for files that are gone" in error
    assert "note: 1 decisions were made for another label" in error
    assert read("new.csv")["photos/red/0.png"]["label"] == "red"


def test_bad_decisions_are_one_line(place, capsys):  # noqa: F811
    def apply(*rows: str) -> str:
        return refused(capsys, "apply", "photos", write("bad.csv", *rows), "--out", "new.csv")

    assert "the first line must name the columns path,label; got 'foo,bar'" in apply("foo,bar", "a,b")
    message = apply(HEADER, "photos/blue/9.png,blue,red,accept,gren")
    assert (
        "bad.csv, line 2: 'gren' (like 'green'?) is no class of the data: correct it, or use --new-classes" in message
    )
    assert "unknown decision 'yes'" in apply(HEADER, "photos/blue/9.png,blue,red,yes,red")
    assert "the decision correct needs a label" in apply(HEADER, "photos/blue/9.png,blue,red,correct,")
    assert "line 3: contradicts" in apply("path,label", "photos/blue/9.png,red", "photos/blue/9.png,green")
    assert "line 2: no path" in apply("path,label", ",red")
    sure = apply("path,label,confidence", "photos/blue/9.png,red,sure")
    assert "bad.csv, line 2: the confidence must be a number from 0 to 1, got 'sure'" in sure
    assert "2 cells, the header has 5" in apply(HEADER, "photos/blue/9.png,blue")
    assert "has no decisions" in apply(HEADER)
    assert "none of the 1 images" in apply("path,label", "gone.png,red")
    assert "no such file of decisions: nowhere.csv" in refused(
        capsys, "apply", "photos", "nowhere.csv", "--out", "new.csv"
    )
    decisions = write("good.csv", "path,label", "photos/blue/9.png,red")
    assert "is an input" in refused(capsys, "apply", "photos", decisions, "--out", decisions)
    message = refused(capsys, "apply", "photos", decisions, "--out", "new.xyz")  # which train would not read
    assert "new.xyz: the name of a table must end in .csv; for other files give --format" in message
    assert not Path("new.csv").exists()


def test_new_classes_need_permission(place, capsys):  # noqa: F811
    decisions = write("decisions.csv", "path,label", "photos/blue/9.png,violet")
    assert result(capsys, "apply", "photos", decisions, "--new-classes", "--out", "new.csv")["corrected"] == 1
    assert read("new.csv")["photos/blue/9.png"]["label"] == "violet"


def test_a_class_that_loses_all_images_is_noted(place, capsys):  # noqa: F811
    rows = [f"photos/blue/{number}.png,red" for number in range(10)]
    decisions = write("decisions.csv", "path,label", *rows)
    assert result(capsys, "apply", "photos", decisions, "--out", "new.csv")["notes"] == ["no image is left of blue"]


def test_tables_that_a_person_wrote_are_not_replaced(place, capsys):  # noqa: F811
    ours = write("ours.csv", "path,label", "photos/blue/0.png,blue")
    marked = write(
        "suspects.csv", "rank,path,given_label,suggested_label,decision", "1,photos/blue/9.png,blue,red,accept"
    )
    typed = write("next.csv", ",".join(NEXT_COLUMNS), "1,more/red-0.png,red,green,blue,0.5,0.1,1,1")
    more = ("--unlabelled", "more", *MODEL)
    for part, out, message in (
        (("suspects", "photos", *MODEL), ours, "--out ours.csv exists and is another table: give another name"),
        (("suspects", "photos", *MODEL), marked, "--out suspects.csv exists and is another table"),
        (("propose", "photos", *more), ours, "--out ours.csv exists and is another table"),
        (("next", "photos", *more), typed, "--out next.csv has labels that you typed, 1: give another name"),
    ):
        before = Path(out).read_bytes()
        assert message in refused(capsys, *part, "--out", out)
        assert Path(out).read_bytes() == before
    write("next.csv", ",".join(NEXT_COLUMNS), "1,more/red-0.png,,green,blue,0.5,0.1,1,1")
    assert label(capsys, "next", "photos", *more, "--budget", 1)[0] == 0  # nothing typed: written anew


# --- proposals ---


def test_proposals_hold_the_target_and_are_added_as_training_images(place, capsys):  # noqa: F811
    given = ("propose", "photos", "--unlabelled", "more", "--init", "model.safetensors")
    found = result(capsys, *given, "--precision-target", 0.2)
    threshold = found["thresholds"]["all"]
    assert threshold["bound"] >= 0.2
    rows = read("proposals.csv")
    assert 0 < len(rows) == found["proposed"] <= 12
    assert all(float(row["confidence"]) >= threshold["threshold"] - 1e-6 for row in rows.values())
    added = result(capsys, "apply", "photos", "proposals.csv", "--out", "more.csv")
    assert added["added"] == len(rows)
    dataset = load_dataset("more.csv")
    held = [dataset["validation"].name(index) for index in range(len(dataset["validation"]))]
    assert not any("more/" in name for name in held)


def test_proposals_are_refused_where_no_threshold_holds(place, capsys):  # noqa: F811
    given = ("propose", "photos", "--unlabelled", "more")
    message = refused(capsys, *given, "--init", "model.safetensors")
    assert "validation images cannot prove a precision of 98 %, at least 149 are needed" in message
    assert "lower --precision-target" in message
    assert not Path("proposals.csv").exists()
    # A classifier with random weights predicts nearly one class: its precision is low.
    message = refused(capsys, *given, *MODEL, "--precision-target", 0.9)
    assert "no threshold holds" in message


def test_bad_input_of_proposals_is_one_line(place, capsys):  # noqa: F811
    init = ("--init", "model.safetensors")
    assert "must be above 0 and below 1, got '1.2'" in refused(
        capsys, "propose", "photos", "--unlabelled", "more", *init, "--precision-target", 1.2
    )
    assert "one of the arguments --model --init is required" in refused(
        capsys, "propose", "photos", "--unlabelled", "more"
    )
    assert "are labelled already" in refused(capsys, "propose", "photos", "--unlabelled", "photos", *init)
    Path("empty").mkdir()
    assert "empty" in refused(capsys, "propose", "photos", "--unlabelled", "empty", *init)
    assert "has no test images" in refused(
        capsys, "propose", "photos", "--unlabelled", "more", *init, "--split", "test"
    )
    write("other.csv", "path,label", *(f"photos/{n}/{i}.png,{n}-2" for n in COLOURS for i in range(9)))
    message = refused(capsys, "propose", "other.csv", "--unlabelled", "more", *MODEL, "--precision-target", 0.2)
    assert "does not predict 'blue-2': train it on these classes, or use --init" in message


def test_thresholds_by_class_refuse_only_the_classes_that_fail():
    generator = np.random.default_rng(0)
    targets = np.repeat([0, 1], 300)
    first = np.where(targets == 0, generator.uniform(0.8, 1, 600), generator.uniform(0, 0.9, 600))
    fits = fit_thresholds(np.stack((first, 1 - first), 1), targets, ("a", "b"), 0.98)
    assert fits["b"].threshold is not None  # all that are predicted b are b
    assert fits["a"].threshold is None or fits["a"].threshold > 0.8
    assert set(fit_thresholds(np.stack((first, 1 - first), 1), targets, None, 0.98)) == {""}
    few = fit_thresholds(np.eye(2), np.array([0, 1]), ("a", "b"), 0.98)
    assert "1 validation images predicted 'a' cannot prove" in explain_refusal(few, 0.98, "validation")


# --- what to label next ---


@pytest.mark.parametrize("method", METHODS)
def test_next_images_are_different_ones_of_the_pool(method):
    generator = np.random.default_rng(0)
    pool, known = generator.normal(size=(60, 4)), generator.normal(size=(8, 4))
    predicted = generator.dirichlet(np.ones(3), 60)
    chosen = choose_images(method, pool, predicted, known, 10, seed=1)
    assert len(set(chosen.tolist())) == 10
    np.testing.assert_array_equal(chosen, choose_images(method, pool, predicted, known, 10, seed=1))
    everything = choose_images(method, pool, predicted, known, 100, seed=1)
    assert sorted(everything.tolist()) == list(range(60))


def test_copies_do_not_fill_the_budget_of_diverse_choices():
    pool = np.repeat(np.eye(4), 10, axis=0)
    predicted = np.full((40, 2), 0.5)
    for method in ("uncertain-diverse", "k-center", "k-means++"):
        chosen = choose_images(method, pool, predicted, np.zeros((0, 4)), 4, seed=0)
        assert len({int(index) // 10 for index in chosen}) == 4, method


def test_margin_takes_the_most_uncertain_first():
    predicted = np.array([[0.9, 0.1], [0.55, 0.45], [0.7, 0.3]])
    assert choose_images("margin", np.eye(3), predicted, np.eye(3), 2).tolist() == [1, 2]
    assert choose_images("entropy", np.eye(3), predicted, np.eye(3), 2).tolist() == [1, 2]


def test_next_writes_a_table_and_a_page_without_labelled_images(place, capsys):  # noqa: F811
    save_image(Path("photos/red/extra.png"), "red", 1)
    write("pool.csv", "path", "photos/red/extra.png", *(f"more/red-{n}.png" for n in range(4)))
    found = result(capsys, "next", "photos", "--unlabelled", "pool.csv", *MODEL, "--budget", 3)
    assert found["files"] == ["next.csv", "next.html"]
    assert found["notes"] == ["1 images of pool.csv are labelled already: left out"]
    rows = read("next.csv")
    assert len(rows) == 3
    assert all(not row["label"] and row["suggested_label"] in COLOURS for row in rows.values())
    assert refused(capsys, "apply", "photos", write("unnamed.csv", "path,labels", "x,y"), "--out", "o.csv")
    code, out, _ = label(capsys, "apply", "photos", "next.csv", "--out", "o.csv")
    assert code == 0, "an empty column of labels decides nothing"
    assert "3 undecided" in out


def test_next_works_from_one_label_of_each_class(place, capsys):  # noqa: F811
    write("few.csv", "path,label", *(f"photos/{name}/0.png,{name}" for name in COLOURS))
    found = result(capsys, "next", "few.csv", "--unlabelled", "more", *MODEL, "--budget", 5)
    assert (found["n_labelled"], len(found["images"])) == (3, 5)


def test_bad_input_of_next_is_one_line(place, capsys):  # noqa: F811
    given = ("next", "photos", "--unlabelled", "more", *MODEL)
    assert "--budget" in refused(capsys, *given, "--budget", 0)
    assert "invalid choice: 'best'" in refused(capsys, *given, "--method", "best")
    with pytest.raises(ValueError, match="unknown method 'best'"):
        vitrail.choose_images_to_label("photos", "more", "model.safetensors", method="best")
