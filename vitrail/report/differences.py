"""Where several recipes differ, field by field."""

from collections.abc import Iterator
from typing import Any

from vitrail.report.run import Run


class Absent:
    """What stands for a field that a recipe does not have."""

    def __repr__(self) -> str:
        return "–"


ABSENT = Absent()


def differences(values: list[Any], path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Fields by their path, `optimizer.lr`, with each one's value. Objects of different types are shown whole."""
    if all(same(value, values[0]) for value in values):
        return
    if all(isinstance(value, dict) for value in values) and len({str(value.get("type")) for value in values}) == 1:
        for key in dict.fromkeys(key for value in values for key in value):
            inner = f"{path}.{key}" if path else str(key)
            yield from differences([value.get(key, ABSENT) for value in values], inner)
    elif all(isinstance(value, list) for value in values) and len({len(value) for value in values}) == 1:
        if any(isinstance(part, (dict, list)) for value in values for part in value):
            for place in range(len(values[0])):
                yield from differences([value[place] for value in values], f"{path}[{place}]")
        else:
            yield path, values
    else:
        yield path, values


def same(a: Any, b: Any) -> bool:
    """Equal, where 1 and 1.0 are, but 1 and true are not."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return isinstance(a, bool) is isinstance(b, bool) and a == b


def brief(value: Any) -> str:
    """A value on one line: AdamW(lr=0.0003, clip=1.0)."""
    if isinstance(value, dict):
        inner = ", ".join(f"{key}={brief(part)}" for key, part in value.items() if key != "type")
        return f"{value.get('type', '')}({inner})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(brief, value))}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    return (
        {None: "none", True: "yes", False: "no"}.get(value, str(value))
        if isinstance(value, bool | None)
        else str(value)
    )


def of_runs(runs: list[Run]) -> dict[str, list[Any]]:
    """Recipes, and what stands beside them in a run: the data, the weights begun from."""
    beside = {
        "data": [run.part("data", "where") for run in runs],
        "init": [run.part("model", "init") for run in runs],
    }
    found = dict(differences([run.recipe if run.recipe is not None else {} for run in runs]))
    return found | {
        key: values for key, values in beside.items() if key not in found and len(set(map(str, values))) > 1
    }
