"""Reading of run directories: complete, unfinished, damaged, or not a run."""

import json
import re

import numpy as np
import pytest

from tests.reports.made import made_run
from vitrail.metrics.intervals import wilson_interval
from vitrail.reports.page import render_run_page, write_report
from vitrail.reports.run import read_run
from vitrail.reports.summary import format_headline


@pytest.fixture
def run(tmp_path):
    return made_run(tmp_path / "run", photographs=False)


def count_correct(run):
    with np.load(run / "evaluation" / "validation.npz") as file:
        return int((file["logits"].argmax(1) == file["targets"]).sum())


def test_headline_of_a_finished_run(run):
    headline, correct = format_headline(read_run(run)).replace("\u00a0", " "), count_correct(run)
    low, high = wilson_interval(correct, 341)
    score = f"{correct / 3.41:.1f} % ({100 * low:.1f}–{100 * high:.1f})"
    assert headline == f"Ti/16 fine-tuned on clothing: top-1 accuracy {score} on 341 images"


def test_headline_of_a_multilabel_run_from_scratch(tmp_path):
    made = made_run(tmp_path / "run", classes=6, several=True, init=None)
    headline = format_headline(read_run(made))
    assert headline.startswith("Ti/16 trained from scratch on clothing: mAP")
    assert headline.endswith(") on 341 images")


def test_page_is_written_into_the_run(run):
    path = write_report(run)
    assert path == run / "report.html"
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert write_report(str(run)).read_bytes() == path.read_bytes()


def test_unfinished_run_has_a_notice_and_curves(tmp_path):
    made = made_run(tmp_path / "run", finished=False)
    with (made / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 999, "lo')  # being written
    text = render_run_page(read_run(made))
    assert "This run has not finished." in text
    assert "not finished" in format_headline(read_run(made))
    assert "Training curves" in text
    assert "could not be read" not in text


def test_page_of_a_run_without_metrics(tmp_path):
    (tmp_path / "run.json").write_text('{"model": {"name": "Ti/16"}}')
    text = render_run_page(read_run(tmp_path))
    assert "not finished, no metrics yet" in text


def test_run_json_is_optional(run):
    (run / "run.json").unlink()
    text = render_run_page(read_run(run))
    assert "class 0" in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", b"{", "run.json could not be read"),
        ("run.json", b"[1]", "run.json could not be used: it is not a JSON object"),
        ("recipe.json", b"\xff\xfe", "recipe.json could not be read"),
        ("summary.json", b"nonsense", "summary.json could not be read"),
        ("metrics.jsonl", b"nonsense\n{}\n7\n", "metrics.jsonl: 2 of 3 lines are invalid"),
        ("evaluation/validation.npz", b"PK\x03\x04 no zip", "evaluation/validation.npz could not be used"),
        ("evaluation/validation.npz", b"", "evaluation/validation.npz could not be used"),
        ("evaluation/validation.json", b'{"names": ["a"]}', "has 1 names for 341 samples"),
    ],
)
def test_a_damaged_file_is_reported_and_the_rest_is_shown(run, name, content, message):
    (run / name).write_bytes(content)
    text = render_run_page(read_run(run))
    assert message in text
    assert "Some files of the run could not be read." in text


def test_pickled_arrays_are_not_loaded(run):
    np.savez(run / "evaluation/validation.npz", logits=np.array([{}], dtype=object), targets=np.zeros(1))
    found = read_run(run)
    assert "validation" not in found.evaluations
    assert any("validation.npz could not be used" in problem for problem in found.problems)


def test_non_finite_logits_are_reported(run):
    np.savez(run / "evaluation/validation.npz", logits=np.full((3, 10), np.nan), targets=np.zeros(3, int))
    assert "not finite" in render_run_page(read_run(run))


def test_a_summary_that_contradicts_the_logits_is_reported(run):
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"top1": 0.99}))
    text = render_run_page(read_run(run)).replace("\u00a0", " ")
    assert f"99.00 % in summary.json, {count_correct(run) / 3.41:.2f} % from the stored logits" in text


def test_non_finite_values_are_left_out_of_the_curves(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 5000, "epoch": 13, "loss": NaN, "lr": Infinity}\n')
    text = re.sub(r"<(script|style)>.*?</\1>", "", render_run_page(read_run(run)), flags=re.DOTALL).lower()
    assert "loss" in text
    assert not re.search(r"\b(nan|inf)\b", text)


@pytest.mark.parametrize("kind", ["empty", "absent", "file"])
def test_a_path_that_is_no_run_is_an_error_of_one_line(tmp_path, kind):
    path = tmp_path / "path"
    if kind == "empty":
        path.mkdir()
    elif kind == "file":
        path.write_text("")
    with pytest.raises((ValueError, OSError), match=r"not a run|no such directory") as error:
        write_report(path)
    assert "\n" not in str(error.value)
