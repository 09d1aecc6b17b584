"""JSON of configurations, `{"type": "ViTConfig", "size": {"type": "Size", "depth": 12, …}, …}`, and of our other files.

Unknown types, unknown fields and values of another kind are errors, and the dataclasses check their own values. Files that are
not configurations are described by a TypedDict: its keys are checked, further ones are left as they are.
"""

import json
import math
import operator
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NewType, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

T = TypeVar("T")
Finite = NewType("Finite", float)  # a float that is neither infinite nor NaN
INT_LIMIT = 2**63

COMPARISONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}

ALIASES: dict[str, str] = {}  # earlier name of a stored dataclass: its name now, so that earlier files keep loading


def to_json(value: Any) -> Any:
    """Return a configuration, or a part of one, as JSON values.

    A field with the metadata `omit_default` is left out at its default, so that files and checksums of models that do not
    use it stay as earlier versions wrote them.
    """
    if is_dataclass(value):
        kept = {f.name: getattr(value, f.name) for f in fields(value)}
        for f in fields(value):
            if f.metadata.get("omit_default") and kept[f.name] == f.default:
                del kept[f.name]
        return {"type": type(value).__name__} | {name: to_json(part) for name, part in kept.items()}
    return [to_json(part) for part in value] if isinstance(value, tuple) else value


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; values nested too deep for Python are a ValueError too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None


def read_json_file(path: Path, kind: Any) -> Any:
    """Read a JSON file as a value of this type; raise ValueError with its path and the value that is wrong."""
    try:
        return value_from_json(parse_json(path.read_bytes()), kind, "")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def remove_invalid(data: dict[str, Any], kind: Any, where: str) -> list[str]:
    """Remove the values that a TypedDict gives another type; return a message for each."""
    problems = []
    for name, hint in _type_hints(kind).items():
        if is_typeddict(hint) and isinstance(data.get(name), dict):
            problems += remove_invalid(data[name], hint, f"{where}.{name}")
        elif name in data:
            try:
                value_from_json(data[name], hint, f"{where}.{name}")
            except ValueError as error:
                problems.append(str(error))
                del data[name]
    return problems


def untyped_from_json(data: Any, kind: type[T], where: str) -> T:
    """Return the dataclass that `asdict` wrote, without the name of its type."""
    return value_from_json(data | {"type": kind.__name__} if isinstance(data, dict) else data, kind, where)


def dataclass_from_json(data: Any, kind: type[T], where: str) -> T:
    """Return the frozen dataclass that `to_json` wrote; `where` names it in errors."""
    return value_from_json(data, kind, where)


def value_from_json(data: Any, kind: Any, where: str) -> Any:
    """Return JSON data as a value of this type; raise ValueError if it is not one."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _parse_union(data, parts, where)
    if is_dataclass(kind):
        return _parse_dataclass(data, kind, where)
    if kind is Any:
        return data
    if is_typeddict(kind) and isinstance(data, dict):
        if lacking := sorted(kind.__required_keys__ - set(data)):
            raise ValueError(f"{where or 'it'} lacks {', '.join(lacking)}")
        known = [(name, hint) for name, hint in _type_hints(kind).items() if name in data]
        return data | {name: value_from_json(data[name], hint, _join(where, name)) for name, hint in known}
    if origin in (dict, Mapping) and isinstance(data, dict):
        return {name: value_from_json(value, parts[1], _join(where, name)) for name, value in data.items()}
    if origin is list and isinstance(data, list):
        return [value_from_json(item, parts[0], f"{where}[{i}]") for i, item in enumerate(data)]
    if origin is tuple:
        if isinstance(data, list) and (parts[-1] is ... or len(parts) == len(data)):
            kinds = parts[:1] * len(data) if parts[-1] is ... else parts
            items = enumerate(zip(data, kinds, strict=True))
            return tuple(value_from_json(item, kind, f"{where}[{i}]") for i, (item, kind) in items)
    elif origin is Literal:
        if data in parts:
            return data
        raise ValueError(f"{where or 'it'} must be {' or '.join(map(str, parts))}, got {_shorten(data)}")
    elif kind in (float, Finite):
        if (type(data) is float and (kind is float or math.isfinite(data))) or _is_int(data):
            return float(data)
    elif type(data) is kind if kind is not int else _is_int(data):
        return data
    raise ValueError(f"{where or 'it'} is {_shorten(data)}, which is not {_type_name(kind)}")


def check_fields(settings: object, rule: str, *labels: str) -> None:
    """Raise ValueError for a field of a dataclass that is infinite or breaks a rule such as "> 0 and <= 1"; None is allowed.

    A label is the name of a field, or its name and description: "mask, the fraction of hidden patches".
    """
    bounds = [part.split() for part in rule.removesuffix(", or none").split(" and ")]
    for label in labels:
        name, comma, _ = label.partition(",")
        value = getattr(settings, name)
        if value is None:
            continue
        if not value < math.inf or not all(COMPARISONS[sign](value, float(bound)) for sign, bound in bounds):
            raise ValueError(f"{label}{comma} must be {rule}, got {value}")


def _parse_union(data: Any, kinds: tuple[Any, ...], where: str) -> Any:
    classes: dict[str, Any] = {_type_name(kind): kind for kind in kinds if is_dataclass(kind)}
    if isinstance(data, dict) and classes:
        classes = {name: sub for kind in classes.values() for name, sub in _subclasses(kind).items()}
        name = _class_name(data)
        if not isinstance(name, str) or name not in classes:
            raise ValueError(f"{where} has the unknown type {_shorten(name)}: known are {', '.join(classes)}")
        return _parse_dataclass(data, classes[name], where)
    if data is None and NoneType in kinds:
        return None
    for kind in kinds:
        if not is_dataclass(kind) and kind is not NoneType:
            try:
                return value_from_json(data, kind, where)
            except ValueError:
                continue
    raise ValueError(f"{where} is {_shorten(data)}, which is none of {', '.join(map(_type_name, kinds))}")


def _parse_dataclass(data: Any, kind: Any, where: str) -> Any:
    known = _subclasses(kind)
    if not isinstance(data, dict):
        raise ValueError(f"{where} is {_shorten(data)}, which is not {_type_name(kind)}")
    if not isinstance(_class_name(data), str) or _class_name(data) not in known:
        raise ValueError(f"{where} has the unknown type {_shorten(_class_name(data))}: known are {', '.join(known)}")
    kind = known[_class_name(data)]
    hints, names = _type_hints(kind), {f.name for f in fields(kind)}
    given = {name: value for name, value in data.items() if name != "type"}
    if extra := sorted(set(given) - names):
        raise ValueError(f"{where} has the unknown {', '.join(map(_shorten, extra))}: written by a newer version?")
    # A model's JSON must have every field that `to_json` always writes. Elsewhere a missing field, written by an older
    # version, has its default.
    model = getattr(kind, "EVERY_FIELD_WRITTEN", False)
    written = {f.name for f in fields(kind) if model and not f.metadata.get("omit_default")}
    needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING} | written
    if lacking := sorted(needed - set(given)):
        raise ValueError(f"{where} lacks {', '.join(lacking)}")
    return kind(**{name: value_from_json(value, hints[name], _join(where, name)) for name, value in given.items()})


def _subclasses(kind: Any) -> dict[str, Any]:
    """Return a class and its subclasses by name, without those marked as abstract."""
    known = {} if "ABSTRACT" in vars(kind) else {kind.__name__: kind}
    for sub in kind.__subclasses__():
        known |= _subclasses(sub)
    return known


def _class_name(data: dict[str, Any]) -> Any:
    """Return the class name that JSON data gives, replaced by its name in this version."""
    name = data.get("type")
    return ALIASES.get(name, name) if isinstance(name, str) else name


_type_hints = cache(get_type_hints)


def _join(where: str, name: str) -> str:
    return f"{where}.{_shorten(name)[1:-1]}" if where else _shorten(name)[1:-1]


def _is_int(data: Any) -> bool:
    return type(data) is int and -INT_LIMIT <= data < INT_LIMIT


def _type_name(kind: Any) -> str:
    if is_typeddict(kind) or get_origin(kind) in (dict, Mapping):
        return "an object"
    return "a finite number" if kind is Finite else getattr(kind, "__name__", str(kind))


def _shorten(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 60 else text[:57] + "…"
