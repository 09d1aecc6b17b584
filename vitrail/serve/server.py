"""The server process: socket, signals, graceful shutdown and reload."""

import asyncio
import logging
import os
import resource
import signal
import socket
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType

import uvicorn

from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.runtimes.base import Runtime
from vitrail.serve.app import Service, create_app
from vitrail.serve.auth import AllowedHosts, Tokens
from vitrail.serve.batching import Batcher
from vitrail.serve.connection import make_connection_class
from vitrail.serve.decoding import DecodingPool, ImageDecoder
from vitrail.serve.limits import MemoryTrimmer, RequestLimits, RequestRefused
from vitrail.serve.metrics import ServiceMetrics
from vitrail.serve.models import ModelOpener, ModelSource, ServedModels

log = logging.getLogger("vitrail.serve")
TIDY_INTERVAL_SECONDS = 3  # between returns of freed memory to the system and searches for stuck models
MAX_DECODERS = 4  # threads, and processes; a large image takes 8 bytes per pixel in each


@dataclass(frozen=True)
class ServerOptions:
    """Options of workers, batches, shutdown and limits."""

    workers: int = 1  # threads that run the model
    max_batch_size: int = 8  # images
    max_wait: float = 0.005  # seconds that an image waits for a batch
    drain_seconds: float = 1.0  # between "not ready" and refusing connections
    limits: RequestLimits = field(default_factory=RequestLimits)


def create_service(
    models: Sequence[ModelSource],
    opener: ModelOpener,
    options: ServerOptions,
    tokens: Tokens,
    hosts: AllowedHosts | None = None,
) -> Service:
    """Return the service; the server opens the models."""
    metrics, limits = ServiceMetrics(), options.limits
    decoder = ImageDecoder(limits.pixels, MemoryTrimmer(), limits.formats, limits.frames, limits.video_seconds)
    pool = DecodingPool(decoder, min(MAX_DECODERS, os.cpu_count() or 1))

    def make_batcher(name: str, runtimes: Sequence[Runtime], preprocessing: Preprocessing) -> Batcher:
        return Batcher(
            runtimes,
            preprocessing,
            pool,
            request_pixels=options.limits.request_pixels,
            max_batch_size=options.max_batch_size,
            max_wait=options.max_wait,
            on_batch=partial(metrics.record_batch, name),
        )

    served = ServedModels(models, opener, make_batcher, options.workers)
    return Service(served, pool, options.limits, tokens, hosts or AllowedHosts(), metrics)


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. Bind it before opening models, so that a taken port fails early."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; change --host or --port"
        ) from None


def format_address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn server that opens the models while it already answers /healthz.

    SIGTERM: report not ready, drain, refuse connections, finish, exit. SIGHUP: reload the models.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, drain: float, on_ready: Callable[[], None] | None
    ) -> None:
        super().__init__(config)
        self.service, self.drain, self.on_ready = service, drain, on_ready
        self.failure: Exception | None = None  # of opening the models; raise it after `run`
        self.loop: asyncio.AbstractEventLoop | None = None
        self.reloading: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self.opening = self.loop.run_in_executor(self.service.models.pool, self.open_models)

    def open_models(self) -> None:
        """Open the models. Runs in a thread."""
        try:
            self.service.models.open_all()
            if self.on_ready is not None:
                self.on_ready()
        except Exception as error:
            self.failure, self.should_exit = error, True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM and SIGINT; a second signal exits at once, as does the first while models are opened."""
        if not self.service.models.served:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        again, self.service.stopping = self.service.stopping, True
        if again:
            self.force_exit = self.should_exit = True
        elif sig == signal.SIGINT or self.loop is None:
            self.should_exit = True
        else:
            self.loop.call_soon_threadsafe(self.loop.call_later, self.drain, self.request_exit)

    def request_exit(self) -> None:
        self.should_exit = True

    def handle_hangup(self) -> None:
        """Handle SIGHUP: start a reload unless one is running."""
        if self.reloading is None or self.reloading.done():
            self.reloading = asyncio.ensure_future(self.reload())

    async def reload(self) -> None:
        with suppress(RequestRefused):  # logged; the old model stays
            await self.service.reload()

    async def main_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if hasattr(signal, "SIGHUP"):
            try:
                loop.add_signal_handler(signal.SIGHUP, self.handle_hangup)
            except (ValueError, RuntimeError):
                log.debug("no SIGHUP handler: not in the main thread")
        await super().main_loop()


def create_server(service: Service, options: ServerOptions, on_ready: Callable[[], None] | None = None) -> Server:
    """Return a server; start it with `server.run([socket])`. `on_ready` is called when the models are open."""

    async def tidy() -> None:
        service.find_stuck()
        await asyncio.to_thread(service.memory.trim)

    warnings.filterwarnings("ignore", module=r"PIL\.")  # warnings about clients' files would fill the log
    config = uvicorn.Config(
        create_app(service),
        http=make_connection_class(max_connections()),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        callback_notify=tidy,
        timeout_notify=TIDY_INTERVAL_SECONDS,
        timeout_graceful_shutdown=int(options.limits.seconds + options.limits.body_seconds) + 5,
    )
    return Server(config, service, options.drain_seconds, on_ready)


def max_connections() -> int:
    """Return the maximum number of connections: the limit of open files minus a reserve."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(16, (1024 if allowed < 0 else min(allowed, 8192)) - 64)
