"""What schemathesis has to be told: bytes that are called a picture are one."""

import schemathesis
from hypothesis import strategies

from tests.serve.made import picture

for _kind in ("image/jpeg", "image/png", "image/webp", "application/octet-stream"):
    schemathesis.openapi.media_type(_kind, strategies.integers(0, 50).map(lambda seed: picture(seed)))
