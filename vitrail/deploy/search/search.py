"""Index the images of a folder by their features, and find the nearest images of a query."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.checkpoints.known_models import expand_name
from vitrail.data.dataset import Media
from vitrail.data.decode import IMAGE_ERRORS, name_image_errors, open_image
from vitrail.data.sound import open_sound
from vitrail.data.sources.files import MEDIA_SUFFIXES, FileStore, FolderWalker, file_media, printable_path
from vitrail.data.video import open_video
from vitrail.deploy.predict.inputs import NOUNS, AskMedia, ImageInputs, select_media, take_images
from vitrail.deploy.predict.predict import InferenceOptions, RuntimePool, check_input_media, open_pool, predict_rows
from vitrail.deploy.runtimes.base import DeployedModel
from vitrail.deploy.runtimes.exported import is_exported
from vitrail.deploy.runtimes.open import ask_media, open_deployed_model
from vitrail.deploy.runtimes.precision import current_precision, describe_precision
from vitrail.deploy.runtimes.select import MessageCallback
from vitrail.deploy.search import index as files
from vitrail.deploy.search.index import IndexedImage, IndexedModel, SearchIndex, VectorWriter, is_index, read_index
from vitrail.deploy.search.neighbours import build_graph, normalise_rows, write_graph
from vitrail.metrics.views import average_views
from vitrail.utils.files import atomic_write, stage_output
from vitrail.utils.precision import FLOAT_PRECISIONS
from vitrail.utils.progress import ProgressCallback

ROWS_PER_WRITE = 1024  # written at once


@dataclass(frozen=True)
class IndexingResult:
    """Result of indexing a folder."""

    index: SearchIndex
    kept: int  # images whose vectors were reused
    added: int
    changed: int
    removed: int
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        index = self.index
        origin = {"index": str(index.directory), "folder": str(index.folder), "model": index.model.name}
        counts = {"images": len(index.images), "values": index.vectors.shape[1]}
        counts |= {name: getattr(self, name) for name in ("kept", "added", "changed", "removed")}
        recall = None if index.recall is None else asdict(index.recall)
        return origin | counts | {"unreadable": index.unreadable, "recall": recall, "notes": list(self.notes)}


OPENERS: dict[Media, Callable[[str, str], Any]] = {"image": open_image, "video": open_video, "sound": open_sound}


@dataclass(frozen=True)
class Neighbour:
    """An image of the index with its similarity to the query."""

    path: Path
    relative_path: str  # to the folder, printable
    cosine: float


@dataclass(frozen=True)
class SearchResult:
    """A query, an image or a text, and its neighbours, nearest first."""

    query: Path | str
    neighbours: tuple[Neighbour, ...]


def build_index(
    where: str,
    folder: Path,
    out: Path,
    *,
    options: InferenceOptions = InferenceOptions(precision="fp32"),  # noqa: B008
    update: bool = False,
    graph: bool = False,
    progress: ProgressCallback | None = None,
    report: MessageCallback | None = None,
) -> IndexingResult:
    """Write the feature vectors of all images or videos below a folder; with `update`, compute only new and changed images.

    Queries use the precision of the vectors. With "auto" it is chosen once; an update and an exported file keep their own.
    """
    check_index_directory(out, update)
    old = read_index(out) if update else None
    if options.precision == "auto" and (old is not None or is_exported(where)):
        own = "fp32" if old is None or is_exported(where) else old.model.precision
        options = replace(options, precision=own if own in FLOAT_PRECISIONS else "fp32")
    if old is not None and not is_same_path(old.folder, folder):
        raise ValueError(f"{out} is an index of {old.folder}, not {folder}: give that folder, or another --out")
    images = list_images(folder, progress, ask_media(where, options.assume, options.take))
    graph = graph or (old is not None and old.recall is not None)
    builder = IndexBuilder(where, folder, options, graph, progress, report)
    if old is not None:
        return builder.build(out, images, old)
    with stage_output(out) as directory:
        directory.mkdir()
        result = builder.build(directory, images, None)
    return IndexingResult(read_index(out), 0, result.added, 0, 0, result.notes)


def check_index_directory(out: Path, update: bool) -> None:
    """Raise ValueError if the output directory does not fit `update`."""
    if update:
        if not is_index(out):
            raise ValueError(f"{out} is not a search index: omit --update to build one")
    elif is_index(out):
        raise ValueError(f"{out} is a search index already: add --update, or give another --out")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty: give --out a new directory")


def is_same_path(one: Path, other: Path) -> bool:
    """Return True if two paths lead to the same file or folder."""
    return one.exists() and other.exists() and os.path.samefile(one, other)


def list_images(
    folder: Path, progress: ProgressCallback | None = None, ask_media: AskMedia = take_images
) -> list[IndexedImage]:
    """Return all images or videos below a folder, whichever the model takes, in order, with their sizes and times."""
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {problem}: give a folder of images")
    walk, root = FolderWalker(progress=progress, accepted=MEDIA_SUFFIXES), str(folder)
    walk.add_tree(root, set())
    if not len(walk.files):
        raise ValueError(f"no images in {folder}")
    store = select_media(walk, ask_media)
    paths = (os.path.relpath(store.path(item), root) for item in range(len(store)))
    return [IndexedImage(path, *file_stamp(store, item)) for item, path in enumerate(paths)]


def file_stamp(store: FileStore, item: int) -> tuple[int, int]:
    """Return size and modification time; -1, -1 for a broken link, which fails later when read."""
    try:
        return store.stamp(item) or (-1, -1)
    except OSError:
        return -1, -1


@dataclass(frozen=True)
class IndexBuilder:
    """Options of an index to build."""

    where: str
    folder: Path
    options: InferenceOptions
    graph: bool
    progress: ProgressCallback | None
    report: MessageCallback | None

    def build(self, directory: Path, images: list[IndexedImage], old: SearchIndex | None) -> IndexingResult:
        """Write the files of an index; vectors of unchanged images are reused."""
        before = {} if old is None else {image.path: (row, image.stamp) for row, image in enumerate(old.images)}
        kept = [image for image in images if image.path in before and before[image.path][1] == image.stamp]
        fresh = [image for image in images if image.path not in before or before[image.path][1] != image.stamp]
        pool = open_pool(self.where, "features", self.options, len(fresh), self.report)
        deployed = pool.deployed
        if old is not None:
            old.check_same_model(deployed.contract, self.where)
        path = files.new_path(directory, "vectors", "npy")
        with atomic_write(path) as file:
            writer = VectorWriter(file)
            if old is not None:
                rows = np.array([before[image.path][0] for image in kept], dtype=np.int64)
                for start in range(0, len(rows), ROWS_PER_WRITE):
                    writer.add(old.vectors[rows[start : start + ROWS_PER_WRITE]])
            read, unreadable = self.embed_images(pool, fresh, writer)
            if not kept and not read:
                name, reason = next(iter(unreadable.items()))
                raise ValueError(f"no image in {self.folder} can be read, such as {name}: {reason}")
            writer.finish()
        indexed = (*kept, *read)
        parts = {"vectors": files.checksum_file(path), "pictures": files.write_images(directory, indexed)}
        vectors, recall = np.load(path, mmap_mode="r", allow_pickle=False), None
        if self.graph:
            graph, recall = build_graph(vectors, self.progress)
            graph_path = files.new_path(directory, "graph", "faiss")
            write_graph(graph, graph_path)
            parts["graph"] = files.checksum_file(graph_path)
        if deployed.model is not None:  # a lower precision may have been refused meanwhile
            deployed = replace(deployed, contract=replace(deployed.contract, precision=current_precision(deployed)))
        model = describe_model(self.where, deployed, self.options)
        pipeline, folder = deployed.contract.preprocessing, self.folder.resolve()
        index = SearchIndex(directory, folder, model, pipeline, indexed, vectors, unreadable, parts, recall)
        files.write_header(index)
        now, changed = {image.path for image in indexed}, sum(image.path in before for image in read)
        removed = sum(path not in now for path in before)
        notes = (*deployed.notes, *describe_precision(deployed))
        return IndexingResult(index, len(kept), len(read) - changed, changed, removed, notes)

    def embed_images(
        self, pool: RuntimePool, images: Sequence[IndexedImage], writer: VectorWriter
    ) -> tuple[list[IndexedImage], dict[str, str]]:
        """Write the vectors of the readable images; return these images, and the errors of the others by path."""
        store = FileStore.from_paths(os.path.join(self.folder, image.path) for image in images)
        store.media = path_media(self.folder / images[0].path) if images else "image"
        inputs = ImageInputs((store,), np.array([0, len(images)]), (None,))
        if images:
            check_input_media(pool.deployed, inputs)
        rows = predict_rows(pool, inputs, 0, len(images), progress=self.progress)
        pairs, read, unreadable = zip(images, rows, strict=True), [], {}
        while block := list(itertools.islice(pairs, ROWS_PER_WRITE)):
            features = [row.features for _, row in block if row.features is not None]
            if features:
                writer.add(normalise_rows(np.stack(features)))
            read += [image for image, row in block if row.features is not None]
            unreadable |= {printable_path(image.path): row.error for image, row in block if row.features is None}
        return read, unreadable


def describe_model(where: str, deployed: DeployedModel, options: InferenceOptions) -> IndexedModel:
    """Return the model's entry of the index, from which it can be opened again."""
    contract, where = deployed.contract, expand_name(where)
    where = where if where.startswith("hf://") else os.path.abspath(where)
    size = None if options.size is None else list(options.size)
    assume = {name: str(value) for name, value in (options.assume or {}).items()}
    options_of_contract = (contract.checksum, contract.merge, contract.precision)
    return IndexedModel(where, deployed.name, *options_of_contract, size, assume, options.take)


def open_query_model(
    index: SearchIndex,
    where: str | None = None,  # None: the model of the index
    *,
    runtime: str = "auto",
    device: str = "auto",
    assume: Mapping[str, str] | None = None,
    take: str | None = None,
    n_images: int = 1,
) -> DeployedModel:
    """Open the model for queries: the model of the index, or the same model at another path."""
    model, path = index.model, where or index.model.where
    if where is None and not path.startswith("hf://") and not Path(path).exists():
        raise ValueError(f"{path}, the model of {index.directory}, does not exist: give its new path with --model")
    options: dict[str, Any] = {}
    if not is_exported(path):
        options = {"merge": model.merge, "assume": assume or model.assume, "take": take or model.take}
        options |= {"size": model.size and tuple(model.size), "n_images": n_images}
        options |= {"precision": model.precision if model.precision in FLOAT_PRECISIONS else "fp32"}
    deployed = open_deployed_model(path, runtime=runtime, device=device, output_kind="features", **options)
    index.check_same_model(deployed.contract, path)
    return deployed


def find_neighbours(
    index: SearchIndex, deployed: DeployedModel, queries: Sequence[Path], top: int = 10, exact: bool = False
) -> list[SearchResult]:
    """Return the nearest images of each query, without the query itself."""
    index.check_same_model(deployed.contract, deployed.where)
    features = np.concatenate([embed_query(deployed, path) for path in queries])
    if not np.isfinite(features).all():
        bad = queries[int(np.flatnonzero(~np.isfinite(features).all(1))[0])]
        raise ValueError(f"the features of {bad} are not finite with {deployed.where}")
    cosines, rows = index.searcher(exact)(normalise_rows(features), min(top + 1, len(index.images)))
    results = []
    for query, neighbours in zip(queries, list_neighbours(index, cosines, rows), strict=True):
        others = tuple(item for item in neighbours if not is_same_path(item.path, query))
        results.append(SearchResult(query, others[:top]))
    return results


def list_neighbours(index: SearchIndex, cosines: np.ndarray, rows: np.ndarray) -> list[list[Neighbour]]:
    """Return the images of the rows that were found for each query, both [m, k]; -1 stands for none."""
    return [
        [
            Neighbour(index.image_path(int(row)), printable_path(index.images[int(row)].path), float(cosine))
            for cosine, row in zip(query_cosines, query_rows, strict=True)
            if row >= 0
        ]
        for query_cosines, query_rows in zip(cosines, rows, strict=True)
    ]


def path_media(path: Path) -> Media:
    """Return what a path is: an image, a sound, or a video as file or as folder of frames."""
    return "video" if path.is_dir() else file_media(path.name) or "image"


def embed_query(deployed: DeployedModel, path: Path) -> np.ndarray:
    """Return the features of an image or sound, or the mean over views of a video, [1, F]; raise ValueError if unreadable."""
    contract, media = deployed.contract, path_media(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist: give a query {contract.media}")
    if media != contract.media:
        found = "a folder" if path.is_dir() else NOUNS[media]
        raise ValueError(f"{deployed.name} takes {contract.describe_inputs()}, and {path} is {found}")
    name = printable_path(str(path))
    try:
        with name_image_errors(name), OPENERS[media](str(path), name) as item:
            pixels = contract.preprocessing.to_row(item, None).numpy()
    except IMAGE_ERRORS as error:
        raise ValueError(f"cannot read the query {contract.media}: {error}") from error
    views = pixels if len(pixels.shape) > len(contract.preprocessing.shape) else pixels[None]
    return average_views(np.concatenate([deployed.runtime(view[None]) for view in views])[None])
