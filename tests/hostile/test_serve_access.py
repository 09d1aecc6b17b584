"""Web pages that use their visitor's browser against a service on the visitor's machine."""

import pytest

pytest.importorskip("fastapi", reason="the service is not installed: pip install 'vitrail[serve]'")

from tests.serve.made import picture, serving, tiny
from vitrail.serve.auth import AllowedHosts
from vitrail.serve.limits import RequestRefused

TOKEN = "a-token-for-the-tests"
PATHS = (
    "/",
    "/page.js",
    "/page.css",
    "/maps.js",
    "/masks.js",
    "/healthz",
    "/readyz",
    "/models",
    "/metrics",
    "/openapi.json",
    "/no",
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("served") / "tiny.safetensors")


@pytest.fixture(scope="module")
def client(path):
    with serving(f"tiny={path}", hosts=("models.example.org",)) as running:
        yield running


STRANGE_HOSTS = (
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "localhost@evil.example",
    "evil.example#localhost",
    "localhost/evil.example",
    "localhost, evil.example",
    "[::1",
    "localhost:99999",
    "192.0.2.1",
    "",
)


@pytest.mark.parametrize("host", STRANGE_HOSTS)
def test_unknown_hosts_are_refused(client, host):
    for where in PATHS:
        status, said, _ = client.ask("GET", where, Host=host)
        assert status == 421, where
        assert "--allow-host" in said["error"]
    assert client.post("/predict", picture(), Host=host)[0] == 421


def test_missing_or_double_host_is_refused(client):
    for lines in (b"", b"Host: localhost\r\nHost: evil.example\r\n"):
        with client.raw() as sent:
            sent.sendall(b"GET /models HTTP/1.1\r\n" + lines + b"\r\n")
            assert sent.recv(100).startswith((b"HTTP/1.1 421", b"HTTP/1.1 400"))


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:8000", "Models.Example.org:443"])
def test_own_names_are_accepted(client, host):
    assert client.ask("GET", "/models", Host=host)[0] == 200
    assert client.post("/predict", picture(), Host=host, Origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://localhost:1",
        "http://localhost.evil.example",
        "file://",
        "localhost",
        "//",
    ],
)
def test_pages_of_other_sites_cannot_post(client, origin):
    for where in ("/predict", "/embed", "/attention"):
        status, said, _ = client.post(where, picture(), Host="localhost", Origin=origin)
        assert status == 403
        assert "--allow-host" in said["error"]
    assert client.service.image_slots.taken == client.service.body_memory.bytes == 0


def test_page_behind_a_proxy_can_post(client):
    """A proxy may pass another host name on than the browser's; the browser's is given by --allow-host."""
    assert client.post("/predict", picture(), Host="localhost", Origin="https://models.example.org:8443")[0] == 200


def test_reload_by_another_site_is_refused(path):
    with serving(f"tiny={path}", tokens=(TOKEN,)) as client:
        token = {"Authorization": f"Bearer {TOKEN}"}
        assert client.ask("POST", "/reload", Origin="http://evil.example", **token)[0] == 403
        assert client.ask("POST", "/reload", **token)[0] == 200


def test_address_that_the_client_connected_to_is_accepted():
    """With --host 0.0.0.0, the name is the address of the interface."""
    hosts = AllowedHosts((), "0.0.0.0")

    def check(host, address="192.0.2.7"):
        headers = [(b"host", host.encode())]
        hosts.check({"type": "http", "method": "GET", "headers": headers, "server": (address, 8000)})

    check("192.0.2.7:8000")
    check("localhost")
    for host in ("192.0.2.8", "evil.example"):
        with pytest.raises(RequestRefused):
            check(host)
    hosts = AllowedHosts(["*"])
    check("evil.example")


def test_every_response_has_protecting_headers(client):
    responses = [client.ask("GET", where) for where in PATHS]
    responses += [client.post("/predict", b"no image"), client.ask("GET", "/", Host="evil.example")]
    for _, _, headers in responses:
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in headers


def test_internal_errors_have_protecting_headers(client):
    inner, client.service.models.describe = client.service.models.describe, lambda: 1 / 0
    try:
        status, said, headers = client.ask("GET", "/models")
    finally:
        client.service.models.describe = inner
    assert status == 500
    assert said == {"error": "internal error: see the server log"}
    assert headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
