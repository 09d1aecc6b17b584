"""Folders as people have them: each is trained on, or refused in one line with the command that then works."""

import io
import json
import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.data.making import encoded, tree
from tests.evaluation.made import model
from vitrail.cli import main
from vitrail.data.audit import scan
from vitrail.data.sources import load_dataset
from vitrail.serve.models import ModelOpener

SHARED = Path(__file__).parents[3] / "shared" / "data"
TINY = ("--model", "Ti/8", "--set", "model.size.depth=1", "--set", "model.size.width=32", "--set", "model.size.heads=1")
TINY += ("--size", "16", "--batch-size", "4", "--steps", "2", "--workers", "0", "--quiet")


@pytest.fixture(autouse=True)
def _own_directory(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.chdir(tmp_path)


def mask(number: int) -> bytes:
    """Return a palette PNG of three values."""
    image = Image.fromarray(np.random.default_rng(number).integers(1, 4, (40, 40), dtype=np.uint8))
    out = io.BytesIO()
    image.convert("P").save(out, "PNG")
    return out.getvalue()


def photo(number: int) -> bytes:
    """Return a JPEG of many colours."""
    return encoded(number, "JPEG")


def classes(names=("cat", "dog"), each=6, root="", suffix="png") -> dict[str, int | bytes]:
    """Return the files of class folders."""
    return {f"{root}{name}/{i}.{suffix}": 1000 * k + i for k, name in enumerate(names) for i in range(each)}


def number(*patterns: str, make=int) -> dict[str, int | bytes]:
    """Return five different files of each pattern."""
    return {pattern.format(i): make(100 * k + i) for k, pattern in enumerate(patterns) for i in range(5)}


def refused(capsys, *arguments: str) -> str:
    """Run a command that must end with one line and exit code 2, and return the line."""
    assert main(list(arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def suggested(line: str) -> list[str]:
    """Return the arguments of the command that a message suggests."""
    words = shlex.split(line.partition("use vitrail ")[2].partition(" (or ")[0])
    assert words[:1] == ["check"], line
    return words[1:]


def train(*arguments: str, out: str = "run") -> tuple[str, ...]:
    """Train two steps and return the labels of the model."""
    assert main(["train", *arguments, *TINY, "--out", out]) == 0
    return vitrail.load(Path(out) / "model.safetensors").labels


def follow(capsys, *arguments: str, out: str = "run") -> tuple[str, ...]:
    """Run `vitrail check`, which refuses; check and train with the suggested command; return the labels."""
    command = suggested(refused(capsys, "check", *arguments))
    assert suggested(refused(capsys, "train", *arguments, *TINY)) == command
    assert main(["check", *command]) == 0, capsys.readouterr()
    return train(*command, out=out)


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (("cat_001.jpg", "cat_002.jpg", "dog_001.jpg", "dog_002.jpg"), ("cat", "dog")),
        (("cat_001.jpg", "cat-002.jpg", "cat (3).jpg", "dog_1.jpg", "dog (2).jpg", "dog-3.jpg"), ("cat", "dog")),
        (("0001_cat.jpg", "0002_dog.jpg", "0003_cat.jpg", "0004_dog.jpg"), ("cat", "dog")),
        (("cat.0.jpg", "cat.1.jpg", "dog.0.jpg", "dog.1.jpg"), ("cat", "dog")),
        (("great_pyrenees_1.jpg", "great_pyrenees_2.jpg", "Abyssinian_1.jpg", "Abyssinian_9.jpg"), None),
    ],
)
def test_labels_in_names_are_refused_with_a_pattern_that_reads_them(names, labels, tmp_path, capsys):
    tree(tmp_path / "photos", {name: photo(number) for number, name in enumerate(names)})
    line = refused(capsys, "check", "photos")
    assert "no class folders, but labels in the names" in line
    assert main(["check", *suggested(line)]) == 0
    shown = capsys.readouterr().out
    assert f"{names[0]}" in shown
    assert f"→ {(labels or ('Abyssinian',))[0]}" in shown
    found = load_dataset("photos", label_from=suggested(line)[-1])["train"].classes
    assert found == (labels or ("Abyssinian", "great_pyrenees"))


def test_labels_in_names_train_and_are_kept_in_the_recipe(tmp_path, capsys):
    files = {f"{name}_{i:03d}.jpg": photo(1000 * k + i) for k, name in enumerate(("cat", "dog")) for i in range(8)}
    tree(tmp_path / "photos", files)
    assert follow(capsys, "photos") == ("cat", "dog")
    recipe = json.loads(Path("run/recipe.json").read_text())
    assert recipe["data"]["label_from"] == r"^(.+)_\d+\."
    capsys.readouterr()
    assert main(["evaluate", "run", "photos", "--split", "validation", "--json", "--workers", "0"]) == 0
    same_data = json.loads(capsys.readouterr().out)
    os.rename("run", "moved")  # the run is found by nothing but its own files
    os.chdir("/")
    assert main(["evaluate", str(tmp_path / "moved"), "--json", "--workers", "0"]) == 0
    own_data = json.loads(capsys.readouterr().out)
    assert own_data["split"] == "validation"
    assert own_data["top1"] == same_data["top1"]
    assert own_data["n"] == same_data["n"]
    assert "data and splits of the training run of moved" in own_data["data"]["notes"]
    os.rename(tmp_path / "photos", tmp_path / "gone")
    line = refused(capsys, "evaluate", str(tmp_path / "moved"))
    assert "is not at" in line
    assert line.endswith("any more: give DATA")


def test_labels_in_names_are_used_by_every_command(tmp_path, capsys):
    files = {f"{name}_{i}.png": 100 * k + i for k, name in enumerate(("cat", "dog")) for i in range(10)}
    tree(tmp_path / "photos", files)
    pattern = ("--label-from", "^(.+)_")
    assert train("photos", *pattern) == ("cat", "dog")
    os.remove("run/summary.json")  # as if it had been killed before
    assert main(["train", "--resume", "run", "--quiet"]) == 0
    assert main(["train", "--recipe", "run/recipe.json", "--out", "again", "--quiet"]) == 0
    assert vitrail.load("again/model.safetensors").labels == ("cat", "dog")
    short = ("--method", "mae", *(word for word in TINY if word != "Ti/8"))
    short = tuple(word for word in short if word != "--model")
    assert main(["pretrain", "photos", *pattern, *short, "--out", "mae"]) == 0
    assert json.loads(Path("mae/run.json").read_text())["labels"] == ["cat", "dog"]
    capsys.readouterr()
    common = ("--workers", "0", "--json")
    assert main(["transfer", "run", "photos", *pattern, "--methods", "knn", "--out", "table", "--quiet", *common]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["method"] == "knn"
    assert main(["evaluate", "run", "--probe", "knn", *common]) == 0
    assert json.loads(capsys.readouterr().out)["data"]
    Path("names.csv").write_text("cat,dog\ndog,cat\n")  # the pattern stays that of training
    assert main(["evaluate", "run", "photos", "--names", "names.csv", *common]) == 0
    assert "cat is dog, dog is cat" in " ".join(json.loads(capsys.readouterr().out)["data"]["notes"])
    assert "--names nowhere: no such file" in refused(capsys, "evaluate", "run", "photos", "--names", "nowhere")


def test_a_model_without_names_shows_those_of_a_file(tmp_path, capsys):
    model(tmp_path / "model.safetensors", None, classes=3)
    tree(tmp_path / "photos", classes(("0", "1", "2")))
    Path("names.txt").write_text("daisy\nrose\ntulip\n")
    names = ("--names", "names.txt")
    assert main(["evaluate", "model.safetensors", "photos", *names, "--json", "--workers", "0"]) == 0
    assert [row["class"] for row in json.loads(capsys.readouterr().out)["per_class"]] == ["daisy", "rose", "tulip"]
    assert main(["predict", "model.safetensors", "photos", "--out", "out.csv", "--runtime", "torch", *names]) == 0
    rows = Path("out.csv").read_text().splitlines()[1:]
    assert {row.split(",")[1] for row in rows} <= {"daisy", "rose", "tulip"}
    assert (
        main(["inspect", "model.safetensors", "photos/0/0.png", "--terminal", "relevance", "--target", "rose", *names])
        == 0
    )
    assert refused(capsys, "evaluate", "model.safetensors").endswith("the data it was trained on: give DATA")
    served = ModelOpener(1, {"runtime": "torch"}, "names.txt").open_any("model.safetensors")
    assert served.contract.labels == ("daisy", "rose", "tulip")
    line = refused(capsys, "predict", "model.safetensors", "photos", "--out", "b.csv", "--names", "imagenet")
    assert "--names imagenet must list the 3 classes of the model in order" in line


def test_training_shows_ten_files_with_their_labels(tmp_path, capsys):
    tree(tmp_path / "photos", {f"{name}_{i}.jpg": photo(100 * k + i) for k, name in enumerate("ab") for i in range(8)})
    arguments = [word for word in TINY if word != "--quiet"]
    assert main(["train", "photos", "--label-from", r"^(?P<label>.+)_", *arguments, "--out", "run"]) == 0
    shown = "".join(capsys.readouterr())
    lines = [line for line in shown.splitlines() if line.endswith(("→ a", "→ b"))]
    assert len(lines) == 10


def test_pattern_errors_count_the_files_and_name_the_first(tmp_path, capsys):
    tree(tmp_path / "photos", {"cat_1.jpg": 1, "cat_2.jpg": 2, "readme.png": 3, "zebra.png": 4})
    for command in ("check", "train", "pretrain"):
        method = ("--method", "mae") if command == "pretrain" else ()
        line = refused(capsys, command, "photos", *method, "--label-from", "^(.+)_")
        assert "'^(.+)_' matches no class in 2 of 4 files, first photos/readme.png" in line
    assert "is not a regular expression" in refused(capsys, "check", "photos", "--label-from", "(")
    assert "needs a folder of images" in refused(capsys, "check", "nowhere", "--label-from", "(.)")


def test_labels_in_paths_keep_the_split_folders_inside_the_class_folders(tmp_path, capsys):
    files = {
        f"{name}/{split}/{i}.png": 100 * k + i
        for k, name in enumerate("ab")
        for i, split in enumerate(("train", "val"))
    }
    tree(tmp_path / "photos", files)
    assert "--label-from '^([^/]+)/' uses them" in load_dataset("photos").notes[-1]
    found = load_dataset("photos", label_from="^([^/]+)/")
    assert {name: images.class_counts for name, images in found.splits.items()} == {
        "train": {"a": 1, "b": 1},
        "validation": {"a": 1, "b": 1},
    }


@pytest.mark.parametrize(
    "files",
    [
        {f"photos/{path}": n for path, n in classes().items()},
        {f"photos/train/{path}": n for path, n in classes().items()}
        | {f"photos/validation/{path}": 50 + n for path, n in classes().items()},
        {f"photos/{path}": n for path, n in classes().items()}
        | {"readme.txt": b"x", "docs/how.txt": b"x", "a.zip": b"x"},
        {f"photos/train/{path}": n for path, n in classes().items()}
        | {f"photos/valid/{path}": 50 + n for path, n in classes().items()}
        | {"assets/logo.png": 9, "assets/figure.png": 10},
        {f"photos/{path}": n for path, n in classes().items()} | {"assets/logo.png": 9},
    ],
)
def test_one_level_too_high_is_refused_with_the_folder_below(files, tmp_path, capsys):
    tree(tmp_path / "download", files)
    assert "one level too high" in refused(capsys, "check", "download")
    assert follow(capsys, "download") == ("cat", "dog")


def test_one_level_too_high_can_be_insisted_on(tmp_path, capsys):
    tree(tmp_path / "download", {f"photos/{path}": n for path, n in classes().items()} | classes(("assets",)))
    assert "(or classes:download if every folder is a class)" in refused(capsys, "check", "download")
    assert train("classes:download") == ("assets", "photos")
    assert refused(capsys, "check", "classes:nowhere").endswith("classes:nowhere: no such folder")
    os.chdir("/")
    assert main(["evaluate", str(tmp_path / "run"), "--workers", "0"]) == 0  # classes: is resolved like any path


def test_images_beside_masks_are_read_as_masks(tmp_path, capsys):
    names = [f"{name}_{i}" for name in ("Bengal", "pug") for i in range(6)]
    files = {f"images/{name}.jpg": photo(n) for n, name in enumerate(names)}
    files |= {f"annotations/trimaps/{name}.png": mask(n) for n, name in enumerate(names)}
    tree(tmp_path / "pets", files | {"annotations/xmls/a.xml": b"<a/>"})
    dataset = load_dataset("pets")
    assert (dataset.kind, dataset["train"].classes) == ("masks", ("1", "2", "3"))
    assert train("pets/images", "--label-from", r"^(.+)_\d+\.") == ("Bengal", "pug")  # the names are labels too


def test_labels_in_the_names_of_images_beside_masks_in_splits(tmp_path, capsys):
    files: dict[str, int | bytes] = {}
    for offset, split in ((0, "train"), (100, "validation")):
        for n, name in enumerate(f"{name}_{i}" for name in ("Bengal", "pug") for i in range(5)):
            files |= {f"{split}/images/{name}.jpg": photo(offset + n), f"{split}/masks/{name}.png": mask(offset + n)}
    tree(tmp_path / "pets", files)
    assert {split: len(images) for split, images in load_dataset("pets").splits.items()} == {
        "train": 10,
        "validation": 10,
    }
    line = refused(capsys, "check", "pets", "--label-from", r"^(.+)_\d+\.")  # the masks have the same names
    assert "images beside masks" in line
    assert suggested(line) == ["pets/*/images/*", "--label-from", r"^(.+)_\d+\."]
    assert train(*suggested(line)) == ("Bengal", "pug")
    assert "splits" not in json.loads(Path("run/run.json").read_text())["data"]["notes"]


def test_published_files_are_refused_with_their_name(tmp_path, capsys):
    names = [f"{name}_{i}" for name in ("Bengal", "pug") for i in range(6)]
    files: dict[str, int | bytes] = {f"images/{name}.jpg": photo(n) for n, name in enumerate(names)}
    files |= {f"annotations/trimaps/{name}.png": mask(n) for n, name in enumerate(names)}
    listed = [f"{name} 1 1 1\n" for name in names]
    files |= {
        "annotations/trainval.txt": "".join(listed[::2]).encode(),
        "annotations/test.txt": "".join(listed[1::2]).encode(),
    }
    tree(tmp_path / "pets", files)
    assert suggested(line := refused(capsys, "check", "pets")) == ["pets:pets"]
    assert "for masks masks:pets" in line
    assert load_dataset("masks:pets")["train"].classes == ("1", "2", "3")
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "inner").symlink_to(tmp_path / "pets")
    assert suggested(refused(capsys, "check", "up")) == ["pets:up/inner"]  # without a second step
    assert follow(capsys, "pets") == ("Bengal", "pug")


def test_yolo_and_coco_folders_are_refused_with_the_remedy(tmp_path, capsys):
    tree(tmp_path / "yolo", {"train/images/1.jpg": photo(1), "train/labels/1.txt": b"0 1 1 1 1", "data.yaml": b""})
    tree(tmp_path / "coco", {"train2017/1.jpg": photo(1), "val2017/2.jpg": photo(2), "annotations/a.json": b"{}"})
    for name in ("yolo", "coco"):
        assert "list the images in a CSV of path,label" in refused(capsys, "train", name)


@pytest.mark.parametrize("ending", [".png", "_mask.png"])
def test_masks_among_the_images_of_class_folders_are_refused(ending, tmp_path, capsys):
    suffix = "jpg" if ending == ".png" else "png"
    files: dict[str, int | bytes] = {}
    for number, path in enumerate(f"{name}/{name} ({i})" for name in ("benign", "malignant") for i in range(6)):
        files |= {f"{path}.{suffix}": number if suffix == "png" else photo(number), f"{path}{ending}": mask(number)}
    tree(tmp_path / "scans", files)
    assert "masks among the images of benign" in refused(capsys, "check", "scans")
    assert follow(capsys, "scans") == ("benign", "malignant")
    assert json.loads(Path("run/run.json").read_text())["data"]["splits"]["train"]["images"] <= 12


LEGITIMATE = {
    "cat and dog": classes(),
    "images and annotations among others": classes(("images", "annotations", "charts", "text")),
    "images and labels that are photographs": classes(("images", "labels")),
    "photo and mask with the same file names": classes(("photo", "mask")),
    "face masks": classes(("with_mask", "without_mask")),
    "a class of trains": classes(("train", "bus", "car")),
    "years inside the classes": number("hat/{}.png", "shoes/2020/{}.png", "shoes/2021/{}.png"),
    "years inside all classes": number("a/1/{}.png", "a/2/{}.png", "b/1/{}.png", "b/2/{}.png"),
    "splits inside the classes": number("a/train/{}.png", "a/test/{}.png", "b/train/{}.png", "b/test/{}.png"),
    "labels in the names too": number("cat/cat_{}.png", "dog/dog_{}.png"),
    "documents and photographs": classes(("docs", "photos")),
    "numbers": classes(tuple(map(str, range(3)))),
    "a zip beside the classes": classes() | {"photos.zip": b"PK", "notes.txt": b"x"},
    "copies in two formats": number("a/{}.png", "a/{}.bmp", "b/{}.png", "b/{}.bmp"),
    "drawings beside labelled drawings": number("a/{}.png", "a/{}_label.png", "b/{}.png", make=mask),
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_legitimate_class_folders_are_not_refused(name, tmp_path):
    root = tree(tmp_path / "photos", LEGITIMATE[name])
    expected = {path.name for path in root.iterdir() if path.is_dir()}
    assert set(load_dataset("photos")["train"].classes) == expected


def test_splits_in_a_csv_of_any_name(tmp_path, capsys):
    files = {f"{i}.png": i for i in range(12)}
    rows = [f"{i}.png,{'cat' if i % 2 else 'dog'},{'train' if i < 8 else 'val'}" for i in range(12)]
    tree(tmp_path / "photos", files | {"annotations.csv": "\n".join(["file,class,split", *rows]).encode()})
    assert suggested(refused(capsys, "check", "photos")) == ["photos/annotations.csv"]
    assert follow(capsys, "photos") == ("cat", "dog")
    os.rename("photos/annotations.csv", "photos/labels.csv")  # a name that is found by itself
    assert train("photos", out="second") == ("cat", "dog")


def test_train_validation_and_test_folders(tmp_path, capsys):
    files = {
        f"{split}/{path}": 100 * k + n
        for k, split in enumerate(("Train", "VAL", "test"))
        for path, n in classes().items()
    }
    tree(tmp_path / "photos", files)
    assert train("photos") == ("cat", "dog")
    capsys.readouterr()
    assert main(["evaluate", "run", "--json", "--workers", "0"]) == 0
    assert json.loads(capsys.readouterr().out)["split"] == "test"


def test_flat_split_folders_with_labels_in_names(tmp_path, capsys):
    names = [(split, f"{name}.{i}") for split in ("train", "test") for name in ("cat", "dog") for i in range(5)]
    tree(tmp_path / "photos", {f"{split}/{name}.jpg": photo(n) for n, (split, name) in enumerate(names)})
    assert suggested(refused(capsys, "check", "photos"))[0] == "photos"
    assert follow(capsys, "photos") == ("cat", "dog")


def test_an_archive_alone_is_refused_with_the_command_that_unpacks_it(tmp_path, capsys):
    tree(tmp_path / "photos", {"photos.zip": b"PK"})
    assert "unpack it first: cd photos && unzip photos.zip" in refused(capsys, "check", "photos")
    assert "is an archive: unpack it first: cd photos && unzip" in refused(capsys, "check", "photos/photos.zip")


def test_a_test_set_without_labels_is_refused_with_the_training_folder(tmp_path, capsys):
    tree(
        tmp_path / "photos",
        {f"train/{path}": n for path, n in classes().items()} | {"test/1.png": 901, "test/2.png": 902},
    )
    line = refused(capsys, "check", "photos")
    assert "photos/test has 2 images and no class folders, unlike photos/train" in line
    assert train("photos/train") == ("cat", "dog")


def test_numbered_classes_get_names(tmp_path, capsys):
    tree(tmp_path / "photos", classes(("0", "1", "2")))
    Path("names.txt").write_text("daisy\nrose\ntulip\n")
    assert train("photos", "--names", "names.txt") == ("daisy", "rose", "tulip")
    os.chdir("/")
    assert main(["evaluate", str(tmp_path / "run"), "--workers", "0"]) == 0  # the recipe has the file's absolute path
    capsys.readouterr()
    os.chdir(tmp_path)
    assert main(["check", "photos", "--names", "names.txt"]) == 0
    assert "class names from names.txt: 0 is daisy, 1 is rose, 2 is tulip" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("folders", "file", "text"),
    [
        (("1", "2", "3"), "names.txt", "daisy\nrose\ntulip\n"),  # counted from 1
        (("000", "001", "002"), "names.json", '["daisy", "rose", "tulip"]'),
        (("0", "1", "2"), "class_to_idx.json", '{"daisy": 0, "rose": 1, "tulip": 2}'),
        (("a", "b", "c"), "names.csv", "folder,name\na,daisy\nb,rose\nc,tulip\n"),
        (("n1", "n2", "n3"), "names.tsv", "n1\tdaisy\nn2\trose\nn3\ttulip\n"),
        (("n11939491", "n12057211", "n12267677"), "LOC_synset_mapping.txt",
         "n11939491 daisy, ox-eye\nn12057211 rose\nn12267677 tulip, bulb\n"),
        (("n11939491", "n12057211", "n12267677"), "imagenet_class_index.json",
         '{"0": ["n11939491", "daisy"], "1": ["n12057211", "rose"], "7": ["n12267677", "tulip"]}'),
    ],
)  # fmt: skip
def test_files_of_class_names(folders, file, text, tmp_path):
    tree(tmp_path / "photos", classes(folders, each=2))
    Path(file).write_text(text)
    assert load_dataset("photos", names=file)["train"].classes == ("daisy", "rose", "tulip")


def test_class_name_errors_are_one_line(tmp_path, capsys):
    tree(tmp_path / "photos", classes(("0", "7")))
    Path("names.txt").write_text("daisy\nrose\n")
    assert "has no name for 1 of 2 classes, first '7'" in refused(capsys, "check", "photos", "--names", "names.txt")
    assert "--names nowhere: no such file" in refused(capsys, "check", "photos", "--names", "nowhere")


def test_wordnet_ids_get_imagenet_names(tmp_path, capsys):
    tree(tmp_path / "imagenet", classes(("n01440764", "n02012849", "n03126707")))  # also the word of --names
    assert train("imagenet", "--names", "imagenet") == ("tench", "crane bird", "crane")
    assert main(["check", "imagenet", "--names", "imagenet"]) == 0
    assert "n01440764 is tench" in capsys.readouterr().out


def test_mixed_case_and_unicode_names(tmp_path):
    tree(tmp_path / "bücher und mehr", classes(("Katze", "Größe", "猫", "CAFÉ"), suffix="PNG"))
    assert set(train("bücher und mehr")) == {"Katze", "Größe", "猫", "CAFÉ"}


def test_symbolic_links_to_files_folders_and_loops(tmp_path):
    tree(tmp_path / "store", classes(("a", "b", "c"), each=8))
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    for i in range(8):
        (tmp_path / "photos" / "cat" / f"{i}.png").symlink_to(tmp_path / "store" / "a" / f"{i}.png")
    (tmp_path / "photos" / "dog").symlink_to(tmp_path / "store" / "b")
    (tmp_path / "photos" / "cat" / "loop").symlink_to(tmp_path / "photos")
    (tmp_path / "photos" / "self").symlink_to(tmp_path / "photos")  # no class
    (tmp_path / "store" / "b" / "self").symlink_to(tmp_path / "store" / "b")
    assert train("photos") == ("cat", "dog")


def test_the_check_cache_knows_a_file_by_every_route(tmp_path, monkeypatch):
    tree(tmp_path / "up" / "photos", classes(each=3))
    (tmp_path / "link").symlink_to("up/photos")
    (tmp_path / "linked").mkdir()
    for name in ("cat", "dog"):
        (tmp_path / "linked" / name).mkdir()
        for i in range(3):
            (tmp_path / "linked" / name / f"{i}.png").symlink_to(tmp_path / "up" / "photos" / name / f"{i}.png")
    rows = [f"photos/{name}/{i}.png,{name}" for name in ("cat", "dog") for i in range(3)]
    (tmp_path / "up" / "list.csv").write_text("\n".join(["path,label", *rows]))
    scanned: list[int] = []
    inspect = scan.inspect_image
    monkeypatch.setattr(scan, "inspect_image", lambda images, index: (scanned.append(index), inspect(images, index))[1])

    def count_scanned(source: str, *options: str) -> int:
        scanned.clear()
        assert main(["check", source, "--workers", "0", *options]) == 0
        return len(scanned)

    assert count_scanned("up/photos") == 6
    routes = (
        "up/photos/",
        str(tmp_path / "up" / "photos"),
        "link",
        "linked",
        "classes:up",
        "up/list.csv",
        "up/../up/photos",
    )
    assert {route: count_scanned(route) for route in routes} == dict.fromkeys(routes, 0)
    os.utime("up/photos/cat/0.png", ns=(1, 1))
    assert count_scanned("link") == 1
    assert count_scanned("up/photos", "--no-cache") == 6


@pytest.mark.skipif(not SHARED.exists(), reason="no photographs beside this checkout (../shared/data)")
def test_real_pets_clothing_and_imagenet_samples(capsys):
    assert load_dataset(SHARED / "pets").kind == "masks"
    line = refused(capsys, "check", str(SHARED / "pets"), "--label-from", r"^(.+)_\d+\.")
    source, option, pattern = suggested(line)
    found = load_dataset(source, label_from=pattern)
    assert option == "--label-from"
    assert {split: len(images) for split, images in found.splits.items()} == {"train": 400, "validation": 150}
    assert len(found["train"].classes) == 37
    assert len(load_dataset(SHARED / "clothing")["train"].classes) == 10
    assert "holds" in refused(capsys, "check", str(SHARED))
    named = load_dataset(
        SHARED / "imagenet-samples", label_from=r"^(\d+)_", names="imagenet", fractions=(1.0, 0.0, 0.0)
    )
    images = named["train"]
    pairs = [(images.classes[images.targets[i]], Path(images.name(i)).stem[5:]) for i in range(len(images))]
    differing = [
        pair for pair in pairs if re.sub(r"[^a-z]", "", pair[0].lower()) != re.sub(r"[^a-z]", "", pair[1].lower())
    ]
    assert differing == []
