"""Write the feature vector of every image, in the order of the images; --plot draws them as a map.

MODEL and PATHS are as for `vitrail predict`, and so are --resume, --part, --runtime and torchrun. Features are the input
of the head; a distilled model gives both tokens, concatenated. An image that cannot be read gives a row with the error.

--plot writes the images as points of a page: with pan and zoom, thumbnails, colours by class, prediction or any column of a
table, and selections that are exported as CSV. The features are kept too, beside the map if --out is not given. In place of
MODEL, a file of features or an index of `vitrail search` is drawn without computing anything again.

examples:
  vitrail embed dino.pth photos --out features.npy
  vitrail embed deit_tiny.safetensors 'shards/*.tar' --out features.parquet --resume
  vitrail embed model.safetensors cat.jpg --out - --format jsonl | jq '.features | length'
  vitrail embed runs/photos-1 photos --plot map.html
  vitrail embed features.npy --plot tsne.html --projection tsne
  vitrail embed features.npy photos --plot map.html --table suspects.csv --colour-by score
  vitrail embed photos.index --plot map.html

formats of --out:
  .npy      float32 [images, features]; FILE.paths.csv holds path,error of each row; the row of an
            unreadable image is nan
  .parquet  path, error, features (a list of float32)
  .jsonl    the same, one object per line
  .csv      path,error,f0,f1 and so on
"""

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.cli.options import (
    CommandParser,
    check_at_least,
    given_options,
    parse_assumptions,
    print_result,
    refuse_options,
)
from vitrail.cli.predict import add_output_options, compute_output, format_summary, print_note, write_output
from vitrail.cli.text.progress import count_progress
from vitrail.deploy.map import PROJECTIONS, THUMBNAIL_SIZES
from vitrail.utils.text import format_image_count

if TYPE_CHECKING:
    from vitrail.deploy.map.columns import Column
    from vitrail.deploy.map.features import MapPoints
    from vitrail.deploy.map.write import MapSummary
    from vitrail.utils.progress import ProgressCallback

MAP_OPTIONS = ("projection", "seed", "colour_by", "table", "thumbnail_size", "thumbnails", "nearest")
COMPUTE_OPTIONS = (
    "out",
    "format",
    "resume",
    "force",
    "limit",
    "size",
    "tolerance",
    "batch_size",
    "workers",
    "take",
)


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `vitrail embed`."""
    add_output_options(parser, "npy, parquet, jsonl or csv", required=False)
    group = parser.add_group("map")
    group.add_option("--plot FILE.html", "map of the images: one self-contained page", Path)
    group.add_option("--projection", "projection to two dimensions [pca]", choices=PROJECTIONS)
    group.add_option("--colour-by COLUMN", "class, prediction, correctness, split, margin, … or of --table [class]")
    group.add_option(
        "--table FILE", "CSV with a column path: its other columns colour the map (repeatable)", action="append"
    )
    sizes = f"longer side in pixels: {', '.join(map(str, THUMBNAIL_SIZES))} [the largest that fits]"
    group.add_option("--thumbnail-size PX", sizes, int, choices=THUMBNAIL_SIZES)
    group.add_option("--thumbnails N", "most thumbnails [all, as far as they fit into 24 MiB]", int)
    group.add_option("--nearest K", "nearest images listed for each image [5]", int)
    group.add_shared("--seed N")


def run(options: argparse.Namespace) -> int:
    """Write the features, the map, or both."""
    if options.plot is None:
        check_without_map(options)
        return write_output(options, "features", 0)
    check_map_options(options)
    from vitrail.deploy.map.features import is_written_features

    if is_written_features(options.model):
        refuse_options(options, COMPUTE_OPTIONS, f"is for images: {options.model} has vectors already, leave it out")
        return plot(options, options.model)
    if not options.paths:
        raise ValueError(f"PATHS is missing: give the images to embed with {options.model}")
    options.out = options.out or str(options.plot.with_suffix(".npy"))
    from vitrail.deploy.predict.resume import journal_path, partial_path

    is_complete = Path(options.out).exists() and not journal_path(partial_path(Path(options.out), 0, 1)).is_file()
    if is_complete and not options.force:
        redraw = shlex.join(["vitrail", "embed", options.out, *options.paths, "--plot", str(options.plot)])
        raise ValueError(f"{options.out} exists: draw it with {redraw}, or --force to compute it again")
    summary = compute_output(options, "features", 0)
    if summary is None:
        return 130
    return plot(options, options.out, options.model, format_summary(options, summary), summary.as_dict())


def check_without_map(options: argparse.Namespace) -> None:
    """Raise ValueError for options that need --plot, or without anything to write."""
    refuse_options(options, MAP_OPTIONS, "needs --plot FILE.html")
    if options.out is None:
        raise ValueError("nothing to write: give --out FILE for the features, or --plot FILE.html for a map")
    if not options.paths:
        raise ValueError(f"PATHS is missing: give the images to embed with {options.model}")


def check_map_options(options: argparse.Namespace) -> None:
    """Raise ValueError for options that do not fit a map, before anything is computed."""
    if options.plot.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--plot {options.plot}: the name of a map must end in .html")
    if not options.plot.parent.is_dir():
        raise FileNotFoundError(f"--plot {options.plot}: there is no directory {options.plot.parent}")
    if options.out == "-":
        raise ValueError("--plot needs the features in a file: give --out FILE, or leave it out")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--plot needs one process: write --out FILE first, then vitrail embed FILE --plot MAP.html")
    for name in ("thumbnails", "nearest", "seed"):
        check_at_least(0, getattr(options, name), f"--{name}")
    for table in options.table or ():
        if Path(table).is_dir():
            raise IsADirectoryError(f"--table {table} is a directory: give a CSV")
        if not Path(table).is_file():
            raise FileNotFoundError(f"--table {table}: no such file")
    if options.projection == "umap":
        from vitrail.deploy.map.projection import import_umap

        import_umap()  # raises before any computation if it is not installed


def plot(
    options: argparse.Namespace,
    features: str,
    model: str | None = None,
    lines: Sequence[str] = (),
    result: Mapping[str, Any] | None = None,
) -> int:
    """Write the map of a file of features or of an index, and print its summary after that of the features.

    `model` computed the features: its classifier predicts the classes.
    """
    from vitrail.deploy.map.features import open_points
    from vitrail.deploy.map.write import MapOptions, write_map

    show = count_progress()
    try:
        points = open_points(features, options.paths, show)
        if model is not None:
            points = replace(points, source=Path(model).stem if Path(model).is_file() else model)
        columns, notes = collect_columns(options, points, model, show)
        given = {name: value for name, value in given_options(options, MAP_OPTIONS).items() if name != "table"}
        title = f"{name_data(points.data or (features,))}: {format_image_count(len(points), points.media)}"
        summary = write_map(points, columns, options.plot, title, MapOptions(**given), notes, show)
    except KeyboardInterrupt:
        if model is None:
            raise
        again = shlex.join(["vitrail", "embed", features, *options.paths, "--plot", str(options.plot)])
        print_note(f"vitrail embed: interrupted, the features are complete: draw them with {again}")
        return 130
    return print_result(options, {**(result or {}), **summary.as_dict()}, [*lines, *format_map(summary, points.media)])


def collect_columns(
    options: argparse.Namespace, points: "MapPoints", model: str | None, show: "ProgressCallback"
) -> "tuple[list[Column], list[str]]":
    """Return the columns of a map, of the data, the model and the tables, and notes on what is missing."""
    from vitrail.deploy.map import columns as known

    data, notes = known.read_data_columns(points.data, points.names, show)
    classes = next((column for column in data if column.name == known.CLASS), None)
    predicted: list[Column] = []
    if model is not None:
        reading = {"assume": parse_assumptions(options), "take": options.take}
        predicted, reasons = known.read_model_columns(model, points.features, classes, **reading)
        notes += reasons
    joined: list[Column] = []
    for table in options.table or ():
        found, count = known.read_table_columns(Path(table), points.names, points.data, options.colour_by)
        joined += found
        if count < len(points):
            notes.append(f"{table} has {count:,} of {format_image_count(len(points), points.media)}")
    folder = None if classes is not None else known.folder_column(points.names)
    return known.merge_columns([folder] if folder else [], data, predicted, joined), notes


def name_data(paths: Sequence[str]) -> str:
    """Return the name of the data for the title."""
    first = Path(paths[0]).name or Path(paths[0]).resolve().name
    return f"{first} and {len(paths) - 1} more" if len(paths) > 1 else first


def format_map(summary: "MapSummary", media: str) -> list[str]:
    """Return the summary of a map as lines."""
    explained = ""
    if summary.explained is not None:
        explained = f", {' and '.join(f'{100 * share:.1f} %' for share in summary.explained)} of the variance"
    columns = f"; columns {', '.join(summary.columns)}" if summary.columns else "; no columns to colour by"
    what = f"{format_image_count(summary.points, media)} by {summary.projection}{explained}{columns}"
    drawn = (
        f"{summary.thumbnails:,} thumbnails of {summary.thumbnail_size} pixels"
        if summary.thumbnails
        else "no thumbnails"
    )
    size = f"{drawn}, {summary.nbytes / 2**20:,.1f} MiB"
    return [*summary.notes, what, size, str(summary.path)]
