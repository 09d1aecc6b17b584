"""Captions as targets: their number and length in each split, long ones, and texts that many images share."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from vitrail.data.audit.findings import Finding
from vitrail.data.audit.scan import Scans
from vitrail.data.dataset import Images

MAX_WORDS = 60  # of a caption; CLIP's context of 77 tokens holds about so many
MAX_SHARE = 0.05  # of the images of a split with one and the same caption, beyond which it is reported
MIN_IMAGES = 20  # of a split, below which a shared caption is not reported
MAX_SHOWN = 60  # characters of a caption in a finding


@dataclass(frozen=True)
class CaptionSummary:
    """Statistics of the captions of a split."""

    images: int  # different ones
    pairs: int
    captions: int  # different ones
    words: float  # median of a caption
    longest: int  # words

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def summarise_captions(images: Images) -> CaptionSummary | None:
    """Return the statistics of the captions of a split; None for another kind of target or an empty split."""
    if images.captions is None or not len(images):
        return None
    words = count_words(images)
    found = (len(np.unique(images.items)), len(images), len(np.unique(images.targets)))
    return CaptionSummary(*found, float(np.median(words)), int(words.max()))


def count_words(images: Images) -> np.ndarray:
    """Return the number of words of the caption of each pair, [n]."""
    return np.array([len(images.caption(index).split()) for index in range(len(images))], dtype=np.int64)


def find_caption_problems(scans: Scans) -> Iterator[Finding]:
    """Yield findings about captions that are long, and about the most frequent caption if many images share it."""
    for split, scan in scans.items():
        images = scan.images
        if images.captions is None or not len(images):
            continue
        words = count_words(images)
        for index in np.flatnonzero(words > MAX_WORDS).tolist():
            yield Finding("caption-long", images.name(index), f"{words[index]:,} words", (split, index))
        numbers, counts = np.unique(images.targets, return_counts=True)
        most = int(counts.argmax())
        if len(images) >= MIN_IMAGES and counts[most] > MAX_SHARE * len(images):
            text = images.captions[int(numbers[most])]
            shown = text[:MAX_SHOWN] + "…" * (len(text) > MAX_SHOWN)
            yield Finding("caption-shared", f"{split}: {shown}", f"{counts[most]:,} of {len(images):,} images")
