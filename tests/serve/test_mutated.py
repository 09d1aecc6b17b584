"""Hundreds of malformed uploads; benchmarks/uploads.py sends 10,000."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi", reason="the service is not installed: pip install 'vitrail[serve]'")

from tests.serve.made import picture, serving, tiny
from tests.serve.mutated import bombs, files, large, status, uploads
from vitrail.data.decode import FORMATS


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    path = tiny(tmp_path_factory.mktemp("served") / "tiny.safetensors")
    with serving(f"tiny={path}", body=2 * 2**20, body_seconds=1.0, formats=tuple(FORMATS)) as running:
        yield running


def test_malformed_uploads_never_cause_5xx(client):
    asked = list(uploads(340))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda upload: status(client.port, iter([upload.request])), asked))
    strange = [
        (upload.what, code)
        for upload, code in zip(asked, found, strict=True)
        if code is not None and not (code == 200 or 400 <= code < 500 or code == 503)
    ]
    assert not strange
    assert found.count(200) > 10  # some are only slightly damaged
    assert sum(code is not None and 400 <= code < 500 for code in found) > 150
    assert all(
        code is not None for upload, code in zip(asked, found, strict=True) if upload.what.startswith(("bomb", "cut"))
    )
    assert client.predicted(picture())
    assert client.service.image_slots.taken == client.service.body_memory.bytes == 0
    assert {thread.name for thread in threading.enumerate()} >= {"model-0"}


@pytest.mark.parametrize("kind", sorted(bombs()))
def test_bombs_are_refused(client, kind):
    code, said, _ = client.post("/predict", bombs()[kind])
    if kind == "text":  # a large comment in a small image is skipped
        assert code in (200, 422)
    else:
        assert code in (413, 422), said
        assert "\n" not in said["error"]


@pytest.mark.parametrize("kind", sorted(files()))
def test_every_format_is_decoded(client, kind):
    assert client.post("/predict", files()[kind])[0] == 200


def test_large_bodies_are_refused(client):
    assert status(client.port, large()) == 413
    assert status(client.port, large(told=False)) == 413


def test_dripping_body_is_refused(client):
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 1000\r\n\r\n"
    assert status(client.port, iter([head, *[b"x"] * 8]), pause=0.2) == 408
