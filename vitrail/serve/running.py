"""The service as a process: its address, its signals, and an end that drops nobody."""

import asyncio
import logging
import os
import resource
import signal
import socket
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import FrameType

import uvicorn

from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.runtime import Runtime
from vitrail.serve.app import Service, application
from vitrail.serve.batching import Batcher
from vitrail.serve.connection import connection
from vitrail.serve.decoding import Decoder
from vitrail.serve.limits import Limits, Refused
from vitrail.serve.memory import Memory
from vitrail.serve.metrics import Metrics
from vitrail.serve.models import Models, Named
from vitrail.serve.opening import Opening
from vitrail.serve.tokens import Tokens

log = logging.getLogger("vitrail.serve")
GIVE_BACK = 3  # seconds between two times that memory is given back, where there was something large
DECODERS = 4  # threads at most: a large picture takes 8 bytes a pixel in each


@dataclass(frozen=True)
class How:
    """How requests are worked off."""

    workers: int = 1  # threads that run the model
    batch: int = 8  # pictures in a batch at most
    wait: float = 0.005  # seconds that a picture waits for company
    drain: float = 1.0  # seconds between not being ready and taking no more
    limits: Limits = field(default_factory=Limits)


def service(models: Sequence[Named], opening: Opening, how: How, tokens: Tokens) -> Service:
    """Opens the models, and everything between them and the requests."""
    metrics, decoder = Metrics(), Decoder(how.limits.pixels, Memory())
    pool = ThreadPoolExecutor(min(DECODERS, os.cpu_count() or 1), thread_name_prefix="decoding")

    def line(name: str, runtimes: Sequence[Runtime], preprocessing: Preprocessing) -> Batcher:
        return Batcher(
            runtimes,
            preprocessing,
            decoder,
            pool,
            largest=how.batch,
            wait=how.wait,
            saw=partial(metrics.batch, name),
        )

    return Service(Models(models, opening, line, how.workers), decoder, how.limits, tokens, metrics)


def bound(host: str, port: int) -> socket.socket:
    """The address, taken before anything long is done."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(
            f"cannot listen at {host} port {port}: {error.strerror or error}; choose --host and --port"
        ) from None


def address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's, which on SIGTERM is first not ready, then takes no more, then finishes, then ends; SIGHUP opens models anew."""

    def __init__(self, config: uvicorn.Config, served: Service, drain: float) -> None:
        super().__init__(config)
        self.served, self.drain = served, drain
        self.loop: asyncio.AbstractEventLoop | None = None
        self.reloading: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of SIGTERM and SIGINT; the second one waits for nobody."""
        again, self.served.stopping = self.served.stopping, True
        if again:
            self.force_exit = self.should_exit = True
        elif sig == signal.SIGINT or self.loop is None:
            self.should_exit = True
        else:
            self.loop.call_soon_threadsafe(self.loop.call_later, self.drain, self.leave)

    def leave(self) -> None:
        self.should_exit = True

    def hang_up(self) -> None:
        """Of SIGHUP: one reload at a time."""
        if self.reloading is None or self.reloading.done():
            self.reloading = asyncio.ensure_future(self.reload())

    async def reload(self) -> None:
        try:
            await self.served.reload()
        except Refused:
            return  # it is in the log, and the old model goes on

    async def main_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if hasattr(signal, "SIGHUP"):
            try:
                loop.add_signal_handler(signal.SIGHUP, self.hang_up)
            except (ValueError, RuntimeError):
                log.debug("signals are for the main thread")
        await super().main_loop()


def server(served: Service, how: How) -> Server:
    """A server that is ready to run: `server.run([listening])`."""
    warnings.filterwarnings("ignore", module=r"PIL\.")  # what is odd about strangers' files would fill the log
    config = uvicorn.Config(
        application(served),
        http=connection(most_connections()),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        callback_notify=partial(asyncio.to_thread, served.decoder.memory.give_back),
        timeout_notify=GIVE_BACK,
        timeout_graceful_shutdown=int(how.limits.seconds + how.limits.body_seconds) + 5,
    )
    return Server(config, served, how.drain)


def most_connections() -> int:
    """As many as there are files that may be open, less what else needs some."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(16, (1024 if allowed < 0 else min(allowed, 8192)) - 64)
