"""Addresses of remote files, http(s):// and s3://: lists of them, and texts without their credentials."""

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

SCHEMES = ("http", "https", "s3")
ADDRESS = re.compile(r"(?:https?|s3)://", re.IGNORECASE)
HIDDEN = "***"
_COMMA = re.compile(r",(?=(?:https?|s3)://)", re.IGNORECASE)  # between addresses; braces have commas too
_USER = re.compile(r"(?i)\b((?:https?|s3)://)[^/?#\s'\"]*@")
_QUERY = re.compile(
    r"(?i)((?:https?|s3)://(?:(?!,(?:https?|s3)://)[^\s?'\"<>])*)\?(?:(?!,(?:https?|s3)://)[^\s'\"<>])*"
)
_SPLIT = re.compile(r"(?:^|,)(train|training|validation|valid|val|dev|test|testing)=")


class RemoteError(Exception):
    """A remote file that is missing, refused, changed, or could not be read after all attempts.

    It is no OSError: a network that fails must not look like an image that is damaged, which training replaces by another.
    """


def is_remote(source: object) -> bool:
    """Return True for an address of a remote file, or a list of them with commas."""
    return isinstance(source, str) and ADDRESS.match(source) is not None


def redact(text: str) -> str:
    """Return a text in which the user, the password and the query string of every address are hidden."""
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\1?{HIDDEN}", _USER.sub(rf"\1{HIDDEN}@", text))


def has_credentials(source: object) -> bool:
    """Return True if an address has parts that are not shown and not stored."""
    return isinstance(source, str) and redact(source) != source


def refuse_credentials(*sources: object) -> None:
    """Raise ValueError for an address with credentials, where a command would have to store them."""
    for source in sources:
        if has_credentials(source):
            shown = redact(str(source))
            raise ValueError(
                f"{shown}: its credentials cannot be stored: list the shards in a text file, and give that"
            )


def is_redacted(source: object) -> bool:
    """Return True for an address that was stored without its credentials."""
    return isinstance(source, str) and "://" in source and (f"?{HIDDEN}" in source or f"//{HIDDEN}@" in source)


def plain_name(url: str) -> str:
    """Return an address without user, password and query string, the name of a file in messages and reports."""
    parts = urlsplit(url)
    if parts.scheme.lower() == "s3":
        return url
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def split_addresses(source: str) -> list[str]:
    """Return the addresses of a list with commas."""
    return [part.strip() for part in _COMMA.split(source) if part.strip()]


def parse_split_sources(source: str) -> dict[str, str] | None:
    """Return the sources of "train=…,validation=…" by split; None for another source."""
    found = list(_SPLIT.finditer(source))
    if not found or found[0].start():
        return None
    ends = [match.start() for match in found[1:]] + [len(source)]
    values = [(match[1], source[match.end() : end]) for match, end in zip(found, ends, strict=True)]
    if empty := [name for name, value in values if not value.strip()]:
        raise ValueError(f"{redact(source)} has no data for {empty[0]}: write {empty[0]}=DATA")
    if len({name for name, _ in values}) < len(values):
        raise ValueError(f"{redact(source)} names a split twice: give each split once")
    return dict(values)


def redact_all(texts: Sequence[str]) -> list[str]:
    """Return texts with hidden credentials."""
    return [redact(text) for text in texts]
