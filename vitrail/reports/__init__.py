"""Report pages of runs and comparisons of runs, each one self-contained HTML file, from run directories alone."""

from vitrail.reports.compare import render_comparison
from vitrail.reports.page import write_report
from vitrail.reports.summary import format_headline

__all__ = ["format_headline", "render_comparison", "write_report"]
