"""Attacks on the service below HTTP's surface: endless headers and trailers, chunks, pipelines, clients that do not read."""

import socket
import time

import pytest

pytest.importorskip("fastapi", reason="the service is not installed: pip install 'vitrail[serve]'")

from tests.hostile.serving import MEGABYTE, flood, is_ended, read_status, start_service
from tests.serve.made import picture, serving, tiny
from vitrail.serve import connection, server

TOKEN = "a-token-for-the-tests"
HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n"
GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
ALLOWED = f"Authorization: Bearer {TOKEN}\r\n".encode()
ATTACKS = {
    "trailers": (CHUNKED + ALLOWED + b"\r\n5\r\nabcde\r\n0\r\n", b"X: y\r\n" * 10_000),
    "trailers without a token": (CHUNKED + b"\r\n5\r\nabcde\r\n0\r\n", b"X: y\r\n" * 10_000),
    "one endless trailer": (CHUNKED + b"\r\n5\r\nabcde\r\n0\r\nX: ", b"y" * 60_000),
    "one endless name of a trailer": (CHUNKED + b"\r\n5\r\nabcde\r\n0\r\nX", b"y" * 60_000),
    "headers": (GET, b"X: y\r\n" * 10_000),
    "one endless header": (GET + b"X: ", b"y" * 60_000),
    "an endless address": (b"GET /", b"y" * 60_000),
    "an endless chunk extension": (CHUNKED + ALLOWED + b"\r\n5;", b"y" * 60_000),
    "a byte per chunk": (CHUNKED + ALLOWED + b"\r\n", b"1\r\nx\r\n" * 10_000),
    "pipelined requests": (HEAD + ALLOWED + b"Content-Length: 9\r\n\r\nninebytes", (GET + b"\r\n") * 2000),
    "a body without a token": (HEAD + b"Content-Length: 1000000000\r\n\r\n", bytes(60_000)),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("served") / "tiny.safetensors")


@pytest.fixture(scope="module")
def service(path, tmp_path_factory):
    with start_service(tmp_path_factory.mktemp("log"), f"tiny={path}", "--token", TOKEN) as running:
        yield running


@pytest.mark.parametrize("attack", sorted(ATTACKS))
def test_endless_requests_take_no_memory(service, attack):
    """Four clients send up to 64 MB each."""
    opening, piece = ATTACKS[attack]
    before = service.resident()
    for _ in range(4):
        with service.connect() as sent:
            sent.sendall(opening)
            flood(sent, piece, 64 * MEGABYTE, seconds=3)
            assert service.resident() - before < 60 * MEGABYTE
    with service.connect() as sent:
        sent.sendall(GET + b"\r\n")
        assert read_status(sent) == 200
    assert "Traceback" not in service.log.read_text()


@pytest.mark.parametrize("attack", sorted(set(ATTACKS) - {"pipelined requests", "a body without a token"}))
def test_endless_requests_are_ended(service, attack):
    """A client that goes on is cut off long before a megabyte is kept (kernel buffers take some more)."""
    opening, piece = ATTACKS[attack]
    with service.connect() as sent:
        sent.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        sent.sendall(opening)
        flood(sent, piece, 64 * MEGABYTE)
        assert is_ended(sent, 10)


@pytest.mark.parametrize("headers", [b"X: " + b"a" * 100_000 + b"\r\n", b"X: y\r\n" * 101])
def test_headers_in_one_packet_are_counted(service, headers):
    with service.connect() as sent:
        sent.sendall(GET + headers + b"\r\n")
        assert read_status(sent) in (431, None)  # None: reset, because the rest of the packet was not read


def test_large_headers_within_the_limit_are_accepted(service):
    with service.connect() as sent:
        sent.sendall(GET + b"X: " + b"a" * 60_000 + b"\r\n" + b"Y: z\r\n" * 90 + b"\r\n")
        assert read_status(sent) == 200


def test_trailers_do_not_become_headers(path):
    """A trailer must not pass for the token that the headers lack, nor be an error for a client that has one."""
    with serving(f"tiny={path}", tokens=(TOKEN,)) as client:
        data = picture()
        body = b"\r\n%x\r\n%s\r\n0\r\n" % (len(data), data)
        for head, trailer, status in ((b"", ALLOWED, 401), (ALLOWED, b"X-Checksum: 1\r\n", 200)):
            with client.raw() as sent:
                sent.sendall(CHUNKED + head + body + trailer + b"\r\n")
                assert read_status(sent) == status


def test_token_is_checked_before_the_body_is_read(path):
    """Without a token no byte of the body is asked for: no 100 Continue, and 401 at once."""
    with serving(f"tiny={path}", tokens=(TOKEN,)) as client:
        reading = []
        reserve = client.service.body_memory.reserve
        client.service.body_memory.reserve = lambda: (reading.append(1), reserve())[1]
        with client.raw() as sent:
            sent.sendall(HEAD + b"Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n")
            assert read_status(sent) == 401
        assert not reading
        assert client.post("/predict", picture(), Authorization=f"Bearer {TOKEN}")[0] == 200
        assert reading


def test_few_pipelined_requests_are_answered_in_order(path):
    with serving(f"tiny={path}") as client, client.raw() as sent:
        sent.sendall((GET + b"\r\n") * 5)
        said = b""
        while said.count(b'"alive"') < 5:
            said += sent.recv(65536)
        assert said.count(b"HTTP/1.1 200") == 5


def test_clients_that_never_read_are_disconnected(path, monkeypatch):
    """Sixty clients ask for much and read nothing."""
    monkeypatch.setattr(connection, "WRITE_TIMEOUT_SECONDS", 0.5)
    with serving(f"tiny={path}") as client:
        silent = []
        for _ in range(60):
            sent = socket.socket()
            sent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sent.connect(("127.0.0.1", client.port))
            sent.setblocking(False)
            silent.append(sent)
        end = time.monotonic() + 20
        gone = set()
        ask = b"GET /page.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
        while len(gone) < 60 and time.monotonic() < end:
            for number, sent in enumerate(silent):
                try:
                    sent.send(ask)  # more and more responses, none of them read
                except BlockingIOError:
                    pass
                except ConnectionError:
                    gone.add(number)
            time.sleep(0.02)
        assert len(gone) == 60
        assert client.predicted(picture())
        for sent in silent:
            sent.close()


def test_idle_connections_make_room(path, monkeypatch):
    """Sixty connections that send nothing, or half a header, do not lock others out."""
    monkeypatch.setattr(server, "max_connections", lambda: 16)
    with serving(f"tiny={path}") as client:
        idle = []
        for number in range(60):
            idle.append(client.raw())
            idle[-1].sendall(GET if number % 2 else b"")
        for number in range(5):
            assert client.predicted(picture(number))
        assert len(client.running.server_state.connections) <= 17
        for sent in idle:
            sent.close()


def test_slow_readers_keep_their_connection(path, monkeypatch):
    """A client that reads slowly, but more than the minimum, gets its whole response."""
    monkeypatch.setattr(connection, "WRITE_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(connection, "MIN_READ_BYTES", 1000)
    with serving(f"tiny={path}") as client:
        sent = socket.socket()
        sent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sent.connect(("127.0.0.1", client.port))
        with sent:
            sent.sendall(b"GET /page.js HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            said = b""
            while piece := sent.recv(2000):
                said += piece
                time.sleep(0.02)
        head, _, body = said.partition(b"\r\n\r\n")
        assert b"content-length: %d" % len(body) in head
