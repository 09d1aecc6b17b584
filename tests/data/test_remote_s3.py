"""Shards in S3, from a server that answers the calls that are used: HeadObject, GetObject, ListObjectsV2."""

import shutil

import numpy as np
import pytest

from tests.data.remote_server import FileServer
from tests.data.test_remote import contents, same_splits, unreliable
from tests.data.test_sources_parquet import published
from tests.data.test_sources_tar import samples, shard, written
from vitrail.data.remote import transport
from vitrail.data.remote.file import open_files
from vitrail.data.remote.urls import RemoteError
from vitrail.data.sources import load_dataset

pytest.importorskip("s3fs", reason="needs the extra s3")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Serve a bucket; credentials and endpoint are in the environment, as botocore has them. Clients take a second to make."""
    root = tmp_path_factory.mktemp("s3")
    serving = FileServer(root)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": serving.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "SECRET",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": str(root / "none"),
            "VITRAIL_REMOTE_TIMEOUT": "0.5",
            "VITRAIL_REMOTE_ATTEMPTS": "30",
        }.items():
            patch.setenv(name, value)
        patch.setattr(transport, "PAUSE_SECONDS", 0.01)
        patch.setattr(transport, "FIRST_ATTEMPTS", 30)
        transport.CONNECTIONS.transports.pop("s3", None)  # of another endpoint
        yield serving
        transport.CONNECTIONS.transports.pop("s3", None)
    serving.close()


@pytest.fixture
def bucket(server, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shutil.rmtree(server.root / "photos", ignore_errors=True)
    (server.root / "photos").mkdir()
    server.drop = server.stall = server.cut = server.fail = server.sent = 0
    server.refuse.clear()
    server.requests.clear()
    return server


@pytest.mark.parametrize(
    "where",
    [
        "s3://photos/*-00000?.tar",
        "s3://photos/",
        "s3://photos",
        "s3://photos/{train-000000,train-000001,val-000000}.tar",
    ],
)
def test_shards_in_a_bucket_are_found(bucket, where):
    written(bucket.root / "photos")
    remote = load_dataset(where)
    assert same_splits(load_dataset(str(bucket.root / "photos")), remote)
    assert remote["train"].name(0) == "s3://photos/train-000000.tar:0000.png"


def test_tables_of_an_unreliable_server_are_those_of_local_files(bucket):
    published(bucket.root / "photos")
    local = load_dataset(str(bucket.root / "photos"))
    unreliable(bucket)
    assert same_splits(local, load_dataset("s3://photos/data/*.parquet"))


def test_an_interrupted_object_is_resumed(bucket):
    data = np.random.default_rng(0).bytes(2_000_000)
    (bucket.root / "photos" / "a.tar").write_bytes(data)
    (file,) = open_files(["s3://photos/a.tar"])
    bucket.cut = 2
    assert file.read(0, len(data)) == data
    assert bucket.sent < 1.5 * len(data)


def test_an_object_that_changes_is_an_error(bucket, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE_SIZE", "0")
    written(bucket.root / "photos")
    train = load_dataset("s3://photos/train-000001.tar", fractions=(1.0, 0.0, 0.0))["train"]
    assert len(contents(train)) == 4
    shard(bucket.root / "photos" / "train-000001.tar", samples(range(50, 54)))
    with pytest.raises(RemoteError, match=r"^s3://photos/train-000001\.tar changed while it was being read"):
        train.store.data(0)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("s3://photos/missing.tar", "^s3://photos/missing.tar: not found"),
        ("s3://photos/*.tar", "^no file matches s3://photos/\\*.tar$"),
        ("s3://photos/", "^no shards \\(.tar or .parquet\\) in s3://photos/$"),
        ("s3://photos/secret.tar", "^s3://photos/secret.tar: access denied"),
    ],
)
def test_what_is_not_there_is_one_line(bucket, where, message):
    bucket.refuse["/photos/secret.tar"] = 403
    with pytest.raises(RemoteError, match=message) as raised:
        load_dataset(where)
    assert "\n" not in str(raised.value)
    assert "SECRET" not in str(raised.value)
