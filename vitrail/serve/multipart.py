"""Several pictures in one body, as forms send them (RFC 7578).

The body is in memory and its size is limited, so that a part is found by searching for what separates it from the next: one
pass at the speed of C, whatever the body is made of. Parts are counted as they are found.
"""

import re
from dataclasses import dataclass
from urllib.parse import unquote

from vitrail.serve.limits import Refused

HEAD = 8192  # bytes before a part's content
FIELD = "pictures"
NAME = 200  # characters of a file's name that are kept
BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{1,70}")
OPTION = re.compile(r';\s*([\w!#$&+\-^.`|~*]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;\s]+))')


@dataclass(frozen=True)
class Part:
    """The bytes of a picture, and what the client calls it."""

    name: str | None
    data: bytes


def boundary_of(content_type: str) -> bytes:
    """What separates the parts."""
    found = dict(options(content_type)).get("boundary", "")
    if not BOUNDARY.fullmatch(found) or found.endswith(" "):
        raise Refused(
            400, "multipart without a boundary in its Content-Type: let your client library write that header"
        )
    return found.encode("ascii")


def options(header: str) -> list[tuple[str, str]]:
    """The options of a header such as `form-data; name="pictures"`, their names in small letters."""
    return [
        (name.lower(), re.sub(r"\\(.)", r"\1", quoted) if quoted else bare)
        for name, quoted, bare in OPTION.findall(header)
    ]


def parts(body: bytes | bytearray, boundary: bytes, most: int) -> list[Part]:
    """The pictures of a body, in its order."""
    separator = b"\r\n--" + boundary
    if body.startswith(separator[2:]):
        at = len(separator) - 2
    elif (found := body.find(separator)) >= 0:  # something before the first part is allowed, and means nothing
        at = found + len(separator)
    else:
        raise Refused(400, "a multipart body in which its boundary does not occur")
    made: list[Part] = []
    while not body.startswith(b"--", at):
        begin = body.find(b"\r\n", at, at + HEAD)
        if begin < 0 or body[at:begin].strip(b" \t"):
            raise Refused(400, "a multipart body that is broken after a boundary")
        end = body.find(separator, begin)
        if end < 0:
            raise Refused(400, "a multipart body that ends before its last boundary: it was cut off")
        if len(made) == most:
            raise Refused(413, f"more than {most} pictures in one request: send them in several")
        made.append(part(body, begin, end))
        at = end + len(separator)
    if not made:
        raise Refused(422, f"a form without pictures: send them as parts named {FIELD!r}")
    return made


def part(body: bytes | bytearray, begin: int, end: int) -> Part:
    """One part, which starts with the line end before its headers."""
    if body.startswith(b"\r\n\r\n", begin):
        raise Refused(400, "a part of the form has no Content-Disposition")
    head = body.find(b"\r\n\r\n", begin, min(end, begin + HEAD))
    if head < 0:
        raise Refused(400, "a part of the form has no end of its headers, or too many of them")
    lines = body[begin + 2 : head].decode("utf-8", "replace").split("\r\n")
    found = next((line for line in lines if line.lower().startswith("content-disposition:")), "")
    said = dict(options(found))
    if said.get("name") != FIELD:
        name = shown(said.get("name", ""))
        raise Refused(422, f"a part of the form is named {name!r}: pictures are sent as parts named {FIELD!r}")
    return Part(file_name(said), bytes(body[head + 4 : end]))


def file_name(said: dict[str, str]) -> str | None:
    """What the client calls a picture: only shown again, never opened."""
    if (extended := said.get("filename*", "")).lower().startswith("utf-8''"):
        return shown(unquote(extended[7:], errors="replace"))
    return shown(said["filename"]) if "filename" in said else None


def shown(text: str) -> str:
    """Text of a client's, without what cannot be shown and no longer than a line."""
    return "".join(c if c.isprintable() else "�" for c in text[:NAME])
