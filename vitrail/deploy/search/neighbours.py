"""Nearest-neighbour search by cosine: exact in blocks, or approximate and faster with faiss.

n vectors and m queries of D values and length 1, k neighbours. For vectors of length 1 the dot product is the cosine.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.metrics import knn
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
    return knn.normalise_rows(values).astype(np.float32)


@dataclass(frozen=True)
class ExactSearch:
    """Exact search over all vectors."""

    vectors: np.ndarray  # [n, D], in memory or memory-mapped

    def __call__(self, queries: np.ndarray, count: int) -> SearchHits:
        """Return the `count` nearest vectors of each query; ties are in the order of rows."""
        blocks = (queries[start : start + QUERY_BLOCK] for start in range(0, len(queries), QUERY_BLOCK))
        found = [knn.find_nearest(self.vectors, block, count, np.asarray, BLOCK_ROWS) for block in blocks]
        cosines, indices = (np.concatenate(parts) for parts in zip(*found, strict=True))
        order = np.argsort(-cosines, 1, kind="stable")
        return np.take_along_axis(cosines, order, 1), np.take_along_axis(indices, order, 1)


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
        least = near[len(true)] - 1e-6  # copies of one image are equally good neighbours
        others = given[(given != query) & (given != -1)]
        is_good = np.isin(others, true) | (np.asarray(vectors[others]) @ np.asarray(vectors[query]) >= least)
        hits, total = hits + min(len(np.unique(others[is_good])), len(true)), total + len(true)
    return Recall(hits / total if total else 1.0, len(chosen), count, ef_search)


def write_graph(graph: HNSWGraph, path: Path) -> None:
    """Write the graph in faiss's format."""
    import_faiss().write_index(graph.index, str(path))


def read_graph(path: Path, count: int, width: int, ef_search: int) -> HNSWGraph:
    """Read a graph of `write_graph`; the caller has verified its checksum."""
    index = import_faiss().read_index(str(path))
    if (index.ntotal, index.d) != (count, width):
        found, expected = f"{index.ntotal} vectors of {index.d} values", f"{count} of {width}"
        raise ValueError(f"{path} has {found}, expected {expected}: build the index again")
    index.hnsw.efSearch = ef_search
    return HNSWGraph(index)
