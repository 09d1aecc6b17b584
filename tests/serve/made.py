"""A tiny model, images for it, and a service on a free local port."""

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
from vitrail.deploy.runtimes.base import DeployedModel, ModelContract
from vitrail.serve.auth import AllowedHosts, Tokens
from vitrail.serve.limits import RequestLimits
from vitrail.serve.models import ModelOpener, ModelSource
from vitrail.serve.server import ServerOptions, bind_socket, create_server, create_service

LABELS = ("window", "door", "roof")
SIZE = 32
FORM = "multipart/form-data; boundary=between"


def tiny(path: Path, seed: int = 0, classes: int | None = 3) -> Path:
    """Save a ViT with random weights."""
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
    """Return the bytes of an image file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def form(*files: tuple[str, bytes], field: str = "images") -> bytes:
    """Return a multipart body of several files."""
    parts = [
        f'--between\r\nContent-Disposition: form-data; name="{field}"; filename="{name}"\r\n'
        f"Content-Type: image/png\r\n\r\n".encode()
        + data
        + b"\r\n"
        for name, data in files
    ]
    return b"".join(parts) + b"--between--\r\n"


class Held:
    """A runtime that blocks until released and returns the mean of each channel."""

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


class Holding(ModelOpener):
    """A model opener that returns the held runtime."""

    runtime: Held

    def open_any(self, where: str) -> DeployedModel:
        return DeployedModel(
            where, "held", ModelContract(Preprocessing((SIZE, SIZE), (SIZE, SIZE)), LABELS), self.runtime
        )


def held() -> tuple[Held, Holding]:
    runtime, opening = Held(), Holding(1)
    object.__setattr__(opening, "runtime", runtime)
    return runtime, opening


class Client:
    """A client that opens a new connection for each request."""

    def __init__(self, running: Any, port: int) -> None:
        self.running, self.port = running, port

    @property
    def service(self) -> Any:
        return self.running.service

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Return status, body (parsed if JSON) and headers."""
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
    *models: str,
    tokens: tuple[str, ...] = (),
    opening: ModelOpener | None = None,
    how: ServerOptions | None = None,
    hosts: tuple[str, ...] = (),
    **limits: Any,
) -> Iterator[Client]:
    """Run a service in a thread for the block."""
    how = how or ServerOptions(drain_seconds=0.0)
    how = replace(how, limits=replace(RequestLimits(), **limits)) if limits else how
    listening = bind_socket("127.0.0.1", 0)
    named = [ModelSource(*model.split("=", 1)) for model in models]
    made = create_service(
        named,
        opening or ModelOpener(1, {"runtime": "torch", "device": "cpu"}),
        how,
        Tokens(list(tokens)),
        AllowedHosts(hosts),
    )
    running = create_server(made, how)
    thread = threading.Thread(target=running.run, args=([listening],), daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while not (running.started and made.models.served) and time.monotonic() < end:
        time.sleep(0.01)
    assert made.models.served, running.failure
    try:
        yield Client(running, listening.getsockname()[1])
    finally:
        running.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the service did not stop"
