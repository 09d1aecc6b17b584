"""A tiny model, pictures for it, and a service that answers on a free port of this machine."""

import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import vitrail
from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.runtime import Contract, Deployed
from vitrail.serve.limits import Limits
from vitrail.serve.models import Named
from vitrail.serve.opening import Opening
from vitrail.serve.running import How, bound, server, service
from vitrail.serve.tokens import Tokens

LABELS = ("window", "door", "roof")
SIZE = 32
FORM = "multipart/form-data; boundary=between"


def tiny(path: Path, seed: int = 0, classes: int | None = 3) -> Path:
    """A ViT with random weights, saved."""
    torch.manual_seed(seed)
    model = vitrail.build(width=32, depth=2, heads=2, patch=8, image_size=SIZE, classes=classes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    vitrail.save(
        model, path, labels=LABELS if classes else None, preprocessing=Preprocessing((SIZE, SIZE), (SIZE, SIZE))
    )
    return path


def picture(seed: int = 0, size: tuple[int, int] = (40, 48), kind: str = "PNG") -> bytes:
    """The bytes of a picture's file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def form(*files: tuple[str, bytes], field: str = "pictures") -> bytes:
    """Several files as a browser would send them."""
    parts = [
        f'--between\r\nContent-Disposition: form-data; name="{field}"; filename="{name}"\r\n'
        f"Content-Type: image/png\r\n\r\n".encode()
        + data
        + b"\r\n"
        for name, data in files
    ]
    return b"".join(parts) + b"--between--\r\n"


class Held:
    """A runtime that answers when it is let: three numbers, by the mean of a picture."""

    name = "torch"

    def __init__(self) -> None:
        self.let = threading.Event()
        self.let.set()
        self.batches: list[int] = []
        self.entered = threading.Semaphore(0)

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        self.batches.append(len(pixels))
        self.entered.release()
        assert self.let.wait(20)
        return pixels.mean((2, 3), dtype=np.float32) / 64


class Holding(Opening):
    """Opens nothing but that."""

    runtime: Held

    def first(self, where: str) -> Deployed:
        return Deployed(where, "held", Contract(Preprocessing((SIZE, SIZE), (SIZE, SIZE)), LABELS), self.runtime)


def held() -> tuple[Held, Holding]:
    runtime, opening = Held(), Holding(1)
    object.__setattr__(opening, "runtime", runtime)
    return runtime, opening


class Client:
    """Asks a service, each time on a connection of its own."""

    def __init__(self, running: Any, port: int) -> None:
        self.running, self.port = running, port

    @property
    def service(self) -> Any:
        return self.running.served

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """The status, the answer (JSON where it is) and the headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            said = answer.read()
            found = {name.lower(): value for name, value in answer.getheaders()}
        finally:
            connection.close()
        return answer.status, json.loads(said) if found.get("content-type") == "application/json" else said, found

    def post(self, path: str, body: Any, kind: str = "image/png", **headers: str) -> tuple[int, Any, dict[str, str]]:
        return self.ask("POST", path, body, Content_Type=kind, **headers)

    def predicted(self, data: bytes) -> list[dict[str, Any]]:
        status, said, _ = self.post("/predict?top=3", data)
        assert status == 200, said
        return said["predictions"][0]["answers"]

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)


@contextmanager
def serving(
    *models: str, tokens: tuple[str, ...] = (), opening: Opening | None = None, how: How | None = None, **limits: Any
) -> Iterator[Client]:
    """A service in a thread, which ends with the block."""
    how = how or How(drain=0.0)
    how = replace(how, limits=replace(Limits(), **limits)) if limits else how
    listening = bound("127.0.0.1", 0)
    named = [Named(*model.split("=", 1)) for model in models]
    made = service(named, opening or Opening(1, {"runtime": "torch", "device": "cpu"}), how, Tokens(list(tokens)))
    running = server(made, how)
    thread = threading.Thread(target=running.run, args=([listening],), daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while not running.started and time.monotonic() < end:
        time.sleep(0.01)
    assert running.started
    try:
        yield Client(running, listening.getsockname()[1])
    finally:
        running.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the service did not stop"
