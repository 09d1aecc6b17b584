"""Write a map: project vectors, find neighbours, draw thumbnails, and render the page."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitrail.deploy.map.atlas import MAX_BYTES, build_atlas
from vitrail.deploy.map.columns import CLASS, FOLDER, Column
from vitrail.deploy.map.features import MapPoints
from vitrail.deploy.map.page import MapPage, render_map_page
from vitrail.deploy.map.projection import project
from vitrail.deploy.search.neighbours import ExactSearch, SearchHits, normalise_rows
from vitrail.reports.document import write_html
from vitrail.utils.devices import available_cores
from vitrail.utils.progress import ProgressCallback
from vitrail.utils.text import format_image_count

NEAREST = 5
MAX_PAIRS = 2_500_000_000  # of vectors compared for neighbours: all of 50,000 points, two minutes of one core
QUERIES = 256  # points whose neighbours are searched at once


@dataclass(frozen=True)
class MapOptions:
    """Options of a map."""

    projection: str = "pca"
    seed: int = 0
    colour_by: str | None = None  # None: the class, if it is known
    thumbnail_size: int | None = None  # None: by the number of points
    thumbnails: int | None = None  # most of them; None: as many as fit
    nearest: int = NEAREST  # neighbours of each point

    def __post_init__(self) -> None:
        for name, value in (("seed", self.seed), ("thumbnails", self.thumbnails), ("nearest", self.nearest)):
            if value is not None and value < 0:
                raise ValueError(f"{name}= must be >= 0, got {value}")


@dataclass(frozen=True)
class MapSummary:
    """The result of writing a map, for messages and JSON."""

    path: Path
    points: int
    unreadable: int
    projection: str
    explained: tuple[float, float] | None
    columns: tuple[str, ...]
    thumbnails: int
    thumbnail_size: int
    neighbours: int  # points whose neighbours are on the page
    nbytes: int
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        names = (
            "points",
            "unreadable",
            "projection",
            "explained",
            "columns",
            "thumbnails",
            "thumbnail_size",
            "neighbours",
        )
        return (
            {"map": str(self.path)}
            | {name: getattr(self, name) for name in names}
            | {
                "bytes": self.nbytes,
                "notes": list(self.notes),
            }
        )


def write_map(
    points: MapPoints,
    columns: Sequence[Column],
    path: Path,
    title: str,
    options: MapOptions = MapOptions(),  # noqa: B008
    notes: Sequence[str] = (),
    progress: ProgressCallback | None = None,
    *,
    max_bytes: int = MAX_BYTES,  # of the thumbnails
) -> MapSummary:
    """Write the page of a map; raise ValueError for vectors that cannot be projected, or an unknown column."""
    colour = choose_column(columns, options.colour_by)
    vectors = np.empty(points.features.shape, np.float32)
    for start in range(0, len(vectors), QUERIES):
        vectors[start : start + QUERIES] = normalise_rows(points.features[start : start + QUERIES])
    projection = project(vectors, options.projection, options.seed, progress)
    near, cosines = find_point_neighbours(vectors, options.nearest, progress)
    size, limit = options.thumbnail_size, options.thumbnails
    atlas = build_atlas(points.store, points.items, projection.points, size, limit, progress, max_bytes)
    notes = [*notes]
    if atlas.unreadable:
        notes.append(f"{format_image_count(atlas.unreadable, points.media)} cannot be opened and have no thumbnail")
    elif points.store is None and limit != 0:
        notes.append(f"no thumbnails: the files of the {points.media}s are not here, give their PATHS")
    width = points.features.shape[1]
    page = MapPage(title, path.stem, points, projection, columns, colour, atlas, near, cosines, width, notes)
    write_html(render_map_page(page), path)
    return MapSummary(
        path,
        len(points),
        points.unreadable,
        options.projection,
        projection.explained,
        tuple(column.name for column in columns),
        atlas.count,
        atlas.size,
        int((near[:, 0] >= 0).sum()) if near.size else 0,
        path.stat().st_size,
        tuple(notes),
    )


def choose_column(columns: Sequence[Column], name: str | None) -> int:
    """Return the number of the column that colours the map, -1 for none; raise ValueError for an unknown one."""
    names = [column.name for column in columns]
    if name is None:
        return next((names.index(known) for known in (CLASS, FOLDER) if known in names), 0 if names else -1)
    if name not in names:
        known = f"the columns are {', '.join(names)}" if names else "give columns with --table FILE"
        raise ValueError(f"no column {name!r} to colour by: {known}")
    return names.index(name)


def find_point_neighbours(
    vectors: np.ndarray, count: int, progress: ProgressCallback | None = None, max_pairs: int = MAX_PAIRS
) -> SearchHits:
    """Return the nearest other vectors of each vector of length 1, exactly, and their cosines, [n, k] both.

    Of so many that comparing all would take more than `max_pairs` products, evenly spaced ones have neighbours; the others -1.
    """
    n = len(vectors)
    count = min(count, n - 1)
    near, cosines = np.full((n, count), -1, np.int32), np.zeros((n, count), np.float32)
    if not count:
        return near, cosines
    rows = np.unique(np.linspace(0, n - 1, max(1, min(n, max_pairs // n))).round().astype(np.int64))
    blocks = [rows[start : start + QUERIES] for start in range(0, len(rows), QUERIES)]
    search = ExactSearch(vectors)

    def find(block: np.ndarray) -> SearchHits:
        found_cosines, found = search(vectors[block], count + 1)
        others = found != block[:, None]
        others[others.all(1), -1] = False  # more than k copies of a vector: it is not among its own neighbours
        shape = (len(block), count)
        return found[others].reshape(shape), found_cosines[others].reshape(shape)

    done, pool = 0, ThreadPoolExecutor(available_cores())
    try:
        for block, (found, values) in zip(blocks, pool.map(find, blocks), strict=True):
            near[block], cosines[block] = found, values
            done += len(block)
            if progress:
                progress("finding neighbours", done, len(rows))
    finally:
        pool.shutdown(cancel_futures=True)
    return near, cosines
