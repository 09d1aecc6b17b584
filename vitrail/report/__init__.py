"""A run's page, and several runs side by side: reads run directories only, and writes one file that needs nothing else."""

from vitrail.report.compare import compare
from vitrail.report.headline import headline
from vitrail.report.page import write_report

__all__ = ["compare", "headline", "write_report"]
