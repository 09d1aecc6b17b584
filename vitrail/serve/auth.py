"""Bearer tokens: loading, validation and constant-time comparison."""

import hashlib
import hmac
import os
from pathlib import Path

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
