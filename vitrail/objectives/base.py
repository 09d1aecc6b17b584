"""Interfaces of an objective: `Objective` holds the settings of a recipe, `LossModule` the modules that compute the loss.

An objective owns its checks, its loss module, its validation signals and the files that it writes beside the model.
Runs and the training loop use the members below and never ask which objective it is. `registry.py` lists all objectives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from vitrail.data.dataset import TargetKind
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.rng import StepRandom
from vitrail.data.transforms.pipeline import Views
from vitrail.models.base import Model, ModelConfig, TokenConfig, refuse
from vitrail.objectives.teacher import ChannelValues, Teacher
from vitrail.reports.run import MethodText

TeacherOutput = Literal["logits", "features", "maps"]
Parts = dict[str, dict[str, Tensor]]  # tensors of the modules beside the model, by module
Losses = dict[str, Tensor]  # at least the `loss`


def require_draw(draw: StepRandom | None) -> StepRandom:
    """Return the random generator of a training step; raise ValueError without one."""
    if draw is None:
        raise ValueError("the loss needs draw, the random generator of the step, got None: pass a StepRandom")
    return draw


@dataclass(frozen=True)
class Reconstruction:
    """Images as uint8 [B, C, H, W]; hidden patches are grey in `masked`."""

    original: Tensor
    masked: Tensor
    reconstructed: Tensor


class LossModule(nn.Module):
    """A model with its loss: `forward` takes images, targets and a random generator and returns the `loss`."""

    model: Model
    reconstructs: ClassVar[bool] = False  # whether `reconstruct` is implemented

    def count_batch(self, targets: Tensor, total: Callable[[Tensor], Tensor]) -> None:
        """Count what the loss of the next batch is divided by, if that is not the number of images.

        Called before the micro-batches of a step with all `targets` of this process. `total` sums a tensor over processes.
        """

    def after_step(self, step: int) -> None:
        """Update what follows an optimiser step, such as a momentum teacher."""

    def standardise_features(self, y: Tensor) -> Tensor:
        """Return features [n, F] of the kept model as the written file will compute them."""
        return y

    def export_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the kept model as they are written to the model file."""
        return weights

    def signals(self, images: Any, draw: StepRandom, memo: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return numbers that describe held-out images, at least the `loss`.

        `memo` belongs to this batch and is the same at every validation: what does not change may be stored in it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no validation signals")

    def reconstruct(self, images: Tensor, draw: StepRandom, mean: ChannelValues, std: ChannelValues) -> Reconstruction:
        """Return the original, masked and reconstructed images of a normalised batch."""
        raise NotImplementedError(f"{type(self).__name__} does not reconstruct images")


@dataclass(frozen=True)
class LossInputs:
    """Everything that a run offers an objective beside the model to build its loss module."""

    steps: int
    preprocessing: Preprocessing  # of the trained model
    class_weights: Tensor | None = None  # [K]
    teacher: Teacher | None = None
    cached: bool = False  # targets hold the teacher's outputs
    group: ProcessGroup | None = None  # None for one process
    parts: Parts = field(default_factory=dict)  # as read by `Objective.read_parts`


class Objective:
    """Base class of the objectives, which are frozen dataclasses stored in recipes."""

    method: ClassVar[str | None] = None  # its name as `vitrail pretrain --method`
    report: ClassVar[MethodText] = MethodText("supervised")  # its words for the report of a pretraining run
    label_use: ClassVar[Literal["required", "optional", "none"]] = "none"
    target_kinds: ClassVar[tuple[TargetKind, ...]] = ("single", "multi")  # that it learns, where it uses labels
    learns_classes: ClassVar[bool] = True  # whether a model that learns labels has an output for each class or number
    can_shard: ClassVar[bool] = True  # whether FSDP2 can shard the loss module
    teacher_output: ClassVar[TeacherOutput | None] = None  # what it reads of a teacher; None without a teacher
    output_kind: ClassVar[str] = "classes"  # of the models that it trains, as `ModelConfig.output_kind` has it
    keeps: ClassVar[str] = "model"  # the module of the loss module that becomes the model file
    uses_views: ClassVar[bool] = False  # whether it trains on several crops of each image
    unlabelled_score: ClassVar[str] = "rank"  # the signal to maximise where data has no labels
    signals_follow_step: ClassVar[bool] = False  # whether validation signals depend on the training step
    rewrites_head: ClassVar[bool] = False  # whether the head in the model file differs from the trained one
    own_fields: ClassVar[tuple[str, ...]] = ()  # not taken over from another objective when this one replaces it

    @property
    def mixes_pairs(self) -> bool:
        """Return True if neighbours in a batch are mixed, so that both must be in the same process."""
        return False

    @property
    def kept_patches(self) -> float:
        """Fraction of the patches of an image that the model computes in a training step."""
        return 1.0

    @property
    def calls_parts_of_layers(self) -> bool:
        """Return True if a training step calls parts of layers, whose weights FSDP2 gathers for whole layers only."""
        return False

    @property
    def map_classes(self) -> int:
        """Classes kept of each cell of a teacher's cached score map."""
        raise NotImplementedError(f"{type(self).__name__} uses no score maps")

    def fit_targets(self, mean: Sequence[float], std: Sequence[float]) -> Self:
        """Return these settings for training targets with this mean and standard deviation, if targets are numbers."""
        return self

    def adopt_head(self, model: Model) -> None:
        """Change the head of a trained model of the same targets, from which training starts, to what is learnt."""

    def method_for(self, classes: int | None) -> str | None:
        """Return the pretraining method for a model with this many classes; None where it learns labels."""
        return self.method if self.label_use == "none" or classes is None else None

    def check(self, config: TokenConfig, batch: int) -> None:
        """Raise ValueError for a model or batch size that cannot be pretrained. `batch` counts all processes."""

    def check_run(self, config: ModelConfig, batch: int, views: Views | None, ema: bool) -> None:
        """Raise ValueError for a pretraining run that cannot work, before anything is computed."""
        self.check(config.require_tokens("pretraining without labels", clips=True), batch)
        name = type(self).__name__
        if self.uses_views and views is None:
            raise ValueError(f"{name} needs several crops of each image: set views=Views, or use another method")
        if views is not None and not self.uses_views:
            raise ValueError(f"{name} does not use several crops of each image: set views=none, or use method='dino'")
        if views is not None:
            views.check_sizes(config.image_size, config.stride)
        if ema and self.keeps != "model":
            raise ValueError(f"{name} keeps its {self.keeps}, which is an average already: set ema=none")

    def check_model(self, model: Model) -> None:
        """Raise ValueError for a model that cannot be trained with these settings, before anything is written."""
        if model.config.output_kind != self.output_kind:
            segmenter = "use a segmentation model"
            remedy = segmenter if self.output_kind == "masks" else "use the objective Segmentation"
            raise refuse(model.config, type(self).__name__, remedy)

    def check_teacher(self, config: ModelConfig, teacher: Teacher, multi_label: bool) -> None:
        """Raise ValueError for a teacher that this objective cannot use with this student and data."""

    def build_loss(self, model: Model, inputs: LossInputs) -> LossModule:
        """Return the loss module that trains `model`."""
        raise NotImplementedError(f"{type(self).__name__} does not build a loss module")

    def read_parts(self, path: str, config: ModelConfig) -> tuple[Parts, str]:
        """Read modules beside the model from the initial checkpoint; return them and a note for the user."""
        return {}, ""

    @property
    def saved_parts(self) -> tuple[str, ...]:
        """Modules of the loss module beside the model that `write_parts` saves."""
        return ()

    def write_parts(self, model: Model, parts: Parts, directory: Path) -> None:
        """Write the modules of `saved_parts` with the trained model into a run directory."""
