"""Tests of `vitrail transfer` with a tiny model: table, time budget, resuming; and of the start of fine-tuning."""

import json
import math
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import vitrail
from tests.training.test_train import COLOURS, picture
from vitrail.cli import main
from vitrail.cli import transfer as command
from vitrail.cli.text.training import TrainingDisplay
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation import transfer as compare
from vitrail.evaluation.transfer import CLASS_METHODS, METHODS, TransferRow, TransferTable, choose_steps
from vitrail.evaluation.transfer_table import read_table
from vitrail.models.vit_config import RESAMPLINGS
from vitrail.nn.head import Projection
from vitrail.training.recipe import Data, Facts
from vitrail.training.recipes import build_recipe
from vitrail.training.step_time import StepTime

Run = Callable[..., "Done"]
TRANSFER = ("transfer", "model.safetensors", "photos", "--workers", "0")
TRAIN = ("train", "photos", "--init", "model.safetensors", "--workers", "0", "--out", "run")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Create a folder of coloured images and an untrained model with a head for five other classes."""
    for name, colour in COLOURS.items():
        for number in range(12):
            picture(tmp_path / "photos" / "train" / name / f"{number}.png", colour, 100 * number + len(name))
        for number in range(4):
            picture(tmp_path / "photos" / "val" / name / f"{number}.png", colour, 7000 + 100 * number + len(name))
    torch.manual_seed(0)
    model = vitrail.build(None, patch=4, width=16, depth=2, heads=2, classes=5, image_size=16)
    torch.nn.init.normal_(model.head.weight)
    model.preprocessing = Preprocessing((16, 16), (16, 16))
    vitrail.save(model, tmp_path / "model.safetensors")
    return tmp_path


@dataclass(frozen=True)
class Done:
    """Exit code and output of a command."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command in this process, to save the import of PyTorch."""
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))

    def done(*arguments: str) -> Done:
        capsys.readouterr()
        try:
            code = main(list(arguments))
        except SystemExit as left:  # raised by argparse
            code = int(str(left.code))
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return done


class Clock:
    """Clock of the comparison: it advances only by the durations that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.patch = 1000.0, monkeypatch
        monkeypatch.setattr(compare, "time", self)

    def monotonic(self) -> float:
        return self.now

    def takes(self, part: str, seconds: float) -> None:
        """Make a function that the comparison calls take so many seconds, finished or stopped."""
        real = getattr(compare, part)

        def slow(*arguments: Any, **named: Any) -> Any:
            self.now += seconds
            return real(*arguments, **named)

        self.patch.setattr(compare, part, slow)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def rows(text: str) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in json.loads(text)["rows"]}


def test_table_of_all_methods_is_not_computed_twice(here: Path, run: Run) -> None:
    done = run(*TRANSFER, "--out", "out", "--json")
    assert done.returncode == 0, done.stderr
    found = rows(done.stdout)
    assert tuple(found) == CLASS_METHODS
    for row in found.values():
        assert 0 <= row["interval"][0] <= row["score"] <= row["interval"][1] <= 1
        assert row["seconds"] > 0
    assert min(found["knn"]["score"], found["linear"]["score"]) > 0.6  # 1.0 where measured; chance is 1/3
    assert (found["head"]["score"], found["head"]["run"]) == (found["linear"]["score"], "head")
    for method in ("lora", "full"):
        summary = json.loads((here / "out" / method / "summary.json").read_text())
        assert found[method]["score"] == summary["top1"]
    body, head = 2 * 16 * (48 + 16 + 64 + 64), 3 * 17
    assert found["knn"]["trainable"] == 0
    assert found["linear"]["trainable"] == found["head"]["trainable"] == head
    assert found["lora"]["trainable"] == head + 2 * 8 * (16 + 48 + 16 + 16 + 16 + 64 + 64 + 16)
    assert found["full"]["trainable"] > body
    for method in ("head", "lora", "full"):
        assert (here / "out" / method / "model.safetensors").is_file()
    assert json.loads((here / "out" / "table.json").read_text())["rows"] == json.loads(done.stdout)["rows"]

    again = run(*TRANSFER, "--out", "out")
    assert again.returncode == 0, again.stderr
    assert "steps" not in again.stderr  # nothing is trained
    assert "trainable" in again.stdout
    assert f"{100 * found['full']['score']:.2f} %" in again.stdout

    other = run(*TRANSFER, "--out", "out", "--seed", "1")
    assert other.returncode == 2
    assert "give another --out" in other.stderr


def test_methods_without_time_are_listed(here: Path, run: Run) -> None:
    done = run(*TRANSFER, "--out", "out", "--minutes", "0.0001", "--methods", "knn,head,lora,full")
    assert done.returncode == 0, done.stderr
    used = "lora was skipped: the budget of 0.0001 minutes is used up, and at the pace of the features it needs"
    assert re.search(rf"{used} \d+\.\d more; raise --minutes to 1$", done.stdout, re.MULTILINE)
    assert "full was skipped" in done.stdout
    assert not (here / "out" / "full").exists()
    more = run(*TRANSFER, "--out", "out", "--methods", "knn,lora", "--json")
    assert set(rows(more.stdout)) == {"knn", "head", "lora"}
    assert "lora" not in json.loads(more.stdout)["left_out"]


def test_a_stopped_training_is_resumed(here: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [*TRANSFER, "--out", "out", "--methods", "knn,full"]
    on_record = TrainingDisplay.on_record

    def interrupting(display: TrainingDisplay, record: dict[str, Any]) -> None:
        on_record(display, record)
        if record["kind"] == "timing" and record["step"] == 3:  # as Ctrl-C does
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingDisplay, "on_record", interrupting)
        stopped = run(*arguments)
    assert stopped.returncode == 130
    assert "Continue with the same command and --out out" in stopped.stderr
    assert not (here / "out" / "full" / "summary.json").exists()
    begun = json.loads((here / "out" / "full" / "run.json").read_text())["id"]
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert "resuming out/full" in done.stderr
    assert "resuming at step 3 of 24" in done.stderr
    assert "knn:" not in done.stderr
    assert set(rows(done.stdout)) == {"knn", "full"}
    assert json.loads((here / "out" / "full" / "run.json").read_text())["id"] == begun


def test_time_of_a_stopped_training_is_counted_once(
    here: Path, run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part, seconds in {"prepare_data": 5, "probe": 60, "measure_step_time": 7, "train": 100, "resume": 30}.items():
        clock.takes(part, seconds)
    arguments = [*TRANSFER, "--out", "out", "--minutes", "60", "--methods", "knn,linear,full", "--json"]
    on_record = TrainingDisplay.on_record

    def interrupting(display: TrainingDisplay, record: dict[str, Any]) -> None:
        on_record(display, record)
        if record["kind"] == "timing" and record["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingDisplay, "on_record", interrupting)
        assert run(*arguments).returncode == 130
    stopped = read_table(here / "out")
    assert stopped is not None
    assert stopped.spent == 5 + 60 + 7 + 100  # both probes together took 60, though each row counts the features
    assert stopped.begun == {"full": 107}
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert rows(done.stdout)["full"]["seconds"] == 107 + 30
    assert json.loads(done.stdout)["spent"] == 172 + 5 + 30
    assert json.loads(done.stdout)["begun"] == {}


def test_time_of_earlier_calls_is_counted(here: Path, run: Run, clock: Clock) -> None:
    clock.takes("probe", 90)
    assert run(*TRANSFER, "--out", "out", "--minutes", "2", "--methods", "knn").returncode == 0
    clock.takes("prepare_data", 31)
    done = run(*TRANSFER, "--out", "out", "--minutes", "2", "--methods", "knn,full")
    assert "full was skipped: the budget of 2 minutes is used up" in done.stdout  # 90 + 31 seconds


def test_probes_ignore_the_budget(run: Run, clock: Clock) -> None:
    clock.takes("prepare_data", 100)
    done = run(*TRANSFER, "--out", "out", "--minutes", "1", "--methods", "knn,head,lora", "--json")
    assert set(rows(done.stdout)) == {"knn", "head"}
    assert set(json.loads(done.stdout)["left_out"]) == {"lora"}


def test_too_small_a_share_is_reported_with_the_time_needed(
    here: Path, run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pace = StepTime(startup=12.0, step=6.0, evaluation=18.0, steps_per_epoch=30)
    monkeypatch.setattr(compare, "measure_step_time", lambda *arguments: pace)
    clock.takes("measure_step_time", 30)
    arguments = [*TRANSFER, "--out", "out", "--methods", "full"]
    done = run(*arguments, "--minutes", "3")
    # Useful are four epochs of 30 steps.
    assert (
        "full was skipped: 2.5 minutes are left, and 120 steps with evaluation take 12.5; raise --minutes to 13"
        in done.stdout
    )
    assert not (here / "out" / "full").exists()
    found = read_table(here / "out")
    assert found is not None
    assert (found.spent, found.begun) == (30, {})

    def refused(*_: Any, steps: int, **__: Any) -> None:
        raise ValueError(f"{steps} steps are asked for")

    monkeypatch.setattr(compare, "train", refused)
    # Of five minutes, 30 s were spent before, 30 s go to timing and 30 s to startup and evaluation.
    assert "35 steps are asked for" in run(*arguments, "--minutes", "5").stderr


def test_a_method_after_the_budget_is_reported_with_the_time_needed(
    run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pace = StepTime(startup=2.0, step=1.0, evaluation=10.0, steps_per_epoch=3)
    monkeypatch.setattr(compare, "measure_step_time", lambda *arguments: pace)
    clock.takes("train", 200)
    done = run(*TRANSFER, "--out", "out", "--methods", "lora,full", "--minutes", "1")
    assert (
        "full was skipped: the budget of 1 minutes is used up, and at the pace of lora it needs 1.0 more; "
        "raise --minutes to 5" in done.stdout
    )


@pytest.mark.parametrize(
    ("seconds", "n_remaining", "steps"),
    [
        (20, 1, 0),  # startup and evaluation take 12 s: not even 25 steps fit
        (37, 1, 25),
        (37, 2, 25),  # all of it: another training would not fit
        (124, 2, 112),  # the same
        (160, 2, 100),  # four epochs, and the rest for another training
        (224, 2, 100),  # equal shares
        (400, 2, 188),
        (9000, 2, 500),  # the recipe's length
    ],
)
def test_time_is_spent_where_a_training_is_useful(seconds: float, n_remaining: int, steps: int) -> None:
    pace = StepTime(startup=2.0, step=1.0, evaluation=10.0, steps_per_epoch=25)
    assert choose_steps(pace, 500, seconds, n_remaining) == steps


def test_head_is_the_linear_probe_on_cached_features(
    here: Path, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*TRANSFER, "--out", "out", "--methods", "knn").returncode == 0

    def compute(*_: Any, **__: Any) -> None:
        raise AssertionError("the frozen model is computed again")

    with monkeypatch.context() as patch:
        patch.setattr("vitrail.training.features.run_batches", compute)
        done = run(*TRANSFER, "--out", "out", "--methods", "linear,head")
    assert done.returncode == 0, done.stderr
    assert "the linear probe as a model" in done.stdout
    table = read_table(here / "out")
    assert table is not None
    found = {row.method: row for row in table.rows}
    assert found["head"].score == found["linear"].score
    assert found["head"].converged
    written = run("evaluate", "out/head", "photos", "--workers", "0", "--json")
    assert written.returncode == 0, written.stderr
    assert json.loads(written.stdout)["top1"] == found["head"].score
    assert json.loads(written.stdout)["task"] == "single"
    before, after = (vitrail.load(here / name).state_dict() for name in ("model.safetensors", "out/head"))
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("head."))
    assert "logistic regression" in vitrail.load(here / "out" / "head").card["recipe"]["method"]


@pytest.mark.parametrize(
    "slots",
    [{"head": "pre-logits"}, {"prefix": "class+distillation"}, {"head": Projection(8), "classes": None}],
    ids=str,
)
def test_head_of_every_kind_of_model(here: Path, run: Run, slots: dict[str, Any]) -> None:
    torch.manual_seed(0)
    given = {"patch": 4, "width": 16, "depth": 2, "heads": 2, "classes": 5, "image_size": 16} | slots
    model = vitrail.build(None, **given)
    torch.nn.init.normal_(next(model.head.parameters()))
    vitrail.save(model, here / "model.safetensors", preprocessing=Preprocessing((16, 16), (16, 16)))
    done = run(*TRANSFER, "--out", "out", "--methods", "linear,head", "--json")
    assert done.returncode == 0, done.stderr
    found = rows(done.stdout)
    if slots.get("classes", 5):
        assert found["head"]["score"] == found["linear"]["score"]
    written = run("evaluate", "out/head", "photos", "--workers", "0", "--json")
    assert json.loads(written.stdout)["top1"] == found["head"]["score"]


def test_length_is_the_same_in_plan_progress_and_table(here: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(12, 15):  # 39 images in batches of 32: one step per epoch, not 39 / 32
        picture(here / "photos" / "train" / "red" / f"{number}.png", COLOURS["red"], number)
    done = run(*TRANSFER, "--out", "out", "--methods", "full", "--json")
    assert done.returncode == 0, done.stderr
    about = rows(done.stdout)["full"]["about"]
    assert f"full: {about} at" in done.stderr
    records = [json.loads(line) for line in (here / "out" / "full" / "metrics.jsonl").read_text().splitlines()]
    assert about == f"{records[-1]['step']} steps, {records[-1]['epoch']:g} epochs"
    assert rows(done.stdout)["full"]["converged"] is True  # the recipe's length


def test_training_cut_short_is_marked(here: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "choose_steps", lambda *arguments: 4)
    done = run(*TRANSFER, "--out", "out", "--methods", "full")
    assert done.returncode == 0, done.stderr
    assert "4 of 24 steps, 4 epochs, not converged" in done.stdout
    assert "full not converged: the score may rise with more time; raise --minutes" in done.stdout
    table = json.loads((here / "out" / "table.json").read_text())
    assert table["rows"][0]["converged"] is False
    page = (here / "out" / "full" / "report.html").read_text(encoding="utf-8")
    assert "This training has not converged." in page
    assert "4 of the recipe’s 24 steps" in page


@pytest.mark.parametrize("command", [["transfer"], ["evaluate", "--probe", "knn"]])
def test_a_model_without_preprocessing_is_refused(here: Path, run: Run, command: list[str]) -> None:
    bare = vitrail.build(None, patch=4, width=16, depth=2, heads=2, classes=5, image_size=16)
    vitrail.save(bare, here / "bare.safetensors")
    done = run(command[0], "bare.safetensors", "photos", *command[1:], "--workers", "0")
    assert done.returncode == 2
    assert "bare.safetensors has no preprocessing" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "knn,magic"], "unknown method 'magic': use knn, linear, linear-4, head, lora, full"),
        (["--minutes", "0"], "--minutes must be > 0, got 0.0"),
        (["--out", "photos"], "photos is not empty and has no table.json"),
        (["--device", "tpu"], "unknown device 'tpu'"),
    ],
)
def test_user_errors_are_one_line(run: Run, arguments: list[str], message: str) -> None:
    done = run(*TRANSFER, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_an_invalid_size_writes_nothing(here: Path, run: Run) -> None:
    arguments = [*TRANSFER, "--out", "out", "--methods", "knn"]
    wrong = run(*arguments, "--size", "25")
    assert wrong.returncode == 2
    assert "not divisible" in wrong.stderr
    assert not (here / "out").exists()
    assert run(*arguments, "--size", "24").returncode == 0
    assert "give another --out" in run(*arguments, "--size", "16").stderr


def test_a_damaged_table_is_one_line(here: Path, run: Run) -> None:
    (here / "out").mkdir()
    (here / "out" / "table.json").write_text('{"rows": 3}')
    done = run(*TRANSFER, "--out", "out")
    assert done.returncode == 2
    assert "out/table.json is not a valid table" in done.stderr


def test_table_survives_writing_and_reading(tmp_path: Path) -> None:
    table = TransferTable("m", "d", "i", "top1", "test", 12, 10.0)
    table.add_row(TransferRow("full", 0.5, (0.4, 0.6), 61.0, 5_000, "3 steps", "full"))
    table.add_row(TransferRow("knn", 0.25, (0.1, 0.4), 6.0, 0, "k 20"))
    table.left_out["lora"] = "no time"
    table.write(tmp_path)
    assert read_table(tmp_path) == table
    lines = table.format_lines()
    assert [line.split()[0] for line in lines[1:4]] == ["method", "knn", "full"]
    assert lines[3].split() == ["full", "3", "steps", "50.00", "%", "40.0–60.0", "1.0", "5,000"]
    assert lines[4] == "lora was skipped: no time"


def test_methods_of_command_and_library_are_equal() -> None:
    assert command.METHODS == METHODS


# --- the start of fine-tuning ---


def test_a_new_head_is_initialised_to_zero(here: Path, run: Run) -> None:
    """The first loss is that of uniform predictions, and a tiny learning rate keeps the head near zero."""
    done = run(*TRAIN, "--steps", "1", "--lr", "1e-12", "--set", "ema=none", "--set", "schedule.warmup=0")
    assert done.returncode == 0, done.stderr
    first = json.loads((here / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(math.log(3), abs=1e-6)
    head = vitrail.load(here / "run" / "model.safetensors").head
    assert head.weight.shape == (3, 16)
    assert head.weight.abs().max() < 1e-9


@pytest.mark.parametrize(("given", "scale"), [((), 16), (("--set", "optimizer.head_scale=2"), 2)])
def test_a_new_head_has_a_higher_learning_rate_in_a_short_run(
    here: Path, run: Run, given: tuple[str, ...], scale: int
) -> None:
    """The first step of Adam moves a parameter by its learning rate."""
    done = run(*TRAIN, "--steps", "1", "--lr", "1e-5", "--set", "ema=none", *given)
    assert done.returncode == 0, done.stderr
    head = vitrail.load(here / "run" / "model.safetensors").head
    assert head.weight.abs().max().item() == pytest.approx(scale * 1e-5, rel=0.01)


def test_a_larger_size_resamples_positions_by_the_rule_of_the_checkpoint(here: Path, run: Run) -> None:
    vitrail.save(vitrail.load(here / "model.safetensors", assume={"resampling": "google"}), here / "model.safetensors")
    done = run(*TRAIN, "--size", "24", "--steps", "1", "--lr", "1e-12", "--set", "ema=none")
    assert done.returncode == 0, done.stderr
    loaded = vitrail.load(here / "run" / "model.safetensors")
    expected = vitrail.load(here / "model.safetensors", image_size=24).state_dict()["position.weight"]
    assert loaded.config.image_size == (24, 24)
    assert loaded.preprocessing is not None
    assert loaded.preprocessing.size == (24, 24)
    torch.testing.assert_close(loaded.state_dict()["position.weight"], expected, atol=1e-6, rtol=0)
    assert expected.shape[1] == 37
    assert loaded.config.resampling == RESAMPLINGS["google"]
    other = vitrail.load(here / "model.safetensors", image_size=24, assume={"resampling": "timm"})
    assert (other.state_dict()["position.weight"] - expected).abs().max() > 1e-3


def test_a_size_not_divisible_by_the_patch_is_refused(run: Run) -> None:
    done = run(*TRAIN, "--size", "25", "--steps", "1")
    assert done.returncode == 2
    assert "not divisible" in done.stderr


@pytest.mark.parametrize(
    ("method", "lr", "decay", "dropout"),
    [
        ("full", 1e-3, 0.65, 0.5),
        ("last-2", 1e-3, 1.0, 0.5),
        ("lora", 3e-3, 1.0, 0.5),
        ("lora-16", 3e-3, 1.0, 0.5),
        ("head", 3e-3, 1.0, 0.0),
    ],
)
def test_tuning_method_decides_the_learning_rate(method: str, lr: float, decay: float, dropout: float) -> None:
    facts = Facts(800, 10, False, (400, 300), 3, True, vitrail.configure("Ti/16"), overrides={"tune": method})
    recipe = build_recipe("finetune", facts, Data("photos"))
    assert (recipe.batch_size, recipe.optimizer.lr, recipe.optimizer.layer_decay) == (32, lr, decay)
    assert recipe.objective.patch_dropout == dropout
