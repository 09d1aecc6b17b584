"""`vitrail doctor`: what it prints and writes, with PyTorch as it is, and with one that does not import."""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.doctor import made
from vitrail.cli import main
from vitrail.doctor import diagnosis, selftest
from vitrail.doctor.diagnosis import Diagnosis
from vitrail.doctor.page import render_page
from vitrail.doctor.probe import run_probe
from vitrail.doctor.summary import format_headline
from vitrail.utils.json import value_from_json

ROOT = Path(__file__).parents[2]


@pytest.fixture
def healthy(monkeypatch):
    """A PyTorch that imports, without importing it."""
    monkeypatch.setattr(diagnosis, "run_probe", lambda: dict(made.PROBE, threads=1))


def doctor(capsys, *arguments):
    code = main(["doctor", *arguments])
    return code, capsys.readouterr()


def break_torch(folder: Path, source: str) -> dict[str, str]:
    """Return an environment in which `import torch` runs this source."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(source)
    return os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "raise ImportError('libtorch_cpu.so: cannot open shared object file\\nmore')",
            "ImportError: libtorch_cpu.so: cannot",
        ),
        ("raise OSError('libcudart.so.12')", "OSError: libcudart.so.12"),
        ("import os; os.abort()", "import torch crashed (SIGABRT)"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("print('hello')", "AttributeError: module 'torch' has no attribute"),
    ],
)
def test_a_broken_torch_is_reported_in_one_line(tmp_path, source, message):
    environment = break_torch(tmp_path, source)
    command = [sys.executable, "-m", "vitrail", "doctor", "--quick", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    facts = value_from_json(json.loads(done.stdout), Diagnosis, "")
    assert done.returncode == 1
    assert done.stderr == ""
    assert not facts["ok"]
    first = facts["problems"][0]
    assert first["severity"] == "error"
    assert message in first["text"]
    assert "\n" not in first["text"]
    assert facts["machine"]["processor"]["cores"]  # what does not need PyTorch is there


def test_a_broken_torch_has_a_page_and_no_self_test(tmp_path):
    environment = break_torch(tmp_path, "raise ImportError('broken on purpose')")
    command = [sys.executable, "-m", "vitrail", "doctor", "--out", "d.html"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 1
    assert "broken on purpose" in done.stdout
    assert "skipped" in done.stdout
    assert "broken on purpose" in (tmp_path / "d.html").read_text()


def test_a_broken_numpy_is_reported_and_the_page_says_what_it_needs(tmp_path):
    environment = break_torch(tmp_path, "raise ImportError('broken too')")
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise ImportError('libopenblas.so: cannot open')")
    command = [sys.executable, "-m", "vitrail", "doctor", "--quick", "--out", "d.html"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert "numpy does not import: ImportError: libopenblas.so: cannot open" in done.stdout
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "vitrail doctor: the page cannot be drawn (libopenblas.so: cannot open): give --out FILE.json"
    ]


def test_an_import_that_hangs_is_ended():
    start = time.monotonic()
    facts = run_probe(0.5, (sys.executable, "-c", "import time; time.sleep(60)"))
    assert time.monotonic() - start < 30
    assert facts == {"error": "import torch did not end within 0 s"}


def test_a_crash_after_the_import_keeps_the_facts_before_it():
    script = 'print(\'{"version": "1"}\', flush=True); import os; os.abort()'
    facts = run_probe(30, (sys.executable, "-c", script))
    assert facts == {"version": "1", "crash": "after its import, PyTorch crashed (SIGABRT)"}


def test_facts_of_the_installed_torch(tmp_path):
    """The only test that starts the real program."""
    path = tmp_path / "d.json"
    done = subprocess.run(
        [sys.executable, "-m", "vitrail", "doctor", "--test", "matmul", "--json", "--out", str(path)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_TOKEN": "hf_secret"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    facts = value_from_json(json.loads(done.stdout), Diagnosis, "")
    assert facts == json.loads(path.read_text())
    torch = __import__("torch")
    assert facts["software"]["torch"]["version"] == str(torch.__version__)
    assert facts["device"]["name"] in ("cpu", "mps") or facts["device"]["name"].startswith("cuda")
    assert [(test["name"], test["status"]) for test in facts["tests"]] == [("matmul", "ok")]
    assert "hf_secret" not in done.stdout


def test_nothing_private_is_in_any_output(healthy, capsys, tmp_path, monkeypatch):
    home = tmp_path / "home" / "alice-of-wonderland"
    home.mkdir(parents=True)
    for name, value in {"HOME": str(home), "USER": "alice-of-wonderland", "LOGNAME": "alice-of-wonderland"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HTTPS_PROXY", "http://alice:pass@proxy.wonderland:8080")
    monkeypatch.setenv("VITRAIL_DATA", str(home / "data"))
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(platform, "node", lambda: "looking-glass-7")
    monkeypatch.setenv("MASTER_ADDR", "looking-glass-7")
    monkeypatch.chdir(tmp_path)
    _, printed = doctor(capsys, "--quick", "--out", "d.html", "--out", "d.json")
    _, json_printed = doctor(capsys, "--quick", "--json")
    for text in (printed.out, json_printed.out, Path("d.html").read_text(), Path("d.json").read_text()):
        assert "~/" in text
        for private in ("alice-of-wonderland", "wonderland:8080", "looking-glass", "0" * 40):
            assert private not in text


def test_problems_come_first_with_their_remedies(healthy, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "eight")
    code, printed = doctor(capsys, "--quick")
    lines = printed.out.splitlines()
    assert code == 0  # a warning is not a failure
    assert lines[0].startswith("vitrail doctor: ")
    assert "warning" in lines[0]
    number = next(number for number, line in enumerate(lines) if "OMP_NUM_THREADS must be a number" in line)
    assert lines[number + 1].strip().startswith("→ export OMP_NUM_THREADS=")
    assert number < lines.index("Chosen for a run") < lines.index("Software") < lines.index("Machine")
    assert any("pip install 'vitrail[" in line or "simplejpeg" in line for line in lines)


@pytest.mark.parametrize(("step", "code"), [("succeed", 0), ("fail", 1)])
def test_the_exit_code_says_whether_a_test_failed(healthy, capsys, monkeypatch, tmp_path, step, code):
    monkeypatch.setattr(selftest, "STEPS", {"matmul": made.steps(step)[step]})
    page = tmp_path / "d.html"
    found, printed = doctor(capsys, "--test", "matmul", "--out", str(page))
    assert found == code
    assert ("1 of 1 test passed" if not code else "0 of 1 test passed") in printed.out
    assert "self-test 1 of 1, matmul" in printed.err
    assert ("two words" in page.read_text()) is bool(code)


def test_an_interrupt_prints_what_is_known(healthy, capsys, monkeypatch):
    def interrupt(self, report):
        self.results.append(
            {"name": "vit", "title": "t", "status": "stopped", "seconds": 1.0, "detail": "interrupted", "values": {}}
        )
        raise KeyboardInterrupt

    monkeypatch.setattr(selftest.SelfTest, "run", interrupt)
    code, printed = doctor(capsys, "--json")
    assert code == 130
    assert json.loads(printed.out)["tests"][0]["status"] == "stopped"


def test_other_processes_of_torchrun_print_nothing(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    code, printed = doctor(capsys, "--quick")
    assert (code, printed.out, printed.err) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--test", "speed"], "unknown step 'speed': use resume, ddp"),
        (["--quick", "--test", "vit"], "not allowed with argument"),
        (["--out", "report.txt"], "'report.txt' must end in .html or .json"),
        (["--step-timeout", "0"], "must be a number of seconds > 0, got '0'"),
        (["--step-timeout", "soon"], "must be a number of seconds > 0, got 'soon'"),
        (["--quik"], "unknown option --quik: did you mean --quick?"),
    ],
)
def test_wrong_options_are_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", *arguments])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_directory_that_does_not_exist_is_found_before_the_tests(capsys):
    code, printed = doctor(capsys, "--out", "no/such/folder/d.html")
    assert code == 2
    assert "there is no directory no/such/folder" in printed.err


def test_the_page_escapes_what_it_shows_and_has_every_part():
    facts = made.make_facts()
    facts["problems"] = [{"name": "x", "severity": "warning", "text": "<b>bold</b>", "remedy": "do <that>"}]
    result = {"title": "t", "status": "ok", "seconds": 2.0, "detail": "d"}
    loader = {"images_per_second": {"0": 90.0, "1": 120.0}}
    vit = {"prediction_images_per_second": {"fp32": 16.0, "bf16": 30.0}, "training_images_per_second": {"fp32": 5.0}}
    vit |= {f"{name}_precision": {"precision": "bf16", "reason": "measured"} for name in ("prediction", "training")}
    facts["tests"] = [
        {"name": "loader", "values": loader, **result},
        {"name": "vit", "values": vit, **result},
        {"name": "matmul", "values": {"gflops": {"fp32": 130.0, "bf16": 400.0}}, **result},
    ]
    facts["environment"] = {"OMP_NUM_THREADS": "4"}
    page = render_page(facts)
    assert "<b>bold" not in page
    assert "&lt;b&gt;bold" in page
    assert page.count("<figure") == 3
    assert "Content-Security-Policy" in page
    for part in ("problems", "tests", "device", "software", "machine", "storage", "variables"):
        assert f'id="{part}"' in page


def test_the_headline_counts():
    facts = made.make_facts()
    assert format_headline(facts) == "no problems found; no self-test"
    for severity in ("error", "warning", "warning"):
        facts["problems"].append({"name": "x", "severity": severity, "text": "", "remedy": ""})
    assert format_headline(facts) == "1 error and 2 warnings; no self-test"
