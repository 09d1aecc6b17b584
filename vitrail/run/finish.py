"""The end of a run: the model, its answers on the held-out splits, the surest mistakes as pictures, the summary."""

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import ImageOps

from vitrail.checkpoints.loading import load
from vitrail.data.pictures import Pictures
from vitrail.data.preprocessing import plain
from vitrail.evaluate import measures, surest_mistakes
from vitrail.run.judge import answers
from vitrail.run.record import write_json

if TYPE_CHECKING:
    from vitrail.run.running import Run

MISTAKES, THUMBNAIL = 24, 192  # how many, and their longer side in pixels


def score(logits: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """The numbers of a validation that are worth a line of the log."""
    found = measures(logits, targets, intervals=False)
    return {name: float(found[name]) for name in ("loss", "top1", "top5", "map") if found.get(name) is not None}


def finish(run: "Run") -> dict[str, Any]:
    """Writes what a finished run holds. What is judged is the file that was written, loaded as a stranger would load it."""
    training, recipe, team = run.training, run.recipe, run.team
    progress, file = training.progress, run.directory / "model.safetensors"
    best = recipe.keep == "best" or training.stopped == "early"
    if not best:
        with training.final():
            run.save_model(file.name)
    elif team.leads:
        shutil.copyfile(run.directory / "best.safetensors", file)
    team.wait()
    model = load(file, mapped=False).to(team.device)
    results: dict[str, dict[str, Any]] = {}
    for split in ("validation", "test"):
        if split in run.prepared.splits:
            loader = run.loader(split)
            logits = answers(model, loader, recipe.preprocessing.normalise, team)
            results[split] = measures(logits, loader.pictures.targets)
            if team.leads:
                write_answers(run, split, logits, loader.pictures)
    split = "test" if "test" in results else "validation"
    summary = {
        **results[split],
        "split": split,
        "seconds": round(progress.seconds, 3),
        "steps": progress.step,
        "images_per_second": progress.images / max(1e-9, progress.seconds),
        "weights": "best" if best else "last" if training.average is None else "ema",
        "stopped": training.stopped,
        "best_validation": progress.best,
        "best_step": progress.best_step,
        "skipped_nonfinite": progress.nonfinite,
        "unreadable": progress.unreadable | run.loader("validation").unreadable,
        "results": results,
    }
    if team.leads:
        write_json(run.directory / "summary.json", summary)
    team.wait()
    return summary


def write_answers(run: "Run", split: str, logits: np.ndarray, pictures: Pictures) -> None:
    """Logits, targets and names of a split; and small pictures of what it got wrong while it was sure."""
    folder = run.directory / "evaluation"
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / f"{split}.npz", logits=logits, targets=pictures.targets)
    names = [pictures.name(index) for index in range(len(pictures))]
    (folder / f"{split}.json").write_text(json.dumps({"names": names}, ensure_ascii=False), encoding="utf-8")
    for index in surest_mistakes(logits, pictures.targets, MISTAKES):
        with pictures.open(int(index)) as picture:
            small = plain(ImageOps.exif_transpose(picture), 3)
        small.thumbnail((THUMBNAIL, THUMBNAIL))
        small.save(folder / "pictures" / f"{split}-{index:06d}.jpg", quality=88)
