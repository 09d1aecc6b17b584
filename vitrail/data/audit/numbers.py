"""Numbers as targets: range, mean and standard deviation of each split, constant targets, and outliers. n images, M targets."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from vitrail.data.audit.findings import Finding
from vitrail.data.audit.scan import Scans
from vitrail.data.dataset import Dataset, Images

MAX_DEVIATIONS = 10.0  # from the median, in robust standard deviations, beyond which a number is an outlier
ROBUST_FACTOR = 1.4826  # standard deviation of normal values over their median absolute deviation
MIN_VARIATION = 1e-6  # of the largest number: less is lost in float32


@dataclass(frozen=True)
class NumberSummary:
    """Statistics of one target in a split."""

    smallest: float
    largest: float
    mean: float
    std: float

    @property
    def is_constant(self) -> bool:
        """Return True if the numbers do not vary, or vary too little for float32."""
        return self.std <= MIN_VARIATION * max(abs(self.smallest), abs(self.largest))

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def summarise_numbers(images: Images) -> dict[str, NumberSummary]:
    """Return the statistics of each target by name; none of an empty split."""
    if images.target_kind != "numbers" or not len(images):
        return {}
    values = images.targets
    columns = zip(images.classes, values.min(0), values.max(0), values.mean(0), values.std(0), strict=True)
    return {name: NumberSummary(*map(float, statistics)) for name, *statistics in columns}


def find_number_problems(dataset: Dataset, scans: Scans) -> Iterator[Finding]:
    """Yield findings about constant targets and outliers, of usable images only."""
    for split, scan in scans.items():
        usable = np.flatnonzero(scan.find_usable())
        images = scan.images.select(usable)
        for column, (name, statistics) in enumerate(summarise_numbers(images).items()):
            if statistics.is_constant:
                yield Finding("constant-target", f"{split}/{name}", f"all are {statistics.smallest:.6g} in {split}")
                continue
            values = images.targets[:, column]
            middle = float(np.median(values))
            spread = ROBUST_FACTOR * float(np.median(np.abs(values - middle)))
            far = np.flatnonzero(np.abs(values - middle) > MAX_DEVIATIONS * spread) if spread else ()
            for index in far:
                detail = f"{name} {values[index]:.6g}, median {middle:.6g}"
                yield Finding("outlier", images.name(int(index)), detail, (split, int(usable[index])))
