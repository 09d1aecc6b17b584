"""Augmentation by a function of the user: torchvision's transforms, albumentations, or any callable.

A recipe records what the function is (`UserTransform`), not the function: it is given again to resume a run. The function
takes one uint8 image: a tensor [C, H, W] if it is a PyTorch module (torchvision), an array [H, W, C] if it belongs to
albumentations, a PIL image otherwise. It returns an image of the same size as any of these.

PyTorch's, NumPy's and Python's global generators, and the one of albumentations, are seeded by (seed, epoch, index) before
each call and restored after it, so that results depend on neither the number of workers nor on the order of the images.
"""

import functools
import hashlib
import inspect
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitrail.data.preprocessing import ImageSize, convert_image
from vitrail.data.rng import SampleRandom

UserFunction = Callable[..., Any]
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the repr of functions and objects
MAX_DESCRIPTION = 300  # characters of a description in the recipe
PUBLISHED = ("torch", "torchvision", "albumentations", "builtins", "functools")  # classes known by name and repr
CHECKED_SEEDS = 4  # calls on a test image, twice each


@dataclass(frozen=True)
class UserTransform:
    """A function of the user as a recipe records it: what it is, and a hash of that."""

    description: str
    digest: str


class BoundTransform:
    """A step of a pipeline that calls the function of a `UserTransform`."""

    def __init__(self, slot: UserTransform, function: UserFunction) -> None:
        self.slot, self.function = slot, function
        kinds: tuple[type, ...] = type(function).__mro__  # pyright: ignore[reportFunctionMemberAccess]
        self.takes_arrays = any(kind.__module__.partition(".")[0] == "albumentations" for kind in kinds)

    def apply(self, pixels: Tensor, rng: SampleRandom) -> Tensor:
        """Return the image that the function makes of uint8 [C, H, W]."""
        seed = int(rng.uniform_at(0) * 2**53)
        with seeded_generators(seed):
            if self.takes_arrays:
                if hasattr(self.function, "set_random_state"):  # its own generators, since version 1.4.19
                    self.function.set_random_state(np.random.default_rng(seed), random.Random(seed))  # type: ignore[attr-defined]
                result = self.function(image=np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()))
                result = result["image"]
            elif isinstance(self.function, nn.Module):
                result = self.function(pixels.clone())
            else:
                result = self.function(to_pil(pixels))
        return self.read_result(result, tuple(pixels.shape))

    def read_result(self, result: Any, shape: tuple[int, ...]) -> Tensor:
        """Return the function's result as uint8 [C, H, W]; raise ValueError for another shape or type."""
        name = f"the augmentation {shorten(self.slot.description, 60)}"
        if isinstance(result, Image.Image):
            result = np.asarray(convert_image(result, shape[0]))
        if isinstance(result, np.ndarray):
            array = result[:, :, None] if result.ndim == 2 else result
            result = torch.from_numpy(np.array(array))  # a copy: the one of PIL cannot be written to
            result = result.permute(2, 0, 1) if result.ndim == 3 else result
        if not isinstance(result, Tensor):
            raise ValueError(f"{name} returns {type(result).__name__}: return an image, an array or a tensor")
        result = result.detach().as_subclass(Tensor)
        if tuple(result.shape) != shape:
            got, want = ("×".join(map(str, sides)) for sides in (result.shape, shape))
            raise ValueError(f"{name} returns {got} values, expected {want}: keep the size, the recipe crops before it")
        if result.is_floating_point():
            low, high = result.min().item(), result.max().item()
            if not (low >= -1e-4 and high <= 1 + 1e-4):
                limits = f"{low:.3g} to {high:.3g}"
                raise ValueError(f"{name} returns values of {limits}, expected 0 to 1: leave out its normalisation")
            result = (result.clamp(0, 1) * 255).round().to(torch.uint8)
        if result.dtype != torch.uint8:
            raise ValueError(f"{name} returns {result.dtype}: return uint8, or floats from 0 to 1")
        return result.contiguous()


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seed the global generators of PyTorch (CPU), NumPy and Python, and restore their states at the end."""
    generator = torch.default_generator
    states = generator.get_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)
    try:
        yield
    finally:
        generator.set_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


def to_pil(pixels: Tensor) -> Image.Image:
    """Return uint8 [C, H, W] of 1, 3 or 4 channels as a PIL image."""
    array = pixels.permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


# --- what a recipe records ---


def describe_transform(function: UserFunction) -> UserTransform:
    """Return the description of a function and its hash, equal for equal functions in another process."""
    text = describe_callable(function)
    shown = describe_name(function)
    return UserTransform(shorten(shown, MAX_DESCRIPTION), hashlib.sha256(text.encode()).hexdigest()[:32])


def describe_name(function: UserFunction) -> str:
    """Return a function as one line: its name, or its repr without addresses."""
    if isinstance(function, functools.partial):
        return f"partial of {describe_name(function.func)}"
    if inspect.isroutine(function):
        return f"{function.__module__}.{function.__qualname__}"
    return " ".join(ADDRESS.sub("", repr(function)).split())


def describe_callable(function: Any) -> str:
    """Return all that identifies a function: its repr, and the source and values of what the repr does not show."""
    if isinstance(function, functools.partial):
        return f"partial({describe_callable(function.func)}, {describe_value((function.args, function.keywords))})"
    if inspect.isroutine(function):
        plain = inspect.unwrap(getattr(function, "__func__", function))
        cells = [cell.cell_contents for cell in getattr(plain, "__closure__", None) or ()]
        values = describe_value((getattr(plain, "__defaults__", None), getattr(plain, "__kwdefaults__", None), cells))
        return f"{describe_name(function)}\n{read_source(plain)}\n{values}"
    parts = [describe_value(function)]
    members = function.modules() if isinstance(function, nn.Module) else (function,)
    for member in members:
        kind = type(member)
        if kind.__module__.partition(".")[0] not in PUBLISHED:
            public = {name: value for name, value in vars(member).items() if not name.startswith("_")}
            parts += [kind.__qualname__, read_source(kind), describe_value(sorted(public.items()))]
    return "\n".join(parts)


def describe_value(value: Any) -> str:
    """Return the repr of a value without addresses; functions inside lists and tuples with their source."""
    if isinstance(value, list | tuple):
        return f"({', '.join(map(describe_value, value))})"
    if isinstance(value, dict):
        return describe_value(sorted(value.items(), key=repr))
    return describe_callable(value) if inspect.isroutine(value) else ADDRESS.sub("", repr(value))


def read_source(subject: Any) -> str:
    """Return the source of a function or class; its code where there is no source file."""
    try:
        return inspect.getsource(subject)
    except (OSError, TypeError):
        code = getattr(subject, "__code__", None)
        return "" if code is None else f"{code.co_code.hex()} {ADDRESS.sub('', repr(code.co_consts))} {code.co_names}"


def shorten(text: str, limit: int) -> str:
    """Return a text of at most this many characters."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


# --- steps of a recipe ---


def list_functions(augment: Any) -> list[UserFunction]:
    """Return the functions among the steps of an augmentation: a function, or a sequence of functions and slots."""
    steps = augment if isinstance(augment, Sequence) and not callable(augment) else [augment]
    return [step for step in steps if callable(step)]


def bind_transforms(steps: Iterable[Any], functions: Sequence[UserFunction]) -> tuple[Any, ...]:
    """Return the steps of a recipe with each recorded function bound; raise ValueError for one that is not given."""
    known = {describe_transform(function).digest: function for function in functions}
    bound = []
    for step in steps:
        if isinstance(step, UserTransform):
            if step.digest not in known:
                raise ValueError(describe_missing(step, functions))
            step = BoundTransform(step, known[step.digest])
        bound.append(step)
    return tuple(bound)


def describe_missing(step: UserTransform, functions: Sequence[UserFunction]) -> str:
    """Return the error for a recorded function that is not given, or that is another one."""
    name = shorten(step.description, 60)
    if not functions:
        return f"the augmentation calls {name}: give that function again, in Python, with augment="
    given = ", ".join(shorten(describe_transform(function).description, 60) for function in functions)
    why = "the function changed" if given == name else f"augment={given} is another one"
    return f"the augmentation of the start calls {name}, and {why}: give the same function"


def check_transform(step: BoundTransform, size: ImageSize, channels: int) -> None:
    """Raise ValueError if the function fails on an image of noise, or gives two results for one seed."""
    noise = np.random.default_rng(0).integers(0, 256, (channels, *size), dtype=np.uint8)
    for index in range(CHECKED_SEEDS):
        rng = SampleRandom(0, 0, index)
        first, second = (step.apply(torch.from_numpy(noise.copy()), rng) for _ in range(2))
        if not torch.equal(first, second):
            name = shorten(step.slot.description, 60)
            own = "it has a random generator of its own"
            raise ValueError(
                f"the augmentation {name} gives two results for one seed: {own}; use torch, numpy or random"
            )
