"""Models that fail, hang or load slowly behind a service, and model files with hostile preprocessing."""

import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the service is not installed: pip install 'vitrail[serve]'")

from tests.hostile.serving import start_service
from tests.serve.made import Held, held, picture, serving, tiny
from tests.serve.test_limits import wait_until
from vitrail.checkpoints.formats.transformers import parse_preprocessing
from vitrail.data.preprocessing import Preprocessing
from vitrail.serve import server
from vitrail.serve.auth import Tokens
from vitrail.serve.models import ModelSource
from vitrail.serve.server import ServerOptions, bind_socket, create_server, create_service


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, MemoryError, GeneratorExit, RecursionError])
def test_model_thread_survives_any_exception(error, caplog):
    runtime, opening = held()
    with serving("m=held", opening=opening) as client:
        assert client.predicted(picture())

        def crash(self, pixels):
            raise error("not today")

        runtime.__class__ = type("Crashing", (Held,), {"__call__": crash})
        status, said, _ = client.post("/predict", picture())
        assert (status, said) == (500, {"error": "inference failed"})
        runtime.__class__ = Held
        assert client.predicted(picture())
    assert error.__name__ in caplog.text


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_wrong_number_of_rows_is_an_error(rows):
    """Otherwise clients would wait for a result that never comes, or get another's."""
    runtime, opening = held()
    with serving("m=held", opening=opening) as client:
        shape = (rows + (rows == 1), 3)
        runtime.__class__ = type("Wrong", (Held,), {"__call__": lambda self, pixels: np.zeros(shape, np.float32)})
        begin = time.monotonic()
        assert client.post("/predict", picture())[0] == 500
        assert time.monotonic() - begin < 10


def test_stuck_model_is_reported_and_recovers(monkeypatch):
    """Requests fail at the limit, later ones at once, and /healthz tells the supervisor; another model still works."""
    monkeypatch.setattr(server, "TIDY_INTERVAL_SECONDS", 0)
    runtime, opening = held()
    with serving("m=held", opening=opening, seconds=1.0) as client:
        runtime.let.clear()
        assert client.post("/predict", picture())[0] in (500, 503)
        wait_until(lambda: client.ask("GET", "/healthz")[0] == 503, 15)
        assert client.ask("GET", "/readyz")[0] == 503
        begin = time.monotonic()
        status, said, headers = client.post("/predict", picture())
        assert status == 503
        assert "has not returned" in said["error"]
        assert "retry-after" in headers
        assert time.monotonic() - begin < 0.9
        runtime.let.set()
        wait_until(lambda: client.ask("GET", "/healthz")[0] == 200, 15)
        assert client.predicted(picture())


def test_busy_model_is_not_stuck():
    """Batches within the limit do not make the service unhealthy, whatever waits behind them."""
    runtime, opening = held()
    with (
        serving("m=held", opening=opening, how=ServerOptions(max_batch_size=1, drain_seconds=0.0)) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        runtime.let.clear()
        waiting = [pool.submit(client.predicted, picture(n)) for n in range(4)]
        wait_until(lambda: client.service.image_slots.taken == 4)
        client.service.find_stuck()
        assert client.ask("GET", "/healthz")[0] == client.ask("GET", "/readyz")[0] == 200
        runtime.let.set()
        assert all(each.result() for each in waiting)


def test_health_is_answered_while_models_load():
    runtime, opening = held()
    runtime.let.clear()  # the test image of the start waits
    options = ServerOptions(drain_seconds=0.0)
    listening = bind_socket("127.0.0.1", 0)
    service = create_service([ModelSource("m", "held")], opening, options, Tokens([]))
    ready = threading.Event()
    running = create_server(service, options, ready.set)
    thread = threading.Thread(target=running.run, args=([listening],), daemon=True)
    thread.start()

    def ask(path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", listening.getsockname()[1], timeout=20)
        connection.request("POST" if body else "GET", path, body, {"Content-Type": "image/png"})
        answer = connection.getresponse()
        found = answer.status, answer.read(), answer.headers
        connection.close()
        return found

    try:
        wait_until(lambda: running.started)
        for _ in range(20):
            begin = time.monotonic()
            assert ask("/healthz")[0] == 200
            assert time.monotonic() - begin < 1
        for path, body in (("/readyz", None), ("/models", None), ("/predict", picture()), ("/attention", picture())):
            status, said, headers = ask(path, body)
            assert status == 503, path
            assert "loading" in json.loads(said)["error"]
            assert headers["retry-after"] == "5"
        assert ask("/")[0] == 200
        assert not ready.is_set()
        runtime.let.set()
        assert ready.wait(20)
        assert ask("/readyz")[0] == ask("/predict", picture())[0] == 200
    finally:
        runtime.let.set()
        running.should_exit = True
        thread.join(20)
    assert not thread.is_alive()


def test_stop_while_models_load(tmp_path):
    """SIGTERM ends a process that is still loading, without waiting for the model."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = tiny(tmp_path / "tiny.safetensors")
    with start_service(tmp_path, *[f"m{n}={path}" for n in range(40)], port=port, wait=False) as running:
        end = time.monotonic() + 60
        while True:
            try:
                with running.connect():
                    break
            except OSError:
                assert time.monotonic() < end, running.log.read_text()
                time.sleep(0.02)
        running.process.terminate()
        assert running.process.wait(20) in (0, -15)
        assert "Traceback" not in running.log.read_text()


@pytest.mark.parametrize("size", [(60_000, 60_000), (8192, 8192), (1, 65_537), (65_536, 512)])
def test_preprocessing_is_bounded(size):
    with pytest.raises(ValueError, match=r"preprocessing size: (must have at most|each side)"):
        Preprocessing(size, (224, 224))
    with pytest.raises(ValueError, match="preprocessing resize: must have at most 67,108,864 pixels, got 60000×60000"):
        Preprocessing((224, 224), (60_000, 60_000))
    assert Preprocessing((4096, 4096), (8192, 8192)).size == (4096, 4096)


def test_model_directory_with_a_huge_crop_is_refused():
    """A crop of 60,000 pixels would take 10 GiB for one image."""
    half = [0.5, 0.5, 0.5]
    settings = {"image_mean": half, "image_std": half, "size": 224, "do_center_crop": True, "crop_size": 60_000}
    with pytest.raises(ValueError, match="preprocessing size"):
        parse_preprocessing({"preprocessor_config.json": settings}, (224, 224))
