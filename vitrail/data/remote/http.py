"""Requests over HTTP and HTTPS, in the session of fsspec's file system."""

import asyncio
import os
import re
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
from fsspec import config
from fsspec.asyn import sync as run_sync
from fsspec.implementations.http import HTTPFileSystem
from yarl import URL

from vitrail.data.remote.settings import read_settings
from vitrail.data.remote.transport import Interrupted, Sink, Version, check_status, describe_stall
from vitrail.data.remote.urls import RemoteError, plain_name

CHUNK_BYTES = 2**18
CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")


class HTTPTransport:
    """One attempt of a request. Proxies and ~/.netrc are those of the environment; fsspec's configuration adds headers."""

    def __init__(self) -> None:
        settings = dict(config.conf.get("https", {}) or config.conf.get("http", {}))
        client = {"trust_env": True, **settings.pop("client_kwargs", {})}
        self.files = HTTPFileSystem(client_kwargs=client, skip_instance_cache=True, **settings)

    def read_version(self, url: str) -> Version:
        """Request the first byte: some servers and signed addresses refuse HEAD."""
        return cast(Version, run_sync(self.files.loop, self._read_version, url))

    def receive(self, url: str, version: Version, start: int, stop: int, sink: Sink) -> None:
        run_sync(self.files.loop, self._receive, url, version, start, stop, sink)

    def list_files(self, pattern: str) -> list[str]:
        raise RemoteError(f"{plain_name(pattern)}: HTTP cannot list files: use {{000..015}} or a list of addresses")

    async def _read_version(self, url: str) -> Version:
        async with _Response(self.files, url, "bytes=0-0") as response:
            headers, status = response.headers, response.status
            stated = CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
            if status == 416 and stated and stated[3] == "0":
                return Version(0, headers.get("ETag", ""), headers.get("Last-Modified", ""))
            check_status(url, status, response.reason or "", headers.get("Retry-After", ""))
            check_encoding(url, headers)
            length = (stated[3] if stated else "") if status == 206 else headers.get("Content-Length", "")
            if not length.isdecimal():
                raise RemoteError(f"{plain_name(url)}: the server does not state the length of the file")
            etag = headers.get("ETag", "").removeprefix("W/")
            return Version(int(length), etag, headers.get("Last-Modified", ""), ranges=status == 206)

    async def _receive(self, url: str, version: Version, start: int, stop: int, sink: Sink) -> None:
        wanted = f"bytes={start}-{stop - 1}" if version.ranges else None
        async with _Response(self.files, url, wanted) as response:
            headers = response.headers
            if response.status == 416:
                version.check(url, 0, "", "")
            check_status(url, response.status, response.reason or "", headers.get("Retry-After", ""))
            check_encoding(url, headers)
            stated = CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
            length = headers.get("Content-Length", "")
            total = int(stated[3]) if stated else int(length) if length.isdecimal() and response.status == 200 else None
            etag = headers.get("ETag", "").removeprefix("W/")
            version.check(url, total, etag, headers.get("Last-Modified", ""))
            if wanted and (response.status != 206 or stated is None or stated[1] != str(start)):
                raise Interrupted("the server sent another range than was requested")
            left = stop - start if wanted else version.size
            async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                if len(chunk) > left:
                    raise RemoteError(f"{plain_name(url)}: the server sent more bytes than it stated")
                left -= len(chunk)
                sink(chunk)
            if left:
                raise Interrupted(f"the connection was closed {left:,} bytes before the end")


class _Response:
    """The response to a request, with the errors of the library in words."""

    def __init__(self, files: Any, url: str, wanted: str | None) -> None:
        self.files, self.url, self.wanted = files, url, wanted

    async def __aenter__(self) -> Any:
        timeout = read_settings().timeout
        headers = {"Accept-Encoding": "identity"} | ({"Range": self.wanted} if self.wanted else {})
        headers |= self.files.kwargs.get("headers", {})
        limits = aiohttp.ClientTimeout(total=None, connect=timeout, sock_connect=timeout, sock_read=timeout)
        try:
            session = await self.files.set_session()
            address = URL(self.url, encoded="%" in self.url or "?" in self.url)  # a signature is of these very letters
            others = {name: value for name, value in self.files.kwargs.items() if name != "headers"}
            self.response = await session.get(address, headers=headers, timeout=limits, **others)
        except Exception as error:
            raise explain(self.url, error, timeout) from None
        return self.response

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None and self.response.content.at_eof():
            self.response.release()  # the connection is used again
        else:
            self.response.close()  # there may be more data than was read
        if isinstance(error, aiohttp.ClientError | asyncio.TimeoutError | OSError):
            raise explain(self.url, error, read_settings().timeout) from None


def explain(url: str, error: BaseException, timeout: float) -> BaseException:
    """Return an error of the library in words: Interrupted if the request may be repeated, else RemoteError."""
    host = urlsplit(url).hostname or ""  # URL() refuses a wrong port
    match error:
        case aiohttp.ClientConnectorDNSError():
            return Interrupted(f"host not found: {host}")
        case aiohttp.ClientSSLError() | aiohttp.ServerFingerprintMismatch():
            why = str(getattr(error, "os_error", None) or getattr(error, "certificate_error", None) or error)
            why = why.partition("] ")[2].partition(" (_ssl")[0] or why
            return RemoteError(f"{plain_name(url)}: no secure connection to {host} ({why}): check $SSL_CERT_FILE")
        case aiohttp.InvalidURL() | ValueError():
            return RemoteError(f"{plain_name(url)} is not a valid address")
        case aiohttp.TooManyRedirects():
            return RemoteError(f"{plain_name(url)}: too many redirects")
        case asyncio.TimeoutError():
            return Interrupted(describe_stall(timeout))
        case aiohttp.ClientConnectorError():
            number = error.os_error.errno  # its text names addresses
            return Interrupted(f"cannot connect to {host} ({os.strerror(number) if number else 'no answer'})")
        case aiohttp.ClientPayloadError():
            return Interrupted("the connection was closed before the end")
        case aiohttp.ClientError() | OSError():
            return Interrupted(f"the connection was lost ({type(error).__name__})")
    return error


def check_encoding(url: str, headers: Any) -> None:
    """Raise RemoteError for a compressed response: its ranges are those of other bytes."""
    if headers.get("Content-Encoding", "identity") != "identity":
        kind = headers["Content-Encoding"]
        raise RemoteError(f"{plain_name(url)}: the server compresses the file ({kind}): turn that off for it")
