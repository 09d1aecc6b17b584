"""Names that were perhaps meant."""

import re
from collections.abc import Iterable
from difflib import get_close_matches


def alike(name: str, known: Iterable[str]) -> str:
    """A name that is not known, with the closest that is: case, `_` and what follows a comma do not count."""
    spelt: dict[str, str] = {}
    for each in known:
        for part in (each, *each.split(",")):
            spelt.setdefault(folded(part), each)
    near = get_close_matches(folded(name), spelt, n=1, cutoff=0.6)
    return f"{name!r} (like {spelt[near[0]]!r}?)" if near else repr(name)


def folded(name: str) -> str:
    """What is left of a name when the way of writing does not count."""
    return re.sub(r"[\s_-]+", " ", name.casefold()).strip()
