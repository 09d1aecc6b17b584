"""Projections of feature vectors to two dimensions: PCA, UMAP and t-SNE, each the same for the same vectors and seed.

n vectors of D values. PCA reads them in blocks, so memory-mapped ones never have to fit into memory.
"""

import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.utils.progress import ProgressCallback

BLOCK_ROWS = 8192  # vectors in memory at once
MAX_EXACT_WIDTH = 2048  # above, PCA is randomized: the covariance would have more than 4 million values
OVERSAMPLING, POWER_ITERATIONS = 10, 7  # of the randomized SVD (Halko, Martinsson and Tropp 2011)
TSNE_DIMENSIONS = 50  # by PCA before t-SNE, as van der Maaten and Hinton (2008) did
TSNE_ITERATIONS = 1000
MIN_NEIGHBOUR_POINTS = 5  # UMAP and t-SNE need neighbours that are not all points
PERPLEXITY, UMAP_NEIGHBOURS = 30, 15  # defaults of both, smaller for few points
NAMES = {"pca": "PCA", "umap": "UMAP", "tsne": "t-SNE"}


@dataclass(frozen=True)
class Projection:
    """Points of a map, and how they came about."""

    points: np.ndarray  # float32 [n, 2]
    method: str  # pca, umap or tsne
    parameters: dict[str, Any]
    explained: tuple[float, float] | None = None  # share of the variance of both axes, of PCA

    @property
    def name(self) -> str:
        return NAMES[self.method]

    @property
    def is_linear(self) -> bool:
        """Return True if distances of the map are distances of the vectors, seen from one side."""
        return self.method == "pca"


def project(
    vectors: np.ndarray, method: str = "pca", seed: int = 0, progress: ProgressCallback | None = None
) -> Projection:
    """Return vectors [n, D] as points of two dimensions; raise ValueError if they are too few or all equal."""
    count = len(vectors)
    if count < 2:
        raise ValueError(f"a map needs at least 2 vectors, got {count}: give more images")
    if method != "pca" and count < MIN_NEIGHBOUR_POINTS:
        least = f"at least {MIN_NEIGHBOUR_POINTS} vectors"
        raise ValueError(f"--projection {method} needs {least}, got {count}: use pca, or give more images")
    if method == "pca":
        return project_by_pca(vectors, seed, progress)
    return (project_by_tsne if method == "tsne" else project_by_umap)(vectors, seed, progress)


def project_by_pca(vectors: np.ndarray, seed: int = 0, progress: ProgressCallback | None = None) -> Projection:
    """Project onto the first two principal components."""
    mean, axes, explained, solver = find_components(vectors, 2, seed, progress)
    points = np.zeros((len(vectors), 2), np.float32)  # of vectors with one value, the second axis stays 0
    for start, block in iterate_blocks(vectors):
        points[start : start + len(block), : len(axes)] = (block - mean) @ axes.T
    shares = (*explained.tolist(), 0.0)[:2]
    return Projection(points, "pca", {"solver": solver}, (shares[0], shares[1]))


def find_components(
    vectors: np.ndarray, count: int, seed: int = 0, progress: ProgressCallback | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """Return the mean [D], the first principal axes [k, D], their shares of the variance [k], and the solver.

    The axes come from the eigenvectors of the covariance, or of very wide vectors from a randomized SVD. The entry of an axis
    with the largest magnitude is positive, so that no library decides which side of the map is left.
    """
    n, width = vectors.shape
    mean = sum((block.sum(0) for _, block in iterate_blocks(vectors)), np.zeros(width)) / n
    total = sum(float(((block - mean) ** 2).sum()) for _, block in iterate_blocks(vectors))
    if total <= n * width * np.finfo(np.float32).eps ** 2 * max(1.0, float(np.abs(mean).max())) ** 2:
        raise ValueError(f"all {n:,} vectors are equal: the map would be one point, give other images or another model")
    rank = min(count, n, width)
    if width <= MAX_EXACT_WIDTH:
        from scipy.linalg import eigh

        covariance = np.zeros((width, width))
        for start, block in iterate_blocks(vectors):
            covariance += (block - mean).T @ (block - mean)
            if progress:
                progress("computing PCA", start + len(block), n)
        values, found = eigh(covariance, subset_by_index=(width - rank, width - 1))
        axes, solver = found.T[::-1], "exact"
        variances = values[::-1]
    else:
        axes, variances = randomized_components(vectors, mean, rank, seed, progress)
        solver = "randomized"
    largest = axes[np.arange(len(axes)), np.abs(axes).argmax(1)]
    return mean, axes * np.where(largest < 0, -1.0, 1.0)[:, None], np.clip(variances / total, 0, 1), solver


def randomized_components(
    vectors: np.ndarray, mean: np.ndarray, rank: int, seed: int, progress: ProgressCallback | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first right singular vectors of the centred vectors, [k, D], and their squared singular values."""
    n, width = vectors.shape
    size = min(rank + OVERSAMPLING, n, width)
    basis = np.linalg.qr(np.random.default_rng(seed).standard_normal((width, size)))[0]  # [D, s]
    for step in range(POWER_ITERATIONS + 1):
        product = np.zeros((width, size))
        for _, block in iterate_blocks(vectors):
            centred = block - mean
            product += centred.T @ (centred @ basis)
        if progress:
            progress("computing PCA", step + 1, POWER_ITERATIONS + 1)
        basis = np.linalg.qr(product)[0]
    # basis^T X^T X basis, of the last product: eigenvalues and vectors inside the subspace.
    inner = np.zeros((size, size))
    for _, block in iterate_blocks(vectors):
        inside = (block - mean) @ basis
        inner += inside.T @ inside
    values, rotation = np.linalg.eigh(inner)
    return (basis @ rotation[:, ::-1][:, :rank]).T, values[::-1][:rank]


def iterate_blocks(vectors: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the first row and the values of each block, in double precision."""
    for start in range(0, len(vectors), BLOCK_ROWS):
        yield start, np.asarray(vectors[start : start + BLOCK_ROWS], dtype=np.float64)


def project_by_tsne(vectors: np.ndarray, seed: int, progress: ProgressCallback | None) -> Projection:
    """Project by scikit-learn's t-SNE, from the first 50 principal components, starting at the first two."""
    from sklearn.manifold import TSNE

    mean, axes, _, _ = find_components(vectors, min(TSNE_DIMENSIONS, vectors.shape[1]), seed, progress)
    reduced = np.concatenate([(block - mean) @ axes.T for _, block in iterate_blocks(vectors)]).astype(np.float32)
    perplexity = min(PERPLEXITY, (len(vectors) - 1) / 3)
    with redirect_stdout(IterationReader(progress)):
        tsne = TSNE(perplexity=perplexity, init="pca", random_state=seed, max_iter=TSNE_ITERATIONS, verbose=2)
        points = tsne.fit_transform(reduced)
    if progress:  # it may stop before the last iteration
        progress("computing t-SNE, iterations", TSNE_ITERATIONS, TSNE_ITERATIONS)
    parameters = {"perplexity": round(perplexity, 2), "dimensions before": len(axes), "seed": seed}
    return Projection(center_points(points), "tsne", parameters)


class IterationReader(io.TextIOBase):
    """A stream that reads the iterations which scikit-learn prints, for the progress line."""

    def __init__(self, progress: ProgressCallback | None) -> None:
        self.progress = progress

    def write(self, text: str, /) -> int:
        """Report the iteration that a line names."""
        if self.progress and (found := re.search(r"Iteration (\d+)", text)):
            self.progress("computing t-SNE, iterations", min(int(found[1]), TSNE_ITERATIONS), TSNE_ITERATIONS)
        return len(text)


def project_by_umap(vectors: np.ndarray, seed: int, progress: ProgressCallback | None) -> Projection:
    """Project by umap-learn with the cosine distance; a fixed seed makes it use one thread."""
    umap = import_umap()
    neighbours = min(UMAP_NEIGHBOURS, len(vectors) - 1)
    if progress:
        progress("computing UMAP", 0, 0)
    # Spectral initialisation needs more points than dimensions to spare.
    init = "spectral" if len(vectors) > UMAP_NEIGHBOURS else "random"
    settings = {"n_neighbors": neighbours, "metric": "cosine", "init": init, "random_state": seed, "n_jobs": 1}
    points = umap.UMAP(**settings).fit_transform(np.asarray(vectors, dtype=np.float32))
    return Projection(center_points(points), "umap", {"neighbours": neighbours, "metric": "cosine", "seed": seed})


def import_umap() -> Any:
    """Return umap-learn; raise ValueError if it is not installed."""
    try:
        import umap  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            "--projection umap needs umap-learn: pip install 'vitrail[umap]', or use pca or tsne"
        ) from None
    return umap


def center_points(points: Any) -> np.ndarray:
    """Return points around their mean, float32 [n, 2]."""
    points = np.asarray(points, dtype=np.float32)
    return points - points.mean(0)
