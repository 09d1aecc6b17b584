"""A run that learns without labels: watched by what its features do with pictures that were held out."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

from vitrail.checkpoints.loading import load
from vitrail.checkpoints.mae import Autoencoder, write_mae
from vitrail.data.loader import Loader
from vitrail.data.pictures import Pictures
from vitrail.data.pipeline import Prepare
from vitrail.engine.journal import lines, plain
from vitrail.engine.loop import Metrics
from vitrail.evaluate.collapse import Collapse, collapse
from vitrail.evaluate.intervals import wilson
from vitrail.evaluate.knn import knn
from vitrail.evaluate.signals import rank, spread
from vitrail.models.bit import BiT
from vitrail.models.decoder import build_decoder
from vitrail.models.vit import ViT, ViTConfig
from vitrail.models.written import to_json
from vitrail.objectives.dino import DINO
from vitrail.objectives.draw import Draw
from vitrail.objectives.feature_distillation import FeatureDistillation
from vitrail.objectives.mae import MAE, MaskedAutoencoder
from vitrail.objectives.masked_patches import MaskedPatches, MaskedPatchPredictor
from vitrail.objectives.reconstruction import reconstruct
from vitrail.objectives.task import Task
from vitrail.recipe import PictureSlot, method_of
from vitrail.run.brought import brought
from vitrail.run.judge import answers
from vitrail.run.record import write_json
from vitrail.run.running import BEST, Run, fresh

FEWEST = 8  # pictures that anything can be learnt from
FEW = 50  # watched pictures, whose features alone say little
MEMORY, WATCHED = 5_000, 1_000  # training pictures that vote, and held-out ones that are looked at, in a validation
SHOWN = 8  # reconstructions
SIDE = 32  # raw pixels are compared at this size at most
MEMORY_SPLIT, WATCHED_SPLIT, LOSS_SPLIT = "memory", "watched", "loss"  # parts of the data, by what they are for


class Collapsed(Exception):
    """The alarm stopped a run."""


@dataclass
class Pretraining(Run):
    """A model on its way to good features."""

    collapsed: Collapse | None = None
    began: dict[str, Any] | None = None  # what a validation found before the first step
    decoder: dict[str, Tensor] | None = None  # of the file to begin with; empty where it has none that fits

    @property
    def objective(self) -> PictureSlot | FeatureDistillation:
        """What is learnt from pictures alone."""
        assert isinstance(self.recipe.objective, PictureSlot | FeatureDistillation)
        return self.recipe.objective

    @property
    def votes(self) -> bool:
        """Whether neighbours can be asked for a class: there are labels, one for each picture."""
        return self.prepared.labelled and not self.prepared.train.several

    @property
    def score(self) -> str:
        return "knn" if self.votes else "rank"

    def begun(self) -> ViT | BiT:
        self.check()
        recipe = self.recipe
        if recipe.init is None:
            return fresh(recipe)
        config = recipe.model
        model = load(
            recipe.init, classes=None, image_size=config.image_size, channels=config.channels, mapped=False
        ).train()
        if model.config != config:
            raise ValueError(f"{recipe.init} is another model than the recipe's: leave out --model and what changes it")
        if isinstance(self.objective, MAE) and self.decoder is None:
            assert isinstance(config, ViTConfig)
            self.decoder, about = brought(recipe.init, config, self.objective.decoder)
            self.tell(about)
        return model

    def task(self, model: ViT | BiT, steps: int) -> Task:
        recipe, group = self.recipe, dist.group.WORLD if self.team.world > 1 else None
        objective = self.objective
        assert isinstance(objective, PictureSlot)
        assert isinstance(model, ViT)
        torch.manual_seed(recipe.seed)  # what stands beside the model begins the same on every process
        if isinstance(objective, MaskedPatches):
            mean, std = recipe.preprocessing.mean, recipe.preprocessing.std
            return objective.build(model, steps, group, mean=mean, std=std)
        task = objective.build(model, steps, group)
        if isinstance(task, MaskedAutoencoder) and self.decoder:
            task.decoder.load_state_dict(self.decoder)
        return task

    def check(self) -> None:
        """Refuses what cannot work, before anything is written."""
        recipe, splits = self.recipe, self.prepared.splits
        watched = max(2, self.team.world)  # each process looks at one at least
        if len(splits["train"]) < FEWEST or len(splits["validation"]) < watched:
            raise ValueError(
                f"{recipe.data.where} has {len(splits['train'])} pictures to learn from and {len(splits['validation'])} held "
                f"out: learning without labels needs {FEWEST} and {watched} at least"
            )
        if not isinstance(recipe.model, ViTConfig):
            raise ValueError(
                "learning without labels is for Vision Transformers: a ResNet has no patches to hide or to mix"
            )
        self.objective.check(recipe.model, self.batch())
        if isinstance(self.objective, DINO) and recipe.views is None:
            raise ValueError("DINO learns from several crops of a picture: set views=Views, or use another --method")
        if recipe.views is not None and not isinstance(self.objective, DINO):
            raise ValueError("several crops of a picture are for DINO: set views=none, or use --method dino")
        if recipe.tune != "full":
            raise ValueError(
                f"tune={recipe.tune} would leave the encoder as it is: learning without labels trains all of it"
            )
        if recipe.views is not None:
            recipe.views.check(recipe.model.image_size, recipe.model.embed.stride)
        if isinstance(self.objective, DINO) and recipe.ema is not None:
            raise ValueError("DINO's teacher is an average already, and is what is kept: leave out ema")
        self.augmentation()  # refuses crops of another size

    def augmentation(self) -> Prepare:
        recipe, pipeline = self.recipe, self.recipe.preprocessing
        if recipe.views is None:
            return super().augmentation()
        return recipe.views.prepare(recipe.augment, pipeline.size, pipeline.channels, pipeline.turn)

    def normalise(self, pixels: Tensor) -> Any:
        views, pipeline = self.recipe.views, self.recipe.preprocessing
        if views is None:
            return pipeline.normalise(pixels)
        return tuple(
            pipeline.normalise(crops.flatten(0, 1)).unflatten(0, crops.shape[:2])
            for crops in views.apart(pixels, pipeline.size, pipeline.channels)
        )

    # --- watching ---

    def part(self, name: str) -> Loader:
        """Pictures that are looked at again and again: some that vote, some that are judged, some for the loss."""
        if name not in self.loaders:
            split, most = ("train", MEMORY) if name == MEMORY_SPLIT else ("validation", WATCHED)
            pictures = some(self.prepared.splits[split], most)
            if name != LOSS_SPLIT:
                return self.evaluated(name, pictures)
            world = self.team.world
            self.loaders[name] = Loader(
                pictures,
                None,
                self.augmentation(),
                batch_size=max(world, min(self.recipe.batch_size, len(pictures)) // world * world),
                seed=self.recipe.seed,
                rank=self.team.rank,
                world=world,
                workers=self.workers(pictures),
                epochs=1,
            )
        return self.loaders[name]

    def validate(self) -> Metrics:
        progress, history = self.training.progress, self.history()
        if not history:
            assert self.began is not None
            self.training.journal.write(self.began)
            history.append(self.began)
        found = self.seen(self.training.task, progress.step)
        epoch = round(progress.step / self.training.loader.steps, 4)
        self.alarm([*history, {"kind": "validation", "step": progress.step, "epoch": epoch, **found}])
        return found

    def history(self) -> list[dict[str, Any]]:
        """The validations so far, as the first process wrote them down."""
        found = [line for line in lines(self.directory / "metrics.jsonl") if line.get("kind") == "validation"]
        return self.team.said_by_first(found if self.team.leads else None)

    def beginning(self) -> dict[str, Any]:
        """What a validation finds before the first step: signals are held against it."""
        task = self.task(self.begun(), 1).to(self.team.device).eval()
        return {"kind": "validation", "step": 0, "epoch": 0.0, **self.seen(task, 0), "best": False}

    def caution(self) -> None:
        """Says so where there is little to see."""
        watched = len(self.prepared.splits["validation"])
        if not self.votes and watched < FEW:
            self.tell(
                f"{watched} pictures are watched, without labels: rank and spread of so few say little; "
                "hold out more with --split 0.8,0.2,0"
            )

    def seen(self, task: Task, step: int) -> Metrics:
        """The numbers of a validation."""
        with self.team.gathered(task):
            found = self.losses(task, step)
            values, right = self.looked(getattr(task, self.objective.keeps), task.standard)
        found |= {"spread": spread(values), "rank": rank(values)}
        return found if right is None else found | {"knn": float(right.mean())}

    def losses(self, task: Task, step: int) -> Metrics:
        """What the task says at this step of held-out pictures, each time of the same crops with the same chance."""
        loader, team = self.part(LOSS_SPLIT), self.team
        sums: dict[str, Tensor] = {}
        for number, batch in enumerate(loader.epoch(0)):
            mine = len(batch.indices)
            # DINO's temperature follows the step. Elsewhere the step is chance, which is to stay the same.
            at = step if isinstance(self.objective, DINO) else number
            draw = Draw(self.recipe.seed, at, team.rank * mine, mine, team.world * mine, team.device)
            with torch.no_grad():
                said = self.said_of(task, self.normalise(batch.pixels.to(team.device)), draw)
            for name, value in said.items():
                sums[name] = sums.get(name, torch.zeros((), device=team.device)) + value.detach().float()
        return {name: float(team.mean(value / loader.steps)) for name, value in sums.items()}

    def said_of(self, task: Task, images: Any, draw: Draw) -> dict[str, Tensor]:
        """What the task says of a batch of held-out pictures."""
        return task.signals(images, draw)

    def looked(
        self, model: Any, standard: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The features of the watched pictures, and whether their neighbours' vote is right, where they have a class.

        Neighbours are found by what `standard` makes of features. Their spread is not: it would look the same for ever.
        """
        loader, normalise = self.part(WATCHED_SPLIT), self.recipe.preprocessing.normalise
        seen, read = answers(model, loader, normalise, self.team)
        if not self.votes:
            return seen[read], None
        memory = self.part(MEMORY_SPLIT)
        known, there = answers(model, memory, normalise, self.team)
        pair = [known[there], np.nan_to_num(seen[read])]
        if standard is not None:
            pair = [standard(torch.from_numpy(values).to(self.team.device)).cpu().numpy() for values in pair]
        votes = knn(pair[0], memory.pictures.targets[there], pair[1], len(self.prepared.labels))
        return seen[read], votes.argmax(1) == loader.pictures.targets[read]

    def judged(self, history: list[dict[str, Any]]) -> Collapse | None:
        """What the alarm says after the last of these validations."""
        rate, objective = self.recipe.optimizer.lr, to_json(self.objective)
        return collapse(history, str(method_of(self.recipe)), rate, objective)

    def alarm(self, history: list[dict[str, Any]]) -> None:
        """Stops the run, or warns, when its features no longer tell pictures apart."""
        raised = self.team.said_by_first(self.judged(history))
        if raised is None or self.collapsed is not None:
            return
        self.collapsed = raised
        self.tell(f"collapse at step {raised.step:,}: {raised.cause}. {raised.advice}")
        if self.recipe.collapse == "stop":
            self.training.journal.write({**history[-1], "best": False})
            raise Collapsed

    # --- the end ---

    def trained(self, model: ViT | BiT, checkpoint: Any) -> dict[str, Any]:
        history = self.history() if checkpoint is not None else []
        if not history:
            self.caution()
            self.began = self.beginning()  # before there is another task that takes memory
        elif self.recipe.collapse == "warn":  # it warned before it was stopped
            self.collapsed = next(
                filter(None, map(self.judged, (history[:n] for n in range(2, len(history) + 1)))), None
            )
        try:
            return super().trained(model, checkpoint)
        except Collapsed:
            self.training.save()
            return self.finish()

    def finish(self) -> dict[str, Any]:
        training, recipe, team = self.training, self.recipe, self.team
        file = self.directory / "model.safetensors"
        best = (recipe.keep == "best" or training.stopped == "early") and self.best_is_ours()
        summary: dict[str, Any] = {"method": method_of(recipe), "split": "validation"}
        with training.final():
            with team.gathered(training.task):
                summary |= self.losses(training.task, training.progress.step)
            whole = all(bool(torch.isfinite(tensor).all()) for tensor in self.weights().values())
            if whole:
                self.show(training.task)
                if not best:
                    self.save_model(file.name, method=method_of(recipe))
        if best and team.leads:
            shutil.copyfile(self.directory / BEST, file)
        team.wait()
        if whole or best:
            summary |= self.worth(load(file, mapped=False).to(team.device))
        else:
            self.tell("the weights are not finite: there is no model file")
        progress = training.progress
        summary |= {
            "seconds": round(progress.seconds, 3),
            "steps": progress.step,
            "images_per_second": progress.images / max(1e-9, progress.seconds),
            "weights": "best" if best else self.objective.keeps if training.average is None else "ema",
            "stopped": "collapse" if self.collapsed and recipe.collapse == "stop" else training.stopped,
            "best_validation": progress.best,
            "best_step": progress.best_step,
            "skipped_nonfinite": progress.nonfinite,
            "unreadable": progress.unreadable,
        }
        if self.collapsed is not None:
            summary["collapse"] = {
                "cause": self.collapsed.cause,
                "advice": self.collapsed.advice,
                "step": self.collapsed.step,
            }
        if team.leads:
            write_json(self.directory / "summary.json", {name: plain(value) for name, value in summary.items()})
        team.wait()
        return summary

    def worth(self, model: ViT | BiT) -> dict[str, Any]:
        """What the features of the file that was written are worth, beside raw pixels and the untrained network."""
        seen, right = self.looked(model)
        found: dict[str, Any] = {"images": len(seen), "spread": spread(seen), "rank": rank(seen)}
        if right is None:
            return found
        found |= {"knn": float(right.mean()), "knn_interval": list(wilson(int(right.sum()), len(right)))}
        for name, other in (("knn_pixels", pixels), ("knn_random", fresh(self.recipe).eval().to(self.team.device))):
            _, right = self.looked(other)
            assert right is not None
            found[name] = float(right.mean())
        return found

    def show(self, task: Task) -> None:
        """A decoder is kept, and pictures of what was hidden and what was told of it, where the method hides something."""
        if not isinstance(task, MaskedAutoencoder | MaskedPatchPredictor):
            return
        pipeline, loader = self.recipe.preprocessing, self.part(WATCHED_SPLIT)
        if isinstance(task, MaskedAutoencoder):
            model, decoder = self.model(), build_decoder(task.model.config, task.spec.decoder)
            assert isinstance(model, ViT)
            decoder.load_state_dict(self.weights("decoder"))
            if self.team.leads:
                whole = Autoencoder(model, decoder, task.spec.mask, task.spec.norm_pix)
                write_mae(whole, self.directory / "pretraining.safetensors", "vitrail")
        with self.team.gathered(task):  # all processes compute, whichever pictures are theirs: layers may be in shards
            batch = next(iter(loader.once()))
            images = pipeline.normalise(batch.pixels[:SHOWN].to(self.team.device))
            draw = Draw(self.recipe.seed, 0, 0, len(images), len(images), self.team.device)
            made = reconstruct(task, images, draw, pipeline.mean, pipeline.std)
        if not self.team.leads:
            return
        folder = self.directory / "evaluation" / "reconstructions"
        folder.mkdir(parents=True, exist_ok=True)
        for kind in ("original", "masked", "reconstructed"):
            for number, picture in enumerate(getattr(made, kind).cpu()):
                array = picture.permute(1, 2, 0).squeeze(-1).numpy()
                Image.fromarray(array).save(folder / f"{number:02d}-{kind}.png")


def some(pictures: Pictures, most: int) -> Pictures:
    """So many pictures of a split, evenly spread over its order."""
    if len(pictures) <= most:
        return pictures
    return pictures.only(np.linspace(0, len(pictures) - 1, most).round().astype(np.int64))


def pixels(images: Tensor) -> Tensor:
    """Raw pixels as features, small: what any learning has to beat."""
    if max(images.shape[-2:]) > SIDE:  # not on Metal, which cannot average pixels by parts
        images = torch.nn.functional.interpolate(images.cpu(), (SIDE, SIDE), mode="area")
    return images.flatten(1)
