"""Remote shards: the bytes and batches of local files, whatever the network and the server do, within the limit of the cache."""

import hashlib
import multiprocessing
import os
import pickle
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.making import encoded
from tests.data.remote_server import FileServer
from tests.data.test_sources_parquet import published
from tests.data.test_sources_tar import samples, shard, written
from vitrail.data.loader import Loader
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.remote import cache as caching
from vitrail.data.remote import file as files
from vitrail.data.remote import index, transport
from vitrail.data.remote.cache import RemoteCache
from vitrail.data.remote.file import RemoteFile, open_files
from vitrail.data.remote.settings import parse_bytes
from vitrail.data.remote.urls import RemoteError, has_credentials, parse_split_sources, redact
from vitrail.data.sources import load_dataset
from vitrail.data.transforms.augment import Flip
from vitrail.data.transforms.crops import RandomResizedCrop
from vitrail.data.transforms.pipeline import TrainPipeline

pytest.importorskip("aiohttp", reason="needs the extra remote")
PIPELINE = TrainPipeline((RandomResizedCrop((8, 8)), Flip()), (8, 8))


@pytest.fixture(autouse=True)
def settings(tmp_path_factory, monkeypatch):
    """Use a cache of the test's own and short pauses."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(transport, "PAUSE_SECONDS", 0.01)
    transport.CONNECTIONS.answered.clear()


@pytest.fixture
def server(tmp_path):
    (tmp_path / "files").mkdir()
    serving = FileServer(tmp_path / "files")
    yield serving
    serving.close()


def unreliable(server: FileServer, often: bool = False) -> None:
    server.drop, server.stall, server.cut, server.fail = (5, 11, 4, 7) if often else (20, 50, 17, 23)


def stall_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up a stalled read soon. On a busy machine healthy ones stall too, so there are many attempts."""
    monkeypatch.setenv("VITRAIL_REMOTE_TIMEOUT", "0.4")
    monkeypatch.setenv("VITRAIL_REMOTE_ATTEMPTS", "30")
    monkeypatch.setattr(transport, "FIRST_ATTEMPTS", 30)


def contents(images) -> list[bytes]:
    return [images.store.data(int(item)) for item in images.items]


def same_splits(one, other) -> bool:
    assert list(one.splits) == list(other.splits)
    for split in one.splits:
        assert one[split].classes == other[split].classes
        assert one[split].targets.tolist() == other[split].targets.tolist()
        assert contents(one[split]) == contents(other[split])
    return True


def batches(images, epoch: int, workers: int) -> list[torch.Tensor]:
    loader = Loader(images, None, PIPELINE, batch_size=8, seed=3, workers=workers)
    try:
        return [value for batch in loader.iter_epoch(epoch) for value in (batch.pixels, batch.targets, batch.indices)]
    finally:
        loader.close()


@pytest.mark.parametrize("cache", ["0", "16MB"])
@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_bytes_and_batches_of_an_unreliable_server_are_those_of_local_files(server, monkeypatch, kind, cache):
    monkeypatch.setenv("VITRAIL_CACHE_SIZE", cache)
    monkeypatch.setattr(files, "BLOCK_BYTES", 4096)
    stall_early(monkeypatch)
    if kind == "tar":
        for number in range(3):
            shard(server.root / f"train-{number:03}.tar", samples(range(12 * number, 12 * number + 12)))
        shard(server.root / "val-000.tar", samples(range(90, 99)))
        names = ["train-{000..002}.tar", "val-000.tar"]
    else:
        published(server.root)
        names = ["data/train-{00000..00001}-of-00002.parquet", "data/validation-00000-of-00001.parquet"]
    unreliable(server, often=kind == "parquet")
    local = load_dataset(str(server.root))
    remote = load_dataset(",".join(f"{server.url}/{name}" for name in names))
    assert same_splits(local, remote)
    assert remote["train"].shards.tolist() == local["train"].shards.tolist()
    for epoch, workers in ((0, 2), (1, 0)):
        pairs = zip(batches(local["train"], epoch, 0), batches(remote["train"], epoch, workers), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert len(server.requests) > (20 if cache == "0" else 5)


def test_a_spawned_process_opens_its_own_connections(server):
    written(server.root)
    train = load_dataset(f"{server.url}/train-{{000000..000001}}.tar", fractions=(1.0, 0.0, 0.0))["train"]
    again = pickle.loads(pickle.dumps(train))
    assert contents(again) == contents(train)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(train.store.data, range(len(train))) == contents(train)
    assert contents(train) == [encoded(number) for number in range(9)]  # the parent's connection still works


def test_credentials_come_from_the_address_and_from_netrc(server, tmp_path, monkeypatch):
    written(server.root)
    server.login = "ann:pa55word"
    where = f"{server.url}/train-000000.tar"
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(RemoteError, match=r"access denied \(401 Unauthorized\)"):
        load_dataset(where)
    with_user = load_dataset(where.replace("//", "//ann:pa55word@"), fractions=(1.0, 0.0, 0.0))
    assert contents(with_user["train"]) == [encoded(number) for number in range(5)]
    assert with_user.source == where.replace("//", "//***@")
    assert with_user["train"].name(0).startswith(where)
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login ann password pa55word\n")
    assert len(load_dataset(where, fractions=(1.0, 0.0, 0.0))["train"]) == 5


def test_an_interrupted_range_is_resumed_where_it_ended(server):
    data = np.random.default_rng(0).bytes(3_000_000)
    (server.root / "a.tar").write_bytes(data)
    (file,) = open_files([f"{server.url}/a.tar"])
    server.cut = 1  # every answer ends in its middle
    assert file.read(0, len(data)) == data
    starts = [int(asked.removeprefix("bytes=").split("-")[0]) for _, asked in server.requests[1:]]
    assert starts == sorted(set(starts))
    assert server.sent < 1.2 * len(data)


def test_attempts_are_bounded(server, monkeypatch):
    (server.root / "a.tar").write_bytes(bytes(2000))
    (file,) = open_files([f"{server.url}/a.tar"])
    server.fail = 1
    with pytest.raises(RemoteError, match=r"^http://127.*/a\.tar: the server answered 503 .*\(6 attempts\)$"):
        file.read(0, 10)
    assert len(server.requests) == 7
    server.fail, server.stall = 0, 1
    monkeypatch.setenv("VITRAIL_REMOTE_TIMEOUT", "0.1")
    monkeypatch.setenv("VITRAIL_REMOTE_ATTEMPTS", "2")
    with pytest.raises(RemoteError, match=r"no data for 0\.1 s \(\$VITRAIL_REMOTE_TIMEOUT\) \(2 attempts\)"):
        file.read(0, 2)


@pytest.mark.parametrize("etags", [True, False])
def test_a_shard_that_changes_is_an_error(server, etags, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE_SIZE", "0")
    server.etags = etags
    written(server.root)
    where = f"{server.url}/train-{{000000..000001}}.tar"
    train = load_dataset(where, fractions=(1.0, 0.0, 0.0))["train"]
    shard(server.root / "train-000001.tar", samples(range(50, 54)))
    os.utime(server.root / "train-000001.tar", (1, 1))
    assert train.store.data(0) == encoded(0)
    with pytest.raises(RemoteError, match=r"train-000001\.tar changed while it was being read"):
        train.store.data(6)
    loader = Loader(train, None, PIPELINE, batch_size=3, seed=0, cache_bytes=0)
    with pytest.raises(OSError, match="changed while it was being read"):  # not replaced by another image
        list(loader.iter_epoch(0))
    assert load_dataset(where, fractions=(1.0, 0.0, 0.0))["train"].store.data(6) == encoded(51)


def test_a_new_version_is_not_read_from_the_cache(server):
    written(server.root)
    where = f"{server.url}/train-000001.tar"
    assert contents(load_dataset(where, fractions=(1.0, 0.0, 0.0))["train"])[0] == encoded(5)
    shard(server.root / "train-000001.tar", samples(range(50, 54)))
    assert contents(load_dataset(where, fractions=(1.0, 0.0, 0.0))["train"])[0] == encoded(50)


def test_a_server_without_ranges_sends_every_shard_once(server):
    for number in range(2):
        shard(server.root / f"train-{number}.tar", samples(range(20 * number, 20 * number + 20)))
    server.ranges, server.cut = False, 3
    remote = load_dataset(f"{server.url}/train-{{0..1}}.tar")
    assert same_splits(load_dataset(f"{server.root}/train-*.tar"), remote)
    assert "the server sends whole files only (no Range)" in remote.notes[-1]
    whole = sum(path.stat().st_size for path in server.root.iterdir())
    assert server.sent < 3 * whole  # two cut answers were started again, and the first bytes of each were asked for


def test_a_shard_without_ranges_must_fit_into_the_cache(server, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE_SIZE", "16MB")
    (server.root / "a.tar").write_bytes(bytes(15_000_000))
    server.ranges = False
    with pytest.raises(RemoteError, match=r"this one has 15 MB: give a larger cache_size="):
        load_dataset(f"{server.url}/a.tar")


def test_an_index_is_made_once(server):
    written(server.root)
    where = f"{server.url}/train-{{000000..000001}}.tar"
    load_dataset(where, fractions=(1.0, 0.0, 0.0))
    server.requests.clear()
    load_dataset(where + "?X-Amz-Signature=another", fractions=(1.0, 0.0, 0.0))
    assert {asked for name, asked in server.requests} == {"bytes=0-0"}
    assert len(server.requests) == 2 + 3  # versions, and class lists beside the shards


def test_large_members_are_skipped(server):
    data = [np.random.default_rng(number).bytes(3_000_000) for number in range(6)]
    members = [pair for number, clip in enumerate(data) for pair in ((f"{number}.mp4", clip), (f"{number}.cls", b"1"))]
    path = shard(server.root / "train.tar", members)
    (file,) = open_files([f"{server.url}/train.tar"])
    from vitrail.data.sources.tar import iter_members, scan_local

    assert list(iter_members(file)) == list(scan_local(str(path)))
    assert server.sent < path.stat().st_size / 8


def test_a_wrong_port_is_named():
    with pytest.raises(RemoteError, match=r"^http://127\.0\.0\.1:99999/a\.tar is not a valid address$"):
        load_dataset("http://127.0.0.1:99999/a.tar")


def test_damaged_shards_are_named(server):
    whole = written(server.root) / "train-000000.tar"
    whole.write_bytes(whole.read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"http://127.*/train-000000\.tar is not a valid tar file"):
        load_dataset(f"{server.url}/train-000000.tar")
    (server.root / "a.parquet").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"http://127.*/a\.parquet is not a valid Parquet file"):
        load_dataset(f"{server.url}/a.parquet")


def folder_bytes(folder: Path) -> int:
    total = 0
    for path in caching.list_files(folder):
        try:
            total += os.stat(path).st_size
        except FileNotFoundError:
            continue
    return total


def test_the_cache_keeps_its_limit_and_what_was_used_last(server, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE_SIZE", "16MB")
    data = {name: np.random.default_rng(ord(name)).bytes(6_000_000) for name in "abcd"}
    for name, content in data.items():
        (server.root / f"{name}.tar").write_bytes(content)
    opened = dict(zip(data, open_files([f"{server.url}/{name}.tar" for name in data]), strict=True))
    cache = files.open_cache()
    assert cache is not None
    for step, name in enumerate("abacad"):
        for start in range(0, 6_000_000, 500_000):
            assert opened[name].read(start, 500_000) == data[name][start : start + 500_000]
            assert folder_bytes(cache.folder) <= 16_000_000
        for path in (cache.folder / opened[name].key[:2] / opened[name].key).iterdir():
            os.utime(path, (step, step))  # by the clock of the test
        cache.opened.clear()
    server.requests.clear()
    opened["a"].read(0, 6_000_000)
    assert server.requests == []
    opened["b"].read(0, 6_000_000)
    assert server.requests


def write_forever(folder: str, number: int) -> None:
    cache = RemoteCache(Path(folder), 20_000_000)
    data = np.random.default_rng(number).bytes(100_000)
    for entry in range(10**6):
        cache.put(f"{entry % 50:02}{number}", f"{entry:08d}", data)


def test_a_killed_process_leaves_no_torn_entry(tmp_path):
    processes = [multiprocessing.Process(target=write_forever, args=(str(tmp_path), number)) for number in range(2)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 20
    while folder_bytes(tmp_path) < 10_000_000 and time.monotonic() < deadline:
        time.sleep(0.01)
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    entries = [path for path in caching.list_files(tmp_path) if not path.endswith(".partial")]
    assert len(entries) > 50
    expected = {hashlib.sha256(np.random.default_rng(number).bytes(100_000)).digest() for number in range(2)}
    cache = RemoteCache(tmp_path, 20_000_000)
    for path in entries:
        entry = cache.find(Path(path).parent.name, Path(path).name)
        assert entry is not None
        assert hashlib.sha256(entry.read(0, entry.size)).digest() in expected
    usage = (tmp_path / "usage").read_bytes()  # empty if a process was killed as it wrote: counted again
    assert not usage or int(usage) >= folder_bytes(tmp_path) - len(usage)  # too high a count at most
    cache.put("00", "00000000", b"new")
    assert int((tmp_path / "usage").read_bytes()) >= folder_bytes(tmp_path) - len(usage)


def test_torn_entries_and_abandoned_files_are_not_used(tmp_path):
    cache = RemoteCache(tmp_path, 20_000_000)
    cache.put("key", "00000000", b"data" * 1000)
    path = cache.path("key", "00000000")
    path.write_bytes(path.read_bytes()[:-3])  # as a crash of the machine may leave it
    assert RemoteCache(tmp_path, 20_000_000).find("key", "00000000") is None
    assert not path.exists()
    left = path.with_name(".00000001.abc.partial")
    left.write_bytes(b"half")
    os.utime(left, (1, 1))
    assert cache.clean_up(10**9) == 0
    assert not left.exists()


def test_a_cache_that_cannot_be_written_is_an_error(server, tmp_path, monkeypatch):
    written(server.root)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(RemoteError, match=r"cannot use the cache of remote files .*Not a directory"):
        load_dataset(f"{server.url}/train-000000.tar")
    monkeypatch.setenv("VITRAIL_CACHE_SIZE", "0")
    assert len(load_dataset(f"{server.url}/train-000000.tar", fractions=(1.0, 0.0, 0.0))["train"]) == 5


def test_lists_name_local_and_remote_shards(server, tmp_path):
    written(server.root)
    expected = load_dataset(str(server.root))
    listing = tmp_path / "shards.txt"
    listing.write_text(
        f"# shards\nfiles/train-000000.tar\n\n{server.url}/train-000001.tar?key=SECRET\nfiles/val-*.tar\n"
    )
    assert same_splits(load_dataset(str(listing)), expected)
    (server.root / "all.txt").write_text(
        "train-{000000..000001}.tar\nval-000000.tar\n".replace("{000000..000001}", "000000")
    )
    assert len(load_dataset(f"{server.url}/all.txt")["train"]) == 5
    (server.root / "all.txt").write_text("file:///etc/passwd\n")
    with pytest.raises(ValueError, match="which is not remote"):
        load_dataset(f"{server.url}/all.txt")
    addresses = [f"{server.url}/train-00000{number}.tar" for number in range(2)]
    assert len(load_dataset(addresses, fractions=(1.0, 0.0, 0.0))["train"]) == 9
    splits = f"train={','.join(addresses)},validation={server.root}/val-000000.tar"
    assert same_splits(load_dataset(splits), expected)
    assert load_dataset(splits).kind == "tar"


def test_class_names_beside_the_shards_are_read(server):
    written(server.root)
    (server.root / "classes.txt").write_text("cat\ndog\nowl\n")
    assert load_dataset(f"{server.url}/train-000000.tar")["train"].classes == ("cat", "dog", "owl")


def test_a_sample_reads_a_few_shards(server):
    for number in range(20):
        shard(server.root / f"train-{number:03}.tar", samples(range(100), key=f"{number}-{{:04}}"))
    where = f"{server.url}/train-{{000..019}}.tar"
    dataset = load_dataset(where, sample=True, fractions=(1.0, 0.0, 0.0))
    assert dataset.sampled == (8, 20)
    assert len(dataset["train"]) == 8 * 64
    assert dataset.notes[0].startswith("a sample: 512 images, the first of 8 of 20 shards (")
    assert len({name for name, asked in server.requests if asked != "bytes=0-0"}) == 8
    table = published(server.root / "tables")
    remote = f"{server.url}/tables/data/train-{{00000..00001}}-of-00002.parquet"
    assert load_dataset(remote, sample=True).sampled is None  # a sample that has all rows is none
    assert load_dataset(str(table), sample=True).sampled is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://ann:secret@host/a.tar: not found", "https://***@host/a.tar: not found"),
        ("https://h/a.tar?X-Amz-Signature=abc&x=1", "https://h/a.tar?***"),
        ("read https://h/{0..3}.tar?sig=a%2Fb, twice", "read https://h/{0..3}.tar?*** twice"),
        ("https://h/a.tar?sig=1,https://h/b.tar?sig=2", "https://h/a.tar?***,https://h/b.tar?***"),
        ("train=https://u:p@h/a.tar,validation=s3://b/k.tar", "train=https://***@h/a.tar,validation=s3://b/k.tar"),
        ("HTTPS://u:p%40@h:8443/a.tar", "HTTPS://***@h:8443/a.tar"),
        ("https://host/a.tar", "https://host/a.tar"),
        ("photos/what?.jpg", "photos/what?.jpg"),
    ],
)
def test_credentials_are_hidden(text, expected):
    assert redact(text) == expected
    assert redact(expected) == expected
    assert has_credentials(text) == (text != expected)


def test_a_remote_file_shows_no_credentials():
    file = RemoteFile("https://ann:secret@host/dir/a.tar?sig=secret", transport.Version(3))
    again = pickle.loads(pickle.dumps(file))
    assert str(again) == "https://host/dir/a.tar"
    assert again.url == file.url
    assert os.path.dirname(file) == "https://host/dir"
    with pytest.raises(RemoteError, match="stored without its credentials"):
        load_dataset("https://***@host/a.tar")


def test_sources_of_splits_are_parsed():
    assert parse_split_sources("train=a,b,val=c") == {"train": "a,b", "val": "c"}
    assert parse_split_sources("photos") is None
    with pytest.raises(ValueError, match="names a split twice"):
        parse_split_sources("train=a,train=b")
    with pytest.raises(ValueError, match="has no data for validation"):
        parse_split_sources("train=a,validation=")


@pytest.mark.parametrize(
    ("text", "size"), [("20GB", 20 * 10**9), ("0", 0), ("1.5 GiB", 3 * 2**29), ("500mb", 5 * 10**8)]
)
def test_sizes_are_parsed(text, size):
    assert parse_bytes(text) == size


def test_indices_keep_every_name_and_label():
    members = [index.TarMember("a\udc80.jpg", 512, 3), index.TarMember("a.cls", 2048, 2, b"\xff1")]
    assert list(index.decode_index(index.encode_index(members))) == members


def test_evaluation_batches_come_from_remote_parquet(server):
    published(server.root)
    remote = load_dataset(f"{server.url}/data/validation-00000-of-00001.parquet")
    loader = Loader(next(iter(remote.splits.values())), None, Preprocessing((8, 8)), batch_size=2, workers=1)
    assert sum(len(batch.targets) for batch in loader.iter_once()) == 3
    loader.close()
