"""What probes found, as people read it in a terminal."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitrail.evaluation.probing import Probed

FEW = 5  # unreadable pictures that are named


def table(probed: "Probed") -> list[str]:
    """The heading, a line for each probe, and what was left out."""
    how = "found in the cache" if probed.cached else f"computed in {probed.seconds:,.1f} s"
    lines = [
        f"{probed.model} on {probed.data}: {probed.classes} classes, {probed.train:,} training pictures, "
        f"judged on {probed.images:,} {probed.split} pictures",
        f"features of {probed.width:,} values, {how}",
    ]
    lines += [f"  {note}" for note in probed.notes]
    name = "top-1" if probed.measure == "top1" else "mAP"
    rows = [("probe", "", name, "95 % interval", "seconds")]
    for row in probed.rows:
        edges = "–".join(f"{100 * edge:.1f}" for edge in row.interval or ())
        interval = " ".join(part for part in (edges, row.spread) if part)
        rows.append((row.probe, row.about, f"{100 * row.score:.2f} %", interval, f"{row.seconds:.1f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), row[1].ljust(widths[1]), row[2].rjust(widths[2])]
        lines.append("  ".join([*cells, row[3].ljust(widths[3]), row[4].rjust(widths[4])]).rstrip())
    for row in probed.rows:
        lines += [f"{row.probe}: {note}" for note in row.notes]
    if probed.unreadable:
        lines.append(f"{len(probed.unreadable):,} pictures could not be read and are left out:")
        named = list(probed.unreadable.items())
        lines += [f"  {path}: {reason}" for path, reason in named[:FEW]]
        lines += [f"  and {len(named) - FEW:,} more; --json names them all"] if len(named) > FEW else []
    return lines
