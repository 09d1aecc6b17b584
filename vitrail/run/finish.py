"""The end of a run: the model, its answers on the held-out splits, the surest mistakes as pictures, the summary."""

import json
import shutil
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import ImageOps

from vitrail.checkpoints.loading import load
from vitrail.data.pictures import Pictures
from vitrail.data.preprocessing import plain
from vitrail.evaluate import measures, surest_mistakes
from vitrail.evaluate.intervals import wilson
from vitrail.run.additions import save_adapter
from vitrail.run.judge import answers
from vitrail.run.record import write_json

if TYPE_CHECKING:
    from vitrail.run.supervised import Supervised

MISTAKES, THUMBNAIL = 24, 192  # how many, and their longer side in pixels


def score(logits: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """The numbers of a validation that are worth a line of the log."""
    found = summed(logits, targets, intervals=False)
    return {name: float(found[name]) for name in ("loss", "top1", "top5", "map") if found.get(name) is not None}


def summed(logits: np.ndarray, targets: np.ndarray, intervals: bool = True) -> dict[str, Any]:
    """All measures. Where pictures have several labels, `top1` is how often the surest answer is one of them."""
    found = measures(logits, targets, intervals=intervals)
    if targets.ndim == 2:
        right = np.take_along_axis(targets, logits.argmax(1)[:, None], 1)
        found["top1"] = float(right.mean())
        if intervals:
            found["top1_interval"] = list(wilson(int(right.sum()), len(right)))
    return found


def finish(run: "Supervised") -> dict[str, Any]:
    """Writes what a finished run holds. What is judged is the file that was written, loaded as a stranger would load it."""
    training, recipe, team = run.training, run.recipe, run.team
    progress, file = training.progress, run.directory / "model.safetensors"
    best = (recipe.keep == "best" or training.stopped == "early") and run.best_is_ours()
    adapter = None
    if not best:
        with training.final():
            run.save_model(file.name)
            adapter = save_adapter(run)
    elif team.leads:
        shutil.copyfile(run.directory / "best.safetensors", file)
    team.wait()
    model = load(file, mapped=False).to(team.device)
    results: dict[str, dict[str, Any]] = {}
    for split in ("validation", "test"):
        if split in run.prepared.splits:
            loader = run.loader(split)
            logits, read = answers(model, loader, recipe.preprocessing.normalise, team)
            results[split] = summed(logits[read], loader.pictures.targets[read])
            for found in team.everybody(loader.unreadable):
                progress.unreadable |= found
            if team.leads:
                write_answers(run, split, logits[read], loader.pictures.only(read))
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
        "unreadable": progress.unreadable,
        **({"adapter": adapter} if adapter is not None else {}),
        **results,
    }
    if team.leads:
        write_json(run.directory / "summary.json", summary)
    team.wait()
    return summary


def write_answers(run: "Supervised", split: str, logits: np.ndarray, pictures: Pictures) -> None:
    """Logits, targets and names of a split; and small pictures of what it got wrong while it was sure."""
    folder = run.directory / "evaluation"
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / f"{split}.npz", logits=logits, targets=pictures.targets)
    names = [pictures.name(index) for index in range(len(pictures))]
    (folder / f"{split}.json").write_text(json.dumps({"names": names}, ensure_ascii=False), encoding="utf-8")
    for index in surest_mistakes(logits, pictures.targets, MISTAKES):
        try:
            data = small(pictures, int(index))
        except (OSError, ValueError) as error:
            run.tell(f"no small picture of {pictures.name(int(index))}: {error}")
            continue
        (folder / "pictures" / f"{split}-{index:06d}.jpg").write_bytes(data)


def small(pictures: Pictures, index: int) -> bytes:
    """A picture as people see it, small, as the bytes of a JPEG."""
    with pictures.open(index) as picture:
        made = plain(ImageOps.exif_transpose(picture), 3)
    made.thumbnail((THUMBNAIL, THUMBNAIL))
    file = BytesIO()
    made.save(file, "JPEG", quality=88)
    return file.getvalue()
