"""Which form a checkpoint has, what architecture it is, and whether every tensor has its place: from the header alone."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from vitrail.checkpoints import clip, google, timm, torchvision, transformers, vit_pytorch
from vitrail.checkpoints.keys import LeftOut, Table, expected, key, keys_of, layout, left_out, rooted, some
from vitrail.checkpoints.look import Facts, Form, Names, Shapes
from vitrail.models.build import Config, configure

FORMS: tuple[Form, ...] = (
    *timm.FORMS,
    *transformers.FORMS,
    *google.FORMS,
    *torchvision.FORMS,
    *clip.FORMS,
    *vit_pytorch.FORMS,
)
WRAPPERS = ("module.", "_orig_mod.", "model.", "_forward_module.")  # what training leaves before every name


@dataclass(frozen=True)
class Reading:
    """A checkpoint as it was recognised, with the account of every tensor in it."""

    form: str
    why: str
    config: Config
    table: Table  # of the names as they stand in the file
    root: str = ""
    facts: dict[str, tuple[Any, str]] = field(default_factory=dict)  # what tensors do not tell: value, and who told it
    loaded: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)  # on purpose, and why
    missing: dict[str, tuple[int, ...]] = field(default_factory=dict)
    unexpected: dict[str, tuple[int, ...]] = field(default_factory=dict)
    misshapen: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)  # found, expected

    @property
    def whole(self) -> bool:
        return not (self.missing or self.unexpected or self.misshapen)

    def differences(self) -> list[str]:
        """What would have to change, tensor by tensor."""
        return [
            *(f"{name} {list(shape)} is missing" for name, shape in self.missing.items()),
            *(f"{name} {list(shape)} is unexpected" for name, shape in self.unexpected.items()),
            *(f"{name} is {list(found)} and should be {list(want)}" for name, (found, want) in self.misshapen.items()),
        ]


def recognise(shapes: Shapes, settings: Mapping[str, Any], assume: Mapping[str, Any]) -> Reading:
    """The form that fits, or the one that comes closest with what differs; an error where none comes close."""
    wrapper, inner = unwrap(shapes)
    told = {name: (value, "told") for name, value in assume.items()}
    best: Reading | None = None
    complaints: list[str] = []
    for form in FORMS:
        for root in form.roots:
            names = Names(inner, root)
            if not all(names.anywhere(name) for name in form.telling):
                continue
            try:
                facts = Facts(form.told(settings) | told)
                config = form.look(names, facts)
                table = form.table(config, root)
            except ValueError as error:
                complaints.append(f"it looks like {form.title}, but {error}")
                continue
            reading = account(form, root, wrapper, config, table, facts, inner)
            if reading.whole:
                return reading
            if best is None or len(reading.differences()) < len(best.differences()):
                best = reading
    if best is not None:
        return best
    raise ValueError(complaints[0] if complaints else unknown(inner))


def account(form: Form, root: str, wrapper: str, config: Config, table: Table, facts: Facts, shapes: Shapes) -> Reading:
    """Every tensor of the file against every tensor of the form."""
    wanted = expected(table, config)
    aside = left_out(table, shapes)
    telling = " and ".join(root + name for name in form.telling[:2])
    under = f", after {wrapper!r}" if wrapper else ""
    return Reading(
        form=form.name,
        why=f"{form.title}: it has {telling}{under}",
        config=config,
        table=rooted(table, wrapper),
        root=wrapper + root,
        facts=facts.used,
        loaded=tuple(wrapper + name for name in wanted if shapes.get(name) == wanted[name]),
        left_out={wrapper + name: reason for name, reason in aside.items()},
        missing={wrapper + name: shape for name, shape in wanted.items() if name not in shapes},
        unexpected={
            wrapper + name: tuple(shape) for name, shape in shapes.items() if name not in wanted and name not in aside
        },
        misshapen={
            wrapper + name: (tuple(shapes[name]), shape)
            for name, shape in wanted.items()
            if name in shapes and tuple(shapes[name]) != shape
        },
    )


def own(config: Config, shapes: Shapes) -> Reading:
    """The account of an artifact of ours, whose configuration is known."""
    wanted = {name: tuple(tensor.shape) for name, tensor in layout(config).items()}
    table: Table = [*(key(name, name) for name in wanted), LeftOut("decoder.*", "MAE decoder")]
    aside = left_out(table, shapes)
    return Reading(
        form="vitrail",
        why="vitrail's own artifact: its header holds the configuration",
        config=config,
        table=table,
        left_out=aside,
        loaded=tuple(name for name in wanted if shapes.get(name) == wanted[name]),
        missing={name: shape for name, shape in wanted.items() if name not in shapes},
        unexpected={n: tuple(shape) for n, shape in shapes.items() if n not in wanted and n not in aside},
        misshapen={
            name: (tuple(shapes[name]), shape)
            for name, shape in wanted.items()
            if name in shapes and tuple(shapes[name]) != shape
        },
    )


def unwrap(shapes: Shapes) -> tuple[str, Shapes]:
    """What training put before every name, and the names without it."""
    wrapper = ""
    while True:
        more = next((w for w in WRAPPERS if shapes and all(name.startswith(w) for name in shapes)), None)
        if more is None:
            return wrapper, shapes
        wrapper += more
        shapes = {name[len(more) :]: shape for name, shape in shapes.items()}


def unknown(shapes: Shapes) -> str:
    """What is said of a checkpoint that is of no known form: what it has, and which form comes closest."""
    mine = {pattern(name) for name in shapes}
    scores = {name: sum(_has(mine, one) for one in kinds) / len(kinds) for name, kinds in examples().items()}
    closest = max(scores, key=lambda name: scores[name])
    text = f"unknown form: {len(shapes)} tensors, among them {some(shapes, 4)}"
    if not scores[closest]:
        return f"{text}. Not one name is that of a Vision Transformer in a known form: {some(scores, 20)}"
    kinds = examples()[closest]
    lacking = sorted(one for one in kinds if not _has(mine, one))
    strange = sorted(one for one in mine if not any(one.endswith(kind) for kind in kinds))
    return (
        f"{text}. Closest is {closest}, of whose {len(kinds)} kinds of names {len(kinds) - len(lacking)} are there; "
        f"it would also need {some(lacking, 6) or 'nothing'}, and does not know {some(strange, 6) or 'nothing else'}"
    )


def pattern(name: str) -> str:
    """A name with its numbers blotted out."""
    return re.sub(r"\d+", "#", name)


def _has(mine: set[str], one: str) -> bool:
    return any(name == one or name.endswith((f".{one}", f"/{one}")) for name in mine)


@lru_cache(maxsize=1)
def examples() -> dict[str, set[str]]:
    """The kinds of names of every form, from a small model of it."""
    small: dict[str, Any] = {"patch": 16, "width": 64, "depth": 1, "heads": 1, "image_size": 32}
    found = {}
    for form in FORMS:
        config = configure(**form.example) if "name" in form.example else configure(**{**small, **form.example})
        found[form.name] = {pattern(name) for entry in keys_of(form.table(config, "")) for name in entry.theirs}
    return found
