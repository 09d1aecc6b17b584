"""The training loop, the only one.

It uses `losses["loss"]` and never asks which objective it is. The learning rate is a function of the step, samples and their
augmentation of (seed, epoch, index), dropout and stochastic depth of (seed, step, process): a resumed run needs no replay and
computes the same numbers.

The host does not wait for the device inside a step: losses and gradient norms stay on the device until a line of the log, a
validation or a checkpoint. A step whose loss or gradient is not finite changes no weight, which the device decides; the host
learns of it with the next of these, before anything is saved.
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
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from vitrail.data.loader import Batch, Loader, split_share
from vitrail.data.rng import StepRandom
from vitrail.data.worker_pool import WorkersLost
from vitrail.objectives.base import LossModule
from vitrail.training.checkpointing import Checkpoints, Progress, collect_tensors, load_checkpoint
from vitrail.training.distributed import Team, full_tensor
from vitrail.training.logging import MetricsLog
from vitrail.training.optim import Optim, parameter_rules, set_lr, set_weight_decay, skip_if
from vitrail.training.prefetch import prefetch_batches
from vitrail.training.schedule import EMA, ScheduleSlot, WeightAverage
from vitrail.utils.devices import keep_freed_memory
from vitrail.utils.precision import autocast
from vitrail.utils.slurm import stop_code

Precision = Literal["fp32", "bf16", "fp16"]
Metrics = dict[str, float]
MAX_PENDING = 64  # steps whose numbers are on the device, where nothing is logged
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))
FIRST_SAVE_SECONDS = 20.0  # after the start or a resume: a run that is killed early, or again and again, loses little


@dataclass(frozen=True)
class Plan:
    """Length of a run, and the intervals of validation, logging and checkpoints."""

    steps: int
    validate_every: int  # steps
    log_every: int = 10
    save_seconds: float = 300.0  # a checkpoint at least this often, besides the first and one after each validation
    precision: Precision = "fp32"
    seed: int = 0
    patience: int | None = None  # validations without improvement before training stops
    skip_nonfinite: int = 0
    score: str = "top1"  # the validation metric to maximise
    validation_steps: float = 0.0  # estimated duration of a validation, in steps; used until one was measured
    ending: float = 0.0  # estimated duration of everything after the last step, in validations

    def count_validations(self, done: int) -> int:
        """Return the number of validations after `done` steps."""
        every = self.validate_every
        return 0 if done >= self.steps else -(-self.steps // every) - done // every


class Stopped(Exception):
    """The run stopped before its end, after a checkpoint was saved: for a signal, or because worker processes died."""

    def __init__(self, reason: str, checkpoint: Path, exit_code: int, workers: int | None = None) -> None:
        super().__init__(f"{reason}; checkpoint saved in {checkpoint}")
        self.add_note(
            f"continue with vitrail.resume({str(checkpoint.parent.parent)!r}); a run on a Python object needs data="
        )
        self.run, self.exit_code = checkpoint.parent.parent, exit_code
        self.workers = workers  # to resume with, if fewer than before


class Diverged(ValueError):
    """The loss or its gradient is not finite."""


@dataclass(frozen=True)
class PendingStep:
    """A step whose numbers are still on the device."""

    step: int
    epoch: int
    lr: float
    indices: Tensor  # of its images, on the host
    numbers: Tensor  # [2]: mean loss, gradient norm


@dataclass
class Trainer:
    """The loop: a loss module, its data, its optimisers and its progress through a plan."""

    loss_module: LossModule
    loader: Loader
    normalise: Callable[[Tensor], Tensor]
    optim: Optim
    schedule: ScheduleSlot
    plan: Plan
    team: Team
    journal: MetricsLog
    checkpoints: Checkpoints
    validate: Callable[[], Metrics]  # called in evaluation mode, with the averaged weights where there is an EMA
    on_best: Callable[[], None]  # called for the best score so far, with the same weights
    ema: EMA | None = None
    progress: Progress = field(default_factory=Progress)
    stopped: Literal["end", "early"] = "end"

    def __post_init__(self) -> None:
        if self.team.device.type == "cpu":
            keep_freed_memory()
        self.loss_module.to(self.team.device)
        self.wrapped = self.team.wrap(self.loss_module)
        rules = parameter_rules(self.loss_module, self.optim.layer_decay, self.optim.head_scale)
        self.optimizers = self.optim.build(self.loss_module, rules)
        self.average = WeightAverage(self.ema, self.loss_module) if self.ema else None
        self.parameters = [p for p in self.loss_module.parameters() if p.requires_grad]
        # The loss is scaled for float16, where small gradients underflow.
        self.scaler = torch.amp.GradScaler(self.team.device.type, enabled=self.plan.precision == "fp16")
        self.pending: list[PendingStep] = []
        self.signal_number: int | None = None
        self.lost: str | None = None  # the death of this process's workers
        self.validation_seconds: float | None = None  # of the last validation, with its checkpoint

    def resume(self, checkpoint: Path) -> None:
        """Restore everything from a checkpoint."""
        self.progress = load_checkpoint(checkpoint, self.loss_module, self.optimizers, self.average, self.team)
        if self.progress.scale is not None:
            self.scaler.load_state_dict(self.progress.scale)

    def run(self) -> None:
        """Train to the end of the plan, or until a signal, the patience or the loss of worker processes stops it."""
        plan, progress = self.plan, self.progress
        self.journal.truncate(progress.logged, progress.step)
        start = last_save = last_log = time.monotonic()
        save_seconds = min(plan.save_seconds, FIRST_SAVE_SECONDS)
        seconds_before, images_before, first_step = progress.seconds, progress.images, progress.step
        with self.handle_signals():
            batches = prefetch_batches(self.batches(), self.team.device)
            upcoming = self.fetch(batches)
            if self.team.any_process(self.lost is not None)[0]:
                self.save_and_stop()
            if upcoming is not None and progress.step > 0 and self.team.has_buckets:
                self.rehearse(upcoming[0], upcoming[2])
            while upcoming is not None:
                step, epoch, batch = upcoming
                self.train_step(step, epoch, batch)
                progress.step = step + 1
                progress.images += self.loader.batch_size
                log_due = progress.step % plan.log_every == 0 or progress.step == plan.steps
                validation_due = progress.step % plan.validate_every == 0 or progress.step == plan.steps
                if log_due or validation_due:
                    self.read_numbers()
                now = time.monotonic()
                progress.seconds = seconds_before + now - start
                if log_due:
                    self.log()
                    speed = (progress.images - images_before) / max(1e-9, now - last_log)
                    timing = {"step": progress.step, "seconds": round(progress.seconds, 3), "images_per_second": speed}
                    left = self.estimate_seconds_left((now - start) / (progress.step - first_step), validation_due)
                    self.journal.write_timing(timing, seconds_left=left)
                    last_log, images_before = now, progress.images
                if validation_due:
                    self.run_validation()
                    spent = time.monotonic() - now  # validation does not count as training time
                    start, last_log = start + spent, last_log + spent
                upcoming = None if self.out_of_patience else self.fetch(batches)
                over_time = self.team.is_main and time.monotonic() - last_save > save_seconds
                save, stop = self.team.any_process(
                    validation_due or over_time, self.signal_number is not None or self.lost is not None
                )
                if stop:
                    self.save_and_stop()
                if save:
                    self.save()
                    last_save, save_seconds = time.monotonic(), plan.save_seconds
                    if validation_due:
                        self.validation_seconds = last_save - now
        self.stopped = "early" if self.out_of_patience else "end"

    def fetch(self, batches: Iterator[tuple[int, int, Batch]]) -> tuple[int, int, Batch] | None:
        """Return the next step, epoch and batch; None at the end, and if the workers of this process were lost.

        The processes agree on a loss before the next step, whose gradients need all of them.
        """
        try:
            return next(batches, None)
        except WorkersLost as error:
            self.lost = str(error)
            return None

    def save_and_stop(self) -> NoReturn:
        """Save a checkpoint on all processes and raise Stopped, for a signal or lost workers of any of them."""
        self.journal.notify({"kind": "stopping"})
        checkpoint = self.save()
        numbers, losses = zip(*self.team.gather_objects((self.signal_number or 0, self.lost)), strict=True)
        if lost := next(filter(None, losses), None):
            raise Stopped(lost, checkpoint, 1, self.loader.workers // 2)
        number = max(numbers)
        raise Stopped(f"stopped by {signal.Signals(number).name}", checkpoint, stop_code(number))

    def estimate_seconds_left(self, step: float, validation_due: bool) -> float:
        """Return the seconds until the end of the run, validations and final evaluation included, by seconds per step."""
        plan, done = self.plan, self.progress.step
        validation = plan.validation_steps * step if self.validation_seconds is None else self.validation_seconds
        return (plan.steps - done) * step + (plan.count_validations(done) + validation_due + plan.ending) * validation

    @property
    def out_of_patience(self) -> bool:
        """Return True if the validation score has not improved for `plan.patience` validations."""
        return self.plan.patience is not None and self.progress.since_best >= self.plan.patience

    def batches(self) -> Iterator[tuple[int, int, Batch]]:
        """Yield step, epoch and batch, from the current step to the end of the plan."""
        step, per_epoch = self.progress.step, self.loader.steps_per_epoch
        while step < self.plan.steps and not self.out_of_patience:
            epoch, start = divmod(step, per_epoch)
            for batch in self.loader.iter_epoch(epoch, start):
                yield step, epoch, batch
                step += 1
                if step >= self.plan.steps:
                    return

    def train_step(self, step: int, epoch: int, batch: Batch) -> None:
        """Do one step: gradients of the batch, clipping, optimiser, EMA."""
        plan, team = self.plan, self.team
        torch.manual_seed((plan.seed * 1_000_003 + step) * 4096 + team.rank)  # one per seed, step and process
        lr = self.optim.lr * self.schedule.factor(step, plan.steps)
        set_lr(self.optimizers, lr)
        set_weight_decay(self.optimizers, self.optim.decay_at(step, plan.steps))
        self.loss_module.train()
        buffers_before = [
            (buffer, buffer.clone()) for buffer in self.loss_module.buffers() if buffer.is_floating_point()
        ]
        loss = self.backward(step, batch)
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        numbers = torch.stack([team.all_reduce_mean(loss), self.clip_gradients()])
        skip = ~numbers.isfinite().all()
        skip_if(self.optimizers, skip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for buffer, before in buffers_before:  # the step's effect on running statistics is undone too
            buffer.copy_(torch.where(skip, before, buffer))
        self.scaler.update()
        self.loss_module.after_step(step)
        if self.average is not None:
            self.average.update(step)
        self.pending.append(PendingStep(step, epoch, lr, batch.indices, numbers))
        if len(self.pending) == MAX_PENDING:
            self.read_numbers()

    def rehearse(self, step: int, batch: Batch) -> None:
        """Compute the gradients of a step and discard them.

        DDP orders its buckets by its first backward pass, and the place of a gradient decides in which order the processes
        are added. The first step of a resumed run must add as the same step of a run that was not interrupted.
        """
        torch.manual_seed(0)
        self.loss_module.train()
        buffers = [(buffer, buffer.clone()) for buffer in self.loss_module.buffers()]
        self.backward(step, batch)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for buffer, before in buffers:
            buffer.copy_(before)

    def clip_gradients(self) -> Tensor:
        """Clip the gradients to the optimiser's maximum norm, if it has one; return their norm before that."""
        if self.optim.clip is not None:
            return full_tensor(nn.utils.clip_grad_norm_(self.parameters, self.optim.clip))
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return full_tensor(nn.utils.get_total_norm(gradients))

    def read_numbers(self) -> None:
        """Read the losses and gradient norms of the steps since the last call, and react to those that are not finite."""
        pending, self.pending = self.pending, []
        rows = torch.stack([each.numbers for each in pending]).tolist() if pending else []
        for each, (loss, norm) in zip(pending, rows, strict=True):
            if math.isfinite(loss) and math.isfinite(norm):
                self.progress.loss += loss
                self.progress.losses += 1
            # An overflow is usual in float16 now and then: the scaler lowers its factor.
            elif not (self.plan.precision == "fp16" and math.isfinite(loss)):
                self.skip_or_stop(each, loss, norm)
            self.step_metrics = {"lr": each.lr, "grad_norm": norm}

    def backward(self, step: int, batch: Batch) -> Tensor:
        """Accumulate the gradients of this process's share of the batch; return its mean loss."""
        plan, team, local_batch = self.plan, self.team, len(batch.indices)
        all_targets = batch.targets.to(team.device)  # prefetched: already there
        self.loss_module.count_batch(all_targets, team.all_reduce_sum)
        loss = torch.zeros((), device=team.device)
        for a, b in pairwise(split_share(local_batch, self.loader.accumulate)):
            images, targets = self.normalise(batch.pixels[a:b].to(team.device)), all_targets[a:b]
            first = team.world_size * a + team.rank * (b - a)  # as the loader has divided the batch
            draw = StepRandom(plan.seed, step, first, b - a, team.world_size * local_batch, team.device)
            with team.gradient_sync(self.wrapped, last=b == local_batch):
                with self.autocast():
                    part = self.wrapped(images, targets, draw)["loss"] * ((b - a) / local_batch)
                self.scaler.scale(part).backward()
            loss += part.detach()
        return loss

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context of the plan's precision."""
        return autocast(self.team.device.type, self.plan.precision)

    def skip_or_stop(self, skipped: PendingStep, loss: float, norm: float) -> None:
        """Count a skipped step; raise Diverged after more than `plan.skip_nonfinite` of them."""
        self.progress.nonfinite += 1
        names = [self.loader.images.name(index) for index in skipped.indices.tolist()]
        images = [name for part in self.team.gather_objects(names) for name in part]
        what = f"loss {loss:g}" if not math.isfinite(loss) else f"gradient norm {norm:g}"
        where = f"{what} at step {skipped.step + 1} (epoch {skipped.epoch + 1}), learning rate {skipped.lr:.3g}"
        if self.progress.nonfinite > self.plan.skip_nonfinite:
            raise Diverged(
                f"{where}; images: {', '.join(images)}. The last checkpoint is intact. "
                "Lower the learning rate, or use settings=['skip_nonfinite=N'] to skip up to N such steps"
            )
        record = {"kind": "skipped", "step": skipped.step + 1, "why": what, "lr": skipped.lr, "pictures": images}
        self.journal.write(record)

    def describe_step(self, kind: str) -> dict[str, Any]:
        """Return the first fields of a record of the finished steps."""
        step = self.progress.step
        return {"kind": kind, "step": step, "epoch": round(step / self.loader.steps_per_epoch, 4)}

    def log(self) -> None:
        """Log the mean loss since the last line."""
        progress = self.progress
        if progress.losses:
            self.journal.write(
                self.describe_step("train") | {"loss": progress.loss / progress.losses, **self.step_metrics}
            )
        progress.loss, progress.losses = 0.0, 0

    def run_validation(self) -> None:
        """Validate, and record whether the score is the best so far."""
        progress = self.progress
        with self.evaluation_weights():
            metrics = self.validate()
            score = progress.last = metrics[self.plan.score]
            best = progress.best is None or score > progress.best
            self.journal.write(self.describe_step("validation") | metrics | {"best": best})
            if best:
                progress.best, progress.best_step, progress.since_best = score, progress.step, 0
                self.on_best()
            else:
                progress.since_best += 1

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights that are validated and kept: the EMA, where there is one."""
        self.loss_module.eval()
        return self.average.applied() if self.average is not None else nullcontext()

    def save(self) -> Path:
        """Save a checkpoint of the current state."""
        self.read_numbers()  # a step that is not finite stops the run here, before anything is written
        progress = self.progress
        progress.logged = self.journal.bytes
        for unreadable in self.team.gather_objects(self.loader.unreadable):
            progress.unreadable |= unreadable
        progress.scale = self.scaler.state_dict() or None
        return self.checkpoints.save(collect_tensors(self.loss_module, self.optimizers, self.average), progress)

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Stop after the current step on SIGTERM, SIGUSR1 and Ctrl-C, at once on a second Ctrl-C."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.signal_number is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal_number = number

        if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
            yield
            return
        previous = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
