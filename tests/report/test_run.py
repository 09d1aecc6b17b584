"""Run directories in every state: whole, unfinished, damaged, or no run at all."""

import json
import re

import numpy as np
import pytest

from tests.report.made import made_run
from vitrail.evaluate.intervals import wilson
from vitrail.report import headline, write_report
from vitrail.report.page import page
from vitrail.report.run import read_run


@pytest.fixture
def run(tmp_path):
    return made_run(tmp_path / "run", photographs=False)


def right_of(run):
    with np.load(run / "evaluation" / "validation.npz") as file:
        return int((file["logits"].argmax(1) == file["targets"]).sum())


def test_headline_says_it_in_words(run):
    said, right = headline(read_run(run)).replace("\u00a0", " "), right_of(run)
    low, high = wilson(right, 341)
    share, within = f"{right / 3.41:.1f} %", f"({100 * low:.1f}–{100 * high:.1f})"
    assert said == f"Ti/16 fine-tuned on clothing: {share} of 341 pictures right {within}"


def test_from_scratch_and_several_labels_are_said(tmp_path):
    made = made_run(tmp_path / "run", classes=6, several=True, init=None)
    said = headline(read_run(made))
    assert said.startswith("Ti/16 trained from scratch on clothing: mAP")
    assert "on 341 pictures (" in said


def test_page_is_written_into_the_run(run):
    path = write_report(run)
    assert path == run / "report.html"
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert write_report(str(run)).read_bytes() == path.read_bytes()


def test_unfinished_run_says_so_and_shows_its_curves(tmp_path):
    made = made_run(tmp_path / "run", finished=False)
    with (made / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 999, "lo')  # being written
    text = page(read_run(made))
    assert "This run has not finished." in text
    assert "not finished" in headline(read_run(made))
    assert "How training went" in text
    assert "could be read" not in text


def test_a_run_that_just_began_has_a_page(tmp_path):
    (tmp_path / "run.json").write_text('{"model": {"name": "Ti/16"}}')
    text = page(read_run(tmp_path))
    assert "not finished, and nothing measured yet" in text


def test_run_json_alone_is_not_needed(run):
    (run / "run.json").unlink()
    text = page(read_run(run))
    assert "class 0" in text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("run.json", b"{", "run.json could not be read"),
        ("run.json", b"[1]", "run.json could not be used: it holds no object"),
        ("recipe.json", b"\xff\xfe", "recipe.json could not be read"),
        ("summary.json", b"nonsense", "summary.json could not be read"),
        ("metrics.jsonl", b"nonsense\n{}\n7\n", "metrics.jsonl: 2 of 3 lines are not readable"),
        ("evaluation/validation.npz", b"PK\x03\x04 no zip", "evaluation/validation.npz could not be used"),
        ("evaluation/validation.npz", b"", "evaluation/validation.npz could not be used"),
        ("evaluation/validation.json", b'{"names": ["a"]}', "names 1 pictures of 341"),
    ],
)
def test_a_damaged_file_is_named_and_the_rest_is_shown(run, name, content, said):
    (run / name).write_bytes(content)
    text = page(read_run(run))
    assert said in text
    assert "Not all of the run could be read." in text


def test_pickled_arrays_are_not_loaded(run):
    np.savez(run / "evaluation/validation.npz", logits=np.array([{}], dtype=object), targets=np.zeros(1))
    found = read_run(run)
    assert "validation" not in found.evaluations
    assert any("validation.npz could not be used" in problem for problem in found.problems)


def test_logits_that_are_not_finite_are_named(run):
    np.savez(run / "evaluation/validation.npz", logits=np.full((3, 10), np.nan), targets=np.zeros(3, int))
    assert "not finite" in page(read_run(run))


def test_a_summary_that_contradicts_the_logits_is_told(run):
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"top1": 0.99}))
    text = page(read_run(run)).replace("\u00a0", " ")
    assert f"summary.json says 99.00 %, the kept logits give {right_of(run) / 3.41:.2f} %" in text


def test_what_is_not_a_number_is_left_out_of_the_curves(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 5000, "epoch": 13, "loss": NaN, "lr": Infinity}\n')
    text = re.sub(r"<(script|style)>.*?</\1>", "", page(read_run(run)), flags=re.DOTALL).lower()
    assert "loss" in text
    assert not re.search(r"\b(nan|inf)\b", text)


@pytest.mark.parametrize("kind", ["empty", "absent", "file"])
def test_what_is_no_run_is_refused_in_one_line(tmp_path, kind):
    place = tmp_path / "place"
    if kind == "empty":
        place.mkdir()
    elif kind == "file":
        place.write_text("")
    with pytest.raises((ValueError, OSError), match=r"not a run|no directory") as error:
        write_report(place)
    assert "\n" not in str(error.value)
