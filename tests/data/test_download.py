"""Names that resolve by themselves, and downloads from a server on this machine."""

import gzip
import hashlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from tests.data.test_sources_arrays import cifar10, idx, images, labels, mnist, packed, written
from vitrail.data.sources import download as downloading
from vitrail.data.sources import names, read
from vitrail.data.sources.download import download

DATA = np.random.default_rng(0).bytes(700_000)


def md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


class Publisher:
    """A server with some files. It can break off, ignore ranges, or be out of order for a while."""

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

            def do_GET(self):  # noqa: N802
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
    monkeypatch.setattr(downloading, "PAUSE", 0.01)
    server = Publisher()
    server.files["data.bin"] = DATA
    yield server
    server.close()


def test_a_file_arrives_whole_with_progress(publisher, tmp_path):
    seen = []
    download(publisher.url + "data.bin", tmp_path / "new" / "d.bin", md5(DATA), lambda *said: seen.append(said))
    assert (tmp_path / "new" / "d.bin").read_bytes() == DATA
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["d.bin"]
    assert seen[-1] == ("downloading data.bin", len(DATA), len(DATA))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_a_broken_connection_is_resumed_where_it_broke(publisher, tmp_path):
    publisher.breaks = [100_000, 300_000]
    download(publisher.url + "data.bin", tmp_path / "d.bin", md5(DATA))
    assert (tmp_path / "d.bin").read_bytes() == DATA
    assert publisher.asked == [None, "bytes=100000-", "bytes=400000-"]


def test_a_later_run_resumes_what_an_earlier_one_left(publisher, tmp_path):
    (tmp_path / "d.bin.partial").write_bytes(DATA[:250_000])
    download(publisher.url + "data.bin", tmp_path / "d.bin", md5(DATA))
    assert (tmp_path / "d.bin").read_bytes() == DATA
    assert publisher.asked == ["bytes=250000-"]


def test_a_part_that_is_already_all_is_only_checked(publisher, tmp_path):
    (tmp_path / "d.bin.partial").write_bytes(DATA)
    download(publisher.url + "data.bin", tmp_path / "d.bin", md5(DATA))
    assert (tmp_path / "d.bin").read_bytes() == DATA


def test_a_server_that_knows_no_ranges_gives_all_of_it_again(publisher, tmp_path):
    publisher.ranges, publisher.breaks = False, [100_000]
    download(publisher.url + "data.bin", tmp_path / "d.bin", md5(DATA))
    assert (tmp_path / "d.bin").read_bytes() == DATA


def test_the_part_of_another_file_is_thrown_away(publisher, tmp_path):
    (tmp_path / "d.bin.partial").write_bytes(b"something else" * 1000)
    download(publisher.url + "data.bin", tmp_path / "d.bin", md5(DATA))
    assert (tmp_path / "d.bin").read_bytes() == DATA
    assert publisher.asked == ["bytes=14000-", None]


def test_a_server_out_of_order_for_a_moment_is_asked_again(publisher, tmp_path):
    publisher.failures = 1
    download(publisher.url + "data.bin", tmp_path / "d.bin", md5(DATA))
    assert (tmp_path / "d.bin").read_bytes() == DATA


def test_a_wrong_checksum_leaves_nothing_behind(publisher, tmp_path):
    with pytest.raises(ValueError, match=r"has the checksum .* not 0000"):
        download(publisher.url + "data.bin", tmp_path / "d.bin", "0" * 32)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_told_at_once(publisher, tmp_path):
    with pytest.raises(OSError, match=r"other\.bin answers 404"):
        download(publisher.url + "other.bin", tmp_path / "d.bin", md5(DATA))
    assert len(publisher.asked) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_connection_that_always_breaks_keeps_what_came(publisher, tmp_path):
    publisher.breaks = [100_000, *[0] * 20]
    with pytest.raises(OSError, match="cannot be read: the connection broke off"):
        download(publisher.url + "data.bin", tmp_path / "d.bin", md5(DATA))
    assert (tmp_path / "d.bin.partial").read_bytes() == DATA[:100_000]
    assert not (tmp_path / "d.bin").exists()


def test_processes_that_want_the_same_file_get_it_once(publisher, tmp_path):
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
def nowhere(monkeypatch, tmp_path):
    """A machine on which no data is."""
    monkeypatch.setattr(names, "SYSTEM", tmp_path / "system")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("VITRAIL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def published(monkeypatch, publisher, name, files):
    publisher.files |= files
    given = names.Published(
        publisher.url, {file: md5(data) for file, data in files.items()}, names.PUBLISHED[name].also
    )
    monkeypatch.setitem(names.PUBLISHED, name, given)


def fashion():
    files = {}
    for split, count in (("train", 60), ("t10k", 9)):
        files[f"{split}-images-idx3-ubyte.gz"] = gzip.compress(idx(images(count, count)))
        files[f"{split}-labels-idx1-ubyte.gz"] = gzip.compress(idx(labels(count)))
    return files


def test_a_name_is_downloaded_to_the_cache_once(publisher, nowhere, monkeypatch):
    published(monkeypatch, publisher, "fashion-mnist", fashion())
    assert len(read("fashion-mnist")["test"]) == 9
    assert len(publisher.asked) == 4
    found = read("fashion-mnist")
    assert (found.where, found.kind, len(publisher.asked)) == ("fashion-mnist", "idx", 4)
    assert (nowhere / "cache/vitrail/data/fashion-mnist/train-images-idx3-ubyte.gz").is_file()


def test_an_archive_is_downloaded_where_the_user_says(publisher, nowhere, monkeypatch):
    archive = packed(nowhere / "made.tar.gz", cifar10()).read_bytes()
    published(monkeypatch, publisher, "cifar-10", {"cifar-10-binary.tar.gz": archive})
    monkeypatch.setenv("VITRAIL_DATA", str(nowhere / "mine"))
    assert len(read("cifar-10")["test"]) == 10
    assert (nowhere / "mine/cifar-10/cifar-10-binary.tar.gz").read_bytes() == archive


def test_a_download_that_fails_says_what_to_do_by_hand(publisher, nowhere, monkeypatch):
    monkeypatch.setitem(
        names.PUBLISHED, "cifar-10", names.Published(publisher.url, {"cifar-10-binary.tar.gz": "0" * 32})
    )
    with pytest.raises(OSError, match=r"cifar-10 cannot be downloaded: .* answers 404 .* by hand, put .* in ") as error:
        read("cifar-10")
    assert str(nowhere / "cache/vitrail/data/cifar-10") in str(error.value)
    assert "\n" not in str(error.value)


def test_without_a_network_it_says_so_in_a_line(nowhere, monkeypatch):
    monkeypatch.setattr(downloading, "PAUSE", 0.01)
    with socket.socket() as taken:  # a port that nobody listens on
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        monkeypatch.setitem(names.PUBLISHED, "mnist", names.Published(address, names.PUBLISHED["mnist"].files))
        with pytest.raises(OSError, match=r"mnist cannot be downloaded: .*refused.*by hand, put the 4 files") as error:
            read("mnist")
    assert "\n" not in str(error.value)
    assert not list((nowhere / "cache/vitrail/data/mnist").iterdir())


@pytest.mark.parametrize("place", ["mine/fashion-mnist", "cache/vitrail/data/fashion-mnist", "system/fashion-mnist"])
def test_what_is_on_the_machine_is_not_downloaded(nowhere, monkeypatch, place):
    monkeypatch.setenv("VITRAIL_DATA", str(nowhere / "mine"))
    (nowhere / place).parent.mkdir(parents=True, exist_ok=True)
    mnist(nowhere / place)
    assert names.located("fashion-mnist") == str(nowhere / place)
    assert len(read("fashion-mnist")["test"]) == 9


@pytest.mark.parametrize("place", ["cifar-10", "cifar-10-batches-bin", "cifar-10/cifar-10-batches-bin"])
def test_cifar_is_found_under_the_names_that_it_unpacks_to(nowhere, monkeypatch, place):
    monkeypatch.setenv("VITRAIL_DATA", str(nowhere / "mine"))
    written(nowhere / "mine" / place, cifar10())
    assert len(read("cifar-10")["test"]) == 10


def test_half_of_the_data_is_not_taken_for_all(nowhere, monkeypatch):
    monkeypatch.setenv("VITRAIL_DATA", str(nowhere / "mine"))
    (nowhere / "mine").mkdir()
    (mnist(nowhere / "mine/fashion-mnist") / "t10k-labels-idx1-ubyte").unlink()
    assert names.located("fashion-mnist") is None


def test_a_path_comes_before_a_name_and_that_is_told(nowhere):
    mnist(nowhere / "digits")
    found = read("digits")
    assert found.kind == "idx"
    assert any("not the data that is known by this name" in note for note in found.notes)


@pytest.mark.parametrize(
    ("said", "meant"), [("fashion_mnist", "fashion-mnist"), ("FashionMNIST", "fashion-mnist"), ("cifar10", "cifar-10")]
)
def test_a_misspelt_name_gets_the_closest(nowhere, said, meant):
    with pytest.raises(FileNotFoundError, match=rf"did you mean {meant}\? known are digits, "):
        read(said)


def test_a_path_that_is_not_there_is_told(nowhere):
    with pytest.raises(FileNotFoundError, match="there is no photos/cats"):
        read("photos/cats")


def test_a_file_of_another_kind_is_refused(nowhere):
    (nowhere / "notes.pdf").write_bytes(b"x")
    with pytest.raises(ValueError, match="nothing that data is read from: give a folder"):
        read("notes.pdf")
