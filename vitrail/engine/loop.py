"""The training loop. There is no other.

It sees `losses["loss"]` and never asks which objective it is. Rates are functions of the step, samples and their augmentation
of (seed, epoch, index), what modules draw (dropout, stochastic depth) of (seed, step, process): so a run that goes on from a
checkpoint needs no replay and gives the same numbers.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitrail.data.loader import Batch, Loader
from vitrail.engine.distributed import Team, whole
from vitrail.engine.ema import EMA, Average
from vitrail.engine.heap import keep_memory
from vitrail.engine.journal import Journal
from vitrail.engine.optim import Optim, set_decay, set_rate
from vitrail.engine.rules import rules
from vitrail.engine.schedule import ScheduleSlot
from vitrail.engine.state import Checkpoints, Progress, load, tensors_of
from vitrail.objectives.draw import Draw
from vitrail.objectives.task import Task

Precision = Literal["fp32", "bf16", "fp16"]
Metrics = dict[str, float]


@dataclass(frozen=True)
class Plan:
    """How long to train, and what to do at which step."""

    steps: int
    validate_every: int  # steps
    log_every: int = 10
    save_seconds: float = 300.0  # a checkpoint at least this often, besides one after each validation
    accumulate: int = 1  # parts that a process computes its share of a batch in
    precision: Precision = "fp32"
    seed: int = 0
    patience: int | None = None  # validations without improvement before it stops
    skip_nonfinite: int = 0
    score: str = "top1"  # what is to become higher


class Stopped(Exception):
    """Somebody asked the run to stop, and it did, with everything saved."""

    def __init__(self, number: int, checkpoint: Path) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; everything is saved in {checkpoint}")
        self.number, self.run = number, checkpoint.parent.parent


class Diverged(ValueError):
    """The loss or its gradient is no longer a number."""


@dataclass
class Training:
    """A task on its way through a plan."""

    task: Task
    loader: Loader
    normalise: Callable[[Tensor], Tensor]
    optim: Optim
    schedule: ScheduleSlot
    plan: Plan
    team: Team
    journal: Journal
    checkpoints: Checkpoints
    validate: Callable[[], Metrics]  # in evaluation mode, with the averaged weights where there is an average
    improved: Callable[[], None]  # called when the score is the best so far, with the same weights in place
    ema: EMA | None = None
    progress: Progress = field(default_factory=Progress)
    stopped: Literal["end", "early"] = "end"

    def __post_init__(self) -> None:
        if self.team.device.type == "cpu":
            keep_memory()
        self.task.to(self.team.device)
        self.wrapped = self.team.wrap(self.task)
        self.optimizers = self.optim.build(self.task, rules(self.task, self.optim.layer_decay))
        self.average = Average(self.ema, self.task) if self.ema else None
        self.parameters = [p for p in self.task.parameters() if p.requires_grad]
        # Scaling the loss is for float16, whose small gradients would vanish.
        self.scaler = torch.amp.GradScaler(self.team.device.type, enabled=self.plan.precision == "fp16")
        self.signalled: int | None = None

    def resume(self, checkpoint: Path) -> None:
        """Goes on from a checkpoint as if nothing had happened."""
        self.progress = load(checkpoint, self.task, self.optimizers, self.average, self.team)
        if self.progress.scale is not None:
            self.scaler.load_state_dict(self.progress.scale)

    def run(self) -> None:
        """Trains to the end of the plan, or until somebody or the validation says to stop."""
        plan, progress = self.plan, self.progress
        self.journal.begin(progress.logged, progress.step)
        began = saved = logged = time.monotonic()
        before, images_before = progress.seconds, progress.images
        with self.listening():
            for step, epoch, batch in self.batches():
                self.train(step, epoch, batch)
                progress.step = step + 1
                progress.images += self.loader.batch_size
                now = time.monotonic()
                progress.seconds = before + now - began
                if progress.step % plan.log_every == 0 or progress.step == plan.steps:
                    self.log(step)
                    rate = (progress.images - images_before) / max(1e-9, now - logged)
                    timing = {"step": progress.step, "seconds": round(progress.seconds, 3), "images_per_second": rate}
                    self.journal.time(timing)
                    logged, images_before = now, progress.images
                due = progress.step % plan.validate_every == 0 or progress.step == plan.steps
                if due:
                    self.judge(step)
                    spent = time.monotonic() - now  # validation is not training
                    began, logged = began + spent, logged + spent
                over_time = self.team.leads and time.monotonic() - saved > plan.save_seconds
                save, stop = self.team.any(due or over_time, self.signalled is not None)
                if save or stop:
                    place = self.save()
                    saved = time.monotonic()
                    if stop:
                        self.journal.tell({"kind": "stopping"})
                        number = max(n or 0 for n in self.team.everybody(self.signalled))
                        raise Stopped(number, place)
                if self.tired:
                    break
        self.stopped = "early" if self.tired else "end"

    @property
    def tired(self) -> bool:
        """Whether validation has not improved for as long as the plan has patience."""
        return self.plan.patience is not None and self.progress.since_best >= self.plan.patience

    def batches(self) -> Iterator[tuple[int, int, Batch]]:
        """Step, epoch and batch, from where the run stands to the end of the plan."""
        step, per_epoch = self.progress.step, self.loader.steps
        while step < self.plan.steps and not self.tired:
            epoch, start = divmod(step, per_epoch)
            for batch in self.loader.epoch(epoch, start):
                yield step, epoch, batch
                step += 1
                if step >= self.plan.steps:
                    return

    def train(self, step: int, epoch: int, batch: Batch) -> None:
        """One step: gradients of the whole batch, clipped, applied, averaged."""
        plan, team = self.plan, self.team
        torch.manual_seed((plan.seed * 1_000_003 + step) * 4096 + team.rank)
        rate = self.optim.lr * self.schedule.factor(step, plan.steps)
        set_rate(self.optimizers, rate)
        set_decay(self.optimizers, self.optim.decay_at(step, plan.steps))
        self.task.train()
        statistics = [(buffer, buffer.clone()) for buffer in self.task.buffers() if buffer.is_floating_point()]
        loss = self.backward(step, batch)
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        norm = whole(nn.utils.clip_grad_norm_(self.parameters, self.optim.clip or math.inf))
        value, length = team.mean(loss).item(), norm.item()
        if math.isfinite(value) and math.isfinite(length):
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
            team.share_buffers(self.task)
            self.task.after_step(step)
            if self.average is not None:
                self.average.update(step)
            self.progress.loss += value
            self.progress.losses += 1
        else:  # nothing of this step may stay: not in the weights, and not in running statistics
            for buffer, before in statistics:
                buffer.copy_(before)
            self.scaler.update()
            # In float16 a gradient out of range is usual now and then: the loss is scaled less from here on.
            if not (plan.precision == "fp16" and math.isfinite(value)):
                self.refuse(step, epoch, batch, rate, value, length)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.last = {"lr": rate, "grad_norm": length}

    def backward(self, step: int, batch: Batch) -> Tensor:
        """The gradients of this process's share of the batch, part by part; gives its mean loss."""
        plan, team = self.plan, self.team
        mine = len(batch.indices)
        parts = min(plan.accumulate, mine)
        first, total = team.rank * mine, team.world * mine
        loss = torch.zeros((), device=team.device)
        # Even bounds: partners in mixing are neighbours, and stay together.
        bounds = sorted({0, mine, *(2 * round(mine * part / parts / 2) for part in range(1, parts))})
        for a, b in pairwise(bounds):
            images = self.normalise(batch.pixels[a:b].to(team.device, non_blocking=True))
            targets = batch.targets[a:b].to(team.device, non_blocking=True)
            draw = Draw(plan.seed, step, first + a, b - a, total, team.device)
            with team.gathering(self.wrapped, last=b == mine):
                with self.cast():
                    part = self.wrapped(images, targets, draw)["loss"] * ((b - a) / mine)
                self.scaler.scale(part).backward()
            loss += part.detach()
        return loss

    def cast(self) -> Any:
        """Matrix products in half precision, where that is asked for."""
        if self.plan.precision == "fp32":
            return nullcontext()
        return torch.autocast(
            self.team.device.type, {"bf16": torch.bfloat16, "fp16": torch.float16}[self.plan.precision]
        )

    def refuse(self, step: int, epoch: int, batch: Batch, rate: float, loss: float, norm: float) -> None:
        """Counts a step that is skipped; ends the run with all that is known of it when there are too many."""
        self.progress.nonfinite += 1
        names = [self.loader.pictures.name(int(index)) for index in batch.indices]
        everybody = [name for some in self.team.everybody(names) for name in some]
        what = f"loss {loss:g}" if not math.isfinite(loss) else f"gradient norm {norm:g}"
        where = f"{what} at step {step + 1} (epoch {epoch + 1}), learning rate {rate:.3g}"
        if self.progress.nonfinite > self.plan.skip_nonfinite:
            raise Diverged(
                f"{where}; the batch: {', '.join(everybody)}. The last checkpoint is intact. "
                "Try a lower learning rate, or --skip-nonfinite N to leave out up to N such steps"
            )
        self.journal.write({"kind": "skipped", "step": step + 1, "why": what, "lr": rate, "pictures": everybody})

    def log(self, step: int) -> None:
        """A line with the mean loss since the last one."""
        progress = self.progress
        if progress.losses:
            self.journal.write(
                {
                    "kind": "train",
                    "step": progress.step,
                    "epoch": round(progress.step / self.loader.steps, 4),
                    "loss": progress.loss / progress.losses,
                    **self.last,
                }
            )
        progress.loss, progress.losses = 0.0, 0

    def judge(self, step: int) -> None:
        """Validates, and remembers whether it was the best so far."""
        progress = self.progress
        with self.final():
            metrics = self.validate()
            epoch = round(progress.step / self.loader.steps, 4)
            score = metrics[self.plan.score]
            best = progress.best is None or score > progress.best
            record = {"kind": "validation", "step": progress.step, "epoch": epoch, **metrics, "best": best}
            self.journal.write(record)
            if best:
                progress.best, progress.best_step, progress.since_best = score, progress.step, 0
                self.improved()
            else:
                progress.since_best += 1

    def final(self) -> AbstractContextManager[None]:
        """The weights that are judged and kept stand in the model: the average, where there is one."""
        self.task.eval()
        return self.average.swapped() if self.average is not None else nullcontext()

    def save(self) -> Path:
        """A checkpoint of this very moment."""
        progress = self.progress
        progress.logged = self.journal.bytes
        for found in self.team.everybody(self.loader.unreadable):
            progress.unreadable |= found
        progress.scale = self.scaler.state_dict() or None
        return self.checkpoints.save(tensors_of(self.task, self.optimizers, self.average), progress)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C end the run after the step that is under way; a second Ctrl-C at once."""

        def hear(number: int, frame: FrameType | None) -> None:
            if self.signalled is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signalled = number

        if threading.current_thread() is not threading.main_thread():  # signals are the main thread's affair
            yield
            return
        previous = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
