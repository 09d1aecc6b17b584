"""Who may ask: whoever brings one of the tokens, where there are any."""

import hashlib
import hmac
import os
from pathlib import Path

SHORTEST = 8  # characters


class Tokens:
    """Tokens as digests, so that comparing takes as long whatever is brought."""

    def __init__(self, tokens: list[str]) -> None:
        for token in tokens:
            if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
                raise ValueError(
                    f"a token of {len(token)} characters: use at least {SHORTEST} letters and digits without spaces, "
                    "such as `openssl rand -hex 32` writes"
                )
        self.digests = [digest(token.encode("ascii")) for token in tokens]

    def __bool__(self) -> bool:
        return bool(self.digests)

    def allow(self, authorization: str | None) -> bool:
        """Whether this header brings a token. All are compared, and each takes the same time."""
        scheme, _, brought = (authorization or "").partition(" ")
        found = digest(brought.strip().encode("latin-1", "replace"))
        right = sum([hmac.compare_digest(found, known) for known in self.digests])
        return scheme.lower() == "bearer" and right > 0


def digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def tokens_from(given: list[str], file: Path | None) -> Tokens:
    """Those of the command line, of a file (one a line, # begins a comment) and of VITRAIL_TOKEN."""
    found = list(given)
    if file is not None:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        read = [line for line in lines if line and not line.startswith("#")]
        if not read:
            raise ValueError(f"{file} holds no token: write one a line")
        found += read
    if "VITRAIL_TOKEN" in os.environ:
        found.append(os.environ["VITRAIL_TOKEN"].strip())
    return Tokens(found)
