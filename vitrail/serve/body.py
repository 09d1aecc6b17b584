"""A request's body: read under limits as it comes, before anybody looks into it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request

from vitrail.serve.limits import MEGABYTE, Held, Hold, Limits, Refused
from vitrail.serve.multipart import Part, boundary_of, parts

RAW = "application/octet-stream"
FORM = "multipart/form-data"


@asynccontextmanager
async def received(request: Request, limits: Limits, held: Held) -> AsyncIterator[list[Part]]:
    """The pictures of a request: its whole body is one, or it is a form of several."""
    said = request.headers.get("content-type", RAW)
    kind = said.partition(";")[0].strip().lower()
    if kind != FORM and kind != RAW and not kind.startswith("image/"):
        raise Refused(
            415,
            f"Content-Type {kind[:100] or 'of no kind'!r}: send a picture's bytes as image/jpeg, image/png, … or {RAW}, "
            f"or a form ({FORM}) with parts named 'pictures'",
        )
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise Refused(415, "a body with a Content-Encoding: send pictures as they are")
    boundary = boundary_of(said) if kind == FORM else b""
    with held.holding() as hold:
        yield split(await whole(request, limits, hold), boundary, limits.pictures)


def split(body: bytearray, boundary: bytes, most: int) -> list[Part]:
    """The pictures in a body: itself, or what its boundary separates."""
    return parts(body, boundary, most) if boundary else [Part(None, bytes(body))]


async def whole(request: Request, limits: Limits, hold: Hold) -> bytearray:
    """All bytes of a body, counted while they come: a length that the client tells is believed only where it is too large."""
    too_large = Refused(413, f"a body of more than {limits.body / MEGABYTE:g} MB: send less")
    told = request.headers.get("content-length", "")
    if told.isascii() and told.isdigit() and int(told[:20]) > limits.body:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "the connection ended before the body did")
                chunk = message.get("body", b"")
                if len(body) + len(chunk) > limits.body:
                    raise too_large
                hold.add(len(chunk))
                body += chunk
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise Refused(408, f"the body took longer than {limits.body_seconds:g} s to come") from None
    if not body:
        raise Refused(422, "an empty body: send a picture")
    return body
