"""Refusals, their messages, and that the service keeps working afterwards."""

import io
import json
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="the service is not installed: pip install 'vitrail[serve]'")

from tests.serve.made import FORM, form, held, picture, serving, tiny
from vitrail.serve import connection
from vitrail.serve.app import PAGE_FILES
from vitrail.serve.auth import Tokens, load_tokens
from vitrail.serve.metrics import KNOWN_PATHS
from vitrail.serve.server import ServerOptions


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("served") / "tiny.safetensors")


@pytest.fixture(scope="module")
def client(path):
    """Return a client of a service with small limits."""
    with serving(f"tiny={path}", body=300_000, images=8, pixels=1_000_000, body_seconds=0.4) as running:
        yield running
        assert running.predicted(picture())  # it still works after all tests


@cache
def bomb(width: int = 50_000, height: int = 50_000) -> bytes:
    """Return a PNG of a few kilobytes whose header claims gigabytes."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1 + 3 * width) * 8)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_decompression_bomb_is_refused_by_its_header(client):
    before = resident()
    for _ in range(20):
        status, said, _ = client.post("/predict", bomb())
        assert status == 413
        assert "pixels" in said["error"]
    status, said, _ = client.post("/predict", form(("bomb.png", bomb()), ("fine.png", picture())), FORM)
    assert status == 200
    assert "pixels" in said["predictions"][0]["error"]
    assert said["predictions"][1]["answers"]
    assert resident() - before < 40 * 2**20


def resident() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))


def test_pixels_are_counted_before_they_are_decoded(client):
    file = io.BytesIO()
    Image.new("L", (1001, 1000)).save(file, "PNG")
    assert client.post("/predict", file.getvalue())[0] == 413
    file = io.BytesIO()
    Image.new("I;16", (600, 600)).save(file, "PNG")  # needs four times the memory
    status, said, _ = client.post("/predict", file.getvalue())
    assert status == 413
    assert "more than 8 bits" in said["error"]


def test_tiff_tile_size_is_checked(client):
    """A tile is decoded whole, even if the image is small."""
    tags = {256: 16, 257: 16, 258: 8, 259: 5, 262: 1, 277: 1, 322: 40_000, 323: 40_000, 324: 8, 325: 100}
    table = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    data = b"II*\0" + struct.pack("<I", 108) + bytes(100) + struct.pack("<H", len(tags)) + table + bytes(4)
    with Image.open(io.BytesIO(data)) as image:
        assert image.size == (16, 16)
    assert client.post("/predict", data)[0] == 413


def test_jpeg_with_many_scans_is_refused(client):
    status, said, _ = client.post("/predict", picture(kind="JPEG") + b"\xff\xda" * 300)
    assert status == 422
    assert "scans" in said["error"]


def test_large_body_is_refused(client):
    status, said, _ = client.post("/predict", bytes(400_000))
    assert status == 413
    assert "MB" in said["error"]
    pieces = iter([bytes(50_000)] * 8)
    status, said, _ = client.ask("POST", "/predict", pieces, Content_Type="image/png")
    assert status == 413


def test_large_body_is_refused_before_reading(client):
    with client.raw() as sent:
        sent.sendall(
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 104857600\r\n\r\n"
        )
        assert sent.recv(200).startswith(b"HTTP/1.1 413")


def test_chunked_body_is_accepted(client):
    data = picture()
    pieces = iter([data[:100], data[100:101], data[101:]])
    status, _, _ = client.ask("POST", "/predict", pieces, Content_Type="image/png")
    assert status == 200


def test_number_of_images_is_limited(client):
    assert client.post("/predict", form(*[("a.png", picture())] * 8), FORM)[0] == 200
    status, said, _ = client.post("/predict", form(*[("a", b"")] * 2000), FORM)
    assert status == 413
    assert "more than 8 images" in said["error"]
    assert client.post("/attention", form(*[("a.png", picture())] * 2), FORM)[0] == 413


def test_slow_body_times_out(client):
    with client.raw() as sent:
        sent.sendall(
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 1000\r\n\r\nabc"
        )
        assert sent.recv(200).startswith(b"HTTP/1.1 408")


def test_slow_headers_time_out(client, monkeypatch):
    monkeypatch.setattr(connection, "HEADER_TIMEOUT_SECONDS", 0.3)
    begin = time.monotonic()
    with client.raw() as sent:
        sent.sendall(b"POST /predict HTTP/1.1\r\nHost:")
        assert sent.recv(200) == b""
    assert time.monotonic() - begin < 5


def test_large_headers_are_refused(client):
    with client.raw() as sent:
        sent.sendall(b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 70_000)
        assert sent.recv(200).startswith(b"HTTP/1.1 431")
        assert sent.recv(200) == b""


def test_connection_survives_refusals(client):
    data = picture()
    ask = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n"
    with client.raw() as sent:
        for path, status in (
            (b"/predict?model=none", 404),
            (b"/predict", 200),
            (b"/predict?top=x", 422),
            (b"/predict", 200),
        ):
            sent.sendall(ask % (path, len(data)) + data)
            head = b""
            while b"\r\n\r\n" not in head:
                head += sent.recv(1)
            assert head.startswith(b"HTTP/1.1 %d" % status)
            length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
            said = b""
            while len(said) < length:
                said += sent.recv(length - len(said))
            assert isinstance(json.loads(said), dict)


@pytest.mark.parametrize(
    ("body", "kind", "status", "why"),
    [
        (b"abc", "text/plain", 415, "unsupported content type 'text/plain'"),
        (b"a=b", "application/x-www-form-urlencoded", 415, "send image/*"),
        (b"", "image/png", 422, "empty"),
        (b"GIF89a", "image/gif", 422, "the image"),
        (b"--between--\r\n", FORM, 422, "has no images"),
        (b"nothing", FORM, 400, "boundary"),
        (b"--between\r\n", FORM, 400, "incomplete"),
        (b"--between\r\nno headers\r\n--between--", FORM, 400, "headers"),
        (form(("a.png", b"x"), field="file"), FORM, 422, "'file'"),
        (b"x", "multipart/form-data", 400, "boundary"),
        (b"x", 'multipart/form-data; boundary=""', 400, "boundary"),
    ],
)
def test_invalid_bodies_are_refused(client, body, kind, status, why):
    found, said, headers = client.post("/predict", body, kind)
    assert (found, list(said)) == (status, ["error"])
    assert why in said["error"]
    assert "\n" not in said["error"]
    assert headers["x-content-type-options"] == "nosniff"


def test_compressed_body_is_refused(client):
    assert client.post("/predict", zlib.compress(picture()), Content_Encoding="gzip")[0] == 415


def test_full_queue_returns_503_with_retry_after():
    runtime, opening = held()
    with (
        serving(
            "m=held", opening=opening, how=ServerOptions(max_batch_size=1, drain_seconds=0.0), queue=3, images=3
        ) as client,
        ThreadPoolExecutor(3) as pool,
    ):
        client.predicted(picture())
        runtime.let.clear()
        waiting = [pool.submit(client.predicted, picture(n)) for n in range(3)]
        wait_until(lambda: client.service.image_slots.taken == 3)
        status, said, headers = client.post("/predict", picture())
        assert status == 503
        assert "busy" in said["error"]
        assert int(headers["retry-after"]) >= 1
        assert client.ask("GET", "/healthz")[0] == 200
        assert b"vitrail_queue_images 3.0" in client.ask("GET", "/metrics")[1]
        runtime.let.set()
        assert all(each.result() for each in waiting)
        assert client.predicted(picture())
        assert client.service.image_slots.taken == 0


def test_timed_out_requests_are_dropped():
    runtime, opening = held()
    with (
        serving(
            "m=held", opening=opening, how=ServerOptions(max_batch_size=1, drain_seconds=0.0), seconds=0.5
        ) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        client.predicted(picture())
        runtime.let.clear()
        runtime.batches.clear()
        waiting = [pool.submit(client.post, "/predict", picture(n)) for n in range(4)]
        wait_until(lambda: runtime.batches)
        for each in waiting:
            status, said, headers = each.result()
            assert status == 503
            assert "0.5 s" in said["error"]
            assert "retry-after" in headers
        runtime.let.set()
        assert client.predicted(picture())
        assert sum(runtime.batches) == 2  # one was running; the other three never started


def test_disconnected_clients_are_dropped():
    runtime, opening = held()
    with serving("m=held", opening=opening, how=ServerOptions(max_batch_size=1, drain_seconds=0.0)) as client:
        client.predicted(picture())
        runtime.let.clear()
        runtime.batches.clear()
        data = picture()
        head = (
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n"
            % len(data)
        )
        gone = [client.raw() for _ in range(3)]
        for each in gone:
            each.sendall(head + data)
        wait_until(lambda: client.service.image_slots.taken == 3 and runtime.batches)  # one is running
        for each in gone:
            each.close()
        wait_until(lambda: client.service.image_slots.taken == 0)
        runtime.let.set()
        assert client.predicted(data)
        assert sum(runtime.batches) == 2


def wait_until(true, seconds=10):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_total_body_memory_is_limited(path):
    with serving(f"tiny={path}", body=1000) as client:
        head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 1000\r\n\r\n"
        held_open = []
        for _ in range(8):
            sent = client.raw()
            sent.sendall(head + bytes(999))
            held_open.append(sent)
        wait_until(lambda: client.service.body_memory.bytes == 8 * 999)
        status, said, _ = client.post("/predict", bytes(500))
        assert status == 503
        assert "large" in said["error"]
        for sent in held_open:
            sent.close()
        wait_until(lambda: client.service.body_memory.bytes == 0)
        assert client.post("/predict", bytes(500))[0] == 422


def test_routes_require_a_token(path):
    secrets = ("the-first-secret", "the-second-secret")
    with serving(f"tiny={path}", tokens=secrets) as client:
        for method, where in (
            ("POST", "/predict"),
            ("POST", "/embed"),
            ("POST", "/attention"),
            ("GET", "/models"),
            ("GET", "/metrics"),
            ("POST", "/reload"),
        ):
            for brought in (
                {},
                {"Authorization": "Bearer the-first-secreT"},
                {"Authorization": "Basic the-first-secret"},
                {"Authorization": "Bearer"},
                {"Authorization": "Bearer \xe9"},
            ):
                status, said, headers = client.ask(
                    method, where, picture() if method == "POST" else None, Content_Type="image/png", **brought
                )
                assert status == 401, (where, brought)
                assert "Bearer TOKEN" in said["error"]
                assert headers["www-authenticate"] == "Bearer"
        for secret in secrets:
            assert client.post("/predict", picture(), Authorization=f"Bearer {secret}")[0] == 200
        for where in ("/", "/healthz", "/readyz", "/openapi.json"):
            assert client.ask("GET", where)[0] == 200


def test_reload_requires_tokens(client):
    assert client.ask("POST", "/reload")[0] == 404


def test_load_tokens(tmp_path, monkeypatch):
    file = tmp_path / "tokens"
    file.write_text("# ours\nfrom-the-file\n\n")
    monkeypatch.setenv("VITRAIL_TOKEN", "from-the-environment")
    found = load_tokens(["given-by-hand"], file)
    assert all(
        found.is_allowed(f"Bearer {token}") for token in ("from-the-file", "from-the-environment", "given-by-hand")
    )
    assert not found.is_allowed("Bearer # ours")
    with pytest.raises(ValueError, match="at least 8"):
        Tokens(["short"])
    file.write_text("\n")
    with pytest.raises(ValueError, match="has no tokens"):
        load_tokens([], file)


def test_internal_error_is_one_line_and_logged(path, caplog):
    runtime, opening = held()
    with serving("m=held", opening=opening) as client:
        runtime.__class__ = type("Broken", (), {"name": "torch", "__call__": lambda self, pixels: 1 / 0})
        status, said, _ = client.post("/predict", picture())
    assert status == 500
    assert said == {"error": "inference failed"}
    assert "ZeroDivisionError" in caplog.text


def test_not_ready_while_stopping(path):
    with serving(f"tiny={path}", how=ServerOptions(drain_seconds=0.0)) as client:
        client.service.stopping = True
        status, _, headers = client.ask("GET", "/readyz")
        assert status == 503
        assert "retry-after" in headers
        assert client.predicted(picture())
        assert client.ask("GET", "/healthz")[0] == 200


def test_metrics_group_unknown_paths(client):
    client.ask("GET", "/made/up/1")
    client.ask("GET", "/made/up/2")
    client.predicted(picture())
    text = client.ask("GET", "/metrics")[1].decode()
    assert 'vitrail_requests_total{code="404",endpoint="other"}' in text
    assert "made/up" not in text
    for path in PAGE_FILES:
        assert path in KNOWN_PATHS
    for name in (
        "vitrail_request_seconds_bucket",
        "vitrail_batch_images_bucket",
        "vitrail_images_total",
        "process_resident",
    ):
        assert name in text


def test_attention_requests_are_limited(path):
    with serving(f"tiny={path}", attention_requests=2) as client, ThreadPoolExecutor(6) as pool:
        gate = threading.Event()
        inner = client.service.attention_viewer
        client.service.attention_viewer = lambda *given: (gate.wait(20), inner(*given))[1]
        waiting = [pool.submit(client.post, "/attention", picture(n)) for n in range(2)]
        wait_until(lambda: client.service.attention_slots.taken == 2)
        assert client.post("/attention", picture())[0] == 503
        assert client.predicted(picture())
        gate.set()
        assert [each.result()[0] for each in waiting] == [200, 200]


def test_runtime_without_module_has_no_attention():
    _, opening = held()
    with serving("m=held", opening=opening) as client:
        assert client.ask("GET", "/models")[1]["models"][0]["attention"] is False
        status, said, _ = client.post("/attention", picture())
        assert status == 409
        assert "attention" in said["error"]
