"""Other people's dashboards, each behind an extra: TensorBoard, Weights & Biases, MLflow. They hear what the journal writes."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from vitrail.engine.journal import Listener, Record


def numbers(record: Record) -> tuple[int, dict[str, float]]:
    """The step, and every number of a record under a name like train/loss."""
    kind = record.get("kind", "train")
    found = {
        f"{kind}/{name}": float(value)
        for name, value in record.items()
        if name not in ("step", "kind") and isinstance(value, int | float) and not isinstance(value, bool)
    }
    return int(record.get("step", 0)), found


def tensorboard(directory: Path, identity: str, settings: dict[str, Any]) -> Listener:
    writer = needed("tensorboard").SummaryWriter(str(directory / "tensorboard"))
    writer.add_text("recipe", f"```\n{settings}\n```")

    def hear(record: Record) -> None:
        step, found = numbers(record)
        for label, value in found.items():
            writer.add_scalar(label, value, step)
        if found:
            writer.flush()

    return hear


def wandb(directory: Path, identity: str, settings: dict[str, Any]) -> Listener:
    run = needed("wandb").init(
        project="vitrail", name=directory.name, id=identity, resume="allow", dir=str(directory), config=settings
    )

    def hear(record: Record) -> None:
        step, found = numbers(record)
        if found:
            run.log(found | {"step": step})

    return hear


def mlflow(directory: Path, identity: str, settings: dict[str, Any]) -> Listener:
    module = needed("mlflow")
    module.set_experiment("vitrail")
    known = module.search_runs(filter_string=f"tags.vitrail = '{identity}'", output_format="list")
    if known:  # the run goes on after a stop
        module.start_run(run_id=known[0].info.run_id)
    else:
        module.start_run(run_name=directory.name, tags={"vitrail": identity})
        module.log_dict(settings, "recipe.json")

    def hear(record: Record) -> None:
        step, found = numbers(record)
        if found:
            module.log_metrics(found, step=step)

    return hear


TRACKERS: dict[str, Callable[[Path, str, dict[str, Any]], Listener]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
}


def needed(extra: str) -> Any:
    """The module of an extra, or the line that says how to get it."""
    try:
        return import_module("torch.utils.tensorboard" if extra == "tensorboard" else extra)
    except ImportError as error:
        raise ValueError(f"--log {extra} needs the extra: pip install 'vitrail[{extra}]' ({error})") from None
