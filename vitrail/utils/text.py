"""Formatting of numbers, durations and dates, and suggestions for misspelt names."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from typing import Any, TypeGuard

MAX_FLOAT = sys.float_info.max
NO_BREAK_SPACE = "\u00a0"  # between a number and its unit


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a finite number and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_FLOAT


def format_percent(value: Any, digits: int = 1) -> str:
    """Return "87.4 %"; a value below 1 is never rounded up to 100 %."""
    if not is_number(value):
        return "–"
    shown = f"{100 * value:.{digits}f}"
    if value < 1 and float(shown) >= 100:
        shown = f"{100 - 10**-digits:.{digits}f}"
    return f"{shown}{NO_BREAK_SPACE}%"


def format_interval(interval: Any, digits: int = 1) -> str:
    """Return "83.5–90.5", in per cent without the sign."""
    if not is_interval(interval):
        return ""
    low, high = interval
    return f"{100 * low:.{digits}f}–{100 * high:.{digits}f}"


def is_interval(value: Any) -> TypeGuard[Sequence[float]]:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_number, value))


CLEAR_GAP = 0.05  # of confidence and accuracy, that only a small sample leaves unexplained


def format_calibration(metrics: Mapping[str, Any]) -> str:
    """Return "under-confident: mean confidence 70.1 % at 94.3 % accuracy", or "" where that was not measured."""
    confidence, gap, direction = (
        metrics.get(key) for key in ("mean_confidence", "confidence_gap", "calibration_direction")
    )
    if not is_number(confidence) or not is_number(gap) or not isinstance(direction, str):
        return ""
    if direction == "neither":
        direction = (
            "neither over- nor under-confident" if abs(gap) < CLEAR_GAP else "too few samples to tell the direction"
        )
    accuracy = "accuracy of the labels" if "map" in metrics else "accuracy"
    return f"{direction}: mean confidence {format_percent(confidence)} at {format_percent(confidence - gap)} {accuracy}"


def format_temperature(calibration: Any) -> str:
    """Return the temperature of a model with its effect, or "" if `calibration` does not describe one."""
    keys = ("temperature", "images", "calibration_error_before", "calibration_error_after")
    values = [calibration.get(key) for key in keys] if isinstance(calibration, Mapping) else [None]
    if not all(map(is_number, values)):
        return ""
    temperature, images, before, after = values
    if temperature == 1:
        return f"1, logits are not scaled: {calibration.get('reason')}"
    errors = f"calibration error {format_percent(before)} → {format_percent(after)}"
    fitted = f"(cross-validated on {format_count(images)} validation samples)"
    return f"{temperature:.3g}, in the weights of the head: {errors} {fitted}"


def format_count(value: Any) -> str:
    """Return "12,345"."""
    return f"{value:,.0f}" if is_number(value) else "–"


def format_image_count(value: int, noun: str = "image") -> str:
    """Return "1 image" or "12 videos"."""
    return f"{value:,} {noun}" + ("" if value == 1 else "s")


def format_number(value: Any, digits: int = 3) -> str:
    """Return three significant digits: 0.412, 12.3, 1.2e-05."""
    if not is_number(value):
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
        return f"{value:,.{max(0, digits - whole)}f}"
    return f"{value:.{digits - 1}g}"


def format_large_number(value: Any) -> str:
    """Return "5.5 million"."""
    if not is_number(value):
        return "–"
    for name, scale in (("billion", 1e9), ("million", 1e6)):
        if value >= scale:
            return f"{value / scale:.1f}{NO_BREAK_SPACE}{name}"
    return f"{value:,.0f}"


def format_bytes(value: Any) -> str:
    """Return a number of bytes as 150.1 KB or 192.0 MB, in powers of 1,024."""
    if not is_number(value):
        return "–"
    for unit, scale in (("TB", 2**40), ("GB", 2**30), ("MB", 2**20), ("KB", 2**10)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:.0f} B"


def format_duration(seconds: Any) -> str:
    """Return "48 s", "5 min 12 s" or "3 h 20 min"."""
    if not is_number(seconds):
        return "–"
    if seconds < 9.95:
        return f"{seconds:.1f}{NO_BREAK_SPACE}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}{NO_BREAK_SPACE}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}{NO_BREAK_SPACE}min" + (f" {rest}{NO_BREAK_SPACE}s" if rest else "")
    hours, minutes = divmod(minutes, 60)
    return f"{hours}{NO_BREAK_SPACE}h" + (f" {minutes}{NO_BREAK_SPACE}min" if minutes else "")


def format_datetime(text: Any) -> str:
    """Return an ISO time as a date: 3 October 2026, 14:05."""
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return str(text)
    return f"{moment.day} {moment:%B %Y, %H:%M}"


def suggest_closest(name: str, known: Iterable[str]) -> str:
    """Return an unknown name with the closest known one; case, `_` and the part after a comma are ignored."""
    spellings: dict[str, str] = {}
    for candidate in known:
        for part in (candidate, *candidate.split(",")):
            spellings.setdefault(normalize_name(part), candidate)
    near = get_close_matches(normalize_name(name), spellings, n=1, cutoff=0.6)
    return f"{name!r} (like {spellings[near[0]]!r}?)" if near else repr(name)


def normalize_name(name: str) -> str:
    """Return a name with case, spaces, `_` and `-` normalised."""
    return re.sub(r"[\s_-]+", " ", name.casefold()).strip()


def format_table(rows: Sequence[Sequence[str]], right: Iterable[int] = (), rules: Iterable[int] = ()) -> list[str]:
    """Return one line per row with aligned columns: those in `right` to the right, a rule before each row in `rules`."""
    right_aligned, ruled = set(right), set(rules)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column in right_aligned else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    rule = "─" * max(map(len, lines), default=0)
    return [line for index, text in enumerate(lines) for line in ((rule, text) if index in ruled else (text,))]
