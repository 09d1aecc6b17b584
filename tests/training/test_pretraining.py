"""Runs without labels, through the command line: what they leave, how they go on, and what they refuse."""

import json
import shutil
import signal
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.metrics.histories import BURNT, parse_rows
from tests.training.runs import interrupted, last, summary, trained
from tests.training.test_distributed import run as torchrun
from vitrail.checkpoints.mae import read_mae
from vitrail.cli import main
from vitrail.metrics.collapse import BELOW_UNTRAINED, DIVERGENCE, NOT_FINITE, WORSE_THAN_UNTRAINED
from vitrail.objectives.base import LossModule
from vitrail.reports.verdict import format_verdict
from vitrail.training.recipe import Data, Facts, with_settings
from vitrail.training.recipes import build_recipe
from vitrail.training.runs.pretraining import FeatureEvaluator
from vitrail.utils.json import to_json

TINY = ("--set", "model.size.depth=1", "--batch-size", "16")
METHODS = ("mpp", "mae", "dino")
SMALL_CROPS = ("--set", "views.count=4", "--set", "views.local.0.size=[4,4]")
FACTS = Facts(40, 1, False, (16, 16), 3, False)


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def photos(tmp: Path) -> Path:
    """A flat folder of coloured pictures of one size, one of them broken."""
    folder, chance = tmp / "photos", np.random.default_rng(0)
    folder.mkdir()
    for number in range(48):
        base = np.kron(chance.integers(0, 256, (4, 4, 3)), np.ones((4, 4, 1))).astype(np.uint8)
        Image.fromarray(base).save(folder / f"{number:02d}.png")
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    return folder


@pytest.fixture(scope="module", params=METHODS)
def whole(request: pytest.FixtureRequest, tmp: Path) -> Path:
    """A run of each method on digits, whose labels say how good its features are."""
    out = f"{request.param}-whole"
    trained(
        tmp, "digits", "--method", request.param, "--out", out, *TINY, "--steps", "8", "--set", "validate_every=0.05",
        verb="pretrain",
    )  # fmt: skip
    return tmp / out


def test_finished_run_holds_everything(whole: Path) -> None:
    names = {path.name for path in whole.iterdir()}
    assert {"model.safetensors", "recipe.json", "run.json", "metrics.jsonl", "summary.json", "report.html"} <= names
    found, about = summary(whole), json.loads((whole / "run.json").read_text())
    method = whole.name.removesuffix("-whole")
    assert (about["task"], about["method"], found["method"]) == ("pretraining", method, method)
    assert {"loss", "spread", "rank", "knn", "knn_interval", "knn_pixels", "knn_random", "images"} <= set(found)
    assert found["steps"] == 8
    for name, baseline in found["verdict"]["baselines"].items():
        assert baseline["difference"] == pytest.approx(found["knn"] - found[name])
        assert baseline["interval"][0] < baseline["difference"] < baseline["interval"][1]
    assert sorted(found["verdict"]["baselines"]) == ["knn_pixels", "knn_random"]
    assert (whole / "pretraining.safetensors").is_file() == (method == "mae")
    pictures = sorted(path.name for path in (whole / "evaluation" / "reconstructions").glob("00-*.png"))
    assert pictures == ([] if method == "dino" else ["00-masked.png", "00-original.png", "00-reconstructed.png"])
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    judged = [record for record in records if record["kind"] == "validation"]
    assert judged[0]["step"] == 0
    assert [record["step"] for record in judged[1:]] == [5, 8]
    # The file that was written, loaded as a stranger would load it. Of DINO its last LayerNorm standardises features, which
    # the validation does after it: that rounds otherwise, and a vote that is nearly even may change.
    assert judged[-1]["knn"] == pytest.approx(found["knn"], abs=2.5 / found["images"] if method == "dino" else 0)


@pytest.mark.parametrize("whole", ["mae"], indirect=True)
def test_finished_run_ends_with_a_verdict_that_its_report_has_too(tmp: Path, whole: Path) -> None:
    """Eight steps on digits are never better than their pixels, of which k-NN has 97 %."""
    resumed = trained(tmp, "--resume", whole.name, verb="pretrain")
    features, advice = format_verdict(summary(whole))
    assert "worse than raw pixels by " in features
    assert "untrained network" in features
    assert advice.startswith("What to try: train longer (--steps ")
    assert "that is the recipe's length for this data" in advice
    assert [line for line in resumed.stdout.splitlines() if line in (features, advice)] == [features, advice]
    page = unescape((whole / "report.html").read_text())
    assert features in page
    assert "What to try: train longer (<code>--steps " in page


def test_pretrained_model_can_be_fine_tuned(tmp: Path, whole: Path) -> None:
    model = vitrail.load(whole / "model.safetensors")
    assert model.config.classes is None
    assert model.preprocessing is not None
    out = f"{whole.name}-tuned"
    trained(
        tmp, "digits", "--init", str(whole / "model.safetensors"), "--out", out, "--steps", "4", "--batch-size", "16"
    )
    assert summary(tmp / out)["steps"] == 4
    ours, theirs = model.state_dict(), vitrail.load(tmp / out / "model.safetensors").state_dict()
    name = "blocks.0.mlp.fc1.weight"  # four small steps away from where it began
    assert torch.nn.functional.cosine_similarity(ours[name].flatten(), theirs[name].flatten(), 0) > 0.9


@pytest.mark.parametrize("whole", ["mae"], indirect=True)
def test_mae_continues_with_the_decoder_of_its_checkpoint(tmp: Path, whole: Path) -> None:
    """Where the file's fits the objective's; else it begins afresh, and the run says so."""
    arguments = ("digits", "--method", "mae", "--batch-size", "16", "--steps", "1", "--lr", "1e-12")
    before = read_mae(whole / "pretraining.safetensors").decoder.state_dict()
    for file, extra, said, same in (
        ("pretraining", (), "the decoder continues from", True),
        (
            "pretraining",
            ("--set", "objective.decoder.depth=1"),
            "use --set objective.decoder.depth=2 to continue",
            False,
        ),
        ("model", (), "the decoder starts new: ", False),
    ):
        init = str(whole / f"{file}.safetensors")
        done = trained(tmp, *arguments, "--init", init, *extra, "--out", f"on-{file}-{len(extra)}", verb="pretrain")
        assert "rank and spread are unreliable" not in done.stderr  # they have labels
        assert done.stderr.count(said) == 1
        after = read_mae(tmp / f"on-{file}-{len(extra)}" / "pretraining.safetensors").decoder.state_dict()
        assert torch.allclose(after["pred.weight"], before["pred.weight"], atol=1e-6) == same


@pytest.mark.slow
@pytest.mark.parametrize("whole", ["dino", "mae"], indirect=True)
def test_killed_run_resumes_to_the_same_weights(tmp: Path, whole: Path) -> None:
    run, method = tmp / f"{whole.name}-killed", whole.name.removesuffix("-whole")
    arguments = ("digits", "--method", method, "--out", run.name, *TINY, "--steps", "8", "--set", "validate_every=0.05")
    code = interrupted(tmp, run, signal.SIGKILL, 5, *arguments, "--save-seconds", "0", verb="pretrain")
    assert code == -signal.SIGKILL
    trained(tmp, "--resume", run.name, verb="pretrain")
    ours, theirs = last(run), last(whole)
    assert set(ours) == set(theirs)
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert (run / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("method", "parallel"), [("mae", "fsdp"), ("dino", "ddp"), ("dino", "fsdp"), ("mpp", "ddp")])
def test_two_processes_give_the_result_of_one(tmp: Path, method: str, parallel: str) -> None:
    shared = ("--method", method, *TINY, "--steps", "6", "--set", "optimizer=SGD", "--set", "optimizer.lr=0.01")
    # Statistics of a batch are of a process's part of it, so the stem that has them would not give the same.
    shared += ("--set", "model.embed=Patches")
    if not (tmp / f"{method}-one").exists():
        trained(tmp, "digits", "--out", f"{method}-one", *shared, verb="pretrain")
    out = f"{method}-{parallel}"
    torchrun(tmp, 2, "digits", "--out", out, "--parallel", parallel, *shared, verb="pretrain")
    ours, theirs = last(tmp / out), last(tmp / f"{method}-one")
    assert set(ours) == set(theirs)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=2e-4)
    one, two = summary(tmp / f"{method}-one"), summary(tmp / out)
    for name in ("loss", "rank", "spread"):
        assert one[name] == pytest.approx(two[name], rel=1e-2), name


def test_flat_folder_without_labels(tmp: Path, photos: Path) -> None:
    done = trained(
        tmp, "photos", "--method", "mae", "--out", "flat", *TINY, "--steps", "3", verb="pretrain"
    )  # fmt: skip
    assert "broken.png" in done.stderr
    assert "classes" not in done.stderr
    assert done.stderr.count("held-out images without labels: rank and spread are unreliable") == 1
    found = summary(tmp / "flat")
    assert "knn" not in found
    assert found["rank"] > 0
    about = json.loads((tmp / "flat" / "run.json").read_text())
    assert about["labels"] == []
    assert [skipped["path"] for skipped in about["data"]["skipped"]] == ["photos/broken.png"]
    resumed = trained(tmp, "--resume", "flat", verb="pretrain")
    assert "finished already" in resumed.stderr
    assert "Whether the features are better than untrained ones was not measured: " in resumed.stdout
    assert "What to try: train longer (--steps " in resumed.stdout


@pytest.mark.parametrize("collapse", ["stop", "warn"])
def test_collapse_stops_the_run_with_its_cause_or_warns(
    tmp: Path, collapse: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The validations are those of a recorded run with a learning rate of 1: training would depend on the processor."""
    recorded = {record.pop("step"): record for record in parse_rows(BURNT)}
    monkeypatch.setattr(FeatureEvaluator, "measure", lambda self, task, step: dict(recorded[step]))
    monkeypatch.chdir(tmp)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp / "cache"))
    out = f"collapsed-{collapse}"
    arguments = ("digits", "--method", "dino", *TINY, "--steps", "40", "--set", "validate_every=0.05", "--lr", "0.003")
    code = main(["pretrain", *arguments, "--collapse", collapse, "--out", out])
    said = capsys.readouterr().err
    assert code == (1 if collapse == "stop" else 0), said
    assert said.count("collapse at step 30: ") == 1
    found = summary(tmp / out)
    assert found["stopped"] == ("collapse" if collapse == "stop" else "end")
    assert found["steps"] == (30 if collapse == "stop" else 40)
    assert found["collapse"] == {
        "condition": WORSE_THAN_UNTRAINED,
        "cause": BELOW_UNTRAINED,
        "advice": "lower it to a third, --lr 0.001",
        "step": 30,
    }
    logged = [json.loads(line) for line in (tmp / out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged if line["kind"] == "validation"] == list(range(0, found["steps"] + 1, 5))
    assert BELOW_UNTRAINED in unescape((tmp / out / "report.html").read_text())


def test_validation_loss_that_is_not_finite_stops_the_run_at_once(
    tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = FeatureEvaluator.measure

    def overflow(evaluator: FeatureEvaluator, loss_module: LossModule, step: int) -> dict[str, float]:
        return measure(evaluator, loss_module, step) | ({"loss": float("inf")} if step else {})

    monkeypatch.setattr(FeatureEvaluator, "measure", overflow)
    monkeypatch.chdir(tmp)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp / "cache"))
    arguments = ("digits", "--method", "mae", *TINY, "--steps", "20", "--set", "validate_every=0.05", "--lr", "0.003")
    assert main(["pretrain", *arguments, "--out", "overflow"]) == 1
    assert f"collapse at step 5: {NOT_FINITE}" in capsys.readouterr().err
    assert summary(tmp / "overflow")["collapse"]["condition"] == DIVERGENCE


@pytest.mark.parametrize("later", [True, False])
def test_small_crops_are_sized_by_settings_in_any_order(later: bool) -> None:
    settings = ["views.size=[4,4]", "views.local.0.size=[4,4]"]
    found = with_settings(
        build_recipe("dino", FACTS, Data("photos")), ["views.count=4", *settings[:: 1 if later else -1]]
    )
    assert found.views is not None
    found.views.check_sizes(found.model.image_size, 4)
    assert found.views.build_pipeline(found.augment, found.model.image_size).local.shape == (3, 4, 4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("digits",), "--method"),
        ((), "no data: give a folder"),
        (("photos", "--method", "mae", "--set", "objective.mask=0"), "mask"),
        (("photos", "--method", "mae", "--set", "objective.mask=1"), "mask"),
        (("photos", "--method", "mpp", "--set", "objective.corrupt=0"), "corrupt"),
        (("photos", "--method", "dino", "--batch-size", "4"), "batch"),
        (("photos", "--method", "dino", "--set", "views.size=[2,2]"), "2×2 pixels are smaller than a 4×4 patch"),
        (("photos", "--method", "dino", *SMALL_CROPS, "--set", "views.size=[8,8]"), "set views.local.0.size=[8,8]"),
        (("photos", "--method", "dino", "--set", "views=none"), "views"),
        (("photos", "--method", "dino", "--set", "ema=EMA"), "ema"),
        (("photos", "--method", "mae", "--set", "tune=head"), "tune=head"),
        (("empty", "--method", "mae"), "has no images"),
        (("photos", "--method", "dino", "--set", "augment.0=SimpleCrop"), "SimpleCrop"),
        (("photos", "--method", "mae", "--set", "augment.0.size=[64,64]"), "64×64"),
        (("photos", "--method", "mae", "--set", "objective=Classification"), "learns labels"),
        (("photos", "--method", "mae", "--set", "model.classes=10"), "without labels"),
        (("photos", "--method", "mae", "--set", "model.channels=1"), "set model.channels=3"),
        (("digits", "--method", "dino", "--set", "model.channels=3"), "set model.channels=1"),
        (("photos", "--method", "mae", "--size", "18"), "18"),
        (("nowhere", "--method", "mae"), "nowhere"),
        (("few", "--method", "mae"), "needs 10"),
        (("--recipe", "recipe.json", "--method", "mae"), "leave out --method"),
        (("digits", "--method", "mae", "--init", "nowhere.safetensors"), "nowhere.safetensors"),
    ],
)
def test_bad_input_is_one_line_before_training(
    tmp: Path,
    photos: Path,
    arguments: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not (tmp / "few").exists():
        (tmp / "few").mkdir()
        shutil.copy(photos / "00.png", tmp / "few" / "only.png")
    (tmp / "empty").mkdir(exist_ok=True)
    (tmp / "recipe.json").write_text(json.dumps(to_json(build_recipe("mae", FACTS, Data("photos")))))
    monkeypatch.chdir(tmp)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp / "cache"))
    assert main(["pretrain", *arguments, "--out", "never"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("vitrail pretrain: ")]
    assert len(lines) == 1
    assert said in lines[0]
    assert not (tmp / "never").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--recipe", "mae"), "vitrail pretrain with --method mae"),
        (("--set", "objective=MAE"), "trains without labels"),
        (("--set", "model.classes=none"), "no classes"),
    ],
)
def test_train_refuses_pretraining_recipes(
    tmp: Path,
    arguments: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp)
    assert main(["train", "digits", *arguments, "--out", "never"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp / "never").exists()


def test_splits_with_other_classes_are_all_used(tmp: Path, photos: Path) -> None:
    for folder, first, end in (("train/a", 0, 20), ("train/b", 20, 30), ("val", 30, 40)):
        (tmp / "mixed" / folder).mkdir(parents=True, exist_ok=True)
        for number in range(first, end):
            shutil.copy(photos / f"{number:02d}.png", tmp / "mixed" / folder)
    done = trained(tmp, "mixed", "--method", "mpp", "--out", "of-mixed", *TINY, "--steps", "2", verb="pretrain")
    assert "30 train, 10 validation" in done.stderr
    assert "labels are not used" in done.stderr
    assert "knn" not in summary(tmp / "of-mixed")


def test_best_weights_are_kept_with_keep_best(tmp: Path) -> None:
    arguments = (
        "digits",
        "--method",
        "mae",
        *TINY,
        "--steps",
        "8",
        "--set",
        "validate_every=0.02",
        "--set",
        "keep=best",
    )
    trained(tmp, *arguments, "--out", "kept", verb="pretrain")
    found = summary(tmp / "kept")
    assert found["weights"] == "best"
    assert found["knn"] == found["best_validation"]
