"""HTTP connections with limits on the time and size of request headers.

uvicorn has neither limit. A connection refused while its body is still arriving stays open for a few seconds: closing it at once
could discard the response before the client has read it.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 65_536
HEADER_TIMEOUT_SECONDS = 10.0
LINGER_SECONDS = 5.0  # for the rest of the body of a refused request
BUSY_RESPONSE = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 5\r\nconnection: close\r\n\r\n"
HEADERS_TOO_LARGE_RESPONSE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)


def make_connection_class(max_connections: int) -> type[HttpToolsProtocol]:
    """Return a protocol class that allows at most `max_connections` open connections."""

    class Connection(HttpToolsProtocol):
        """uvicorn's protocol with timeouts."""

        clock: asyncio.TimerHandle | None = None
        headers_to_come = True
        head = 0  # bytes since the last request was complete

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                self.end(BUSY_RESPONSE)
            else:
                self.wind(HEADER_TIMEOUT_SECONDS)

        def connection_lost(self, exc: Exception | None) -> None:
            self.wind(None)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.headers_to_come:
                self.head += len(data)
                if self.clock is None:
                    self.wind(HEADER_TIMEOUT_SECONDS)
            super().data_received(data)
            if self.headers_to_come and self.head > MAX_HEADER_BYTES:
                self.end(HEADERS_TOO_LARGE_RESPONSE)

        def on_headers_complete(self) -> None:
            self.headers_to_come, self.head = False, 0
            self.wind(None)
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self.headers_to_come = True
            self.wind(None)
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self.headers_to_come and not self.transport.is_closing():
                self.wind(LINGER_SECONDS)

        def wind(self, seconds: float | None) -> None:
            """Start the timeout after which the connection is closed; stop it for None."""
            if self.clock is not None:
                self.clock.cancel()
            self.clock = None if seconds is None else self.loop.call_later(seconds, self.end)

        def end(self, last: bytes = b"") -> None:
            """Close the connection after an optional last response."""
            self.wind(None)
            if not self.transport.is_closing():
                if last:
                    self.transport.write(last)
                self.transport.close()

    return Connection
