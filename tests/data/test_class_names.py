"""The names of ImageNet-1k in the package, and the names that files give to classes."""

import pytest

from vitrail.data.class_names import NamesByIndex, name_outputs, read_names_file


def test_imagenet_names_are_those_of_torchvision_in_order():
    categories = pytest.importorskip("torchvision.models._meta", reason="torchvision is not installed")
    assert list(name_outputs("imagenet", 1000)) == categories._IMAGENET_CATEGORIES


def test_imagenet_ids_are_those_of_timm_in_order():
    timm = pytest.importorskip("timm.data", reason="timm is not installed")
    parsed = read_names_file("imagenet", "--names")
    assert isinstance(parsed, NamesByIndex)
    info = timm.ImageNetInfo()
    assert [names[-1] for _, names in parsed.names] == [info.index_to_label_name(index) for index in range(1000)]


def test_imagenet_names_are_unique():
    assert len(set(name_outputs("imagenet", 1000))) == 1000


def test_file_in_this_folder_takes_precedence_over_the_word(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imagenet").write_text("a\nb\n")
    assert name_outputs("imagenet", 2) == ("a", "b")
    with pytest.raises(ValueError, match="must list the 3 classes of the model in order"):
        name_outputs("imagenet", 3)
