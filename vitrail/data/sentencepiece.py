"""SentencePiece models, SigLIP's `spiece.model`, as the JSON of the `tokenizers` library.

The file is a Protocol Buffers message. The few fields that matter are read here: the pieces with their scores and types, the
unknown piece, and the table of the normaliser.
"""

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_PIECES = 2_000_000
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # types of pieces
UNIGRAM = 1


@dataclass
class PieceModel:
    """What a SentencePiece model holds for the library."""

    pieces: list[tuple[str, float]] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    kind: int = UNIGRAM
    charsmap: bytes = b""


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an integer of variable length, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            return value, at
    raise ValueError("an integer is cut off or too long")


def read_fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each field of a message: an integer, a float, or bytes."""
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = read_varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            if at + size > len(data):
                raise ValueError("a number is cut off")
            (value,) = struct.unpack("<d" if wire == 1 else "<f", data[at : at + size])
            at += size
        elif wire == 2:
            size, at = read_varint(data, at)
            if at + size > len(data):
                raise ValueError("a field is cut off")
            value, at = data[at : at + size], at + size
        else:
            raise ValueError(f"unknown wire type {wire}")
        yield number, value


def parse_model(data: bytes) -> PieceModel:
    """Return a SentencePiece model; raise ValueError for anything else."""
    model = PieceModel()
    for number, value in read_fields(data):
        if number in (1, 2, 3) and not isinstance(value, bytes):
            raise ValueError(f"field {number} is no message")
        if number == 1:
            parts = {1: b"", 2: 0.0, 3: 1} | dict(read_fields(value))
            text, score, kind = parts[1], parts[2], parts[3]
            if not isinstance(text, bytes) or not isinstance(score, float) or not math.isfinite(score):
                raise ValueError(f"piece {len(model.pieces)} has no text or no finite score")
            model.pieces.append((text.decode(), score))
            model.kinds.append(int(kind))
            if len(model.pieces) > MAX_PIECES:
                raise ValueError(f"more than {MAX_PIECES:,} pieces")
        elif number == 2:
            model.kind = next((int(part) for index, part in read_fields(value) if index == 3), UNIGRAM)
        elif number == 3:
            model.charsmap = next((part for index, part in read_fields(value) if index == 2), b"")
    if not model.pieces:
        raise ValueError("it has no pieces")
    return model


def read_sentencepiece(path: Path, library: Any) -> dict[str, Any]:
    """Return the library's JSON of a unigram model, which ends texts with `</s>`."""
    try:
        model = parse_model(path.read_bytes())
    except (ValueError, UnicodeDecodeError, struct.error) as error:
        raise ValueError(f"{path}: not a SentencePiece model ({error})") from None
    if model.kind != UNIGRAM or BYTE in model.kinds:
        raise ValueError(f"{path}: only unigram models without bytes are read: save it as tokenizer.json")
    if UNKNOWN not in model.kinds:
        raise ValueError(f"{path}: it has no unknown piece")
    from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors

    tokenizer = library.Tokenizer(models.Unigram(model.pieces, unk_id=model.kinds.index(UNKNOWN)))
    names = [(piece, kind) for (piece, _), kind in zip(model.pieces, model.kinds, strict=True)]
    added = [(piece, kind == CONTROL) for piece, kind in names if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(piece, normalized=False, special=special) for piece, special in added])
    steps = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    steps += [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    if (end := tokenizer.token_to_id("</s>")) is not None:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
    return json.loads(tokenizer.to_str())
