"""A file server on the loopback interface for tests of remote data: ranges, faults, S3's listing, TLS."""

import base64
import email.utils
import hashlib
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

LISTED = "<Contents><Key>{}</Key><Size>{}</Size><ETag>{}</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
LISTING = (
    '<?xml version="1.0"?><ListBucketResult><Name>{}</Name><Prefix></Prefix><KeyCount>{}</KeyCount><MaxKeys>1000</MaxKeys>'
    "<IsTruncated>false</IsTruncated>{}</ListBucketResult>"
)


class FileServer:
    """Serve the files below a folder. Every n-th request may be dropped, stalled, cut or refused."""

    def __init__(self, root: Path, certificate: tuple[Path, Path] | None = None) -> None:
        self.root = root
        self.drop = self.stall = self.cut = self.fail = 0  # every n-th request; 0: none
        self.ranges, self.etags, self.lengths = True, True, True
        self.refuse: dict[str, int] = {}  # status of a path
        self.login = ""  # user:password
        self.requests: list[tuple[str, str]] = []  # path and range
        self.sent = 0  # bytes
        self.lock, self.closed = threading.Lock(), threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def do_GET(self):
                server.answer(self)

            def do_HEAD(self):
                server.answer(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        scheme = "https" if certificate else "http"
        self.url = f"{scheme}://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, handler) -> None:
        """Answer a request, or commit a fault."""
        parts = urlsplit(handler.path)
        path = self.root / parts.path.lstrip("/")
        wanted = handler.headers.get("Range", "")
        with self.lock:
            self.requests.append((parts.path, wanted))
            number = len(self.requests)
        if "list-type" in parts.query:
            return self.list(handler, parts.path.strip("/"), parse_qs(parts.query))
        if handler.command == "HEAD" and path.is_dir():  # HeadBucket
            return self.send(handler, 200, {}, b"")
        expected = f"Basic {base64.b64encode(self.login.encode()).decode()}"
        if self.login and handler.headers.get("Authorization") != expected:
            return self.send(handler, 401, {}, b"who")
        status = self.refuse.get(parts.path, 200 if path.is_file() else 404)
        if status != 200 or (self.fail and number % self.fail == 0):
            return self.send(handler, status if status != 200 else 503, {}, b"no")
        if self.drop and number % self.drop == 0:
            handler.close_connection = True
            return handler.connection.shutdown(2) if not hasattr(handler.connection, "unwrap") else None
        data = path.read_bytes()
        headers = {"Last-Modified": email.utils.formatdate(int(path.stat().st_mtime), usegmt=True)}
        etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        headers |= {"ETag": etag} if self.etags else {}
        if handler.headers.get("If-Match", etag) != etag:
            return self.send(handler, 412, {}, b"changed")
        body, code = data, 200
        if wanted and self.ranges:
            first, last = wanted.removeprefix("bytes=").split("-")
            start, stop = int(first), min(int(last) + 1, len(data))
            if start >= len(data):
                return self.send(handler, 416, {"Content-Range": f"bytes */{len(data)}"}, b"")
            body, code = data[start:stop], 206
            headers |= {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        sent = body
        if self.cut and number % self.cut == 0 and len(body) > 1:
            sent, handler.close_connection = body[: len(body) // 2], True
        if self.stall and number % self.stall == 0 and len(body) > 1:
            self.send(handler, code, headers, body, body[: len(body) // 3])
            handler.close_connection = True
            self.closed.wait(3)
            return None
        return self.send(handler, code, headers, body, sent)

    def send(self, handler, status: int, headers: dict[str, str], body: bytes, sent: bytes | None = None) -> None:
        """Send a response, of which only a part may be sent."""
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        if self.lengths:
            handler.send_header("Content-Length", str(len(body)))
        else:
            handler.close_connection = True
        handler.end_headers()
        if handler.command == "GET":
            try:
                handler.wfile.write(body if sent is None else sent)
                handler.wfile.flush()
            except OSError:  # the client has closed the connection
                return
            with self.lock:
                self.sent += len(body if sent is None else sent)

    def list(self, handler, bucket: str, query: dict[str, list[str]]) -> None:
        """Answer S3's ListObjectsV2."""
        root, prefix = self.root / bucket, query.get("prefix", [""])[0]
        keys = [str(path.relative_to(root)) for path in sorted(root.rglob("*")) if path.is_file()]
        keys = [key for key in keys if key.startswith(prefix)]
        if "delimiter" in query:
            keys = [key for key in keys if "/" not in key.removeprefix(prefix)]
        rows = "".join(LISTED.format(quote(key), (root / key).stat().st_size, '"x"') for key in keys)
        self.send(handler, 200, {"Content-Type": "application/xml"}, LISTING.format(bucket, len(keys), rows).encode())

    def close(self) -> None:
        self.closed.set()
        self.server.shutdown()
        self.server.server_close()


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Return a certificate of 127.0.0.1 that nobody trusts, and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key
