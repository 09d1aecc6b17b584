"""Remote shards through the command line: runs as on local files, one line for what is wrong, no credentials anywhere."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests import forked
from tests.data.remote_server import FileServer, make_certificate
from tests.data.test_sources_tar import samples, shard
from tests.evaluation.made import model
from tests.training.runs import assert_same, environment, newest, summary
from vitrail.cli import main
from vitrail.training.train import choose_directory

pytest.importorskip("aiohttp", reason="needs the extra remote")
TINY = ("--model", "Ti/8", "--set", "model.size.depth=1", "--set", "model.size.width=32", "--set", "model.size.heads=1")
TINY += (
    "--size",
    "16",
    "--batch-size",
    "8",
    "--steps",
    "12",
    "--workers",
    "2",
    "--save-seconds",
    "0",
    "--set",
    "ema=EMA",
)
SECRET = "5ecret"


@pytest.fixture(scope="module")
def tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("remote")


@pytest.fixture(scope="module")
def server(tmp: Path):
    root = tmp / "files"
    for number in range(3):
        shard(root / f"train-{number:03}.tar", samples(range(12 * number, 12 * number + 12)))
    shard(root / "val-000.tar", samples(range(90, 99)))
    serving = FileServer(root)
    yield serving
    serving.close()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(tmp: Path, *arguments: str):
    return forked.run(*arguments, cwd=tmp, env=environment(tmp))


@pytest.fixture(scope="module")
def whole(tmp: Path, server: FileServer) -> Path:
    """A run on the local files."""
    done = run(tmp, "train", "files", *TINY, "--out", "whole", "--quiet")
    assert done.returncode == 0, done.stderr
    return tmp / "whole"


def test_a_killed_run_on_an_unreliable_server_resumes_to_the_weights_of_local_files(tmp, server, whole):
    server.drop, server.cut, server.fail = 20, 6, 9
    remote = tmp / "remote"
    data = f"{server.url}/{{train-{{000..002}},val-000}}.tar?X-Amz-Signature={SECRET}"
    arguments = ["train", data, *TINY, "--out", "remote", "--cache-size", "16MB"]
    with (tmp / "out").open("w"):
        pass
    request = {"arguments": arguments, "cwd": str(tmp), "env": environment(tmp), "timeout": 100}
    child = forked.start_child(request | {"out": str(tmp / "out"), "err": str(tmp / "err")})
    begin = time.monotonic()
    while newest(remote) < 2 and time.monotonic() - begin < 60:
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    assert forked.wait_for_child() == -signal.SIGKILL, (tmp / "err").read_text()
    assert not (remote / "summary.json").exists()
    refused = run(tmp, "train", "--resume", "remote")
    assert refused.returncode == 2
    assert "give this DATA again" in refused.stderr
    done = run(tmp, "train", data.replace(SECRET, "renewed"), "--resume", "remote")
    assert done.returncode == 0, done.stderr
    server.drop = server.cut = server.fail = 0
    assert_same(remote, whole)
    assert (remote / "model.safetensors").read_bytes()[-4096:] == (whole / "model.safetensors").read_bytes()[-4096:]
    assert summary(remote)["top1"] == summary(whole)["top1"]
    written = b"".join(path.read_bytes() for path in remote.rglob("*") if path.is_file())
    printed = (tmp / "out").read_text() + (tmp / "err").read_text() + refused.stderr + done.stdout + done.stderr
    assert SECRET.encode() not in written
    assert SECRET not in printed
    assert "renewed" not in printed
    record = json.loads((remote / "run.json").read_text())
    assert record["data"]["where"] == f"{server.url}/{{train-{{000..002}},val-000}}.tar?***"
    assert "?***" in record["command"][2]


def test_commands_read_remote_shards(tmp, server, whole, capsys, monkeypatch):
    monkeypatch.chdir(tmp)
    where = f"{server.url}/val-000.tar"
    assert main(["evaluate", "whole", where, "--json"]) == 0
    remote = json.loads(capsys.readouterr().out)
    assert main(["evaluate", "whole", "files/val-000.tar", "--json"]) == 0
    local = json.loads(capsys.readouterr().out)
    shared = ("images", "top1", "loss", "per_class", "confusion")
    assert {name: remote[name] for name in shared} == {name: local[name] for name in shared}
    for verb, out in (("predict", "jsonl"), ("embed", "jsonl")):
        assert main([verb, "whole", f"{where}?sig={SECRET}", "--out", f"{verb}-remote.{out}"]) == 0
        assert main([verb, "whole", "files/val-000.tar", "--out", f"{verb}-local.{out}"]) == 0
        texts = {kind: Path(f"{verb}-{kind}.{out}").read_text() for kind in ("remote", "local")}
        rows = [[json.loads(line) for line in text.splitlines()] for text in texts.values()]
        assert len(rows[0]) == 9
        assert [row.pop("path").removeprefix(f"{where}:") for row in rows[0]] == [
            row.pop("path").removeprefix("files/val-000.tar:") for row in rows[1]
        ]
        assert rows[0] == rows[1]
        assert SECRET not in texts["remote"]
    assert SECRET not in "".join(capsys.readouterr())


def test_check_samples_remote_shards(tmp, server, capsys):
    for number in range(10):
        shard(server.root / "many" / f"train-{number}.tar", samples(range(70), key=f"{number}-{{:04}}"))
    where = f"{server.url}/many/train-{{0..9}}.tar"
    main(["check", where, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["sampled"] == {"shards": 8, "of": 10}
    assert found["images"] == 8 * 64
    main(["check", where, "--near", "none"])
    printed = capsys.readouterr().out
    assert "a sample: 512 images, the first of 8 of 10 shards (" in printed
    assert "--all" in printed
    main(["check", where, "--all", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert "sampled" not in found
    assert found["images"] == 700
    shutil.rmtree(server.root / "many")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("{url}/none.tar", "{url}/none.tar: not found (404 Not Found)"),
        ("{url}/train-000.tar,{url}/none.tar", "{url}/none.tar: not found (404 Not Found)"),
        (
            "{url}/secret.tar?sig=5ecret",
            "{url}/secret.tar: access denied (403 Forbidden): check the credentials, or whether a",
        ),
        ("http://no-such-host.invalid/a.tar", "host not found: no-such-host.invalid (3 attempts)"),
        ("http://127.0.0.1:9/a.tar", "http://127.0.0.1:9/a.tar: cannot connect to 127.0.0.1"),
        ("{url}/train-*.tar", "HTTP cannot list files: use {{000..015}} or"),
        ("{url}/train-{{0..x}}.tar", "{{0..x}} is neither a range"),
        ("{url}/a.tar.gz", "a.tar.gz cannot be read over the network: decompress it"),
        ("{url}/paths.parquet", "paths.parquet lists paths: over the network, tables must have the images in them"),
        ("train={url}/train-000.tar,train={url}/val-000.tar", "names a split twice"),
        ("ftp://host/a.tar", "no such file or folder: ftp://host/a.tar"),
    ],
)
def test_what_is_wrong_is_one_line(server, capsys, where, message):
    server.refuse["/secret.tar"] = 403
    (server.root / "a.tar.gz").write_bytes(b"\x1f\x8b")
    pq = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
    import pyarrow

    pq.write_table(pyarrow.table({"path": ["a.jpg"], "label": ["cat"]}), server.root / "paths.parquet")
    assert main(["check", where.format(url=server.url)]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert message.format(url=server.url) in printed
    assert SECRET not in printed


def test_a_certificate_that_nobody_trusts_is_one_line(tmp, server, tmp_path, capsys, monkeypatch):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    certificate = make_certificate(tmp_path)
    secure = FileServer(server.root, certificate)
    try:
        assert main(["check", f"{secure.url}/train-000.tar"]) == 2
        printed = capsys.readouterr().err
        assert "no secure connection to 127.0.0.1 (certificate verify failed: self-signed certificate)" in printed
        assert printed.count("\n") == 1
        trusting = environment(tmp) | {"SSL_CERT_FILE": str(certificate[0])}
        done = forked.run("check", f"{secure.url}/{{train-000,val-000}}.tar", "--json", cwd=tmp, env=trusting)
        assert json.loads(done.stdout)["images"] == 21, done.stderr
    finally:
        secure.close()


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("https://host:8000/shop/train-{000..031}.tar,https://host/shop/val-{0..7}.tar", "train"),
        ("train=https://host/photos-{0..3}.tar?***,validation=https://host/b.tar", "photos"),
        ("s3://bucket/photos/*.parquet", "photos"),
        ("s3://bucket/", "bucket"),
    ],
)
def test_run_directories_are_named_by_the_shards(where, name):
    assert str(choose_directory(where, "finetune")) == f"runs/{name}-finetune-1"


def test_a_server_that_states_no_length_is_one_line(server, capsys):
    server.lengths = server.ranges = False
    try:
        assert main(["check", f"{server.url}/train-000.tar"]) == 2
        assert "the server does not state the length of the file" in capsys.readouterr().err
    finally:
        server.lengths = server.ranges = True


@pytest.mark.parametrize(("size", "message"), [("20", "too small"), ("much", "is not a size: use 20GB, 500MB, or 0")])
def test_cache_sizes_are_checked(capsys, size, message):
    with pytest.raises(SystemExit):
        main(["check", "digits", "--cache-size", size])
    assert message in capsys.readouterr().err


def test_credentials_are_refused_where_they_would_be_stored(tmp, server, tmp_path, capsys):
    where = f"{server.url}/val-000.tar?sig={SECRET}"
    file = tmp_path / "model.safetensors"
    model(file)
    assert main(["transfer", str(file), where, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr().err
    assert "its credentials cannot be stored: list the shards in a text file" in printed
    assert SECRET not in printed
    assert SECRET.encode() not in b"".join(
        path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()
    )
