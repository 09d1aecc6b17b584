"""Tasks: what a model learns to predict for an image, and everything that depends on that. See `base.py`."""

from vitrail.data.dataset import Images
from vitrail.tasks.base import Task
from vitrail.tasks.captions import Captions
from vitrail.tasks.classes import MultiLabel, SingleLabel
from vitrail.tasks.masks import Masks
from vitrail.tasks.numbers import Numbers

__all__ = ["TASKS", "Task", "task_of"]

TASKS: dict[str, Task] = {task.name: task for task in (SingleLabel(), MultiLabel(), Masks(), Numbers(), Captions())}


def task_of(images: Images) -> Task:
    """Return the task that the targets of these images state."""
    return TASKS[images.target_kind]
