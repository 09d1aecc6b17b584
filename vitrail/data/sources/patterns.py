"""Several files in one word: `train-{000000..000009}.tar`, `{train,val}-*.parquet`."""

import glob
import os
import re

BRACES = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"(\d+)\.\.(\d+)")
MOST = 1_000_000


def is_pattern(where: str) -> bool:
    """Whether a path stands for several files."""
    return any(letter in where for letter in "*?[{")


def expanded(where: str) -> list[str]:
    """The files that a pattern stands for. Those that braces name must be there."""
    found: list[str] = []
    for each in braces(where):
        if any(letter in each for letter in "*?["):
            matched = sorted(glob.glob(each))
            if not matched:
                raise FileNotFoundError(f"no file matches {each}")
            found += matched
        elif not os.path.isfile(each):
            raise FileNotFoundError(f"there is no {each}, which {where} names")
        else:
            found.append(each)
    return list(dict.fromkeys(found))


def braces(where: str) -> list[str]:
    """Every word that the braces make: ranges of numbers, with their zeros, and lists with commas."""
    match = BRACES.search(where)
    if not match:
        return [where]
    inside = match[1]
    if numbers := RANGE.fullmatch(inside):
        first, last = int(numbers[1]), int(numbers[2])
        if last < first or last - first >= MOST:
            raise ValueError(f"{where}: {{{inside}}} is no range of at most {MOST:,} numbers")
        choices = [f"{number:0{len(numbers[1])}d}" for number in range(first, last + 1)]
    elif "," in inside:
        choices = inside.split(",")
    else:
        raise ValueError(f"{where}: {{{inside}}} is neither a range, {{000..009}}, nor a list, {{train,val}}")
    return [word for choice in choices for word in braces(where[: match.start()] + choice + where[match.end() :])]
