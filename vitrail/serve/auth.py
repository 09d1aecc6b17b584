"""Access: bearer tokens, compared in constant time, and the host names and origins of requests.

A web page can make its visitor's browser send requests to services on the visitor's machine, under the page's own host name
(DNS rebinding) or under theirs (cross-site requests). Both show in the headers Host and Origin, which a page cannot set.
"""

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from vitrail.serve.limits import RequestRefused

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # change nothing, and another site's page cannot read the response
MIN_TOKEN_LENGTH = 8  # characters


class Tokens:
    """Digests of the accepted tokens, compared in constant time."""

    def __init__(self, tokens: list[str]) -> None:
        for token in tokens:
            if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
                raise ValueError(
                    f"invalid token of {len(token)} characters: use at least {MIN_TOKEN_LENGTH} ASCII characters without "
                    "spaces, e.g. from `openssl rand -hex 32`"
                )
        self.digests = [hash_token(token.encode("ascii")) for token in tokens]

    def __bool__(self) -> bool:
        return bool(self.digests)

    def is_allowed(self, authorization: str | None) -> bool:
        """Return True if an Authorization header has a valid token. All digests are compared, in constant time."""
        scheme, _, token = (authorization or "").partition(" ")
        digest = hash_token(token.strip().encode("latin-1", "replace"))
        matches = sum([hmac.compare_digest(digest, known) for known in self.digests])
        return scheme.lower() == "bearer" and matches > 0


class AllowedHosts:
    """Host names of the service: loopback names, the address that the client connected to, and given ones ("*": all)."""

    def __init__(self, names: Iterable[str] = (), listening: str = "") -> None:
        self.given = {name.lower().strip("[]") for name in names}
        self.names = {*LOOPBACK_HOSTS, listening.lower(), *self.given}

    def check(self, scope: Scope) -> None:
        """Refuse a request for another host, and one that another site's page sends."""
        if "*" in self.given:
            return
        headers = Headers(scope=scope)
        hosts = [host.lower() for host in headers.getlist("host")]
        name = parse_host(f"//{hosts[0]}") if len(hosts) == 1 else None
        if name is None or (name not in self.names and name != (scope.get("server") or ("",))[0]):
            message = f"unknown host {', '.join(hosts)[:100]!r}: start the service with --allow-host NAME"
            raise RequestRefused(421, message)
        for origin in map(str.lower, headers.getlist("origin") if scope["method"] not in SAFE_METHODS else ()):
            if origin.partition("://")[2] != hosts[0] and parse_host(origin) not in self.given:
                raise RequestRefused(403, f"requests of pages from {origin[:100]!r} are not allowed: see --allow-host")


def parse_host(url: str) -> str | None:
    """Return the host name of a URL without its port, None if it is invalid."""
    try:
        parts = urlsplit(url)
        return parts.hostname if parts.username is None and parts.port != 0 and not parts.path.strip("/") else None
    except ValueError:
        return None


def hash_token(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def load_tokens(tokens: list[str], file: Path | None) -> Tokens:
    """Return the tokens of the command line, of a file (one per line, # starts a comment) and of VITRAIL_TOKEN."""
    tokens = list(tokens)
    if file is not None:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        from_file = [line for line in lines if line and not line.startswith("#")]
        if not from_file:
            raise ValueError(f"{file} has no tokens: write one per line")
        tokens += from_file
    if "VITRAIL_TOKEN" in os.environ:
        tokens.append(os.environ["VITRAIL_TOKEN"].strip())
    return Tokens(tokens)
