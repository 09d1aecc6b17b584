"""Report sections on the predictions of tasks other than classes, chosen by what was evaluated."""

from typing import Any

from vitrail.reports.caption_sections import build_caption_sections
from vitrail.reports.document import PageSection
from vitrail.reports.mask_sections import build_mask_sections, read_palette
from vitrail.reports.number_sections import build_number_sections
from vitrail.reports.run import EvaluatedCaptions, EvaluatedMasks, EvaluatedNumbers


def build_target_sections(
    evaluation: EvaluatedMasks | EvaluatedNumbers | EvaluatedCaptions, labels: list[str], colours: Any = None
) -> list[PageSection]:
    """Return the sections; `colours` are those of the classes of masks, as a run stores them."""
    if isinstance(evaluation, EvaluatedMasks):
        return build_mask_sections(evaluation, labels, read_palette(colours, labels))
    if isinstance(evaluation, EvaluatedCaptions):
        return build_caption_sections(evaluation)
    return build_number_sections(evaluation, labels)
