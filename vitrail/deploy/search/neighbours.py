"""Nearest-neighbour search by cosine: exact in blocks, or approximate and faster with faiss.

n vectors and m queries of D values and length 1, k neighbours. For vectors of length 1 the dot product is the cosine.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.metrics.knn import find_largest
from vitrail.utils.progress import ProgressCallback

SearchHits = tuple[np.ndarray, np.ndarray]  # cosines and row indices, both [m, k], nearest first

BLOCK_ROWS = 16_384  # vectors in memory at once; the file is memory-mapped
QUERY_BLOCK = 256
HNSW_LINKS = 32  # per vector
EF_CONSTRUCTION = 100  # candidates during construction
EF_SEARCH_CANDIDATES = (32, 64, 128, 256, 512)  # the first with enough recall is used
MIN_RECALL = 0.99  # of a graph
RECALL_QUERIES, RECALL_NEIGHBOURS = 200, 10  # for measuring recall


def normalise_rows(values: np.ndarray) -> np.ndarray:
    """Return rows scaled to length 1, float32; zero rows stay zero."""
    wide = values.astype(np.float64)
    norm = np.linalg.norm(wide, axis=1, keepdims=True)
    return (wide / np.maximum(norm, 1e-12)).astype(np.float32)


@dataclass(frozen=True)
class ExactSearch:
    """Exact search over all vectors."""

    vectors: np.ndarray  # [n, D], in memory or memory-mapped

    def __call__(self, queries: np.ndarray, count: int) -> SearchHits:
        """Return the `count` nearest vectors of each query; ties are in the order of rows."""
        parts = [
            self._search_block(queries[at : at + QUERY_BLOCK], count) for at in range(0, len(queries), QUERY_BLOCK)
        ]
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def _search_block(self, queries: np.ndarray, count: int) -> SearchHits:
        best = np.empty((len(queries), 0), dtype=np.float32)
        indices = np.empty((len(queries), 0), dtype=np.int64)
        for start in range(0, len(self.vectors), BLOCK_ROWS):
            block = np.asarray(self.vectors[start : start + BLOCK_ROWS])
            cosines = np.concatenate((best, queries @ block.T), 1)
            rows = np.broadcast_to(np.arange(start, start + len(block)), (len(queries), len(block)))
            candidates = np.concatenate((indices, rows), 1)
            chosen = find_largest(cosines, min(count, cosines.shape[1]))
            best, indices = np.take_along_axis(cosines, chosen, 1), np.take_along_axis(candidates, chosen, 1)
        order = np.argsort(-best, 1, kind="stable")
        return np.take_along_axis(best, order, 1), np.take_along_axis(indices, order, 1)


@dataclass(frozen=True)
class HNSWGraph:
    """Approximate search with faiss's HNSW graph (Malkov and Yashunin 2016)."""

    index: Any

    def __call__(self, queries: np.ndarray, count: int) -> SearchHits:
        """Search like `ExactSearch`; missing neighbours have the index -1."""
        return self.index.search(np.ascontiguousarray(queries), min(count, self.index.ntotal))


@dataclass(frozen=True)
class Recall:
    """Fraction of the true neighbours found by a graph, measured on its own vectors."""

    share: float
    queries: int
    neighbours: int
    looked: int  # efSearch

    def describe(self) -> str:
        return (
            f"recall {100 * self.share:.1f} % of the {self.neighbours} nearest neighbours, measured on {self.queries:,} "
            f"images against exact search (efSearch {self.looked})"
        )


def import_faiss() -> Any:
    """Return faiss; raise ValueError if it is not installed."""
    try:
        import faiss  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError("faiss is not installed: pip install 'vitrail[faiss]', or use exact search") from error
    return faiss


def build_graph(vectors: np.ndarray, progress: ProgressCallback | None = None) -> tuple[HNSWGraph, Recall]:
    """Build the graph of these vectors, with the smallest efSearch that reaches `MIN_RECALL`; return it and its recall."""
    faiss = import_faiss()
    index = faiss.IndexHNSWFlat(vectors.shape[1], HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = EF_CONSTRUCTION
    for start in range(0, len(vectors), BLOCK_ROWS):
        index.add(np.ascontiguousarray(vectors[start : start + BLOCK_ROWS]))
        if progress:
            progress("building graph", min(start + BLOCK_ROWS, len(vectors)), len(vectors))
    graph, recall = HNSWGraph(index), Recall(0.0, 0, 0, 0)
    for ef_search in EF_SEARCH_CANDIDATES:
        index.hnsw.efSearch = ef_search
        recall = measure_recall(graph, vectors, ef_search)
        if recall.share >= MIN_RECALL:
            break
    return graph, recall


def measure_recall(graph: HNSWGraph, vectors: np.ndarray, ef_search: int) -> Recall:
    """Measure the recall of a graph; the query itself is not counted."""
    chosen = np.linspace(0, len(vectors) - 1, min(RECALL_QUERIES, len(vectors))).round().astype(np.int64)
    queries, count = np.asarray(vectors[chosen]), min(RECALL_NEIGHBOURS, len(vectors) - 1)
    (cosines, indices), (_, found) = ExactSearch(vectors)(queries, count + 1), graph(queries, count + 1)
    hits, total = 0, 0
    for query, nearest, near, given in zip(chosen, indices, cosines, found, strict=True):
        true = [index for index in nearest if index != query][:count]
        least = near[len(true)]  # copies of one image are equally good neighbours
        similarity = np.asarray(vectors[given]) @ np.asarray(vectors[query])
        good = {
            int(index)
            for index, cosine in zip(given, similarity, strict=True)
            if index not in (query, -1) and (index in true or cosine >= least - 1e-6)
        }
        hits, total = hits + min(len(good), len(true)), total + len(true)
    return Recall(hits / total if total else 1.0, len(chosen), count, ef_search)


def write_graph(graph: HNSWGraph, path: Path) -> None:
    """Write the graph in faiss's format."""
    import_faiss().write_index(graph.index, str(path))


def read_graph(path: Path, count: int, width: int, ef_search: int) -> HNSWGraph:
    """Read a graph of `write_graph`; the caller has verified its checksum."""
    index = import_faiss().read_index(str(path))
    if (index.ntotal, index.d) != (count, width):
        raise ValueError(
            f"{path} has {index.ntotal} vectors of {index.d} values, expected {count} of {width}: build the index again"
        )
    index.hnsw.efSearch = ef_search
    return HNSWGraph(index)
