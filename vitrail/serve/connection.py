"""A connection that cannot be held for nothing.

uvicorn waits for a request's headers for ever and takes as many as come. Here they must be complete within some seconds and some
kilobytes. A client that is refused while its body is still coming is heard out for a moment, because a connection that is
closed on it would take the refusal away with it.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS = 65_536  # bytes
SECONDS = 10.0  # for the headers to come
LINGER = 5.0  # seconds for the rest of a body that nobody wants
BUSY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 5\r\nconnection: close\r\n\r\n"
LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def connection(most: int) -> type[HttpToolsProtocol]:
    """The protocol, of which at most so many are open at once."""

    class Connection(HttpToolsProtocol):
        """uvicorn's own, with clocks."""

        clock: asyncio.TimerHandle | None = None
        headers_to_come = True
        head = 0  # bytes since the last request was complete

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most:
                self.end(BUSY)
            else:
                self.wind(SECONDS)

        def connection_lost(self, exc: Exception | None) -> None:
            self.wind(None)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.headers_to_come:
                self.head += len(data)
                if self.clock is None:
                    self.wind(SECONDS)
            super().data_received(data)
            if self.headers_to_come and self.head > HEADERS:
                self.end(LARGE)

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
                self.wind(LINGER)

        def wind(self, seconds: float | None) -> None:
            """Sets the clock, after which the connection ends; or stops it."""
            if self.clock is not None:
                self.clock.cancel()
            self.clock = None if seconds is None else self.loop.call_later(seconds, self.end)

        def end(self, last: bytes = b"") -> None:
            """Closes the connection, with a last word."""
            self.wind(None)
            if not self.transport.is_closing():
                if last:
                    self.transport.write(last)
                self.transport.close()

    return Connection
