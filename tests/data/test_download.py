"""Datasets by name, and downloads from a local server."""

import gzip
import hashlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from tests.data.test_sources_arrays import cifar10, idx, images, labels, mnist, packed, written
from vitrail.data.sources import downloads, load_dataset
from vitrail.data.sources import downloads as downloading
from vitrail.data.sources.downloads import download

DATA = np.random.default_rng(0).bytes(700_000)


def md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


class Publisher:
    """A file server that can drop connections, ignore ranges, or return errors."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.asked: list[str | None] = []
        self.breaks: list[int] = []  # after how many bytes each of the next answers breaks off
        self.failures = 0  # how many of the next answers are 503
        self.ranges = True
        publisher = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments):
                pass

            def do_GET(self):
                publisher.answer(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, handler):
        asked = handler.headers.get("Range")
        self.asked.append(asked)
        data = self.files.get(handler.path.removeprefix("/"))
        if data is None:
            return handler.send_error(404)
        if self.failures:
            self.failures -= 1
            return handler.send_error(503)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.ranges else 0
        if start >= len(data):
            return handler.send_error(416)
        handler.send_response(206 if start else 200)
        handler.send_header("Content-Length", str(len(data) - start))
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        handler.end_headers()
        rest = data[start:]
        handler.wfile.write(rest[: self.breaks.pop(0)] if self.breaks else rest)
        return None

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def publisher(monkeypatch):
    monkeypatch.setattr(downloading, "RETRY_PAUSE_SECONDS", 0.01)
    server = Publisher()
    server.files["data.bin"] = DATA
    yield server
    server.close()


def test_a_download_is_complete_and_reports_progress(publisher, tmp_path):
    seen = []
    download(publisher.url + "data.bin", tmp_path / "new" / "d.bin", md5(DATA), lambda *args: seen.append(args))
    assert (tmp_path / "new" / "d.bin").read_bytes() == DATA
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["d.bin"]
    assert seen[-1] == ("downloading data.bin", len(DATA), len(DATA))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_a_lost_connection_is_resumed(publisher, tmp_path):
    publisher.breaks = [100_000, 300_000]
    download(publisher.url + "data.bin", tmp_path / "d.bin", md5(DATA))
    assert (tmp_path / "d.bin").read_bytes() == DATA
    assert publisher.asked == [None, "bytes=100000-", "bytes=400000-"]


def test_a_partial_file_is_resumed(publisher, tmp_path):
    (tmp_path / "d.bin.partial").write_bytes(DATA[:250_000])
    download(publisher.url + "data.bin", tmp_path / "d.bin", md5(DATA))
    assert (tmp_path / "d.bin").read_bytes() == DATA
    assert publisher.asked == ["bytes=250000-"]


def test_a_complete_partial_file_is_only_verified(publisher, tmp_path):
    (tmp_path / "d.bin.partial").write_bytes(DATA)
    download(publisher.url + "data.bin", tmp_path / "d.bin", md5(DATA))
    assert (tmp_path / "d.bin").read_bytes() == DATA


def test_a_server_without_ranges_sends_the_whole_file(publisher, tmp_path):
    publisher.ranges, publisher.breaks = False, [100_000]
    download(publisher.url + "data.bin", tmp_path / "d.bin", md5(DATA))
    assert (tmp_path / "d.bin").read_bytes() == DATA


def test_a_wrong_partial_file_is_discarded(publisher, tmp_path):
    (tmp_path / "d.bin.partial").write_bytes(b"something else" * 1000)
    download(publisher.url + "data.bin", tmp_path / "d.bin", md5(DATA))
    assert (tmp_path / "d.bin").read_bytes() == DATA
    assert publisher.asked == ["bytes=14000-", None]


def test_a_server_error_is_retried(publisher, tmp_path):
    publisher.failures = 1
    download(publisher.url + "data.bin", tmp_path / "d.bin", md5(DATA))
    assert (tmp_path / "d.bin").read_bytes() == DATA


def test_a_wrong_checksum_leaves_nothing_behind(publisher, tmp_path):
    with pytest.raises(ValueError, match=r"has the MD5 .* expected 0000"):
        download(publisher.url + "data.bin", tmp_path / "d.bin", "0" * 32)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_not_retried(publisher, tmp_path):
    with pytest.raises(OSError, match=r"other\.bin returned 404"):
        download(publisher.url + "other.bin", tmp_path / "d.bin", md5(DATA))
    assert len(publisher.asked) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_failing_download_keeps_the_partial_file(publisher, tmp_path):
    publisher.breaks = [100_000, *[0] * 20]
    with pytest.raises(OSError, match=r"cannot read .*: the connection was lost"):
        download(publisher.url + "data.bin", tmp_path / "d.bin", md5(DATA))
    assert (tmp_path / "d.bin.partial").read_bytes() == DATA[:100_000]
    assert not (tmp_path / "d.bin").exists()


def test_parallel_downloads_fetch_once(publisher, tmp_path):
    errors = []

    def want():
        try:
            download(publisher.url + "data.bin", tmp_path / "d.bin", md5(DATA))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [path.name for path in tmp_path.iterdir()] == ["d.bin"]
    assert (tmp_path / "d.bin").read_bytes() == DATA
    assert len(publisher.asked) == 1


@pytest.fixture
def empty_machine(monkeypatch, tmp_path):
    """Set up a machine without data."""
    monkeypatch.setattr(downloads, "SYSTEM_DIRECTORY", tmp_path / "system")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("VITRAIL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def published(monkeypatch, publisher, name, files):
    publisher.files |= files
    given = downloads.PublishedDataset(
        publisher.url, {file: md5(data) for file, data in files.items()}, downloads.PUBLISHED_DATASETS[name].aliases
    )
    monkeypatch.setitem(downloads.PUBLISHED_DATASETS, name, given)


def fashion():
    files = {}
    for split, count in (("train", 60), ("t10k", 9)):
        files[f"{split}-images-idx3-ubyte.gz"] = gzip.compress(idx(images(count, count)))
        files[f"{split}-labels-idx1-ubyte.gz"] = gzip.compress(idx(labels(count)))
    return files


def test_a_name_is_downloaded_to_the_cache_once(publisher, empty_machine, monkeypatch):
    published(monkeypatch, publisher, "fashion-mnist", fashion())
    assert len(load_dataset("fashion-mnist")["test"]) == 9
    assert len(publisher.asked) == 4
    found = load_dataset("fashion-mnist")
    assert (found.source, found.kind, len(publisher.asked)) == ("fashion-mnist", "idx", 4)
    assert (empty_machine / "cache/vitrail/data/fashion-mnist/train-images-idx3-ubyte.gz").is_file()


def test_an_archive_is_downloaded_to_vitrail_data(publisher, empty_machine, monkeypatch):
    archive = packed(empty_machine / "made.tar.gz", cifar10()).read_bytes()
    published(monkeypatch, publisher, "cifar-10", {"cifar-10-binary.tar.gz": archive})
    monkeypatch.setenv("VITRAIL_DATA", str(empty_machine / "mine"))
    assert len(load_dataset("cifar-10")["test"]) == 10
    assert (empty_machine / "mine/cifar-10/cifar-10-binary.tar.gz").read_bytes() == archive


def test_a_failed_download_explains_the_manual_steps(publisher, empty_machine, monkeypatch):
    monkeypatch.setitem(
        downloads.PUBLISHED_DATASETS,
        "cifar-10",
        downloads.PublishedDataset(publisher.url, {"cifar-10-binary.tar.gz": "0" * 32}),
    )
    with pytest.raises(OSError, match=r"cannot download cifar-10: .* returned 404 .* download .* to ") as error:
        load_dataset("cifar-10")
    assert str(empty_machine / "cache/vitrail/data/cifar-10") in str(error.value)
    assert "\n" not in str(error.value)


def test_no_network_is_a_one_line_error(empty_machine, monkeypatch):
    monkeypatch.setattr(downloading, "RETRY_PAUSE_SECONDS", 0.01)
    with socket.socket() as taken:  # a port that nobody listens on
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        monkeypatch.setitem(
            downloads.PUBLISHED_DATASETS,
            "mnist",
            downloads.PublishedDataset(address, downloads.PUBLISHED_DATASETS["mnist"].files),
        )
        with pytest.raises(OSError, match=r"cannot download mnist: .*refused.*download the 4 files") as error:
            load_dataset("mnist")
    assert "\n" not in str(error.value)
    assert not list((empty_machine / "cache/vitrail/data/mnist").iterdir())


@pytest.mark.parametrize("location", ["mine/fashion-mnist", "cache/vitrail/data/fashion-mnist", "system/fashion-mnist"])
def test_local_data_is_not_downloaded(empty_machine, monkeypatch, location):
    monkeypatch.setenv("VITRAIL_DATA", str(empty_machine / "mine"))
    (empty_machine / location).parent.mkdir(parents=True, exist_ok=True)
    mnist(empty_machine / location)
    assert downloads.find_local("fashion-mnist") == str(empty_machine / location)
    assert len(load_dataset("fashion-mnist")["test"]) == 9


@pytest.mark.parametrize("location", ["cifar-10", "cifar-10-batches-bin", "cifar-10/cifar-10-batches-bin"])
def test_cifar_is_found_by_its_folder_names(empty_machine, monkeypatch, location):
    monkeypatch.setenv("VITRAIL_DATA", str(empty_machine / "mine"))
    written(empty_machine / "mine" / location, cifar10())
    assert len(load_dataset("cifar-10")["test"]) == 10


def test_incomplete_data_is_not_used(empty_machine, monkeypatch):
    monkeypatch.setenv("VITRAIL_DATA", str(empty_machine / "mine"))
    (empty_machine / "mine").mkdir()
    (mnist(empty_machine / "mine/fashion-mnist") / "t10k-labels-idx1-ubyte").unlink()
    assert downloads.find_local("fashion-mnist") is None


def test_a_local_folder_takes_precedence_with_a_note(empty_machine):
    mnist(empty_machine / "digits")
    found = load_dataset("digits")
    assert found.kind == "idx"
    assert any("not the published dataset of this name" in note for note in found.notes)


@pytest.mark.parametrize(
    ("typed", "meant"), [("fashion_mnist", "fashion-mnist"), ("FashionMNIST", "fashion-mnist"), ("cifar10", "cifar-10")]
)
def test_a_misspelt_name_suggests_the_closest(empty_machine, typed, meant):
    with pytest.raises(FileNotFoundError, match=rf"did you mean {meant}\? datasets: digits, "):
        load_dataset(typed)


def test_a_missing_path_is_an_error(empty_machine):
    with pytest.raises(FileNotFoundError, match="no such file or folder: photos/cats"):
        load_dataset("photos/cats")


def test_an_unsupported_file_is_an_error(empty_machine):
    (empty_machine / "notes.pdf").write_bytes(b"x")
    with pytest.raises(ValueError, match="not a supported data file: give a folder"):
        load_dataset("notes.pdf")
