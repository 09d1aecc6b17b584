"""Labels in CSV, COCO, Label Studio and FiftyOne files: there and back, opened by the projects' own libraries."""

import json
from pathlib import Path

import pytest
from PIL import Image

import vitrail
from tests.labelling.made import label, place, refused, result  # noqa: F401
from vitrail.labelling import FORMATS
from vitrail.labelling.formats import LabelRow, build_table, read_labels, write_labels

NAMES = {
    "csv": "labels.csv",
    "coco": "labels.json",
    "label-studio": "tasks.json",
    "fiftyone": "one",
    "fiftyone-dataset": "all",
}


@pytest.fixture
def table(tmp_path):
    """Create three images, one without a label, one with a predicted label."""
    rows = []
    for number, name in enumerate(("ä b.jpg", "c,d.jpg", "e.png")):
        path = tmp_path / "images" / name
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (20 + number, 10), (number, 0, 0)).save(path)
        rows.append(path)
    return build_table(
        [
            LabelRow(str(rows[0]), ("cat",), "train"),
            LabelRow(str(rows[1]), ("dog",), "validation", 0.75),
            LabelRow(str(rows[2]), (), "train"),
        ],
        ("cat", "dog"),
    )


@pytest.mark.parametrize("form", FORMATS)
def test_a_table_comes_back_from_every_format(table, tmp_path, form):
    out = tmp_path / NAMES[form]
    write_labels(table, out, form)
    found = read_labels(out)
    assert [row.path for row in found.rows] == [row.path for row in table.rows]
    assert [row.labels for row in found.rows] == [("cat",), ("dog",), ()]
    assert [row.confidence for row in found.rows] == [None, 0.75, None]
    assert found.classes == ("cat", "dog")
    if form != "fiftyone":  # it has no splits
        assert [row.split for row in found.rows] == ["train", "validation", "train"]
    assert read_labels(out, form).rows == found.rows


@pytest.mark.parametrize("form", FORMATS)
def test_several_labels_of_an_image_come_back(table, tmp_path, form):
    several = build_table([LabelRow(table.rows[0].path, ("cat", "dog")), LabelRow(table.rows[2].path, ("dog",))])
    write_labels(several, tmp_path / NAMES[form], form)
    assert [row.labels for row in read_labels(tmp_path / NAMES[form]).rows] == [("cat", "dog"), ("dog",)]


def test_a_folder_becomes_a_table_that_train_reads(place, capsys):  # noqa: F811
    found = result(capsys, "convert", "photos", "labels.json", "--format", "coco")
    assert (found["images"], found["classes"]) == (30, ["blue", "green", "red"])
    result(capsys, "convert", "labels.json", "labels.csv")
    audit = vitrail.check("labels.csv")
    assert audit.dataset["train"].classes == ("blue", "green", "red")
    assert sum(map(len, audit.dataset.splits.values())) == 30


def test_decisions_may_be_the_export_of_another_project(place, capsys):  # noqa: F811
    tasks = [
        {"id": 1, "data": {"image": "/data/local-files/?d=photos/blue/9.png"}, "annotations": [choose("red")]},
        {"id": 2, "data": {"image": "/data/local-files/?d=photos/red/0.png"}, "annotations": [choose("blue", True)]},
    ]
    Path("export.json").write_text(json.dumps(tasks))
    counts = result(capsys, "apply", "photos", "export.json", "--out", "new.csv")
    assert (counts["corrected"], counts["undecided"]) == (1, 1)


def choose(name: str, cancelled: bool = False, updated: str = "") -> dict:
    """Return an annotation of Label Studio."""
    value = {"type": "choices", "from_name": "label", "to_name": "image", "value": {"choices": [name]}}
    return {"result": [value], "was_cancelled": cancelled, "updated_at": updated}


def test_the_latest_annotation_counts_and_plain_exports_are_read(tmp_path):
    tasks = [
        {
            "data": {"image": "a.jpg"},
            "annotations": [choose("new", updated="2026-02"), choose("old", updated="2026-01")],
        },
        {"data": {"image": "b.jpg"}, "predictions": [{"score": 0.5, "result": choose("guess")["result"]}]},
    ]
    (tmp_path / "full.json").write_text(json.dumps(tasks))
    rows = read_labels(tmp_path / "full.json").rows
    assert [(row.labels, row.confidence) for row in rows] == [(("new",), None), (("guess",), 0.5)]
    plain = [{"image": "a.jpg", "label": "cat"}, {"image": "b.jpg", "choice": {"choices": ["x", "y"]}}]
    (tmp_path / "min.json").write_text(json.dumps(plain))
    assert [row.labels for row in read_labels(tmp_path / "min.json").rows] == [("cat",), ("x", "y")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("{}", "neither COCO nor a file of Label Studio or FiftyOne"),
        ("[]", "neither COCO"),
        ('{"images": [], "annotations": [], "categories": []}', "lists no images"),
        ('{"images": [{"id": 1}], "annotations": [], "categories": []}', "an image needs an id and a file_name"),
        (
            '{"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": [{"id": 1, "image_id": 1, "category_id": 7}],'
            ' "categories": [{"id": 1, "name": "cat"}]}',
            "no category has the id 7",
        ),
        ('[{"data": {"image": "a.jpg"}}, {"data": {}}]', "task 2: no image in its data"),
        ('{"classes": ["a"], "labels": {"x": 3}}', "no class has the index 3"),
        ('{"samples": [{"tags": []}]}', "sample 1: no filepath"),
    ],
)
def test_bad_files_are_one_line(tmp_path, monkeypatch, capsys, text, message):
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text(text)
    assert message in refused(capsys, "convert", "bad.json", "out.csv")


def test_bad_requests_are_one_line(place, capsys):  # noqa: F811
    assert "is no file of the format fiftyone" in refused(capsys, "convert", "photos", "out.csv", "--from", "fiftyone")
    assert "is a directory, give a name without a suffix" in refused(
        capsys, "convert", "photos", "out.json", "--format", "fiftyone"
    )
    assert "is not below --root" in refused(
        capsys, "convert", "photos", "out.json", "--format", "label-studio", "--root", "more"
    )
    Path("labels.csv").write_text("path,label,confidence\nphotos/red/0.png,red,7\n")
    assert "the confidence must be a number from 0 to 1, got '7'" in refused(capsys, "convert", "labels.csv", "o.csv")
    Path("labels.csv").write_text("path,label\ngone.png,red\n")
    assert "COCO needs the size of each image" in refused(capsys, "convert", "labels.csv", "o.json", "--format", "coco")
    code, _, error = label(capsys, "convert", "labels.csv", "o.csv")
    assert code == 0
    assert "1 images do not exist, such as" in error
    assert "--root" in error


# --- the projects' own libraries ---


def test_pycocotools_opens_the_file(table, tmp_path):
    coco = pytest.importorskip("pycocotools.coco", reason="pycocotools is not installed: pip install pycocotools")
    write_labels(table, tmp_path / "labels.json", "coco")
    opened = coco.COCO(str(tmp_path / "labels.json"))
    assert [each["name"] for each in opened.loadCats(opened.getCatIds())] == ["cat", "dog"]
    (image,) = opened.loadImgs(opened.getImgIds(catIds=[2]))
    assert (image["file_name"], image["width"], image["height"]) == ("images/c,d.jpg", 21, 10)
    (annotation,) = opened.loadAnns(opened.getAnnIds(imgIds=[image["id"]]))
    assert annotation["bbox"] == [0, 0, 21, 10]


def test_label_studio_accepts_tasks_and_interface(table, tmp_path):
    interface = pytest.importorskip(
        "label_studio_sdk.label_interface", reason="Label Studio is not installed: pip install label-studio-sdk"
    )
    converters = pytest.importorskip("label_studio_sdk.converter")
    write_labels(table, tmp_path / "tasks.json", "label-studio")
    config, tasks = (tmp_path / "tasks.xml").read_text(), json.loads((tmp_path / "tasks.json").read_text())
    opened = interface.LabelInterface(config)
    opened.validate()
    assert all(opened.validate_annotation(each) for task in tasks for each in task["annotations"])
    assert all(opened.validate_prediction(each) for task in tasks for each in task["predictions"])
    converter = converters.Converter(config=config, project_dir=None)
    converter.convert(str(tmp_path / "tasks.json"), str(tmp_path / "min"), "JSON_MIN", is_dir=False)
    back = read_labels(tmp_path / "min" / "result.json", root=tmp_path / "images")
    assert {row.path: row.labels for row in back.rows} == {
        table.rows[0].path: ("cat",),
        table.rows[1].path: (),  # an export has no predictions
        table.rows[2].path: (),
    }


def test_fiftyone_opens_the_directories(table, tmp_path):
    importers = pytest.importorskip(
        "fiftyone.utils.data.importers", reason="FiftyOne is not installed: pip install fiftyone"
    )
    write_labels(table, tmp_path / "one", "fiftyone")
    opened = importers.FiftyOneImageClassificationDatasetImporter(str(tmp_path / "one"), data_path="data.json")
    with opened:
        found = {path: label and (label.label, label.confidence) for path, _, label in opened}
    paths = [row.path for row in table.rows]
    assert found == dict(zip(paths, [("cat", None), ("dog", 0.75), None], strict=True))
    write_labels(table, tmp_path / "all", "fiftyone-dataset")
    whole = importers.LegacyFiftyOneDatasetImporter(str(tmp_path / "all"))
    with whole:
        samples = list(whole)
    assert [sample.filepath for sample in samples] == paths
    assert [sample["ground_truth"] and sample["ground_truth"].label for sample in samples] == ["cat", "dog", None]
    assert [sample.tags for sample in samples] == [["train"], ["validation"], ["train"]]
