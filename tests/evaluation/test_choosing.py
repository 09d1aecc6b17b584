"""Selection of the images of an evaluation."""

import pytest

from tests.data.making import encoded, tree
from tests.evaluation.made import folder
from vitrail.evaluation.selection import EvaluationData, select_images


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def split_data(tmp_path, *splits):
    for place, split in enumerate(splits):
        folder(tmp_path / "data", ("a", "b"), each=3, begin=100 * place, split=f"{split}/")
    return str(tmp_path / "data")


@pytest.mark.parametrize(
    ("splits", "chosen"),
    [
        (("train", "val", "test"), "test"),
        (("train", "validation"), "validation"),
        (("train", "test"), "test"),
        (("val",), "validation"),
        (("train",), "all"),
    ],
)
def test_held_out_split_is_the_default(tmp_path, splits, chosen):
    found = select_images(EvaluationData(split_data(tmp_path, *splits)))
    assert found.split == chosen
    assert len(found.images) == 7
    assert found.notes == ()


def test_folder_without_splits_is_evaluated_whole(tmp_path):
    found = select_images(EvaluationData(str(folder(tmp_path / "data"))))
    assert (found.split, len(found.images), found.notes) == ("all", 63, ())


def test_requested_split_equals_the_training_split(tmp_path):
    where = str(folder(tmp_path / "data"))
    from vitrail.data.sources import load_dataset

    for fractions in (None, (0.5, 0.3, 0.2)):
        found = select_images(EvaluationData(where, "val"), {"m": {"where": where, "fractions": fractions}})
        trained = load_dataset(where, fractions=fractions)["validation"]
        assert found.images.items.tolist() == trained.items.tolist()
        assert "by content" in found.notes[0]


def test_evaluation_on_training_data_is_noted(tmp_path):
    where = str(folder(tmp_path / "data"))
    trained = {"m": {"where": where + "/../data", "fractions": None}}
    assert "m was trained on" in select_images(EvaluationData(where), trained).notes[-1]
    assert (
        "its metrics are too optimistic: use split='validation'"
        in select_images(EvaluationData(where), trained).notes[-1]
    )
    assert "optimistic" not in " ".join(select_images(EvaluationData(where, "validation"), trained).notes)
    assert "optimistic" not in " ".join(select_images(EvaluationData(where), {"m": {"where": "/elsewhere"}}).notes)


def test_training_data_is_recognised_by_its_recorded_path(tmp_path, monkeypatch):
    where = str(folder(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other" / "data").mkdir(parents=True)
    here, elsewhere = {"where": "../data", "path": where}, {"where": "data", "path": str(tmp_path / "other" / "data")}
    assert "m was trained on" in select_images(EvaluationData("data"), {"m": here}).notes[-1]
    assert select_images(EvaluationData("data"), {"m": elsewhere}).notes == ()


def test_every_model_trained_on_the_data_is_noted(tmp_path):
    where = str(folder(tmp_path / "data"))
    trained = {"a": None, "b": {"where": where, "fractions": None}, "c": {"where": where, "fractions": [0.5, 0.5, 0.0]}}
    assert [note.split(" was ")[0] for note in select_images(EvaluationData(where), trained).notes] == ["b", "c"]
    assert "c was trained on" in select_images(EvaluationData(where, "validation"), trained).notes[-1]
    assert "another split of" in select_images(EvaluationData(where, "validation"), trained).notes[-1]


def test_digits_have_a_test_split(tmp_path):
    found = select_images(EvaluationData("digits"))
    assert (found.split, len(found.images)) == ("test", 270)


def test_missing_split_is_an_error(tmp_path):
    where = split_data(tmp_path, "train", "val")
    for asked in ("test", "tset"):
        with pytest.raises(ValueError, match=f"has no {asked} split: it has train, validation"):
            select_images(EvaluationData(where, asked))


def test_limit_is_deterministic_and_covers_all_classes(tmp_path):
    where = str(folder(tmp_path / "data"))
    found = select_images(EvaluationData(where, limit=14))
    assert len(found.images) == 14
    assert (found.images.count_classes() > 0).all()
    assert found.images.items.tolist() == select_images(EvaluationData(where, limit=14)).images.items.tolist()
    assert found.notes == ("14 of 63 images, evenly spaced",)
    assert select_images(EvaluationData(where, limit=1000)).notes == ()
    with pytest.raises(ValueError, match="limit= must be >= 1, got 0"):
        select_images(EvaluationData(where, limit=0))


def test_unreadable_files_are_skipped_and_listed(tmp_path):
    good = encoded(7)
    root = tree(
        tmp_path / "data",
        {
            "a/1.png": 1,
            "a/empty.png": b"",
            "a/cut.png": good[: len(good) // 2],
            "b/2.png": 2,
            "b/page.jpg": b"<html>not found</html>",
        },
    )
    found = select_images(EvaluationData(str(root)))
    assert len(found.images) == 2
    assert sorted(found.skipped) == [str(root / name) for name in ("a/cut.png", "a/empty.png", "b/page.jpg")]
    assert all(found.skipped.values())


def test_no_readable_image_is_an_error(tmp_path):
    root = tree(tmp_path / "data", {"a/1.png": b"", "b/2.png": b""})
    with pytest.raises(ValueError, match=r"none of the 2 images of .* can be used: .*1\.png"):
        select_images(EvaluationData(str(root)))


def test_quarantined_images_are_skipped(tmp_path):
    root = folder(tmp_path / "data", ("a", "b"), each=2)
    listed = tmp_path / "bad.txt"
    listed.write_text(f"{root / 'a' / '0000.png'}\tblurred\n", encoding="utf-8")
    found = select_images(EvaluationData(str(root), quarantine=str(listed)))
    assert len(found.images) == 4
    assert found.skipped == {str(root / "a" / "0000.png"): f"listed in {listed}"}


def test_classes_from_file_names(tmp_path):
    root = tree(tmp_path / "flat", {"0002_shark.png": 1, "0007_cock.png": 2, "more/0007_hen.png": 3})
    found = select_images(EvaluationData(str(root), label_from=r"^(\d+)_"))
    assert found.images.classes == ("0002", "0007")
    assert found.images.targets.tolist() == [0, 1, 1]
    assert select_images(EvaluationData(str(root), label_from=r"[a-z]+(?=\.)")).images.classes == (
        "cock",
        "hen",
        "shark",
    )
    with pytest.raises(ValueError, match=r"matches no class in .*0002_shark\.png"):
        select_images(EvaluationData(str(root), label_from="^(x)_"))
    with pytest.raises(ValueError, match="is not a regular expression"):
        select_images(EvaluationData(str(root), label_from="("))


def test_flat_folder_error_suggests_label_from(tmp_path):
    root = tree(tmp_path / "flat", {"0002_shark.png": 1})
    with pytest.raises(ValueError, match=r"no class folders.*label_from="):
        select_images(EvaluationData(str(root)))
