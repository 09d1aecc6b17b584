"""HTTP connections with limits on what a client sends before it is known, and on the time it takes to send and to read.

uvicorn has none of these limits. Headers and trailers are counted as they are parsed, in pieces, so that a large packet is
not kept first. A connection refused while its body is still arriving stays open for a few seconds: closing it at once could
discard the response before the client has read it.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 65_536  # of a request: its URL, headers and trailers
HEADER_PIECE_BYTES = 4096  # parsed at once
MAX_HEADERS = 100
MAX_PIPELINED = 8  # requests that wait for the response to an earlier one on their connection
FREE_CHUNKS, MIN_CHUNK_BYTES = 256, 256  # of a chunked body: chunks of any size, mean size of all others
HEADER_TIMEOUT_SECONDS = 10.0
LINGER_SECONDS = 5.0  # for the rest of the body of a refused request
WRITE_TIMEOUT_SECONDS = 10.0  # in which a client must read MIN_READ_BYTES of a response
MIN_READ_BYTES = 100_000


def format_response(status: str, *headers: str) -> bytes:
    """Return a response without content that ends the connection."""
    lines = (f"HTTP/1.1 {status}", "content-length: 0", "x-content-type-options: nosniff", "connection: close")
    return "\r\n".join((*lines, *headers, "", "")).encode("ascii")


BUSY_RESPONSE = format_response("503 Service Unavailable", "retry-after: 5")
INVALID_RESPONSE = format_response("400 Bad Request")
HEADERS_TOO_LARGE_RESPONSE = format_response("431 Request Header Fields Too Large")


class LimitExceeded(Exception):
    """Raised inside the parser to stop it."""


def make_connection_class(max_connections: int) -> type[HttpToolsProtocol]:
    """Return a protocol class that allows at most `max_connections` open connections."""

    class Connection(HttpToolsProtocol):
        """uvicorn's protocol with limits and timeouts."""

        clock: asyncio.TimerHandle | None = None
        write_clock: asyncio.TimerHandle | None = None
        headers_to_come = True
        kept = 0  # bytes of URL, headers and trailers of the request
        unparsed = 0  # bytes since the parser completed something: a header, a chunk, a piece of the body
        chunks = body_bytes = unsent = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=0)  # `pause_writing` whenever the client does not keep up
            self.wind(HEADER_TIMEOUT_SECONDS)
            if len(self.connections) > max_connections:  # a connection without a request makes room
                idle = (each for each in self.connections if isinstance(each, Connection) and each.is_idle)
                next((each for each in idle if each is not self), self).end(BUSY_RESPONSE)

        @property
        def is_idle(self) -> bool:
            answered = self.cycle is None or self.cycle.response_complete
            return self.headers_to_come and answered and not self.transport.is_closing()

        def connection_lost(self, exc: Exception | None) -> None:
            self.wind(None)
            self.stop_write_clock()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            before_body = self.headers_to_come
            if before_body and self.clock is None:
                self.wind(HEADER_TIMEOUT_SECONDS)
            start = 0
            while start < len(data):
                size = HEADER_PIECE_BYTES if self.headers_to_come else MAX_HEADER_BYTES
                piece = data[start : start + size]
                start += size
                self.unparsed += len(piece)
                super().data_received(piece)
                if self.kept + self.unparsed > MAX_HEADER_BYTES:
                    self.end(HEADERS_TOO_LARGE_RESPONSE)
                if self.transport.is_closing():
                    return
            if before_body and not self.headers_to_come:
                self.flow.pause_reading()  # until the application, which checks the token first, asks for the body

        def keep(self, size: int) -> None:
            """Count bytes of the URL, a header or a trailer before they are kept."""
            self.kept += size
            self.unparsed = 0
            if self.kept > MAX_HEADER_BYTES or len(self.headers) >= MAX_HEADERS:
                raise LimitExceeded

        def on_message_begin(self) -> None:
            self.kept = self.chunks = self.body_bytes = 0
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self.keep(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self.keep(len(name) + len(value))
            if self.headers_to_come:  # trailers are not used
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self.headers_to_come, self.unparsed = False, 0
            self.wind(None)
            super().on_headers_complete()
            if len(self.pipeline) > MAX_PIPELINED:
                raise LimitExceeded

        def on_chunk_header(self) -> None:
            self.unparsed = 0
            self.chunks += 1
            if self.chunks > FREE_CHUNKS + self.body_bytes // MIN_CHUNK_BYTES:
                raise LimitExceeded  # a byte per chunk would cost the event loop a second per megabyte

        def on_body(self, body: bytes) -> None:
            self.unparsed = 0
            self.body_bytes += len(body)
            super().on_body(body)

        def on_message_complete(self) -> None:
            self.headers_to_come, self.kept, self.unparsed = True, 0, 0
            self.wind(None)
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self.headers_to_come and not self.transport.is_closing():
                self.wind(LINGER_SECONDS)

        def send_400_response(self, msg: str) -> None:
            """Refuse what the parser does not accept."""
            too_large = self.kept > MAX_HEADER_BYTES or len(self.headers or ()) >= MAX_HEADERS
            self.end(HEADERS_TOO_LARGE_RESPONSE if too_large else INVALID_RESPONSE)

        def pause_writing(self) -> None:
            super().pause_writing()
            self.unsent = self.transport.get_write_buffer_size()
            self.write_clock = self.loop.call_later(WRITE_TIMEOUT_SECONDS, self.check_writing)

        def resume_writing(self) -> None:
            super().resume_writing()
            self.stop_write_clock()

        def check_writing(self) -> None:
            """End the connection of a client that has read too little since the last check."""
            unsent, self.unsent = self.unsent, self.transport.get_write_buffer_size()
            if unsent - self.unsent < MIN_READ_BYTES:
                self.transport.abort()
            else:
                self.write_clock = self.loop.call_later(WRITE_TIMEOUT_SECONDS, self.check_writing)

        def stop_write_clock(self) -> None:
            if self.write_clock is not None:
                self.write_clock.cancel()

        def wind(self, seconds: float | None) -> None:
            """Start the timeout after which the connection is closed; stop it for None."""
            if self.clock is not None:
                self.clock.cancel()
            self.clock = None if seconds is None else self.loop.call_later(seconds, self.end)

        def end(self, last: bytes = b"") -> None:
            """Close the connection, after a last response unless another one has begun."""
            self.wind(None)
            if not self.transport.is_closing():
                if last and (self.cycle is None or self.cycle.response_complete or not self.cycle.response_started):
                    self.transport.write(last)
                self.transport.close()

    return Connection
