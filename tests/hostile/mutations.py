"""Seeded damage of files that vitrail itself wrote: values of another type in JSON, and damaged bytes."""

import json
import random
import struct
from pathlib import Path
from typing import Any

HOSTILE_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**40,
    10**400,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../../etc/passwd",
    "\ud800",
    "é" * 5_000,
    [],
    [[]],
    ["x"] * 50,
    {},
    {"type": []},
    {"type": "os.system", "command": "true"},
)
MAX_PATHS = 2_000


def mutate_file(path: Path, rng: random.Random) -> str:
    """Damage a file in one place and return a description."""
    data = path.read_bytes()
    if rng.random() < 0.75:
        if path.suffix == ".safetensors":
            changed = mutate_safetensors(data, rng)
        elif path.suffix in (".json", ".jsonl"):
            changed = mutate_json_lines(data, rng) if path.suffix == ".jsonl" else mutate_json(data, rng)
        else:
            changed = mutate_bytes(data, rng)
    else:
        changed = mutate_bytes(data, rng)
    path.write_bytes(changed[0])
    return f"{path.name}: {changed[1]}"


def mutate_json(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Replace or remove one value of a JSON document."""
    try:
        document = json.loads(data)
    except ValueError:
        return mutate_bytes(data, rng)
    places = list(list_values(document))
    if not places:
        return b"[]", "an empty list"
    container, key = rng.choice(places)
    if isinstance(container, dict) and rng.random() < 0.2:
        del container[key]
        what = f"without {key!r}"
    else:
        value = rng.choice(HOSTILE_VALUES)
        container[key] = value
        what = f"{key!r} = {str(value)[:30]!r} ({type(value).__name__})"
    return json.dumps(document).encode("utf-8", "surrogatepass"), what


def list_values(document: Any) -> list[tuple[Any, Any]]:
    """Return the container and key of every value, the outermost first."""
    places: list[tuple[Any, Any]] = []
    containers = [document]
    while containers and len(places) < MAX_PATHS:
        container = containers.pop(0)
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))
        for key in keys:
            places.append((container, key))
            if isinstance(container[key], (dict, list)):
                containers.append(container[key])
    return places


def mutate_json_lines(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Replace or remove one value of one line."""
    lines = data.splitlines(keepends=True)
    if not lines:
        return mutate_bytes(data, rng)
    at = rng.randrange(len(lines))
    changed, what = mutate_json(lines[at], rng)
    lines[at] = changed + b"\n"
    return b"".join(lines), f"line {at + 1}: {what}"


def mutate_safetensors(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Replace a value of the header, or of a JSON document inside its metadata."""
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    metadata = header.get("__metadata__", {})
    documents = [key for key, value in metadata.items() if value[:1] in "{["]
    if documents and rng.random() < 0.7:
        key = rng.choice(documents)
        changed, what = mutate_json(metadata[key].encode(), rng)
        metadata[key] = changed.decode("utf-8", "replace")
        what = f"metadata {key!r}: {what}"
        text = json.dumps(header).encode()
    else:
        text, what = mutate_json(json.dumps(header).encode(), rng)
    return struct.pack("<Q", len(text)) + text + data[8 + length :], what


def mutate_bytes(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Flip, cut, repeat or insert bytes."""
    if not data:
        return b"\0", "one byte"
    at, length = rng.randrange(len(data)), rng.randint(1, 64)
    match rng.randrange(6):
        case 0:
            return data[:at], f"cut at {at}"
        case 1:
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :], f"a bit of byte {at}"
        case 2:
            return data[:at] + rng.randbytes(length) + data[at + length :], f"{length} bytes at {at}"
        case 3:
            return data[:at] + data[at + length :], f"without {length} bytes at {at}"
        case 4:
            return data + data[at : at + length], f"{length} bytes more"
        case _:
            return b"", "empty"
