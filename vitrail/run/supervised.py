"""A run that learns labels: judged by its answers on pictures that were held out."""

from typing import Any

import torch

from vitrail.checkpoints.loading import load
from vitrail.engine.loop import Metrics
from vitrail.evaluate import score_name
from vitrail.models.bit import BiT
from vitrail.models.vit import ViT
from vitrail.objectives.task import Task
from vitrail.recipe import LabelSlot
from vitrail.run.finish import finish, score
from vitrail.run.judge import answers
from vitrail.run.running import Run, fresh


class Supervised(Run):
    """A classifier on its way."""

    @property
    def objective(self) -> LabelSlot:
        """What is asked about the labels."""
        assert isinstance(self.recipe.objective, LabelSlot)
        return self.recipe.objective

    @property
    def score(self) -> str:
        return score_name(self.prepared.train.several)

    def task(self, model: ViT | BiT, steps: int) -> Task:
        return self.objective.build(model, self.class_weights())

    def validate(self) -> Metrics:
        task, loader = self.training.task, self.loader("validation")
        logits, read = answers(lambda x: task(x)["logits"], loader, self.recipe.preprocessing.normalise, self.team)
        return score(logits[read], loader.pictures.targets[read])

    def finish(self) -> dict[str, Any]:
        return finish(self)

    def batch(self) -> int:
        return in_pairs(super().batch(), self.objective, self.team.world)

    def class_weights(self) -> torch.Tensor | None:
        """Rare classes count more: inversely to their pictures, and one on average over the pictures."""
        if self.recipe.data.balance != "weights":
            return None
        train = self.prepared.train
        counts = torch.from_numpy(train.counts()).float().clamp(min=1)
        if train.several:  # as if a label were there as often as not
            return ((len(train) - counts) / counts).clamp(1, 100)
        return counts.sum() / len(counts) / counts

    def begun(self) -> ViT | BiT:
        """The model as training finds it: fresh, or with the weights of a checkpoint and a head for these labels."""
        self.batch()  # refused before anything is written
        model, init = fresh(self.recipe), self.recipe.init
        if init is None:
            return model
        config = self.recipe.model
        # Not mapped: pages of a file are aligned otherwise than memory, and sums could differ in their last bit.
        source = load(
            init, classes=config.classes, image_size=config.image_size, channels=config.channels, mapped=False
        )
        theirs, ours = source.state_dict(), model.state_dict()
        differ = sorted(
            n for n in {*theirs, *ours} if n not in theirs or n not in ours or theirs[n].shape != ours[n].shape
        )
        if differ:
            raise ValueError(
                f"{init} is another model than the recipe's: {len(differ)} tensors differ, {', '.join(differ[:3])} among them"
            )
        if source.labels == self.prepared.labels.names:
            self.tell(f"{init} has these very labels: its head is kept")
        else:  # a head for as many other classes knows nothing of these
            last = [n for n in theirs if n.startswith("head.") and not n.startswith("head.pre_logits")]
            theirs |= {name: torch.zeros_like(theirs[name]) for name in last}
        model.load_state_dict(theirs)
        return model


def in_pairs(batch: int, objective: LabelSlot, world: int) -> int:
    """The batch, if there are pairs to be mixed, none of which comes to different processes."""
    if objective.pairs and batch < 2:
        raise ValueError(
            f"mixing needs pairs, and there are none in a batch of {batch}: use --batch-size 2 or more, or leave out mixing"
        )
    if objective.pairs and world > 1 and batch // world % 2:
        raise ValueError(f"mixing needs pairs: a batch of {batch} gives each of {world} processes an odd number")
    return batch
