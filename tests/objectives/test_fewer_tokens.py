"""Fewer tokens in training steps: schedules, gradients, resume, and values that are refused."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vitrail
from tests.training.made import CPU
from tests.training.runs import assert_same, train, trained
from vitrail.data.rng import StepRandom
from vitrail.models.base import TokenModel
from vitrail.models.token_merging import merge_model
from vitrail.nn.embed import patchify
from vitrail.objectives.base import LossInputs
from vitrail.objectives.classification import Classification, ClassificationLoss
from vitrail.objectives.distillation import Distillation
from vitrail.objectives.fewer_tokens import (
    FlexiblePatches,
    PatchDropout,
    ProgressiveResolution,
    TokenMerging,
    TokenSlot,
    resize_patches,
)
from vitrail.training.distributed import Team
from vitrail.training.runs.run import Run
from vitrail.training.step_time import measure_steps

STEPS = 10
SLOTS: dict[str, TokenSlot] = {
    "dropout": PatchDropout(start=0.75, end=0.25),
    "resolution": ProgressiveResolution(start=0.5),
    "merging": TokenMerging(r=2),
    "patches": FlexiblePatches(sizes=(8,)),
}


def task(slot: TokenSlot | None, **slots: Any) -> ClassificationLoss:
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "patch": 4,
        "width": 16,
        "depth": 4,
        "heads": 2,
        "classes": 5,
        "image_size": 16,
        "channels": 1,
    }
    model = vitrail.build(None, **(given | slots))
    torch.nn.init.normal_(model.head.weight, std=0.1)
    made = Classification(tokens=slot).build_loss(model, LossInputs(STEPS, vitrail.Preprocessing()))
    assert isinstance(made, ClassificationLoss)
    return made.train()


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 1, 16, 16, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 5


def count_tokens(made: ClassificationLoss, step: int) -> list[int]:
    """Return the input tokens of each layer of a training step."""
    seen: list[int] = []
    blocks = made.model.require_tokens("a test").blocks
    hooks = [b.get_submodule("norm1").register_forward_hook(lambda m, x, y: seen.append(x[0].shape[1])) for b in blocks]
    made(*batch(), StepRandom(0, step, 0, 6, 6, CPU))["loss"].backward()
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize(
    ("name", "first", "middle"),
    [("dropout", [5] * 4, [9] * 4), ("resolution", [5] * 4, [10] * 4), ("patches", [5] * 4, [5] * 4)],
)
def test_number_of_tokens_follows_the_step(name: str, first: list[int], middle: list[int]) -> None:
    """17 tokens: 16 patches and the class token. All slots use them all in the last fifth."""
    made = task(SLOTS[name])
    assert count_tokens(made, 0) == first
    assert count_tokens(made, 4) == middle
    assert count_tokens(made, 8) == count_tokens(made, 9) == [17] * 4


def test_merging_shortens_the_later_layers() -> None:
    made = task(SLOTS["merging"])
    assert count_tokens(made, 0) == count_tokens(made, 7) == [17, 17, 15, 13]
    assert count_tokens(made, 8) == [17] * 4


@pytest.mark.parametrize("name", list(SLOTS))
def test_every_parameter_gets_a_gradient_and_steps_repeat(name: str) -> None:
    losses = []
    for _ in range(2):
        made = task(SLOTS[name])
        loss = made(*batch(), StepRandom(3, 2, 0, 6, 6, CPU))["loss"]
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", list(SLOTS))
def test_evaluation_and_the_last_part_use_the_whole_model(name: str) -> None:
    short, plain = task(SLOTS[name]), task(None)
    images, targets = batch()
    draw = StepRandom(0, 9, 0, 6, 6, CPU)
    assert torch.equal(short(images, targets, draw)["loss"], plain(images, targets, draw)["loss"])
    assert torch.equal(short.eval()(images)["logits"], plain.eval()(images)["logits"])


def test_merging_computes_what_a_merged_model_predicts() -> None:
    made = task(SLOTS["merging"])
    images, _ = batch()
    model = made.model
    assert isinstance(model, TokenModel)
    logits = SLOTS["merging"].compute_logits(model, images, StepRandom(0, 0, 0, 6, 6, CPU), STEPS)
    torch.testing.assert_close(logits, merge_model(model, 2)(images))


@pytest.mark.parametrize("new", [6, 8])
def test_resized_patches_have_the_same_embedding(new: int) -> None:
    """FlexiViT, equation 3: a patch enlarged by B and the matrix resized by the pseudoinverse give the same product."""
    weight, images = torch.randn(5, 2 * 16), torch.randn(3, 2, 4, 4)
    larger = F.interpolate(images, size=(new, new), mode="bilinear", antialias=True)
    ours = patchify(larger, new) @ resize_patches(weight, 4, new).t()
    torch.testing.assert_close(ours, patchify(images, 4) @ weight.t(), rtol=1e-4, atol=1e-4)
    assert torch.allclose(resize_patches(weight, 4, 4), weight, atol=1e-5)


def test_patch_size_is_the_same_for_parts_of_a_batch_and_changes_with_the_step() -> None:
    slot = FlexiblePatches(sizes=(2, 4, 8))
    sizes = [slot.size_at(StepRandom(0, step, 0, 2, 6, CPU), 100, 4) for step in range(80)]
    assert sizes == [slot.size_at(StepRandom(0, step, 4, 2, 6, CPU), 100, 4) for step in range(80)]
    assert set(sizes) == {2, 4, 8}
    assert {slot.size_at(StepRandom(0, step, 0, 2, 6, CPU), 100, 4) for step in range(80, 100)} == {4}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PatchDropout(start=1.0), "start must be >= 0 and < 1, got 1.0"),
        (
            lambda: PatchDropout(full=1.5),
            "full, the fraction of the run with all tokens, must be >= 0 and < 1, got 1.5",
        ),
        (
            lambda: ProgressiveResolution(start=0),
            "start, the first fraction of the image side, must be > 0 and < 1, got 0",
        ),
        (lambda: TokenMerging(r=0), "r, the tokens merged in a layer, must be >= 1, got 0"),
        (lambda: FlexiblePatches(sizes=()), "sizes, the patch sizes, must be a list of numbers >= 1, got []"),
        (lambda: Classification(patch_dropout=0.5, tokens=TokenMerging()), "both shorten a step: set patch_dropout=0"),
        (lambda: Distillation(tokens=TokenMerging()), "Distillation does not support objective.tokens"),
        (lambda: task(FlexiblePatches(sizes=(3,))), "patches of 3 do not divide an image of 16×16"),
        (lambda: task(FlexiblePatches(sizes=(8,)), embed="conv-stem"), "FlexiblePatches needs linear patches"),
        (lambda: task(ProgressiveResolution(start=0.99)), "set a smaller objective.tokens.start"),
        (lambda: task(TokenMerging(), position="rotary2d"), "token merging does not support"),
    ],
)
def test_bad_values_are_refused_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        make()
    assert "\n" not in str(error.value)


def test_models_without_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"objective\.tokens=PatchDropout does not support"):
        Classification(tokens=PatchDropout()).build(vitrail.build("R50x1", classes=5))


def test_merging_is_refused_with_sharded_layers() -> None:
    run = object.__new__(Run)
    recipe = SimpleNamespace(tune="full", objective=Classification(tokens=TokenMerging()))
    run.setup = SimpleNamespace(recipe=recipe, machine=None, team=Team(0, 2, CPU, "fsdp"))  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"TokenMerging calls parts of layers, which are sharded: use parallel='ddp'"):
        run.build_trainer(task(None).model)


def test_time_budget_measures_steps_of_all_parts_of_the_run() -> None:
    seen: list[int] = []
    stub: Any = SimpleNamespace(
        loader=SimpleNamespace(workers=0),
        team=Team(0, 1, CPU),
        plan=SimpleNamespace(steps=60),
        batches=lambda: ((step, 0, None) for step in range(60)),
        train_step=lambda step, epoch, batch: seen.append(step),
    )
    measure_steps(stub, None)
    assert len(seen) == 5
    assert {step // 20 for step in seen} == {0, 1, 2}


FEW = ("--batch-size", "32", "--set", "model.size.depth=2", "--set", "ema=EMA", "--set", "model.embed=Patches")


@pytest.mark.parametrize(
    "setting",
    [
        "FlexiblePatches",
        *(pytest.param(s, marks=pytest.mark.slow) for s in ("PatchDropout", "ProgressiveResolution", "TokenMerging")),
    ],
)
def test_resumed_run_computes_the_same(tmp_path: Path, setting: str) -> None:
    slot = ("--set", f"objective.tokens={setting}")
    slot += ("--set", "objective.tokens.sizes=[2,4,8]") if setting == "FlexiblePatches" else ()
    trained(tmp_path, "digits", "--out", "whole", "--steps", "12", *FEW, *slot, "--set", "validate_every=0.1")
    run = tmp_path / "again"
    shutil.copytree(tmp_path / "whole", run)
    newest = sorted((run / "checkpoints").iterdir())[-1]
    shutil.rmtree(newest)
    (run / "summary.json").unlink()
    trained(tmp_path, "--resume", "again")
    assert_same(run, tmp_path / "whole")


def test_command_line_refuses_a_bad_slot_in_one_line(tmp_path: Path) -> None:
    cases = {
        ("Progressive",): "unknown class 'Progressive'",
        ("TokenMerging", "objective.tokens.r=0"): "r, the tokens merged in a layer, must be >= 1, got 0",
        ("FlexiblePatches",): "FlexiblePatches needs linear patches, got ConvStem: set model.embed=Patches",
    }
    for (name, *more), said in cases.items():
        settings = [part for setting in (f"objective.tokens={name}", *more) for part in ("--set", setting)]
        done = train(tmp_path, "digits", "--out", "run", "--steps", "2", *settings)
        assert done.returncode == 2
        assert said in done.stderr.strip().splitlines()[-1]
        assert not (tmp_path / "run").exists()
