"""Hundreds of uploads that no honest client would send: 10,000 are in benchmarks/uploads.py."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi", reason="the service is not installed: pip install 'vitrail[serve]'")

from tests.serve.made import picture, serving, tiny
from tests.serve.mutated import bombs, files, large, status, uploads


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with serving(
        f"tiny={tiny(tmp_path_factory.mktemp('served') / 'tiny.safetensors')}", body=2 * 2**20, body_seconds=1.0
    ) as running:
        yield running


def test_no_upload_brings_a_fault_or_ends_the_service(client):
    asked = list(uploads(340))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda upload: status(client.port, iter([upload.request])), asked))
    strange = [
        (upload.what, code)
        for upload, code in zip(asked, found, strict=True)
        if code is not None and not (code == 200 or 400 <= code < 500 or code == 503)
    ]
    assert not strange
    assert found.count(200) > 10  # some are not broken enough
    assert sum(code is not None and 400 <= code < 500 for code in found) > 150
    assert all(
        code is not None for upload, code in zip(asked, found, strict=True) if upload.what.startswith(("bomb", "cut"))
    )
    assert client.predicted(picture())
    assert client.service.places.taken == client.service.held.bytes == 0
    assert {thread.name for thread in threading.enumerate()} >= {"model-0"}


@pytest.mark.parametrize("kind", sorted(bombs()))
def test_no_bomb_is_answered_with_more_than_a_refusal(client, kind):
    code, said, _ = client.post("/predict", bombs()[kind])
    if kind == "text":  # a comment of megabytes in a small picture is left unread
        assert code in (200, 422)
    else:
        assert code in (413, 422), said
        assert "\n" not in said["error"]


@pytest.mark.parametrize("kind", sorted(files()))
def test_whole_pictures_of_every_format_are_answered(client, kind):
    assert client.post("/predict", files()[kind])[0] == 200


def test_bodies_of_a_hundred_megabytes_are_refused_with_and_without_a_length(client):
    assert status(client.port, large()) == 413
    assert status(client.port, large(told=False)) == 413


def test_a_body_that_drips_is_refused(client):
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: 1000\r\n\r\n"
    assert status(client.port, iter([head, *[b"x"] * 8]), pause=0.2) == 408
