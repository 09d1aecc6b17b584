"""Tables in Python: pandas and Polars frames, and datasets of Hugging Face's `datasets`, also by hf://datasets/owner/name."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vitrail.data.dataset import Dataset
from vitrail.data.sources import manifest, parquet
from vitrail.data.sources import splits as parts
from vitrail.data.sources.numbers import find_target_columns
from vitrail.data.sources.objects import (
    MaskCell,
    ReadSource,
    SampleList,
    describe_object,
    make_reader,
    name_object,
    read_masks,
)

FRAMES = ("DataFrame", "LazyFrame")
HUB_PREFIX = "hf://datasets/"
HUB_ADDRESS = re.compile(
    r"hf://datasets/(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<config>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?"
)


def is_frame(data: object) -> bool:
    """Return True for a frame of pandas or Polars, which need not be installed."""
    return type(data).__module__.partition(".")[0] in ("pandas", "polars") and type(data).__name__ in FRAMES


def is_hub_data(data: object) -> bool:
    """Return True for an object of Hugging Face's `datasets`, which need not be installed."""
    return type(data).__module__.partition(".")[0] == "datasets"


def read_frame(frame: Any, options: parts.ReadOptions) -> Dataset:
    """Read a frame with the columns of a manifest: path or image, label or mask, and optionally split."""
    if hasattr(frame, "collect"):
        raise ValueError("a LazyFrame has no rows yet: give frame.collect()")
    names = [str(name) for name in frame.columns]
    image_columns = (*manifest.PATH_COLUMNS, *parquet.IMAGE_COLUMNS)
    columns = (image_columns, manifest.LABEL_COLUMNS, manifest.SPLIT_COLUMNS)
    image, label, split = (manifest.find_column(names, known) for known in columns)
    mask = manifest.find_column(names, manifest.MASK_COLUMNS) if label is None else None
    numbers = find_target_columns(names, options.targets, "the table") if options.targets else []
    if image is None or (label is None and mask is None and options.needs_labels and not options.targets):
        missing = "image (path or image)" if image is None else "label or mask"
        raise ValueError(f"the table has no column {missing}, got {', '.join(names) or 'none'}: rename one")
    images, source, reader = frame[frame.columns[image]].to_list(), describe_object(frame), make_reader(options)
    rows = [f"row {row}" for row in range(len(images))]
    labels: list[Any] = [None] * len(images)
    if options.targets:
        columns = [frame[frame.columns[column]].to_list() for column in numbers]
        labels = [list(cells) for cells in zip(*columns, strict=True)]
    elif label is not None:
        cells = frame[frame.columns[label]].to_list()
        labels = [reader.read(cell, row) for cell, row in zip(cells, rows, strict=True)]
        if None not in labels:
            labels = list(manifest.split_labels("the table", labels, options.multi_label))
    splits, masks = None, None
    if split is not None:
        cells = frame[frame.columns[split]].to_list()
        splits = [manifest.parse_split(str(cell), row) for cell, row in zip(cells, rows, strict=True)]
    if mask is not None:
        masks = read_masks([MaskCell(cell) for cell in frame[frame.columns[mask]].to_list()], "the table", options)
    return SampleList(source, images, labels, reader.order, splits, masks=masks).build(options)


@dataclass(frozen=True)
class ColumnImages:
    """The undecoded images of a column of Hugging Face's `datasets`."""

    dataset: Any
    column: str

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: int) -> Any:
        return self.dataset[int(item)][self.column]


@dataclass(frozen=True)
class MaskColumn(Sequence[MaskCell]):
    """The undecoded masks of a column of Hugging Face's `datasets`."""

    column: ColumnImages

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, item: Any) -> Any:
        return MaskCell(self.column[item])


def read_hub_data(data: Any, options: parts.ReadOptions, read: ReadSource) -> Dataset:
    """Read a Dataset or DatasetDict of Hugging Face's `datasets`."""
    if isinstance(data, Mapping):
        known = {name: part for name, part in data.items() if parts.parse_split_name(str(name))}
        if not known:
            raise ValueError(f"no split is named train, validation or test, got {', '.join(map(str, data))}")
        dataset = read(dict(known), options)
        left_out = [f"the split {name} is not used" for name in data if name not in known]
        return replace(dataset, source=describe_object(data), notes=(*dataset.notes, *left_out))
    if not hasattr(data, "__len__"):
        raise ValueError(f"{type(data).__name__} can be read only from its start: load it without streaming=True")
    import datasets

    plain, features = data.with_format(None), data.features
    image = find_image_feature(features, datasets.Image)
    label = find_label_feature(features, datasets.ClassLabel)
    if (
        image is not None
        and not options.targets
        and (mask := find_mask_feature(features, datasets.Image, image, label))
    ):
        cells = [
            ColumnImages(plain.select_columns([name]).cast_column(name, datasets.Image(decode=False)), name)
            for name in (image, mask)
        ]
        masks = read_masks(MaskColumn(cells[1]), name_object(describe_object(data), options), options)
        return SampleList(describe_object(data), cells[0], [None] * len(data), masks=masks).build(options)
    if image is None or (label is None and options.needs_labels and not options.targets):
        missing = "Image" if image is None else "ClassLabel"
        raise ValueError(f"the dataset has no column of type {missing}, got {', '.join(features)}: use cast_column")
    images = ColumnImages(plain.select_columns([image]).cast_column(image, datasets.Image(decode=False)), image)
    source, count = describe_object(data), len(data)
    if options.targets:
        find_target_columns(list(features), options.targets, source)
        rows = plain.select_columns(list(options.targets))
        return SampleList(source, images, [[row[name] for name in options.targets] for row in rows]).build(options)
    if label is None:
        return SampleList(source, images, [None] * count).build(options)
    feature = getattr(features[label], "feature", features[label])  # of a list
    names = getattr(feature, "names", None)
    labels = [parquet.parse_label(cell, names, source) for cell in plain.select_columns([label])[label]]
    kept = [row for row, found in enumerate(labels) if found is not None or not options.needs_labels]
    notes = [f"{count - len(kept):,} rows without a label are not used"] if len(kept) < count else []
    values = images if len(kept) == count else ColumnImages(images.dataset.select(kept), image)
    return SampleList(source, values, [labels[row] for row in kept], names, notes=notes).build(options)


def find_image_feature(features: Mapping[str, Any], kind: type) -> str | None:
    """Return the column of images: one with a usual name, or the first."""
    found = [name for name, feature in features.items() if isinstance(feature, kind)]
    usual = [name for name in parquet.IMAGE_COLUMNS if name in found]
    return next(iter([*usual, *found]), None)


def find_mask_feature(features: Mapping[str, Any], kind: type, image: str, label: str | None) -> str | None:
    """Return the column of masks: a second column of images with a usual name, if no other column has labels."""
    if label is not None and not isinstance(features[label], kind):
        return None
    found = [name for name, feature in features.items() if isinstance(feature, kind) and name != image]
    return next((name for name in parquet.MASK_COLUMNS if name in found), None)


def find_label_feature(features: Mapping[str, Any], kind: type) -> str | None:
    """Return the column of labels: class labels, or lists of them, first those with a usual name; else a usual name."""
    found = [name for name, feature in features.items() if isinstance(getattr(feature, "feature", feature), kind)]
    usual = [name for name in parquet.LABEL_COLUMNS if name in features]
    return next(iter([*(name for name in usual if name in found), *found, *usual]), None)


def read_hub(address: str, options: parts.ReadOptions, read: ReadSource) -> Dataset:
    """Read hf://datasets/owner/name, optionally /config and @revision, through Hugging Face's `datasets`."""
    match = HUB_ADDRESS.fullmatch(address)
    if match is None:
        raise ValueError(f"invalid dataset address {address!r}: use hf://datasets/owner/name, or …/name/config")
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{address} needs datasets: pip install 'vitrail[datasets]'") from None
    try:
        data = datasets.load_dataset(match["name"], match["config"], revision=match["revision"])
    except (OSError, ValueError, RuntimeError, NotImplementedError) as error:
        reason = parquet.format_first_line(error)
        raise OSError(f"{address} cannot be read ({reason}): check the name and the network") from None
    return replace(read(data, options), source=address, kind="hub")
