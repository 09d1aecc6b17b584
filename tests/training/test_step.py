"""A training step does not wait for the device, and a step that is not finite changes nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import vitrail
from vitrail.data.dataset import Images
from vitrail.data.loader import Batch, Loader
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources.arrays import ArrayStore
from vitrail.data.transforms.crops import Fit
from vitrail.data.transforms.pipeline import TrainPipeline
from vitrail.models.mae_decoder import Decoder
from vitrail.nn.embed import ConvStem
from vitrail.objectives.base import LossModule
from vitrail.objectives.classification import Classification
from vitrail.objectives.dino import DINO
from vitrail.objectives.mae import MAE
from vitrail.objectives.masked_patches import MaskedPatches
from vitrail.training.checkpointing import Checkpoints, collect_tensors
from vitrail.training.distributed import Team
from vitrail.training.logging import MetricsLog
from vitrail.training.optim import SGD, AdamW, Lamb, Muon, Optim
from vitrail.training.prefetch import prefetch_batches
from vitrail.training.runs.run import compile_loss
from vitrail.training.schedule import EMA, Constant
from vitrail.training.trainer import Diverged, Plan, Trainer

CPU, ADAMW = torch.device("cpu"), AdamW()
PIPELINE = Preprocessing(size=(16, 16), resize=(16, 16), mean=(0.5,), std=(0.25,))


class ListCalls(TorchDispatchMode):
    """List the operations; `reads` counts those that read a number back to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    @property
    def reads(self) -> int:
        return self.names.count("_local_scalar_dense")


def images(count: int = 32) -> Images:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 16, 16), dtype=np.uint8)
    targets = np.arange(count) % 5
    return Images(ArrayStore(pixels, ((0, "memory"),)), np.arange(count), targets, tuple("abcde"))


def trainer(
    folder: Path,
    optim: Optim = ADAMW,
    loss_module: LossModule | None = None,
    records: list[Any] | None = None,
    **plan: Any,
) -> Trainer:
    if loss_module is None:
        torch.manual_seed(0)
        model = vitrail.build(
            None, patch=4, embed=ConvStem(4), width=16, depth=2, heads=2, classes=5, image_size=16, channels=1
        )
        nn.init.normal_(model.head.weight, std=0.1)
        loss_module = Classification(mixup=0.2, cutmix=0.5, patch_dropout=0.25).build(model)
    team = Team(0, 1, CPU)
    settings: dict[str, Any] = {"steps": 12, "validate_every": 100, "log_every": 4, "save_seconds": 0.0} | plan
    return Trainer(
        loss_module=loss_module,
        loader=Loader(images(), None, TrainPipeline((Fit((16, 16)),), (16, 16), 1, False), batch_size=8),
        normalise=PIPELINE.normalise,
        optim=optim,
        schedule=Constant(),
        plan=Plan(**settings),
        team=team,
        journal=MetricsLog(None, (records.append,) if records is not None else ()),
        checkpoints=Checkpoints(folder, team),
        validate=lambda: {"top1": 0.5},
        on_best=lambda: None,
        ema=EMA(),
    )


def state(made: Trainer) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in collect_tensors(made.loss_module, made.optimizers, None).items()}


@pytest.mark.parametrize("optim", [AdamW(), SGD(), Lamb(weight_decay=0.1), Muon(), AdamW(clip=None)])
def test_step_reads_no_number_back(tmp_path: Path, optim: Optim) -> None:
    made = trainer(tmp_path, optim)
    for step, epoch, batch in made.batches():
        with ListCalls() as counter:
            made.train_step(step, epoch, batch)
        assert counter.reads == 0
    assert len(made.pending) == 12
    made.read_numbers()
    assert made.progress.losses == 12


@pytest.mark.parametrize("objective", [MAE(decoder=Decoder(1, 16, 2)), MaskedPatches(), MaskedPatches(target="pixels")])
def test_pretraining_step_reads_no_number_back(tmp_path: Path, objective: Any) -> None:
    model = vitrail.build(None, patch=4, width=16, depth=2, heads=2, classes=None, image_size=16, channels=1)
    made = trainer(tmp_path, loss_module=objective.build(model, 1))
    step, epoch, batch = next(made.batches())
    with ListCalls() as counter:
        made.train_step(step, epoch, batch)
    assert counter.reads == 0


def test_dino_step_reads_no_number_back(tmp_path: Path) -> None:
    model = vitrail.build(None, patch=4, width=16, depth=2, heads=2, classes=None, image_size=16, channels=1)
    made = trainer(tmp_path, loss_module=DINO(out=16, hidden=16, bottleneck=8).build(model, 12))
    made.normalise = lambda pixels: (torch.stack([pixels.float()] * 2, 1), torch.zeros(len(pixels), 0, 1, 8, 8))
    step, epoch, batch = next(made.batches())
    with ListCalls() as counter:
        made.train_step(step, epoch, batch)
    assert counter.reads == 0


@pytest.mark.parametrize("optim", [AdamW(), SGD(weight_decay=0.1), Lamb(weight_decay=0.1), Muon(weight_decay=0.1)])
@pytest.mark.parametrize("first", [True, False])
def test_step_that_is_not_finite_changes_nothing(tmp_path: Path, optim: Optim, first: bool) -> None:
    made = trainer(tmp_path, optim, skip_nonfinite=1)
    batches = made.batches()
    if not first:
        made.train_step(*next(batches))
    before = state(made)
    normalise = made.normalise
    made.normalise = lambda pixels: normalise(pixels) * torch.nan
    made.train_step(*next(batches))
    after = state(made)
    counted = [name for name in after if name.endswith("num_batches_tracked")]
    zero = [name for name in after if name not in before]  # the optimiser's state, made by the first step
    assert all(not after[name].any() for name in zero)
    assert not [n for n in before if n not in counted and not torch.equal(before[n], after[n])]
    made.normalise = normalise
    made.train_step(*next(batches))
    made.read_numbers()
    assert made.progress.nonfinite == 1
    assert made.progress.losses == (1 if first else 2)
    assert all(t.isfinite().all() for t in state(made).values())


@pytest.mark.parametrize("at", [2, 3, 6])
def test_nonfinite_loss_names_its_step_and_leaves_the_checkpoint_before(tmp_path: Path, at: int) -> None:
    """The loss of step `at` is not finite; lines are logged after steps 4, 8 and 12, a checkpoint is due after each step."""
    records: list[Any] = []
    made = trainer(tmp_path, records=records)
    normalise, calls = made.normalise, iter(range(1, 100))
    made.normalise = lambda pixels: normalise(pixels) * (torch.nan if next(calls) == at else 1)
    with pytest.raises(Diverged, match=rf"loss nan at step {at} \(epoch 1|loss nan at step {at} \(epoch 2") as error:
        made.run()
    assert "\n" not in str(error.value)
    newest, _ = made.checkpoints.newest_intact()
    assert newest is not None
    assert newest.name == f"step-{at - 1:08d}"
    made.resume(newest)
    assert made.progress.nonfinite == 0
    assert all(t.isfinite().all() for t in state(made).values())


def test_without_checkpoints_the_log_line_stops_the_run(tmp_path: Path) -> None:
    records: list[Any] = []
    made = trainer(tmp_path, records=records, save_seconds=1000.0)
    normalise, calls = made.normalise, iter(range(1, 100))
    made.normalise = lambda pixels: normalise(pixels) * (torch.nan if next(calls) == 6 else 1)
    with pytest.raises(Diverged, match="loss nan at step 6"):
        made.run()
    assert [record["step"] for record in records if record["kind"] == "train"] == [4]
    assert made.progress.step == 8  # the next line of the log


class FakeStream:
    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def wait_stream(self, other: "FakeStream") -> None:
        self.events.append(f"{self.name} waits for {other.name}")


def test_batches_are_pinned_and_sent_ahead_on_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls on CUDA, which this test replaces: it was never run on a GPU."""
    events: list[str] = []
    copying, computing = FakeStream("copy", events), FakeStream("compute", events)

    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        events.append(f"on {stream.name}")
        yield

    def pin(tensor: Tensor) -> Tensor:
        events.append("pin")
        return tensor

    def to(tensor: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        events.append(f"to {device.type}, {'without' if non_blocking else 'with'} waiting")
        return tensor

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copying)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: computing)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: events.append(f"keep for {stream.name}"))

    def read() -> Iterator[tuple[int, int, Batch]]:
        for step in range(3):
            events.append(f"read {step}")
            yield step, 0, Batch(torch.zeros(1), torch.zeros(1), torch.zeros(1))

    send = ["on copy", *["pin", "to cuda, without waiting"] * 2]
    give = ["compute waits for copy", *["keep for compute"] * 2]
    for step, _, _ in prefetch_batches(read(), torch.device("cuda")):
        events.append(f"train {step}")
    steps = [f"train {step}" for step in range(3)]
    expected = ["read 0", *send, "read 1", *send, *give, steps[0], "read 2", *send, *give, steps[1], *give, steps[2]]
    assert events == expected


def test_prefetch_on_the_cpu_reads_one_batch_at_a_time() -> None:
    seen: list[int] = []
    batch = Batch(torch.zeros(1), torch.zeros(1), torch.zeros(1))
    source = ((step, 0, seen.append(step) or batch) for step in range(3))
    for step, _, given in prefetch_batches(source, CPU):
        assert seen == list(range(step + 1))
        assert given is batch


@pytest.mark.parametrize(("device", "options"), [("cuda", {"mode": "reduce-overhead"}), ("cpu", {})])
def test_compiling_uses_cuda_graphs_on_cuda(monkeypatch: pytest.MonkeyPatch, device: str, options: Any) -> None:
    """The mode that PyTorch gets; CUDA graphs were never run here."""
    seen: list[Any] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: seen.append(options))
    model = vitrail.build(None, patch=4, width=16, depth=2, heads=2, classes=5, image_size=16, channels=1)
    compile_loss(Classification().build(model), device)
    assert seen == [options] * 3  # the model and its blocks


def test_fused_and_foreach_calls_are_used(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    with ListCalls() as counter:
        made.train_step(*next(made.batches()))
    seen = counter.names
    groups = len(made.optimizers[0].param_groups)
    assert seen.count("_fused_adamw_") == groups
    assert seen.count("_foreach_lerp_") == 1  # the EMA of all weights
    assert seen.count("_local_scalar_dense") == 0
