"""Terminal output of `vitrail export`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vitrail.cli.describe import format_bytes
from vitrail.utils.text import format_table

if TYPE_CHECKING:
    from vitrail.deploy.export.comparison import OutputComparison, RuntimeSpeed, VerificationReport


def format_report(model: str, report: "VerificationReport") -> str:
    """Return the verification as lines."""
    state = "" if report.passed else "  (beyond the tolerance)"
    lines = [f"{model} → {report.file} ({report.runtime}, {report.precision}){state}"]
    lines += [f"  compared with the model on {report.pictures:,} images ({report.source}):"]
    lines += [f"    {line}" for line in format_comparison(report.compared)]
    if report.features is not None:
        lines.append(f"  features: largest difference {report.features.largest_difference:.3g}")
    for result in report.at_sizes:
        height, width = result.size
        lines.append(f"  at {height}×{width}, generated images: {format_difference(result.compared)}")
    if report.unmerged is not None:
        lines += ["  effect of token merging, compared with the model without it:"]
        lines += [f"    {line}" for line in format_comparison(report.unmerged)]
    lines.append(f"  size: {format_bytes(report.bytes)}, checkpoint {format_bytes(report.bytes_before)}")
    lines += [f"  {line}" for line in format_speeds(report.speeds)]
    if report.kept:
        lines.append(f"  layers in float: {', '.join(report.kept)}")
    lines += [f"  note: {note}" for note in report.notes]
    lines += [f"  beyond the tolerance: {refusal}" for refusal in report.refusals]
    return "\n".join(lines)


def format_difference(comparison: "OutputComparison") -> str:
    """Return the largest difference beside the largest value."""
    return (
        f"{comparison.what}: largest difference {comparison.largest_difference:.3g}, "
        f"largest value {comparison.largest:.3g}"
    )


def format_comparison(comparison: "OutputComparison") -> list[str]:
    """Return differences, agreement and accuracy as lines."""
    lines = [format_difference(comparison)]
    if comparison.agreement is not None and comparison.agreement_interval is not None:
        low, high = comparison.agreement_interval
        lines.append(f"same prediction: {comparison.agreement:.2%}  (95 %: {low:.1%} to {high:.1%})")
    if comparison.score is not None:
        score = comparison.score
        before, after = (
            f"{value:.2%}" + ("" if interval is None else f" ({interval[0]:.1%} to {interval[1]:.1%})")
            for value, interval in ((score.first, score.first_interval), (score.second, score.second_interval))
        )
        low, high = (100 * bound for bound in score.difference_interval)
        lines.append(f"{score.measure}: {before} → {after}")
        lines.append(f"difference: {100 * score.difference:+.2f} points (95 %: {low:+.2f} to {high:+.2f})")
    return lines


def format_speeds(speeds: "Mapping[str, RuntimeSpeed]") -> list[str]:
    """Return latency and throughput as a table; the measurements are interleaved."""
    first = next(iter(speeds.values())).throughput
    rows = [("speed", "latency, 1 image", "images/s, batch 16", "")]
    for name, speed in speeds.items():
        ratio = f"{speed.throughput / first:.2f}×"
        rows.append((name, f"{1000 * speed.latency:.2f} ms", f"{speed.throughput:.1f}", ratio))
    return format_table(rows, right=(1, 2, 3))
