"""Bound the memory that a pickle would take, from its opcodes, before anything is unpickled.

`weights_only=True` runs no code of a file, but it calls a few functions that copy their arguments, such as `_codecs.encode`.
A small file can call them thousands of times on one large string. So the program is walked here with sizes instead of values.
"""

import pickletools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO

BYTES_PER_OBJECT = 64  # of a Python object, and of an entry in a container
ALLOCATORS = ("bytearray", "Tensor")  # the ends of names of callables that allocate as many bytes as an integer says
MAX_BYTES = 2**62
STACK_ERROR = "its pickle takes more from the stack than it holds"


@dataclass(slots=True)
class StackValue:
    """Known properties of a value: bytes of everything in it, largest integer in it, and the name of a callable."""

    nbytes: int = BYTES_PER_OBJECT
    largest: int = 0
    name: str = ""


MARK = StackValue()


def estimate_pickle_memory(program: bytes | IO[bytes]) -> int:
    """Return an upper bound of the bytes that unpickling allocates, without storages; raise ValueError if it is damaged."""
    stack: list[StackValue] = []
    memo: dict[int, StackValue] = {}
    total = 0
    for opcode, argument, _ in pickletools.genops(program):
        match opcode.name:
            case "MARK":
                stack.append(MARK)
            case "BINGET" | "LONG_BINGET" | "GET":
                stack.append(_read_memo(memo, _index(argument)))
            case "BINPUT" | "LONG_BINPUT" | "PUT" | "MEMOIZE":
                memo[len(memo) if argument is None else _index(argument)] = _pop(stack, 1, keep=True)[0]
            case "REDUCE" | "NEWOBJ" | "BUILD":
                target, arguments = _pop(stack, 2)
                made = BYTES_PER_OBJECT + arguments.nbytes
                if target.name.endswith(ALLOCATORS):
                    made += arguments.largest
                total += made
                stack.append(StackValue(target.nbytes + made))
            case "APPEND" | "APPENDS" | "SETITEM" | "SETITEMS" | "ADDITEMS":
                items = _pop_to_mark(stack) if opcode.name.endswith("S") else _pop(stack, len(opcode.stack_before) - 1)
                container = _pop(stack, 1, keep=True)[0]
                _add(container, items)
                total += BYTES_PER_OBJECT * len(items)
            case _:
                marked = pickletools.markobject in opcode.stack_before
                taken = _pop_to_mark(stack) if marked else _pop(stack, len(opcode.stack_before))
                for _ in opcode.stack_after:
                    made = StackValue(BYTES_PER_OBJECT + (len(argument) if isinstance(argument, (str, bytes)) else 0))
                    total += made.nbytes
                    if isinstance(argument, int):
                        made.largest = abs(argument)
                    elif opcode.name == "GLOBAL":
                        made.name = str(argument)
                    _add(made, taken)
                    stack.append(made)
    return total


def _add(container: StackValue, items: Iterable[StackValue]) -> None:
    for item in items:
        container.nbytes = min(container.nbytes + item.nbytes, MAX_BYTES)  # nested containers may double it each time
        container.largest = max(container.largest, item.largest)


def _pop(stack: list[StackValue], count: int, keep: bool = False) -> list[StackValue]:
    if len(stack) < count:
        raise ValueError(STACK_ERROR)
    taken = stack[len(stack) - count :]
    if not keep:
        del stack[len(stack) - count :]
    return taken


def _pop_to_mark(stack: list[StackValue]) -> list[StackValue]:
    taken = []
    while stack:
        if (value := stack.pop()) is MARK:
            return taken
        taken.append(value)
    raise ValueError(STACK_ERROR)


def _index(argument: object) -> int:
    return int(str(argument))


def _read_memo(memo: dict[int, StackValue], index: int) -> StackValue:
    if index not in memo:
        raise ValueError(f"its pickle asks for the value {index}, which it has not stored")
    return memo[index]
