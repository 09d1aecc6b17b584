"""Which pictures a model is judged on."""

import pytest

from tests.data.making import encoded, tree
from tests.evaluation.made import folder
from vitrail.evaluation.choosing import Wanted, choose


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
def test_what_is_held_out_is_taken_first(tmp_path, splits, chosen):
    found = choose(Wanted(split_data(tmp_path, *splits)))
    assert found.split == chosen
    assert len(found.pictures) == 7
    assert found.notes == ()


def test_a_folder_without_splits_is_judged_whole(tmp_path):
    found = choose(Wanted(str(folder(tmp_path / "data"))))
    assert (found.split, len(found.pictures), found.notes) == ("all", 63, ())


def test_asked_for_a_split_gives_the_one_that_training_makes(tmp_path):
    where = str(folder(tmp_path / "data"))
    from vitrail.data.sources import read

    for fractions in (None, (0.5, 0.3, 0.2)):
        found = choose(Wanted(where, "val"), {"m": {"where": where, "fractions": fractions}})
        trained = read(where, fractions=fractions)["validation"]
        assert found.pictures.items.tolist() == trained.items.tolist()
        assert "by content" in found.notes[0]


def test_judging_on_what_was_trained_on_is_said(tmp_path):
    where = str(folder(tmp_path / "data"))
    trained = {"m": {"where": where + "/../data", "fractions": None}}
    assert "m was trained on pictures" in choose(Wanted(where), trained).notes[-1]
    assert "these numbers flatter it: --split validation" in choose(Wanted(where), trained).notes[-1]
    assert "flatter" not in " ".join(choose(Wanted(where, "validation"), trained).notes)
    assert "flatter" not in " ".join(choose(Wanted(where), {"m": {"where": "/elsewhere"}}).notes)


def test_data_is_known_by_the_place_that_the_run_wrote_down(tmp_path, monkeypatch):
    where = str(folder(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other" / "data").mkdir(parents=True)
    here, elsewhere = {"where": "../data", "path": where}, {"where": "data", "path": str(tmp_path / "other" / "data")}
    assert "m was trained on" in choose(Wanted("data"), {"m": here}).notes[-1]
    assert choose(Wanted("data"), {"m": elsewhere}).notes == ()


def test_every_model_that_was_trained_on_it_is_named(tmp_path):
    where = str(folder(tmp_path / "data"))
    trained = {"a": None, "b": {"where": where, "fractions": None}, "c": {"where": where, "fractions": [0.5, 0.5, 0.0]}}
    assert [note.split(" was ")[0] for note in choose(Wanted(where), trained).notes] == ["b", "c"]
    assert "c was trained on" in choose(Wanted(where, "validation"), trained).notes[-1]
    assert "divided otherwise" in choose(Wanted(where, "validation"), trained).notes[-1]


def test_digits_have_a_test_split(tmp_path):
    found = choose(Wanted("digits"))
    assert (found.split, len(found.pictures)) == ("test", 270)


def test_a_split_that_is_not_there_is_refused(tmp_path):
    where = split_data(tmp_path, "train", "val")
    for asked in ("test", "tset"):
        with pytest.raises(ValueError, match=f"has no {asked} split: it has train, validation"):
            choose(Wanted(where, asked))


def test_a_limit_takes_pictures_of_all_classes_and_the_same_ones_again(tmp_path):
    where = str(folder(tmp_path / "data"))
    found = choose(Wanted(where, limit=14))
    assert len(found.pictures) == 14
    assert (found.pictures.counts() > 0).all()
    assert found.pictures.items.tolist() == choose(Wanted(where, limit=14)).pictures.items.tolist()
    assert found.notes == ("14 of 63 pictures, evenly spread over their order",)
    assert choose(Wanted(where, limit=1000)).notes == ()
    with pytest.raises(ValueError, match="--limit 0: at least 1 picture"):
        choose(Wanted(where, limit=0))


def test_bad_files_are_left_out_and_named(tmp_path):
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
    found = choose(Wanted(str(root)))
    assert len(found.pictures) == 2
    assert sorted(found.left_out) == [str(root / name) for name in ("a/cut.png", "a/empty.png", "b/page.jpg")]
    assert all(found.left_out.values())


def test_nothing_that_can_be_read_is_one_line(tmp_path):
    root = tree(tmp_path / "data", {"a/1.png": b"", "b/2.png": b""})
    with pytest.raises(ValueError, match=r"none of the 2 pictures of .* can be used: .*1\.png"):
        choose(Wanted(str(root)))


def test_a_quarantine_is_obeyed(tmp_path):
    root = folder(tmp_path / "data", ("a", "b"), each=2)
    listed = tmp_path / "bad.txt"
    listed.write_text(f"{root / 'a' / '0000.png'}\tblurred\n", encoding="utf-8")
    found = choose(Wanted(str(root), quarantine=str(listed)))
    assert len(found.pictures) == 4
    assert found.left_out == {str(root / "a" / "0000.png"): f"named in {listed}"}


def test_classes_are_found_in_the_names_of_files(tmp_path):
    root = tree(tmp_path / "flat", {"0002_shark.png": 1, "0007_cock.png": 2, "more/0007_hen.png": 3})
    found = choose(Wanted(str(root), label_from=r"^(\d+)_"))
    assert found.pictures.classes == ("0002", "0007")
    assert found.pictures.targets.tolist() == [0, 1, 1]
    assert choose(Wanted(str(root), label_from=r"[a-z]+(?=\.)")).pictures.classes == ("cock", "hen", "shark")
    with pytest.raises(ValueError, match=r"finds no class in .*0002_shark\.png"):
        choose(Wanted(str(root), label_from="^(x)_"))
    with pytest.raises(ValueError, match="is no regular expression"):
        choose(Wanted(str(root), label_from="("))


def test_a_flat_folder_is_refused_with_the_way_out(tmp_path):
    root = tree(tmp_path / "flat", {"0002_shark.png": 1})
    with pytest.raises(ValueError, match=r"no class folders.*--label-from"):
        choose(Wanted(str(root)))
