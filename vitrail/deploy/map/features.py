"""The vectors of a map: read from a file of `vitrail embed` or from a search index, with the images that they belong to."""

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitrail.data.dataset import Media, Store
from vitrail.data.sources.files import FileStore, file_media, find_media, printable_path
from vitrail.deploy.predict.formats import import_pyarrow
from vitrail.deploy.predict.inputs import collect_inputs
from vitrail.deploy.search.index import is_index, read_index
from vitrail.utils.progress import ProgressCallback

SAMPLE = 100  # files looked at, to tell what all are
MAX_POINTS = 100_000  # of a page; of more vectors, evenly spaced ones are drawn
FEATURE_SUFFIXES = (".npy", ".csv", ".jsonl", ".parquet")
Features = tuple[list[str], list[str], np.ndarray]  # paths, errors ("" for none), and vectors [n, D]


@dataclass(frozen=True)
class MapPoints:
    """The vectors of a map, each with its name and its image."""

    names: list[str]  # [n]
    features: np.ndarray  # float32 [n, D], as the model computed them, or of an index rows of length 1
    store: Store | None  # of the images; None if their files are not known
    items: np.ndarray  # int64 [n]: indices into the store, -1 for an image that it does not have
    media: Media
    source: str  # the model, or the file of the vectors
    data: tuple[str, ...]  # folders, lists and datasets of the images, for their classes
    total: int  # vectors of the source, of which these are drawn
    unreadable: int = 0  # images without a vector

    def __len__(self) -> int:
        return len(self.names)


def is_written_features(where: str) -> bool:
    """Return True for a file of `vitrail embed` or a search index, False for a model."""
    path = Path(where)
    return is_index(path) or (path.suffix.lower() in FEATURE_SUFFIXES and path.is_file())


def open_points(where: str, paths: Sequence[str] = (), progress: ProgressCallback | None = None) -> MapPoints:
    """Return the points of a file of `vitrail embed` or of a search index; `paths` are their images, found by name."""
    if is_index(Path(where)):
        index = read_index(Path(where))
        files = [str(index.image_path(row)) for row in range(len(index.images))]
        names, errors, vectors = [*map(printable_path, files)], [""] * len(files), index.vectors
        source, media, unreadable = index.model.name, index.media, len(index.unreadable)
        store: Store | None = FileStore.from_paths(files, media)
        data = tuple(paths) or (str(index.folder),)
    else:
        names, errors, vectors = read_features(Path(where))
        source, unreadable, data = Path(where).name, 0, tuple(paths)
        media, store = find_files(where, names)
    if paths:
        taken: Media = media
        store = collect_inputs(paths, progress, lambda: taken)
        media = store.media
    return build_points(names, errors, vectors, store, media, source, data, unreadable)


def find_files(where: str, names: list[str]) -> tuple[Media, Store | None]:
    """Return what named files are, and their store; None for members of archives, and for files that were moved."""
    here = [name for name in names[:SAMPLE] if Path(name).exists()]
    if here:
        media = find_media(where, here)
        return media, FileStore.from_paths(names, media)
    return file_media(names[0]) or "image" if names else "image", None


def build_points(
    names: list[str],
    errors: Sequence[str],
    vectors: np.ndarray,
    store: Store | None,
    media: Media,
    source: str,
    data: tuple[str, ...] = (),
    unreadable: int = 0,
) -> MapPoints:
    """Return the points of readable images; raise ValueError if a vector is not finite."""
    rows = np.flatnonzero(np.array([not error for error in errors], dtype=bool))
    unreadable += len(names) - len(rows)
    if not len(rows):
        raise ValueError(f"{source} has no vectors: no image could be read")
    if len(rows) > MAX_POINTS:
        rows = rows[np.linspace(0, len(rows) - 1, MAX_POINTS).round().astype(np.int64)]
    chosen = np.array(vectors[rows] if len(rows) < len(vectors) else vectors, dtype=np.float32)
    finite = np.isfinite(chosen).all(1)
    if not finite.all():
        bad = int(rows[np.flatnonzero(~finite)[0]])
        count = int((~finite).sum())
        raise ValueError(
            f"{count:,} of {len(rows):,} vectors are not finite (NaN), first that of {names[bad]}: embed again"
        )
    kept = [names[row] for row in rows.tolist()]
    items = rows if store is None or len(store) == len(names) else np.full(len(rows), -1)
    if store is not None and not has_names(store, items, kept):
        found = {store.name(item): item for item in range(len(store))}
        items = np.array([found.get(name, -1) for name in kept], dtype=np.int64)
        if (items < 0).all():
            raise ValueError(f"{source} is of other images: it has {kept[0]}, and PATHS {store.name(0)}")
    total = len(names) - sum(map(bool, errors))
    return MapPoints(kept, chosen, store, items, media, source, data, total, unreadable)


def has_names(store: Store, items: np.ndarray, names: list[str]) -> bool:
    """Return True if the items of a store have these names."""
    return all(item >= 0 and store.name(item) == name for item, name in zip(items.tolist(), names, strict=True))


def read_features(path: Path) -> Features:
    """Read a file of `vitrail embed`; raise ValueError if it is none."""
    readers: dict[str, Callable[[Path], Features]] = {
        ".npy": read_npy,
        ".csv": read_csv_features,
        ".jsonl": read_jsonl,
        ".parquet": read_parquet,
    }
    try:
        names, errors, vectors = readers[path.suffix.lower()](path)
    except (ValueError, KeyError, TypeError, EOFError, StopIteration) as error:
        if "pip install" in str(error):
            raise
        reason = f"no {error}" if isinstance(error, KeyError) else str(error) or "it is empty"
        raise ValueError(f"{path} is not a file of vitrail embed: {reason}") from error
    if vectors.ndim != 2 or not vectors.shape[1] or len(vectors) != len(names) or vectors.dtype.kind != "f":
        raise ValueError(f"{path} has {len(names):,} paths, but vectors {vectors.dtype} {list(vectors.shape)}")
    return names, errors, vectors


def read_npy(path: Path) -> Features:
    """Read a NumPy file and the paths beside it; the vectors are memory-mapped."""
    listing = path.with_name(f"{path.name}.paths.csv")
    if not listing.is_file():
        raise ValueError(f"{listing.name} is missing, which names its rows")
    vectors = np.load(path, mmap_mode="r", allow_pickle=False)
    with listing.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [row["path"] for row in rows], [row["error"] or "" for row in rows], vectors


def read_csv_features(path: Path) -> Features:
    """Read the columns path, error, f0, f1 and so on."""
    names, errors, vectors = [], [], []
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        header = next(reader)
        if header[:3] != ["path", "error", "f0"]:
            raise ValueError(f"its columns are {','.join(header)[:60]}")
        for name, error, *values in reader:
            names.append(name)
            errors.append(error)
            vectors.append(np.array([float(value or "nan") for value in values], dtype=np.float32))
    return names, errors, np.stack(vectors)


def read_jsonl(path: Path) -> Features:
    """Read JSON lines with the keys path, error and features."""
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    return join_lists([row["path"] for row in rows], [row["error"] for row in rows], [row["features"] for row in rows])


def read_parquet(path: Path) -> Features:
    """Read the columns path, error and features."""
    import_pyarrow()
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.read_table(path, columns=["path", "error", "features"])
    except (ArrowException, OSError) as error:
        raise ValueError(str(error).splitlines()[0]) from error
    columns = (table.column(name).combine_chunks() for name in ("path", "error", "features"))
    names, errors, features = columns
    return join_lists(names.to_pylist(), errors.to_pylist(), features.to_numpy(zero_copy_only=False))


def join_lists(names: list[str], errors: list[str | None], features: Sequence[Sequence[float] | None]) -> Features:
    """Return lists of numbers as one array; an unreadable image has none."""
    width = next((len(values) for values in features if values is not None), 1)
    vectors = np.full((len(names), width), np.nan, dtype=np.float32)
    for row, values in enumerate(features):
        if values is not None:
            vectors[row] = values
    return names, [error or "" for error in errors], vectors
