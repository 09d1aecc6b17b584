"""What `vitrail export` found, in words."""

from collections.abc import Mapping
from typing import Any

from vitrail.cli.describe import bytes_of


def text(model: str, proof: Any) -> str:
    """The proof in a few lines."""
    state = "" if proof.passed else "  (beyond the tolerance)"
    lines = [f"{model} → {proof.file} ({proof.runtime}, {proof.precision}){state}"]
    lines += [f"  beside the model on {proof.pictures:,} pictures ({proof.source}):"]
    lines += [f"  {line}" for line in compared(proof.compared)]
    if proof.features is not None:
        lines.append(f"  features: largest difference {proof.features.largest_difference:.3g}")
    for each in proof.at_sizes:
        apart = f"largest difference {each.compared.largest_difference:.3g}, of {each.compared.largest:.3g}"
        lines.append(f"  at {each.size[0]}×{each.size[1]}, generated pictures: {each.compared.what}: {apart}")
    if proof.unmerged is not None:
        lines += ["  what merging changed, against the model without it:"]
        lines += [f"  {line}" for line in compared(proof.unmerged)]
    lines.append(f"  size: {bytes_of(proof.bytes)}, the model's file {bytes_of(proof.bytes_before)}")
    lines += [f"  {line}" for line in table(proof.speeds)]
    if proof.kept:
        lines.append(f"  in float: {', '.join(proof.kept)}")
    lines += [f"  note: {note}" for note in proof.notes]
    lines += [f"  beyond the tolerance: {refusal}" for refusal in proof.refusals]
    return "\n".join(lines)


def compared(found: Any) -> list[str]:
    """Differences, and answers that changed."""
    lines = [f"  {found.what}: largest difference {found.largest_difference:.3g}, of {found.largest:.3g}"]
    if found.agreement is not None:
        low, high = found.agreement_interval
        lines.append(f"  the same answer: {found.agreement:.2%}  (95 %: {low:.1%} to {high:.1%})")
    if found.score is not None:
        score = found.score
        first, second = (
            f"{value:.2%}" + ("" if around is None else f" ({around[0]:.1%} to {around[1]:.1%})")
            for value, around in ((score.first, score.first_interval), (score.second, score.second_interval))
        )
        low, high = (100 * bound for bound in score.difference_interval)
        lines.append(f"  {score.measure}: {first} → {second}")
        lines.append(f"  difference: {100 * score.difference:+.2f} points (95 %: {low:+.2f} to {high:+.2f})")
    return lines


def table(speeds: Mapping[str, Any]) -> list[str]:
    """Latency and throughput of each, measured in turns."""
    lines = ["measured in turns:    one picture    pictures a second, 16 at once"]
    first = next(iter(speeds.values())).throughput
    for name, speed in speeds.items():
        ratio = speed.throughput / first
        lines.append(f"  {name:<16}{1000 * speed.latency:>12.2f} ms{speed.throughput:>16.1f}   {ratio:.2f}×")
    return lines
