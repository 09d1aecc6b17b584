"""The nearest of many vectors: exactly, a block at a time; or about as well and quicker through faiss.

n vectors of length 1 and D values, m queries of length 1, k neighbours. Where lengths are 1, a product is a cosine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.evaluate.knn import largest

Progress = Callable[[str, int, int], None]
Found = tuple[np.ndarray, np.ndarray]  # cosines and places, [m, k] both, the nearest first

BLOCK = 16_384  # vectors at once: the file is mapped, so no more of it need be in memory
QUERIES = 256
LINKS = 32  # of each vector in the graph
BUILD = 100  # candidates while the graph is built
LOOKED = (32, 64, 128, 256, 512)  # candidates while it is searched: the first that finds enough is taken
ENOUGH = 0.99  # of the true neighbours
SAMPLE, OF = 200, 10  # queries to measure that with, and neighbours of each


def unit(values: np.ndarray) -> np.ndarray:
    """Rows of length 1, float32; a row of zeros stays one."""
    wide = values.astype(np.float64)
    length = np.linalg.norm(wide, axis=1, keepdims=True)
    return (wide / np.maximum(length, 1e-12)).astype(np.float32)


@dataclass(frozen=True)
class Exact:
    """Every vector is compared."""

    vectors: np.ndarray  # [n, D], in memory or mapped

    def __call__(self, queries: np.ndarray, count: int) -> Found:
        """The nearest of each query; of those equally near, the first in order."""
        parts = [self._few(queries[at : at + QUERIES], count) for at in range(0, len(queries), QUERIES)]
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def _few(self, queries: np.ndarray, count: int) -> Found:
        best = np.empty((len(queries), 0), dtype=np.float32)
        places = np.empty((len(queries), 0), dtype=np.int64)
        for start in range(0, len(self.vectors), BLOCK):
            block = np.asarray(self.vectors[start : start + BLOCK])
            cosines = np.concatenate((best, queries @ block.T), 1)
            here = np.broadcast_to(np.arange(start, start + len(block)), (len(queries), len(block)))
            candidates = np.concatenate((places, here), 1)
            chosen = largest(cosines, min(count, cosines.shape[1]))
            best, places = np.take_along_axis(cosines, chosen, 1), np.take_along_axis(candidates, chosen, 1)
        order = np.argsort(-best, 1, kind="stable")
        return np.take_along_axis(best, order, 1), np.take_along_axis(places, order, 1)


@dataclass(frozen=True)
class Graph:
    """faiss's graph of near vectors (HNSW, Malkov and Yashunin 2016): few are compared, and now and then one is missed."""

    index: Any

    def __call__(self, queries: np.ndarray, count: int) -> Found:
        """As `Exact`; where it finds no more, the place is -1."""
        return self.index.search(np.ascontiguousarray(queries), min(count, self.index.ntotal))


@dataclass(frozen=True)
class Recall:
    """How many of the true neighbours a graph finds, measured on vectors of its own."""

    share: float
    queries: int
    neighbours: int
    looked: int  # candidates that it looks at

    def in_words(self) -> str:
        return (
            f"{100 * self.share:.1f} % of the {self.neighbours} nearest were found, measured on {self.queries:,} of the "
            f"pictures against the exact search (efSearch {self.looked})"
        )


def faiss_module() -> Any:
    """faiss, or a line that says how to get it."""
    try:
        import faiss  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError("faiss is not installed: pip install 'vitrail[faiss]', or search exactly") from error
    return faiss


def build_graph(vectors: np.ndarray, progress: Progress | None = None) -> tuple[Graph, Recall]:
    """The graph of these vectors, and what it finds. It looks as widely as it must to find enough."""
    faiss = faiss_module()
    index = faiss.IndexHNSWFlat(vectors.shape[1], LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = BUILD
    for start in range(0, len(vectors), BLOCK):
        index.add(np.ascontiguousarray(vectors[start : start + BLOCK]))
        if progress:
            progress("linking neighbours", min(start + BLOCK, len(vectors)), len(vectors))
    graph, recall = Graph(index), Recall(0.0, 0, 0, 0)
    for looked in LOOKED:
        index.hnsw.efSearch = looked
        recall = recall_of(graph, vectors, looked)
        if recall.share >= ENOUGH:
            break
    return graph, recall


def recall_of(graph: Graph, vectors: np.ndarray, looked: int) -> Recall:
    """How many of the nearest it finds, itself not counted."""
    chosen = np.linspace(0, len(vectors) - 1, min(SAMPLE, len(vectors))).round().astype(np.int64)
    queries, count = np.asarray(vectors[chosen]), min(OF, len(vectors) - 1)
    (truth, places), (_, found) = Exact(vectors)(queries, count + 1), graph(queries, count + 1)
    hits, wanted = 0, 0
    for query, nearest, near, given in zip(chosen, places, truth, found, strict=True):
        true = [place for place in nearest if place != query][:count]
        least = near[len(true)]  # of copies of one picture each is as good as another
        cosines = np.asarray(vectors[given]) @ np.asarray(vectors[query])
        good = {
            int(p)
            for p, c in zip(given, cosines, strict=True)
            if p not in (query, -1) and (p in true or c >= least - 1e-6)
        }
        hits, wanted = hits + min(len(good), len(true)), wanted + len(true)
    return Recall(hits / wanted if wanted else 1.0, len(chosen), count, looked)


def write_graph(graph: Graph, path: Path) -> None:
    """The graph as faiss writes it."""
    faiss_module().write_index(graph.index, str(path))


def read_graph(path: Path, count: int, width: int, looked: int) -> Graph:
    """A graph that `write_graph` wrote; the caller has seen to it that the bytes are those that were written."""
    index = faiss_module().read_index(str(path))
    if (index.ntotal, index.d) != (count, width):
        raise ValueError(
            f"{path} is of {index.ntotal} vectors of {index.d} values, not of {count} of {width}: index anew"
        )
    index.hnsw.efSearch = looked
    return Graph(index)
