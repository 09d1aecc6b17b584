"""Hooks for schemathesis: image media types are generated as valid images."""

import schemathesis
from hypothesis import strategies

from tests.serve.made import picture

_pictures = strategies.integers(0, 50).map(picture)
for _kind in ("image/jpeg", "image/png", "image/webp", "application/octet-stream"):
    schemathesis.openapi.media_type(_kind, _pictures)
schemathesis.openapi.format("binary", _pictures)
