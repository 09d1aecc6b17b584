"""A model and some pictures to a directory of figures, arrays and one page."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vitrail import __version__
from vitrail.analysis import arrays, distances, filters, look, patch_at, positions
from vitrail.analysis.between import CELLS
from vitrail.analysis.seen import Distances, Filters, Positions
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.vit import ViT
from vitrail.nn.embed import PatchEmbedding
from vitrail.nn.shape import Grid
from vitrail.report.markup import plain
from vitrail.views import distance, filtered, placed
from vitrail.views.drawn import OF_MODELS, OF_PICTURES, VIEWS, figures, wanted
from vitrail.views.folder import Folder
from vitrail.views.packed import cells_for, figure
from vitrail.views.packed import picture as packed
from vitrail.views.page import Panel, page
from vitrail.views.pictures import Unusable, evenly, folder_names, none_read, prepared
from vitrail.views.shown import Shown
from vitrail.views.worded import OF_PICTURE, Figure, of_distance, of_filters, of_positions

Tell = Callable[[str, int, int], None]
PAPER = 128  # pictures that figure 7 (right) was measured on
BATCH, TOKENS = 8, 2048  # at most so many pictures together, and so many tokens where there is more than one
FILTERS = 28  # as in figure 7 (left)


def quiet(doing: str, done: int, total: int) -> None:
    """Tells nobody."""


@dataclass(frozen=True)
class Looker:
    """A model with its pipeline, ready to look at files."""

    model: ViT
    preprocessing: Preprocessing
    name: str
    views: Sequence[str] = VIEWS
    layers: Sequence[int] | None = None  # from 1; all unless given
    at: tuple[int, int] | None = None  # x and y, in pixels of the picture as the model sees it
    target: int | None = None
    components: int = FILTERS  # principal filters

    def __post_init__(self) -> None:
        depth = len(self.model.blocks)
        for layer in self.layers or ():
            if not 1 <= layer <= depth:
                raise ValueError(f"layer {layer} of {depth}: use 1 to {depth}")
        if self.at is not None:
            (x, y), (height, width) = self.at, self.preprocessing.size
            if not (0 <= x < width and 0 <= y < height):
                raise ValueError(
                    f"--at {x},{y} is outside of the picture as the model sees it, {width}×{height} pixels: "
                    f"use 0,0 to {width - 1},{height - 1}"
                )

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def grid(self) -> Grid:
        """Of the size that is looked at."""
        height, width = (side // self.model.embed.stride for side in self.preprocessing.size)
        return height, width

    def shown(
        self, path: Path, tell: Tell | None = None, asked: Sequence[str] | None = None, cells: int = CELLS
    ) -> Shown:
        """One file, looked at; attention between patches on a grid of at most so many cells."""
        image, pixels = prepared(path, self.preprocessing)
        seen = look(
            self.model,
            image[None].to(self.device),
            at=None if self.at is None else patch_at(self.model, *self.at, size=self.preprocessing.size),
            target=self.target,
            cells=cells,
            views=wanted(self.views) if asked is None else asked,
            tell=tell,
        )
        recipe = self.model.card.get("recipe")
        objective = recipe.get("objective") if isinstance(recipe, dict) else None
        return Shown(
            path.name,
            pixels,
            seen,
            self.model.labels,
            self.name,
            channels=self.model.embed.channels,
            linear=isinstance(self.model.embed, PatchEmbedding),
            each=isinstance(objective, dict) and objective.get("loss") == "sigmoid",
        )

    def distances(self, files: Sequence[Path], skip: Callable[[str], None], tell: Tell = quiet) -> Distances:
        """Mean attention distance over those of the files that can be read; `skip` hears of the others."""
        return distances(self.model, self._batches(files, skip, tell))

    def positions(self) -> Positions:
        """On the grid of the size that is looked at."""
        return positions(self.model, self.grid)

    def filters(self) -> Filters:
        return filters(self.model, self.components)

    def _batches(self, files: Sequence[Path], skip: Callable[[str], None], tell: Tell) -> Iterator[torch.Tensor]:
        held: list[torch.Tensor] = []
        problems: list[str] = []
        most = max(1, min(BATCH, TOKENS // (self.grid[0] * self.grid[1])))
        for number, path in enumerate(files, start=1):
            try:
                held.append(prepared(path, self.preprocessing)[0])
            except Unusable as problem:
                problems.append(str(problem))
                skip(str(problem))
                continue
            if len(held) == most:
                yield torch.stack(held).to(self.device)
                held = []
            tell("measuring distances", number, len(files))
        if held:
            yield torch.stack(held).to(self.device)
        if len(problems) == len(files):
            raise none_read(problems)


@dataclass
class Written:
    """What an inspection wrote and what it left out."""

    directory: Path
    pictures: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def skip(self, problem: str) -> None:
        """A picture that could not be read, named once."""
        if problem not in self.skipped:
            self.skipped.append(problem)


def inspect(
    looker: Looker, files: Sequence[Path], out: Path, limit: int, tell: Tell = quiet, layers: Tell = quiet
) -> Written:
    """Looks at up to `limit` of the files, spread evenly, and measures distances over up to 128 of them, or `limit` if more.

    `tell` hears how many pictures are done, `layers` how many layers of one.
    """
    folder = Folder(out)
    try:
        return _inspected(looker, files, folder, limit, tell, layers)
    except BaseException:
        folder.leave()
        raise


def _inspected(looker: Looker, files: Sequence[Path], folder: Folder, limit: int, tell: Tell, layers: Tell) -> Written:
    """Writes everything into the folder."""
    chosen = evenly(list(files), limit)
    written = Written(folder.path)
    about = {"vitrail": __version__, "model": looker.name, "views": list(looker.views)}
    folder.record(about)
    panels: list[Panel] = []
    size = looker.model.config.size
    cells = cells_for(len(chosen), size.depth, size.heads, looker.grid)
    if any(view in OF_PICTURES for view in looker.views):
        for number, (path, name) in enumerate(zip(chosen, folder_names(chosen), strict=True)):
            tell("pictures", number, len(chosen))
            try:
                shown = looker.shown(path, partial(_of_picture, layers, path.name), cells=cells)
            except Unusable as problem:
                written.skip(str(problem))
                continue
            drawn = figures(shown, looker.views, looker.layers)
            on_page: dict[str, str] = {}
            for file, draw in drawn.items():
                png = draw()
                folder.write(f"{name}/{file}", png)
                if (view := file.removesuffix(".png")) in OF_PICTURE:
                    on_page[view] = figure(png)
            folder.save(f"{name}/arrays.npz", {**arrays(shown.seen), "picture": shown.pixels})
            panels.append(Panel(packed(shown), [f"{name}/{file}" for file in drawn], on_page))
            written.pictures.append(said(shown, path, name, list(drawn)))
            folder.record(about)
        tell("pictures", len(chosen), len(chosen))
        if not panels:
            raise none_read(written.skipped)
    models = _of_model(looker, measured(files, limit), folder, written, tell)
    folder.write("index.html", page(looker.name, looker.model, panels, models).encode("utf-8"))
    folder.record(about, done=True)
    written.files = sorted(folder.written)
    return written


def measured(files: Sequence[Path], limit: int) -> list[Path]:
    """The files that distances are measured on: as many as in the paper, or as many as are drawn if that is more."""
    return evenly(list(files), max(PAPER, limit))


def said(shown: Shown, path: Path, folder: str, files: list[str]) -> dict[str, Any]:
    """What is told of one picture."""
    told: dict[str, Any] = {
        "picture": str(path),
        "folder": folder,
        "files": [*files, "arrays.npz"],
        "predicted": [{"class": k, "name": name, "probability": odds} for k, name, odds in shown.said(5)],
    }
    if shown.seen.at is not None:
        told["patch"] = {"row": shown.seen.at[0], "column": shown.seen.at[1]}
    if shown.seen.target is not None:
        told["target"] = {"class": shown.seen.target, "name": shown.label(shown.seen.target)}
    return told


def _of_picture(layers: Tell, name: str, _: str, done: int, total: int) -> None:
    """Layers that are done, told under the picture's name."""
    layers(plain(name), done, total)


def _of_model(looker: Looker, files: list[Path], folder: Folder, written: Written, tell: Tell) -> list[Figure]:
    """The views of the model itself: figures, and all arrays in one file."""
    if not any(view in OF_MODELS for view in looker.views):
        return []
    found: dict[str, Distances | Positions | Filters] = {}
    made: list[Figure] = []
    if "distance" in looker.views:
        found["distance"] = far = looker.distances(files, written.skip, tell)
        made.append(of_distance(distance.draw(far, looker.name, looker.model.embed.stride)))
    if "positions" in looker.views:
        found["positions"] = where = looker.positions()
        made.append(of_positions(where, looker.model.position, placed.draw(where, looker.name)))
    if "filters" in looker.views:
        found["filters"] = tiles = looker.filters()
        made.append(of_filters(tiles, filtered.draw(tiles, looker.name)))
    folder.save(
        "model.npz", {f"{view}.{key}": value for view, each in found.items() for key, value in arrays(each).items()}
    )
    for each in made:
        if each.png is not None:
            folder.write(f"{each.view}.png", each.png)
    return made
