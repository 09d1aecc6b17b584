"""Checkpoints move between any numbers of processes and layouts: the same bits, and the same run."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import vitrail
from tests.training.groups import run_processes
from tests.training.runs import tensors
from tests.training.test_step import PIPELINE, images
from vitrail.data.loader import Loader
from vitrail.data.transforms.crops import Fit
from vitrail.data.transforms.pipeline import TrainPipeline
from vitrail.nn.embed import ConvStem
from vitrail.objectives.classification import Classification
from vitrail.training.checkpointing import Checkpoints, read_progress
from vitrail.training.distributed import Parallel, Team, choose_shard_size, join_process_group
from vitrail.training.logging import MetricsLog
from vitrail.training.optim import SGD, AdamW, Muon, Optim
from vitrail.training.schedule import EMA, Constant
from vitrail.training.trainer import Plan, Trainer

STEPS = 8


def build_trainer(folder: Path, team: Team, optim: Optim) -> Trainer:
    """A model with BatchNorm in its stem, whose running statistics are buffers."""
    torch.manual_seed(0)
    slots = {"patch": 4, "embed": ConvStem(4), "width": 16, "depth": 2, "heads": 2}
    model = vitrail.build(None, **slots, classes=5, image_size=16, channels=1)
    nn.init.normal_(model.get_parameter("head.weight"), std=0.1)
    pipeline = TrainPipeline((Fit((16, 16)),), (16, 16), 1, False)
    return Trainer(
        loss_module=Classification().build(model),
        loader=Loader(images(), None, pipeline, batch_size=8, rank=team.rank, world_size=team.world_size),
        normalise=PIPELINE.normalise,
        optim=optim,
        schedule=Constant(),
        plan=Plan(steps=STEPS, validate_every=100),
        team=team,
        journal=MetricsLog(None, ()),
        checkpoints=Checkpoints(folder, team),
        validate=lambda: {"top1": 0.5},
        on_best=lambda: None,
        ema=EMA(),
    )


def continue_in(folder: Path, parallel: Parallel, step: int, optim: Optim) -> None:
    """Continue from the newest checkpoint of a folder, if there is one, to a step."""
    with join_process_group("cpu", parallel) as team:
        trainer = build_trainer(folder, team, optim)
        if newest := trainer.checkpoints.steps():
            trainer.resume(newest[-1])
        trainer.plan = replace(trainer.plan, steps=step)  # saves at its end
        trainer.run()


def copy_through(folder: Path, parallels: list[Parallel], optim: Optim) -> None:
    """Load the newest checkpoint in each layout, and save what was loaded for the next one."""
    for parallel in parallels:
        with join_process_group("cpu", parallel) as team:
            trainer = build_trainer(folder, team, optim)
            trainer.resume(trainer.checkpoints.steps()[-1])
            if team.world_size > 1:
                weight = trainer.loss_module.get_parameter("model.blocks.0.mlp.fc1.weight")
                placements = weight.placements if isinstance(weight, DTensor) else ()
                assert sum(isinstance(each, Shard) for each in placements) == (parallel != "ddp")
                assert len(placements) == {"ddp": 0, "fsdp": 1, "hsdp": 2}[parallel]
            team.barrier()  # all have read it
            if team.is_main:
                shutil.rmtree(folder)  # what is saved must come from the processes
            team.barrier()
            trainer.save()


def test_every_bit_survives_every_layout(tmp_path: Path) -> None:
    """Of Muon, which leaves vectors to AdamW: two kinds of state."""
    folder, optim = tmp_path / "checkpoints", Muon()
    run_processes(continue_in, 1, folder, "ddp", 3, optim)
    before, progress = tensors(folder / "step-00000003"), read_progress(folder / "step-00000003")
    assert {"weights", "average", "optimizer"} == {name.partition(".")[0] for name in before}
    for world, parallels in ((4, ["ddp", "fsdp", "hsdp"]), (2, ["fsdp", "ddp", "hsdp"]), (1, ["ddp"])):
        run_processes(copy_through, world, folder, parallels, optim, per_host=min(world, 2))
        after = tensors(folder / "step-00000003")
        assert set(after) == set(before)
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
        assert replace(read_progress(folder / "step-00000003"), logged=progress.logged) == progress  # no log is open


def test_run_of_other_processes_stays_near_the_run_of_one(tmp_path: Path) -> None:
    """Up to the order of additions, of images and of gradients: in four as 2×2, and in others one after another."""
    optim = SGD(lr=0.05)
    changes = ((1, "ddp", 2), (4, "fsdp", 4), (2, "fsdp", 5), (4, "hsdp", 6), (2, "ddp", 7), (1, "ddp", STEPS))
    for name, stages in (("one", ((1, "ddp", STEPS),)), ("2×2", ((4, "hsdp", STEPS),)), ("changed", changes)):
        for world, parallel, step in stages:
            run_processes(continue_in, world, tmp_path / name, parallel, step, optim, per_host=min(world, 2))
    expected = tensors(tmp_path / "one" / f"step-{STEPS:08d}")
    for other in ("2×2", "changed"):
        found = tensors(tmp_path / other / f"step-{STEPS:08d}")
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("parallel", ["ddp", "hsdp"])
def test_run_that_is_resumed_in_its_own_layout_has_the_same_bits(tmp_path: Path, parallel: Parallel) -> None:
    for folder, steps in (("whole", (STEPS,)), ("parts", (3, STEPS))):
        for step in steps:
            run_processes(continue_in, 4, tmp_path / folder, parallel, step, AdamW(), per_host=2)
    expected, found = (tensors(tmp_path / name / f"step-{STEPS:08d}") for name in ("whole", "parts"))
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_shard_size_is_that_of_a_host_or_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert choose_shard_size("hsdp", None, 8) == 4
    assert choose_shard_size("hsdp", 2, 8) == 2
    assert choose_shard_size("fsdp", None, 8) is None
    with pytest.raises(ValueError, match="8 processes cannot be divided by shard_size=3: give shard_size="):
        choose_shard_size("hsdp", 3, 8)
    with pytest.raises(ValueError, match="10 processes cannot be divided by shard_size=4, the processes of this host"):
        choose_shard_size("hsdp", None, 10)
    with pytest.raises(ValueError, match="shard_size=2 is for parallel='hsdp'"):
        choose_shard_size("ddp", 2, 8)
