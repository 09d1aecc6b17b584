"""Tests of `vitrail evaluate`."""

import hashlib
import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.data.making import tree
from tests.evaluation import made
from vitrail import build, save
from vitrail.cli import evaluate as command
from vitrail.cli import main
from vitrail.data.preprocessing import Preprocessing

SHARED = Path(__file__).parents[3] / "shared"
WEIGHTS = SHARED / "weights" / "deit_tiny_patch16_224.safetensors"
SAMPLES = SHARED / "data" / "imagenet-samples"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Create two models, images of seven classes and an empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    made.model(tmp_path / "model" / "a.safetensors")
    made.model(tmp_path / "model" / "b.safetensors", seed=5)
    made.folder(tmp_path / "zoo")
    return tmp_path


def vitrail(capsys, *arguments):
    code = main(["evaluate", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_output_has_metrics_with_intervals(place):
    arguments = [sys.executable, "-m", "vitrail", "evaluate", "model/a.safetensors", "zoo"]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == "a on zoo, all: 63 images"
    assert any(line.startswith("Top-1 accuracy") and "%" in line and "–" in line for line in lines)
    assert any(line.startswith("weakest classes") for line in lines)
    assert any(line.startswith("most confident errors") for line in lines)
    assert "images/s" in lines[-1]


def test_standard_output_is_only_json(place, capsys):
    code, out, err = vitrail(capsys, "model/a.safetensors", "zoo", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert {"top1", "top5", "n", "interval", "per_class", "ece", "throughput", "unreadable"} <= set(report)
    assert report["n"] == 63
    assert report["throughput"]["images_per_second"] > 0


def test_out_has_predictions_metrics_and_page(place, capsys):
    code, out, _ = vitrail(capsys, "model/a.safetensors", "zoo", "--out", "judged", "--against", "model/b.safetensors")
    assert code == 0
    names = ["predictions.csv", "predictions-2.csv", "evaluation.json", "report.html"]
    assert out.splitlines()[-4:] == [f"judged/{name}" for name in names]
    assert sorted(path.name for path in Path("judged").iterdir()) == sorted(names)
    assert "McNemar’s mid-p" in out
    measured = [line for line in out.splitlines() if line.startswith(("Top", "Balanced", "F1", "Expected", "Cross"))]
    assert len(measured) == 6
    assert all(line.count("–") == 2 for line in measured), "a number without its interval"
    report = json.loads(Path("judged/evaluation.json").read_text(encoding="utf-8"))
    page = Path("judged/report.html").read_text(encoding="utf-8")
    assert report["model"]["sha256"] in page
    assert report["comparisons"][0]["verdict"] in page.replace("&#x27;", "'")
    assert page.count("data:image/jpeg;base64,") == min(24, round(63 * (1 - report["top1"])))
    for part in ("classes", "confusion", "calibration", "mistakes", "chance", "data", "model", "command"):
        assert f'id="{part}"' in page, part
    assert "vitrail evaluate model/a.safetensors zoo --out judged --against model/b.safetensors" in page


def test_unreadable_files_are_counted_and_listed(place, capsys):
    tree(place / "zoo", {f"ape/bad{k}.png": b"" for k in range(7)})
    code, out, _ = vitrail(capsys, "model/a.safetensors", "zoo", "--out", "judged")
    assert code == 0
    assert "63 images" in out
    assert "7 files left out" in out
    assert "ape/bad0.png: " in out
    assert "… and 2 more" in out
    report = json.loads(Path("judged/evaluation.json").read_text(encoding="utf-8"))
    assert len(report["unreadable"]) == 7
    assert "7 files skipped" in Path("judged/report.html").read_text(encoding="utf-8")


def test_map_translates_classes(place, capsys):
    (place / "zoo" / "ape").rename(place / "zoo" / "Affe")
    code, _, err = vitrail(capsys, "model/a.safetensors", "zoo")
    assert code == 2
    assert "1 of 7 classes are unknown to the model: 'Affe'" in err
    Path("map.json").write_text('{"Affe": "ape"}', encoding="utf-8")
    code, out, _ = vitrail(capsys, "model/a.safetensors", "zoo", "--map", "map.json", "--json")
    assert code == 0
    assert json.loads(out)["data"]["classes_matched"] == "through map.json"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model/a.safetensors", "nowhere/here"], "no such file or folder: nowhere/here"),
        (["model/c.safetensors", "zoo"], "model/c.safetensors"),
        (["model/a.safetensors", "zoo", "--split", "test"], "zoo has no test split: it has train, validation"),
        (["model/a.safetensors", "zoo", "--map", "gone.json"], "evaluate: --map gone.json: no such file\n"),
        (["model/a.safetensors", "zoo", "--map", "zoo"], "evaluate: --map zoo is a directory: give JSON"),
        (["model/five.safetensors", "zoo"], "takes 5 channels, images have 1, 3 or 4"),
        (["model/a.safetensors", "nowhere/here", "--out", "new/judged"], "no such file or folder: nowhere/here"),
        (["model/a.safetensors", "zoo", "--out", "/proc/x"], "cannot make the directory /proc/x: "),
        (["model/a.safetensors", "zoo", "--out", "zoo"], "zoo is not empty and not an evaluation"),
        (["model/a.safetensors", "zoo", "--out", "mine"], "mine is not empty and not an evaluation"),
        (["model/a.safetensors", "zoo", "--out", "model/a.safetensors"], "is a file: give a directory"),
        (["model/a.safetensors", "zoo", "--batch-size", "0"], "--batch-size must be >= 1, got 0"),
        (["model/a.safetensors", "zoo", "--workers", "-1"], "--workers must be >= 0, got -1"),
        (["model/a.safetensors", "zoo", "--size", "9"], "not divisible"),
        (["model/a.safetensors", "zoo", "--device", "tpu"], "unknown device 'tpu'"),
        (["model/a.safetensors", "zoo", "--assume", "heads=3"], "leave out heads"),
        (["model/a.safetensors", "zoo", "--probe", "knn", "--map", "x.json"], "--map has no effect with --probe"),
        (["model/a.safetensors", "zoo", "--shots", "5"], "--shots is an option of probes: add --probe"),
        (["model/a.safetensors", "zoo", "--seed", "0"], "--seed is an option of probes: add --probe"),
        (["model/a.safetensors", "zoo", "--temperature", "0"], "--temperature is an option of probes: add --probe"),
        (["model/a.safetensors", "zoo", "--probe", "knn", "--limit", "0"], "--limit has no effect with --probe"),
        (
            ["model/a.safetensors", "zoo", "--probe", "knn", "--batch-size", "0"],
            "--batch-size has no effect with --probe",
        ),
        (["model/a.safetensors", "zoo", "--probe", "knn", "--shots", "5"], "--shots is an option of --probe few-shot"),
    ],
)
def test_user_errors_are_one_line_with_exit_code_2_and_write_nothing(place, capsys, arguments, message):
    (place / "mine").mkdir()
    (place / "mine" / "evaluation.json").write_text('{"model": "mine"}', encoding="utf-8")
    five = Preprocessing((8, 8), (8, 8)).with_channels(5)
    model = build(patch=4, width=16, depth=1, heads=2, classes=7, image_size=8, channels=5)
    save(model, place / "model" / "five.safetensors", labels=made.CLASSES, preprocessing=five)
    code, out, err = vitrail(capsys, *arguments)
    assert sorted(path.name for path in (place / "mine").iterdir()) == ["evaluation.json"]
    assert not any((place / name).exists() for name in ("new", "zoo/report.html", "zoo/predictions.csv"))
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("vitrail evaluate: ")
    assert len(err.splitlines()) == 1


def test_an_earlier_evaluation_is_replaced_even_if_incomplete(place, capsys, monkeypatch):
    def fail(evaluation, path):
        raise OSError(f"{path} was not written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(import_module("vitrail.evaluation.evaluate"), "write_predictions", fail)
        assert vitrail(capsys, "model/a.safetensors", "zoo", "--out", "judged")[0] == 2
    for name in ("a", "b"):
        assert vitrail(capsys, f"model/{name}.safetensors", "zoo", "--out", "judged")[0] == 0
        report = json.loads(Path("judged/evaluation.json").read_text(encoding="utf-8"))
        assert report["model"]["sha256"] == hashlib.sha256(Path(f"model/{name}.safetensors").read_bytes()).hexdigest()
        assert Path("judged/report.html").is_file()


def test_a_run_directory_is_not_overwritten(place, capsys):
    (place / "run").mkdir()
    (place / "run" / "run.json").write_text("{}", encoding="utf-8")
    code, _, err = vitrail(capsys, "model/a.safetensors", "zoo", "--out", "run")
    assert code == 2
    assert "is a run, its report.html would be overwritten" in err


def test_interruption_reports_the_number_of_images(place, capsys, monkeypatch):
    def interrupt():
        def show(stage, done, total):
            if stage in ("judging", "evaluating") and done >= 32:
                raise KeyboardInterrupt

        return show

    monkeypatch.setattr(command, "count_progress", interrupt)
    code, out, err = vitrail(capsys, "model/a.safetensors", "zoo", "--batch-size", "16", "--out", "judged")
    assert (code, out) == (130, "")
    assert err.splitlines() == ["vitrail evaluate: interrupted after 32 of 63 images; nothing was written"]
    assert not Path("judged").exists()


def test_page_fits_a_phone_and_escapes_names(place, capsys):
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install 'vitrail[dev]'"
    )
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium is installed: apt install chromium")
    hostile = "<img src=x onerror=alert(1)>"
    labels = (hostile, "a" * 90, "שמלה", "cat")
    made.model(place / "h.safetensors", labels)
    made.folder(place / "hostile", labels, each=4)
    code, _, err = vitrail(
        capsys, "h.safetensors", "hostile", "--out", "judged", "--against", "h.safetensors", "--limit", "20"
    )
    assert code == 0, err
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page, messages = browser.new_page(viewport={"width": 390, "height": 900}), []
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("dialog", lambda dialog: messages.append(dialog.message))
        page.goto((place / "judged" / "report.html").as_uri())
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("[...document.images].filter(i => !i.complete || !i.naturalWidth).length") == 0
        assert page.locator("#mistakes img").count() > 0
        assert page.locator("#classes").get_by_text(hostile, exact=True).count() == 1
        browser.close()
    assert messages == []


@pytest.mark.slow
@pytest.mark.skipif(not WEIGHTS.exists(), reason="the DeiT-Ti weights are not beside this checkout (../shared/weights)")
@pytest.mark.skipif(not SAMPLES.exists(), reason="the 200 photographs are not beside this checkout (../shared/data)")
def test_deit_tiny_classifies_162_of_200_photographs_correctly(place, capsys):
    info = pytest.importorskip("timm.data", reason="timm is not installed: pip install 'vitrail[peers]'").ImageNetInfo()
    index = {k: [info.index_to_label_name(k), info.index_to_description(k)] for k in range(1000)}
    Path("imagenet_class_index.json").write_text(json.dumps(index), encoding="utf-8")
    arguments = (
        WEIGHTS,
        SAMPLES,
        "--label-from",
        r"^(\d+)_",
        "--map",
        "imagenet_class_index.json",
        "--json",
        "--precision",
        "fp32",
    )
    code, out, err = vitrail(capsys, *arguments)
    assert code == 0, err
    report = json.loads(out)
    assert (report["n"], round(200 * report["top1"])) == (200, 162)
    assert report["data"]["classes_present"] == 200
    assert report["per_class"][1]["class"].startswith("cock")
