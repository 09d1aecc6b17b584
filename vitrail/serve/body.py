"""Reading of request bodies: one image as raw bytes, or several in a multipart form (RFC 7578).

The body is in memory and its size is limited, so parts are found by searching for the boundary in one pass.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import unquote

from fastapi import Request

from vitrail.serve.limits import MEGABYTE, BodyMemory, BodyReservation, RequestLimits, RequestRefused

MAX_HEADER_BYTES = 8192  # of a part
FIELD_NAME = "images"
MAX_NAME_LENGTH = 200  # characters of a file name; the rest is cut off
BOUNDARY_PATTERN = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{1,70}")
OPTION_PATTERN = re.compile(r';\s*([\w!#$&+\-^.`|~*]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;\s]+))')


@dataclass(frozen=True)
class ImagePart:
    """The bytes of an image and the client's name for it."""

    name: str | None
    data: bytes


def parse_boundary(content_type: str) -> bytes:
    """Return the boundary of a multipart Content-Type."""
    boundary = dict(parse_header_options(content_type)).get("boundary", "")
    if not BOUNDARY_PATTERN.fullmatch(boundary) or boundary.endswith(" "):
        raise RequestRefused(400, "no valid boundary in the multipart Content-Type: let your client library set it")
    return boundary.encode("ascii")


def parse_header_options(header: str) -> list[tuple[str, str]]:
    """Return the options of a header such as `form-data; name="images"`, with names in lower case."""
    return [
        (name.lower(), re.sub(r"\\(.)", r"\1", quoted) if quoted else bare)
        for name, quoted, bare in OPTION_PATTERN.findall(header)
    ]


def parse_multipart(body: bytes | bytearray, boundary: bytes, max_images: int) -> list[ImagePart]:
    """Return the images of a multipart body, in order."""
    separator = b"\r\n--" + boundary
    if body.startswith(separator[2:]):
        at = len(separator) - 2
    elif (first := body.find(separator)) >= 0:  # a preamble before the first part is allowed and ignored
        at = first + len(separator)
    else:
        raise RequestRefused(400, "the multipart boundary does not occur in the body")
    parts: list[ImagePart] = []
    while not body.startswith(b"--", at):
        begin = body.find(b"\r\n", at, at + MAX_HEADER_BYTES)
        if begin < 0 or body[at:begin].strip(b" \t"):
            raise RequestRefused(400, "invalid multipart body: unexpected data after a boundary")
        end = body.find(separator, begin)
        if end < 0:
            raise RequestRefused(400, "incomplete multipart body: the last boundary is missing")
        if len(parts) == max_images:
            raise RequestRefused(413, f"more than {max_images} images in one request: split it")
        parts.append(parse_part(body, begin, end))
        at = end + len(separator)
    if not parts:
        raise RequestRefused(422, f"the form has no images: send them as parts named {FIELD_NAME!r}")
    return parts


def parse_part(body: bytes | bytearray, start: int, end: int) -> ImagePart:
    """Return one part; `start` is the line break before its headers."""
    if body.startswith(b"\r\n\r\n", start):
        raise RequestRefused(400, "invalid form: a part has no Content-Disposition")
    head = body.find(b"\r\n\r\n", start, min(end, start + MAX_HEADER_BYTES))
    if head < 0:
        raise RequestRefused(400, "invalid form: the headers of a part are incomplete or too large")
    lines = body[start + 2 : head].decode("utf-8", "replace").split("\r\n")
    disposition = next((line for line in lines if line.lower().startswith("content-disposition:")), "")
    options = dict(parse_header_options(disposition))
    if options.get("name") != FIELD_NAME:
        name = sanitise_text(options.get("name", ""))
        raise RequestRefused(422, f"unexpected part {name!r} in the form: name the parts {FIELD_NAME!r}")
    return ImagePart(parse_file_name(options), bytes(body[head + 4 : end]))


def parse_file_name(options: dict[str, str]) -> str | None:
    """Return the client's file name of an image. It is only echoed, never opened."""
    if (extended := options.get("filename*", "")).lower().startswith("utf-8''"):
        return sanitise_text(unquote(extended[7:], errors="replace"))
    return sanitise_text(options["filename"]) if "filename" in options else None


def sanitise_text(text: str) -> str:
    """Return a client's text without unprintable characters, shortened."""
    return "".join(c if c.isprintable() else "�" for c in text[:MAX_NAME_LENGTH])


RAW_TYPE = "application/octet-stream"
FORM_TYPE = "multipart/form-data"


@asynccontextmanager
async def receive_images(
    request: Request, limits: RequestLimits, body_memory: BodyMemory
) -> AsyncIterator[list[ImagePart]]:
    """Yield the images of a request: the body itself, or the parts of a form."""
    content_type = request.headers.get("content-type", RAW_TYPE)
    kind = content_type.partition(";")[0].strip().lower()
    if kind != FORM_TYPE and kind != RAW_TYPE and not kind.startswith(("image/", "video/", "audio/")):
        accepted = f"image/*, video/*, audio/*, {RAW_TYPE} or {FORM_TYPE} with parts named {FIELD_NAME!r}"
        raise RequestRefused(415, f"unsupported content type {kind[:100]!r}: send {accepted}")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise RequestRefused(415, "unsupported Content-Encoding: send uncompressed bodies")
    boundary = parse_boundary(content_type) if kind == FORM_TYPE else b""
    with body_memory.reserve() as reservation:
        body = await read_body(request, limits, reservation)
        yield parse_multipart(body, boundary, limits.images) if boundary else [ImagePart(None, bytes(body))]


async def read_body(request: Request, limits: RequestLimits, reservation: BodyReservation) -> bytearray:
    """Return the body, counting bytes as they arrive. Content-Length is used only to refuse large bodies early."""
    too_large = RequestRefused(413, f"the body is larger than {limits.body / MEGABYTE:g} MB")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > limits.body:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise RequestRefused(400, "the client disconnected before the end of the body")
                chunk = message.get("body", b"")
                if len(body) + len(chunk) > limits.body:
                    raise too_large
                reservation.reserve(len(chunk))
                body += chunk
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise RequestRefused(408, f"the body took longer than {limits.body_seconds:g} s to arrive") from None
    if not body:
        raise RequestRefused(422, "the body is empty: send an image")
    return body
