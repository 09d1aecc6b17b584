"""Numbers as people read them."""

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypeGuard

SPACE = "\u00a0"  # between a number and its unit, where no line may end


def is_number(value: Any) -> TypeGuard[float]:
    """Finite, and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def percent(value: Any, digits: int = 1) -> str:
    """87.4 %. What is almost all, but not all, is not called 100."""
    if not is_number(value):
        return "–"
    shown = f"{100 * value:.{digits}f}"
    if value < 1 and float(shown) >= 100:
        shown = f"{100 - 10**-digits:.{digits}f}"
    return f"{shown}{SPACE}%"


def span(interval: Any, digits: int = 1) -> str:
    """83.5–90.5, in per cent without the sign."""
    if not is_interval(interval):
        return ""
    low, high = interval
    return f"{100 * low:.{digits}f}–{100 * high:.{digits}f}"


def is_interval(value: Any) -> TypeGuard[Sequence[float]]:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_number, value))


def count(value: Any) -> str:
    """12,345."""
    return f"{value:,.0f}" if is_number(value) else "–"


def pictures(value: int) -> str:
    return f"{value:,} picture" + ("" if value == 1 else "s")


def number(value: Any, digits: int = 3) -> str:
    """Three digits that count: 0.412, 12.3, 1.2e-05."""
    if not is_number(value):
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
        return f"{value:,.{max(0, digits - whole)}f}"
    return f"{value:.{digits - 1}g}"


def large(value: Any) -> str:
    """5.5 million."""
    if not is_number(value):
        return "–"
    for name, scale in (("billion", 1e9), ("million", 1e6)):
        if value >= scale:
            return f"{value / scale:.1f}{SPACE}{name}"
    return f"{value:,.0f}"


def duration(seconds: Any) -> str:
    """48 s, 5 min 12 s, 3 h 20 min."""
    if not is_number(seconds):
        return "–"
    if seconds < 9.95:
        return f"{seconds:.1f}{SPACE}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}{SPACE}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}{SPACE}min" + (f" {rest}{SPACE}s" if rest else "")
    hours, minutes = divmod(minutes, 60)
    return f"{hours}{SPACE}h" + (f" {minutes}{SPACE}min" if minutes else "")


def when(text: Any) -> str:
    """An ISO time as a date: 3 October 2026, 14:05."""
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return str(text)
    return f"{moment.day} {moment:%B %Y, %H:%M}"
