"""A caption for each image: models with two towers are judged by retrieval. n pairs, F features."""

from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.dataset import Images, TargetKind
from vitrail.metrics.retrieval import RANKS, list_first, rank_pairs, summarise_retrieval
from vitrail.tasks.base import Task
from vitrail.tasks.comparison import OutputComparison, TargetStatistics, check_shapes, measure_difference

MAX_STORED = 200  # characters of a caption in the stored evaluation
DIRECTIONS = ("image_to_text", "text_to_image")


class Captions(Task):
    """A text per image; rows are the unit vectors of an image and of its caption beside each other, [n, 2 F]."""

    name: ClassVar[TargetKind] = "captions"
    title: ClassVar[str] = "captions"
    noun: ClassVar[str] = "captions"
    outputs: ClassVar[str] = "features of images and texts"
    min_outputs: ClassVar[int] = 1
    recipe: ClassVar[str | None] = "contrastive"
    score: ClassVar[str] = "image_to_text_1"
    validation_metrics: ClassVar[tuple[str, ...]] = tuple(f"{way}_{k}" for way in DIRECTIONS for k in RANKS)

    def describe_targets(self, images: Images) -> str:
        return f"{len(np.unique(images.targets)):,} different captions"

    def describe_split(self, images: Images) -> dict[str, Any]:
        return {"captions": len(np.unique(images.targets))}

    def reduce_outputs(self, outputs: Tensor, images: Images, indices: np.ndarray) -> np.ndarray:
        """Return rows of the features of images and of their captions, given beside each other, [B, 2 F]."""
        halves = outputs.float().chunk(2, dim=1)
        return torch.cat([F.normalize(half, dim=1) for half in halves], 1).cpu().numpy()

    def compute_metrics(self, rows: np.ndarray, images: Images, *, intervals: bool = True) -> dict[str, Any]:
        return summarise_retrieval(*split_rows(rows), images.items, images.targets, intervals=intervals)

    def compare_outputs(
        self,
        first: np.ndarray,
        second: np.ndarray,
        targets: np.ndarray | None = None,
        statistics: TargetStatistics | None = None,
    ) -> OutputComparison:
        """Compare features."""
        check_shapes(first, second, "features")
        return OutputComparison("features", *measure_difference(first, second))

    def stored_arrays(self, rows: np.ndarray, images: Images) -> dict[str, np.ndarray]:
        image, text = split_rows(rows)
        texts = [images.caption(index)[:MAX_STORED] for index in range(len(images))]
        numbers = {"items": images.items, "captions": images.targets}
        return {"image_features": image, "text_features": text, **numbers, "texts": np.array(texts, dtype=np.str_)}

    def find_examples(self, rows: np.ndarray, images: Images, count: int) -> np.ndarray:
        """Return the images whose best caption has the highest ranks, the worst first."""
        ranks, _ = rank_pairs(*split_rows(rows), images.items, images.targets)
        order = np.argsort(-ranks, kind="stable")
        return list_first(images.items)[0][order[ranks[order] > 0]][:count]


def split_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the features of images and of texts, [n, F] each."""
    half = rows.shape[1] // 2
    return rows[:, :half], rows[:, half:]
