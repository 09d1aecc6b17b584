"""Embed a folder once, then find the pictures nearest to a picture."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from vitrail.checkpoints.files.atomic import staged
from vitrail.data.decode import UNREADABLE
from vitrail.data.opening import named, opened
from vitrail.data.sources.files import Files, printable
from vitrail.data.sources.folders import Walk
from vitrail.deploy.exported_files import is_exported
from vitrail.deploy.inputs import Inputs
from vitrail.deploy.nearest import build_graph, unit, write_graph
from vitrail.deploy.opening import opened as opened_model
from vitrail.deploy.predicting import Answering, How, Ready, ready
from vitrail.deploy.runtime import Deployed
from vitrail.deploy.search_index import (
    Index,
    Model,
    Picture,
    Writer,
    is_index,
    new_part,
    read_index,
    sealed,
    write_head,
    write_pictures,
)

Progress = Callable[[str, int, int], None]
Tell = Callable[[str], None]
TOGETHER = 1024  # rows that are written at once


@dataclass(frozen=True)
class Indexed:
    """What came of indexing."""

    index: Index
    kept: int  # pictures whose vectors were there already
    added: int
    changed: int
    removed: int
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        index = self.index
        return {
            "index": str(index.directory),
            "folder": str(index.folder),
            "model": index.model.name,
            "pictures": len(index.pictures),
            "values": index.vectors.shape[1],
            **{name: getattr(self, name) for name in ("kept", "added", "changed", "removed")},
            "unreadable": index.unreadable,
            "recall": None if index.recall is None else asdict(index.recall),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Neighbour:
    """A picture of the index, and how near it is."""

    path: Path
    shown: str  # from the folder on, printable
    cosine: float


@dataclass(frozen=True)
class Answer:
    """A picture that was asked for, and those nearest to it, the nearest first."""

    query: Path
    neighbours: tuple[Neighbour, ...]


# --- making an index ---


def make_index(
    where: str,
    folder: Path,
    out: Path,
    *,
    how: How = How(),  # noqa: B008 (a value)
    update: bool = False,
    graph: bool = False,
    progress: Progress | None = None,
    tell: Tell | None = None,
) -> Indexed:
    """Every picture below a folder as a vector, kept in a directory; with `update`, only what is new or changed is computed."""
    check_out(out, update)
    old = read_index(out) if update else None
    if old is not None and not same(old.folder, folder):
        raise ValueError(f"{out} is an index of {old.folder}, not of {folder}: give that folder, or another --out")
    listed = pictures_below(folder, progress)
    making = Making(where, folder, how, graph or (old is not None and old.recall is not None), progress, tell)
    if old is not None:
        return making.written(out, listed, old)
    with staged(out) as place:
        place.mkdir()
        made = making.written(place, listed, None)
    return Indexed(read_index(out), 0, made.added, 0, 0, made.notes)


def check_out(out: Path, update: bool) -> None:
    """Refused before a model is opened for it."""
    if update:
        if not is_index(out):
            raise ValueError(f"{out} is no index to update: leave --update out to make it")
    elif is_index(out):
        raise ValueError(f"{out} is an index already: add --update to bring it up to date, or give another --out")
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there and not empty: give --out the name of a new directory")


def same(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file or folder."""
    return one.exists() and other.exists() and os.path.samefile(one, other)


def pictures_below(folder: Path, progress: Progress | None = None) -> list[Picture]:
    """All pictures below a folder, in order, with what to know them again by."""
    if not folder.is_dir():
        what = "a file" if folder.exists() else "not there"
        raise ValueError(f"{folder} is {what}: give a folder of pictures")
    walk, root = Walk(progress=progress), str(folder)
    walk.below(root, set())
    if not walk.listing.count:
        raise ValueError(f"{folder} holds no pictures")
    store = walk.listing.store()
    return [Picture(os.path.relpath(store.path(item), root), *stamp(store, item)) for item in range(len(store))]


def stamp(store: Files, item: int) -> tuple[int, int]:
    """Size and time of change; nobody's for a link to nothing, of which reading says what it is."""
    try:
        return store.stamp(item) or (-1, -1)
    except OSError:
        return -1, -1


@dataclass(frozen=True)
class Making:
    """An index on its way."""

    where: str
    folder: Path
    how: How
    graph: bool
    progress: Progress | None
    tell: Tell | None

    def written(self, place: Path, listed: list[Picture], old: Index | None) -> Indexed:
        """The files of an index: rows that are still right are taken over, the others computed."""
        before = {} if old is None else {picture.path: (row, picture) for row, picture in enumerate(old.pictures)}
        kept = [p for p in listed if p.path in before and before[p.path][1].stamp == p.stamp]
        fresh = [p for p in listed if p.path not in before or before[p.path][1].stamp != p.stamp]
        opened = ready(self.where, "features", self.how, len(fresh), self.tell)
        deployed = opened.deployed
        if old is not None:
            old.refuse_other(deployed.contract, self.where)
        with new_part(place, "vectors", "npy") as (file, made):
            writer = Writer(file)
            if old is not None:
                rows = np.array([before[p.path][0] for p in kept], dtype=np.int64)
                for start in range(0, len(rows), TOGETHER):
                    writer.add(old.vectors[rows[start : start + TOGETHER]])
            read, unreadable = self.embedded(opened, fresh, writer)
            if not kept and not read:
                name, reason = next(iter(unreadable.items()))
                raise ValueError(f"no picture in {self.folder} could be read, {name} for example: {reason}")
            writer.finish()
        pictures = (*kept, *read)
        parts = {"vectors": made[0], "pictures": write_pictures(place, pictures)}
        vectors, recall = np.load(place / made[0].name, mmap_mode="r", allow_pickle=False), None
        if self.graph:
            linked, recall = build_graph(vectors, self.progress)
            path = place / made[0].name.replace("vectors", "graph").replace(".npy", ".faiss")
            write_graph(linked, path)
            parts["graph"] = sealed(path)
        model = model_of(self.where, deployed, self.how)
        pipeline = deployed.contract.preprocessing
        index = Index(place, self.folder.resolve(), model, pipeline, pictures, vectors, unreadable, parts, recall)
        write_head(index)
        now, changed = {p.path for p in pictures}, sum(p.path in before for p in read)
        removed = sum(path not in now for path in before)
        return Indexed(index, len(kept), len(read) - changed, changed, removed, deployed.notes)

    def embedded(
        self, opened: Ready, pictures: Sequence[Picture], writer: Writer
    ) -> tuple[list[Picture], dict[str, str]]:
        """Writes a row for each picture that can be read; gives these in order, and why the others cannot."""
        store = Files.of(os.path.join(self.folder, p.path) for p in pictures)
        inputs = Inputs((store,), np.array([0, len(pictures)]), (None,))
        rows = Answering(opened, inputs, self.how).rows(0, len(pictures), self.progress)
        read: list[Picture] = []
        unreadable: dict[str, str] = {}
        waiting: list[np.ndarray] = []
        for picture, row in zip(pictures, rows, strict=True):
            if row.features is None:
                unreadable[printable(picture.path)] = row.error or "not read"
                continue
            read.append(picture)
            waiting.append(row.features)
            if len(waiting) == TOGETHER:
                writer.add(unit(np.stack(waiting)))
                waiting = []
        if waiting:
            writer.add(unit(np.stack(waiting)))
        return read, unreadable


def model_of(where: str, deployed: Deployed, how: How) -> Model:
    """What the index says of its model, so that it can be opened again from anywhere."""
    return Model(
        where if where.startswith("hf://") else os.path.abspath(where),
        deployed.name,
        deployed.contract.checksum,
        deployed.contract.merge,
        deployed.contract.precision,
        None if how.size is None else list(how.size),
        {name: str(value) for name, value in (how.assume or {}).items()},
        how.take,
    )


# --- asking it ---


def opened_for(
    index: Index,
    where: str | None = None,  # None for the model that made it
    *,
    runtime: str = "auto",
    device: str = "auto",
    assume: Mapping[str, str] | None = None,
    take: str | None = None,
    pictures: int = 1,
) -> Deployed:
    """The model that is to look at the queries: the index's own unless another place is given, and the same in any case."""
    model, path = index.model, where or index.model.where
    if where is None and not path.startswith("hf://") and not Path(path).exists():
        raise ValueError(f"{index.directory} was made by {path}, which is gone: say where it is now with --model")
    if is_exported(path):
        deployed = opened_model(path, runtime=runtime, device=device, gives="features")
    else:
        deployed = opened_model(
            path,
            runtime=runtime,
            device=device,
            gives="features",
            merge=model.merge,
            size=None if model.size is None else (model.size[0], model.size[1]),
            assume=assume or model.assume,
            take=take or model.take,
            precision=model.precision if model.precision in ("fp32", "bf16", "fp16") else "fp32",
            pictures=pictures,
        )
    index.refuse_other(deployed.contract, path)
    return deployed


def find(index: Index, deployed: Deployed, queries: Sequence[Path], top: int = 10, exact: bool = False) -> list[Answer]:
    """The nearest pictures to each picture, which itself is not counted where it is in the index."""
    index.refuse_other(deployed.contract, deployed.where)
    asked = np.concatenate([deployed.runtime(prepared(deployed, path)[None]) for path in queries])
    if not np.isfinite(asked).all():
        bad = queries[int(np.flatnonzero(~np.isfinite(asked).all(1))[0])]
        raise ValueError(f"{deployed.where} gives no finite numbers for {bad}")
    cosines, places = index.nearest(exact)(unit(asked), min(top + 1, len(index.pictures)))
    answers = []
    for query, near, where in zip(queries, cosines, places, strict=True):
        found = [
            Neighbour(index.path(int(place)), printable(index.pictures[int(place)].path), float(cosine))
            for cosine, place in zip(near, where, strict=True)
            if place >= 0
        ]
        answers.append(Answer(query, tuple(each for each in found if not same(each.path, query))[:top]))
    return answers


def prepared(deployed: Deployed, path: Path) -> np.ndarray:
    """A picture as the model takes it, uint8 [C, H, W]; an error that names it where it cannot be read."""
    if not path.is_file():
        raise ValueError(f"{path} is {'a folder' if path.is_dir() else 'not there'}: give a picture to look for")
    name = printable(str(path))
    try:
        with named(name), opened(str(path), name) as image:
            return deployed.contract.preprocessing.pixels(image).numpy()
    except UNREADABLE as error:
        raise ValueError(f"the picture to look for cannot be read: {error}") from error
