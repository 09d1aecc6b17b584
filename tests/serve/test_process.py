"""The server process: output and signals."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("fastapi", reason="the service is not installed: pip install 'vitrail[serve]'")

from tests.serve.made import picture, tiny


@pytest.fixture
def started(tmp_path):
    """Return a function that starts the command; processes are killed at the end."""
    running = []

    def start(*arguments):
        command = [sys.executable, "-m", "vitrail", "serve", *arguments, "--runtime", "torch", "--port", "0"]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=(tmp_path / "log").open("w"),
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        running.append(process)
        told = []
        for line in process.stdout:
            told.append(line)
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                return process, int(found[1]), "".join(told)
        raise AssertionError((tmp_path / "log").read_text())

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


def ask(port, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST" if body else "GET", path, body, {"Content-Type": "image/png"} if body else {})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def test_graceful_stop_and_reload(started, tmp_path):
    file = tiny(tmp_path / "tiny.safetensors", 1)
    process, port, told = started(f"tiny={file}", "--drain", "1")
    assert "tiny: " in told
    first = ask(port, "/predict", picture())
    assert first[0] == 200
    shutil.copy(tiny(tmp_path / "other.safetensors", 2), file)
    process.send_signal(signal.SIGHUP)  # the new file takes over
    end = time.monotonic() + 20
    while ask(port, "/predict", picture())[1]["predictions"] == first[1]["predictions"]:
        assert time.monotonic() < end
        time.sleep(0.05)

    slow = http.client.HTTPConnection("127.0.0.1", port, timeout=30)  # a request that is half sent when the stop comes
    data = picture()
    slow.putrequest("POST", "/predict")
    slow.putheader("Content-Type", "image/png")
    slow.putheader("Content-Length", str(len(data)))
    slow.endheaders(data[:100])
    found = []
    process.send_signal(signal.SIGTERM)
    end = time.monotonic() + 10
    while (state := ask(port, "/readyz"))[0] == 200:
        assert time.monotonic() < end
    assert state[0] == 503
    assert ask(port, "/predict", data)[0] == 200  # not ready, but still serving

    def finish():
        time.sleep(1.5)  # connections are refused now
        slow.send(data[100:])
        found.append(slow.getresponse().status)

    thread = threading.Thread(target=finish)
    thread.start()
    thread.join()
    assert found == [200]
    assert process.wait(20) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["there-is-none.safetensors"], "there-is-none"),
        (["{file}", "--max-batch", "0"], "--max-batch must be >= 1, got 0"),
        (["{file}", "--token", "short"], "at least 8"),
        (["a={file}", "a={file}"], "two models"),
        (["{file}", "--host", "192.0.2.1"], "cannot listen"),
    ],
)
def test_startup_errors_are_one_line(tmp_path, capsys, arguments, why):
    from vitrail.cli import main

    file = tiny(tmp_path / "tiny.safetensors")
    assert main(["serve", *(each.format(file=file) for each in arguments), "--port", "0", "--runtime", "torch"]) == 2
    told = capsys.readouterr().err
    assert why in told
    assert told.count("\n") == 1


def test_missing_package_error(monkeypatch, capsys):
    import vitrail.serve
    from vitrail.cli import main

    monkeypatch.setattr(vitrail.serve, "find_spec", lambda name: None if name == "uvicorn" else object())
    assert main(["serve", "model"]) == 2
    assert capsys.readouterr().err == "vitrail serve: the service needs uvicorn: pip install 'vitrail[serve]'\n"
