"""Tests of `vitrail check`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests import forked
from tests.data.spoilt import encoded, good, odd_names, photograph, put, spoilt
from vitrail.cli import check, main
from vitrail.cli.options import CommandParser
from vitrail.data import audit

CLOTHING = Path(__file__).parents[3] / "shared" / "data" / "clothing"
needs_clothing = pytest.mark.skipif(
    not CLOTHING.exists(), reason="no photographs beside this checkout (../shared/data)"
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def vitrail(*arguments, **options):
    return forked.run("check", *map(str, arguments), **options)


def test_defects_give_exit_code_1_with_count_path_and_remedy(tmp_path):
    result = vitrail(spoilt(tmp_path / "photos"))
    assert result.returncode == 1
    assert result.stderr == ""
    text = result.stdout
    assert "photos: 36 images, 4 classes" in text
    for part in (
        "error         2  truncated: image data ends too early\n",
        "          train/cat/zero.jpg  empty file\n",
        "train/cat/words.jpg  text: '404: there was no such image'",
        "train/cat/bomb.png  3,600 megapixels",
        "warning       1  duplicate: identical images in one split\n          train/dog/copy.jpg  identical to train/dog/0.jpg\n",
        "note          4  mode: unusual pixel formats\n",
        "          … and 1 more\n          → harmless: converted when read\n",
        "10 errors, 3 warnings, 11 notes: fix the errors before training.",
    ):
        assert part in text
    assert "\033" not in text
    assert max(map(len, text.replace(str(tmp_path), "").splitlines())) <= 100


def test_good_data_gives_exit_code_0(tmp_path):
    result = vitrail(good(tmp_path))
    assert result.returncode == 0
    assert result.stdout.endswith("No findings: ready to train.\n")


def test_json_has_counts_and_problems(tmp_path):
    result = vitrail(spoilt(tmp_path), "--json")
    assert result.returncode == 1
    report = json.loads(result.stdout)
    assert (report["images"], report["ok"]) == (36, False)
    assert sorted(report["classes"]) == ["cat", "dog", "fox", "owl"]
    assert report["splits"]["train"] == {"images": 27, "classes": {"cat": 18, "dog": 9, "owl": 0}}
    assert {frozenset(problem) for problem in report["problems"]} == {frozenset({"kind", "path", "detail", "severity"})}
    zero = next(problem for problem in report["problems"] if problem["kind"] == "zero-byte")
    assert zero["path"] == str(tmp_path / "train/cat/zero.jpg")
    good_result = json.loads(vitrail(good(tmp_path / "good"), "--json").stdout)
    assert (good_result["ok"], good_result["problems"]) == (True, [])


def test_data_without_quarantined_images_has_no_errors(tmp_path):
    root = spoilt(tmp_path / "photos")
    result = vitrail(root, "--quarantine", tmp_path / "bad.txt")
    assert result.stdout.endswith("bad.txt: 8 to leave out\n")
    lines = (tmp_path / "bad.txt").read_text().splitlines()
    assert f"{root}/train/cat/zero.jpg\tzero-byte: empty file" in lines
    for line in lines:
        os.remove(line.split("\t")[0])
    for folder in ("train/owl", "validation/owl"):
        (root / folder).rmdir()
    put(root / "train/fox/a.jpg", encoded(photograph(900)))
    assert vitrail(root).returncode == 0


def test_unprintable_names_are_escaped(tmp_path):
    root = odd_names(tmp_path / "photos")
    result = vitrail(root, "--quarantine", tmp_path / "bad.txt", "--examples", "10")
    assert result.returncode == 1
    assert "train/犬/two\\nlines\\tand a tab.jpg  empty file\n" in result.stdout
    assert "train/犬/\\x1b[31mred.jpg  empty file\n" in result.stdout
    assert "pipe.jpg  a pipe" in result.stdout
    assert "nowhere.jpg  missing file or broken link" in result.stdout
    assert len((tmp_path / "bad.txt").read_text(encoding="utf-8").splitlines()) == 6
    problems = json.loads(vitrail(root, "--json").stdout)["problems"]
    assert str(root / "train/犬/two\nlines\tand a tab.jpg") in {problem["path"] for problem in problems}


def test_names_that_are_not_utf8_are_listed(tmp_path):
    good(tmp_path)
    with open(os.fsencode(tmp_path) + b"/train/cat/\xff\xfe.jpg", "wb"):
        pass
    result = vitrail(tmp_path)
    assert "train/cat/\\xff\\xfe.jpg  empty file" in result.stdout
    assert json.loads(vitrail(tmp_path, "--json").stdout)["problems"][0]["kind"] == "zero-byte"


def test_output_fits_80_columns(tmp_path):
    spoilt(tmp_path / "photos")
    result = vitrail("photos", cwd=tmp_path, env={**os.environ, "COLUMNS": "80"})
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_colours_only_in_terminals(tmp_path):
    good(tmp_path, each=2)
    command = f"{sys.executable} -m vitrail check {tmp_path}"
    script = f"import os, pty, sys\ncode = pty.spawn({command.split()!r})\nsys.exit(os.waitstatus_to_exitcode(code))"
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, env=environment)
    assert result.returncode == 0
    assert b"\033[1m" in result.stdout
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=60, env={**environment, "NO_COLOR": "1"}
    )
    assert b"\033[1m" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere"),
        ([], "DATA"),
        (["{data}", "--near", "many"], "'many' is not a number of bits"),
        (["{data}", "--workers", "-1"], "--workers"),
        (["{data}", "--imbalance", "1"], "'1' is not a ratio"),
        (["{data}", "--quarantine", "{data}/no/such/list.txt"], "cannot write list.txt: there is no directory"),
        (["{data}/empty"], "empty"),
    ],
)
def test_user_errors_are_one_line_with_exit_code_2(tmp_path, arguments, message):
    good(tmp_path, each=1)
    (tmp_path / "empty").mkdir()
    result = vitrail(*(argument.format(data=tmp_path) for argument in arguments))
    assert result.returncode == 2
    assert message in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_digits_are_checked_in_memory():
    report = json.loads(vitrail("digits", "--json").stdout)
    assert (report["images"], len(report["classes"]), report["ok"]) == (1797, 10, True)


def test_manifest_with_missing_files_and_contradicting_labels(tmp_path):
    for number in range(6):
        put(tmp_path / f"{number}.jpg", encoded(photograph(number)))
    rows = ["path,label,split", "0.jpg,a,train", "1.jpg,b,train", "gone.jpg,b,train", "2.jpg,b,train"]
    rows += ["3.jpg,a,validation", "4.jpg,b,validation", "2.jpg,a,validation"]
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    report = json.loads(vitrail(tmp_path / "labels.csv", "--json").stdout)
    kinds = [(problem["kind"], os.path.basename(problem["path"])) for problem in report["problems"]]
    assert kinds == [("unreadable", "gone.jpg"), ("contradiction", "2.jpg"), ("contradiction", "2.jpg")]


def test_tar_members_are_decoded_completely(tmp_path):
    import tarfile

    for split, seed in (("train", 0), ("val", 10)):
        with tarfile.open(tmp_path / f"{split}-000000.tar", "w") as tar:
            for number in range(4):
                data = encoded(photograph(seed + number))
                files = {
                    "jpg": data[:-900] if (split, number) == ("train", 2) else data,
                    "cls": b"01"[number % 2 : number % 2 + 1],
                }
                for suffix, content in files.items():
                    put(tmp_path / "member", content)
                    tar.add(tmp_path / "member", f"{number:06}.{suffix}")
    os.remove(tmp_path / "member")
    report = json.loads(vitrail(tmp_path, "--json").stdout)
    assert report["images"] == 8
    assert [problem["kind"] for problem in report["problems"]] == ["truncated"]
    assert "000002" in report["problems"][0]["path"]


def test_parquet_with_embedded_images(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow: pip install 'vitrail[parquet]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    for split, seed in (("train", 0), ("validation", 100)):
        images = [encoded(photograph(seed + number)) for number in range(40)]
        if split == "train":
            images[7] = b"no picture"
        table = pyarrow.table({"image": images, "label": [f"class {n % 2}" for n in range(40)]})
        parquet.write_table(table, tmp_path / f"{split}-00000-of-00001.parquet", row_group_size=16)
    for _ in range(2):  # the second from the cache
        report = json.loads(vitrail(tmp_path, "--json", "--workers", "2").stdout)
        assert [problem["kind"] for problem in report["problems"]] == ["not-an-image"]
        assert report["problems"][0]["path"].endswith("train-00000-of-00001.parquet[7]")


def many(root: Path, count: int = 6000) -> Path:
    """Create more images than can be audited in a few seconds: hard links to one, audited again under every name."""
    pixels = np.random.default_rng(0).integers(0, 256, (1200, 1600, 3), dtype=np.uint8)
    first = put(root / "train/cat/first.jpg", encoded(Image.fromarray(pixels)))
    for split in ("train", "validation"):
        for label in ("cat", "dog"):
            (root / split / label).mkdir(parents=True, exist_ok=True)
            for number in range(count // 4):
                os.link(first, root / split / label / f"{number}.jpg")
    return root


def session(leader: int) -> list[int]:
    """Return the running processes of a session."""
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader and fields[0] != "Z":
                processes.append(int(entry.name))
    return processes


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_remains_after_a_signal(tmp_path, how):
    many(tmp_path)
    command = [sys.executable, "-m", "vitrail", "check", str(tmp_path), "--workers", "2"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    wait_until(lambda: len(session(process.pid)) == 3)
    time.sleep(0.5)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # a terminal sends it to all
    else:
        process.send_signal(how)
    out, error = process.communicate(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    assert (out, error) == ("", "vitrail check: interrupted\n" if how == signal.SIGINT else "")
    wait_until(lambda: not session(process.pid))


def wait_until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_defaults_of_options_equal_those_of_the_audit():
    parser = CommandParser()
    check.add_arguments(parser)
    options = parser.parse_args(["data"])
    names = {"near": "max_hash_distance", "tiny": "min_side", "imbalance": "max_imbalance"}
    defaults = {option: audit.audit_dataset.__kwdefaults__[name] for option, name in names.items()}
    assert {option: getattr(options, option) for option in defaults} == defaults


@needs_clothing
@pytest.mark.slow
def test_clothing_photographs_have_one_warning(tmp_path):
    result = vitrail(CLOTHING)
    assert result.returncode == 0
    assert "1,141 images, 10 classes" in result.stdout
    assert "near-contradiction" in result.stdout
    assert "1 warning: no errors, ready to train." in result.stdout


def test_pipe_in_a_folder_without_splits_does_not_hang(tmp_path):
    """A folder without splits is divided by content, which reads every file before the audit."""
    for number in range(8):
        put(tmp_path / ("one", "two")[number % 2] / f"{number}.png", encoded(photograph(number), "PNG"))
    os.mkfifo(tmp_path / "one" / "pipe.jpg")
    result = vitrail(tmp_path)
    assert result.returncode == 1
    assert "pipe.jpg" in result.stdout


def test_the_verdict_is_that_of_training(tmp_path, capsys):
    """A class with one image cannot be in both splits, and one class cannot be trained."""
    rng = np.random.default_rng(0)
    for name, count in (("hat", 6), ("shoe", 6), ("rare", 1)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    arguments = ["train", str(tmp_path / "photos"), "--steps", "1", "--batch-size", "4", "--size", "16", "--quiet"]
    assert main(["check", str(tmp_path / "photos")]) == 0
    assert "no errors; train with --allow-class-mismatch, or add images" in capsys.readouterr().out
    assert main([*arguments, "--out", str(tmp_path / "refused")]) == 2
    assert capsys.readouterr().err.rstrip().endswith("or use --allow-class-mismatch")
    assert main([*arguments, "--out", str(tmp_path / "run"), "--allow-class-mismatch"]) == 0
    for name in ("shoe", "rare"):
        shutil.rmtree(tmp_path / "photos" / name)
    capsys.readouterr()
    assert main(["check", str(tmp_path / "photos")]) == 0
    assert "training with labels needs two classes or more" in capsys.readouterr().out
