"""Configurations as JSON, there and back: `{"type": "ViTConfig", "size": {"type": "Size", "depth": 12, …}, …}`.

Reading trusts nothing: an unknown type, a field too many or of another kind is an error, and what a configuration refuses
to be, it refuses here too.
"""

from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vitrail.models.bit import BiTConfig
from vitrail.models.build import Config
from vitrail.models.vit import ViTConfig


def to_json(value: Any) -> Any:
    """A configuration, or a part of one, in JSON's own kinds of value."""
    if is_dataclass(value):
        return {"type": type(value).__name__} | {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    return [to_json(part) for part in value] if isinstance(value, tuple) else value


def from_json(data: Any) -> Config:
    """The configuration that `to_json` wrote."""
    return _read(data, ViTConfig | BiTConfig, "config")


def dataclass_from_json(data: Any, kind: type, where: str) -> Any:
    """Any frozen dataclass that `to_json` wrote."""
    return _read(data, kind, where)


def read_value(data: Any, kind: Any, where: str) -> Any:
    """A value of any kind that a configuration may hold."""
    return _read(data, kind, where)


def _read(data: Any, kind: Any, where: str) -> Any:
    """`data` as a value of this kind, or an error that says where it is not one."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _one_of(data, parts, where)
    if is_dataclass(kind):
        return _dataclass(data, kind, where)
    if origin is tuple:
        if isinstance(data, list) and (parts[-1] is ... or len(parts) == len(data)):
            kinds = parts[:1] * len(data) if parts[-1] is ... else parts
            return tuple(
                _read(item, each, f"{where}[{i}]") for i, (item, each) in enumerate(zip(data, kinds, strict=True))
            )
    elif origin is Literal:
        if data in parts:
            return data
    elif kind is float:
        if type(data) in (int, float):
            return float(data)
    elif type(data) is kind:
        return data
    raise ValueError(f"{where} is {_short(data)}, which is not {_name(kind)}")


def _one_of(data: Any, kinds: tuple[Any, ...], where: str) -> Any:
    classes: dict[str, Any] = {_name(kind): kind for kind in kinds if is_dataclass(kind)}
    if isinstance(data, dict) and classes:
        classes |= {_name(sub): sub for kind in classes.values() for sub in kind.__subclasses__()}
        name = data.get("type")
        if not isinstance(name, str) or name not in classes:
            raise ValueError(f"{where} is of the unknown type {_short(name)}: known are {', '.join(classes)}")
        return _dataclass(data, classes[name], where)
    if data is None and NoneType in kinds:
        return None
    for kind in kinds:
        if not is_dataclass(kind) and kind is not NoneType:
            try:
                return _read(data, kind, where)
            except ValueError:
                continue
    raise ValueError(f"{where} is {_short(data)}, which is none of {', '.join(map(_name, kinds))}")


def _dataclass(data: Any, kind: Any, where: str) -> Any:
    known = {sub.__name__: sub for sub in (kind, *kind.__subclasses__())}
    if not isinstance(data, dict) or data.get("type") not in known:
        raise ValueError(f"{where} is {_short(data)}, which is not {_name(kind)}")
    kind = known[data["type"]]
    hints, names = get_type_hints(kind), {f.name for f in fields(kind)}
    given = {name: value for name, value in data.items() if name != "type"}
    if extra := sorted(set(given) - names):
        raise ValueError(f"{where} has the unknown {', '.join(map(_short, extra))}: written by a newer version?")
    # A model says everything. Elsewhere, what an older version did not write means what it did: a later field's default.
    model = issubclass(kind, ViTConfig | BiTConfig)
    needed = {f.name for f in fields(kind) if model or (f.default is MISSING and f.default_factory is MISSING)}
    if lacking := sorted(needed - set(given)):
        raise ValueError(f"{where} lacks {', '.join(lacking)}")
    return kind(**{name: _read(value, hints[name], f"{where}.{name}") for name, value in given.items()})


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


def _short(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 60 else text[:57] + "…"
