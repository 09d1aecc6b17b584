"""Recall of retrieval between images and captions, both ways, as for CLIP and on COCO.

n pairs, I different images, C different captions, F features.
"""

from typing import Any

import numpy as np

from vitrail.metrics.intervals import wilson_interval

RANKS = (1, 5)
BLOCK_VALUES = 2**24  # similarities computed at once


def list_first(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first pair of each different number, and the position of each pair's number among them."""
    _, first, position = np.unique(numbers, return_index=True, return_inverse=True)
    return first, position.ravel()


def rank_matches(queries: np.ndarray, others: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Return the rank of the most similar match of each query, from 0, [Q]; of equal similarities a match is the last.

    `queries` [Q, F] and `others` [O, F] are unit vectors, `pairs` [n, 2] the indices of those that match.
    """
    ranks = np.zeros(len(queries), dtype=np.int64)
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    step = max(1, BLOCK_VALUES // max(1, len(others)))
    for start in range(0, len(queries), step):
        similarity = queries[start : start + step] @ others.T
        low, high = np.searchsorted(pairs[:, 0], [start, start + step])
        mine = pairs[low:high]
        row = mine[:, 0] - start
        matched = similarity[row, mine[:, 1]]
        best = np.full(len(similarity), -np.inf, dtype=similarity.dtype)
        np.maximum.at(best, row, matched)
        others_before = (similarity >= best[:, None]).sum(1)  # the best match itself is one of them
        matches_before = np.bincount(row, weights=matched >= best[row], minlength=len(similarity)).astype(np.int64)
        ranks[start : start + step] = others_before - matches_before
    return ranks


def rank_pairs(
    images: np.ndarray, texts: np.ndarray, items: np.ndarray, captions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rank of the best caption of each different image, [I], and of the best image of each caption, [C].

    `images` and `texts` are the unit vectors of pairs, [n, F]; `items` and `captions` the numbers of image and caption, [n].
    """
    first_image, image = list_first(items)
    first_text, text = list_first(captions)
    pairs = np.unique(np.stack((image, text), 1), axis=0)
    one, two = images[first_image], texts[first_text]
    return rank_matches(one, two, pairs), rank_matches(two, one, pairs[:, ::-1])


def summarise_retrieval(
    images: np.ndarray, texts: np.ndarray, items: np.ndarray, captions: np.ndarray, *, intervals: bool = True
) -> dict[str, Any]:
    """Return the recall at 1 and 5 in both directions, ready for JSON: whether a match is among the k most similar.

    An image may have several captions and a caption several images: any of them is a match.
    """
    if not len(images) == len(texts) == len(items) == len(captions) or not len(images):
        raise ValueError(f"retrieval needs pairs, got {len(images)} images and {len(texts)} texts")
    if not (np.isfinite(images).all() and np.isfinite(texts).all()):
        raise ValueError("features of images or texts are not finite")
    ranks = dict(zip(("image_to_text", "text_to_image"), rank_pairs(images, texts, items, captions), strict=True))
    metrics: dict[str, Any] = {"images": len(ranks["image_to_text"]), "captions": len(ranks["text_to_image"])}
    for direction, found in ranks.items():
        for k in RANKS:
            hits = int((found < k).sum())
            metrics[f"{direction}_{k}"] = hits / len(found)
            if intervals:
                metrics[f"{direction}_{k}_interval"] = list(wilson_interval(hits, len(found)))
    if intervals:
        metrics["interval"] = metrics["image_to_text_1_interval"]
    return metrics
