"""Hosts that do not know each other predict parts, and joining these gives the bytes of one process."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.deploy.asked import images, model, vitrail
from tests.deploy.masks import photos, save_segmenter
from tests.deploy.test_predict_resume import Killed, killed_after
from vitrail.deploy.predict import resume as resuming
from vitrail.deploy.predict.processes import ProcessShare, process_share

COUNT = 12


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("parts")
    model(root / "model.safetensors")
    save_segmenter(root / "segmenter.safetensors")
    images(root / "photos", COUNT)
    photos(root / "scenes", 4)
    return root


def command(place: Path, out: object, *more: object) -> int:
    """Predict, embed or segment, by the name of the output."""
    masks = str(out).endswith(("masks/", ".json"))
    verb = "embed" if Path(str(out)).name.startswith("f.") else "predict"
    data = "segmenter.safetensors" if masks else "model.safetensors", "scenes" if masks else "photos"
    return vitrail(verb, place / data[0], place / data[1], "--out", out, "--batch-size", 1, "--runtime", "torch", *more)


def compute_parts(place: Path, folder: Path, name: str, count: int = 3) -> list[Path]:
    """Compute each part on a "host" with a directory of its own; return the directories."""
    hosts = [folder / f"host{number}" for number in range(1, count + 1)]
    for number, host in enumerate(hosts, start=1):
        host.mkdir()
        assert command(place, f"{host}/{name}", "--part", f"{number}/{count}", "--resume") == 0
        assert not (host / name).is_file()
    return hosts


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet", "f.npy", "m.json"])
def test_joined_parts_are_the_bytes_of_one_process(
    place: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "whole").mkdir()
    assert command(place, tmp_path / "whole" / name) == 0
    hosts = compute_parts(place, tmp_path, name)
    capsys.readouterr()
    assert vitrail("join", tmp_path / name, *hosts, "--json") == 0
    assert json.loads(capsys.readouterr().out)["parts"] == 3
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()
    assert [list(host.iterdir()) for host in hosts] == [[], [], []]


def test_masks_of_hosts_are_joined_in_one_directory(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, joined = tmp_path / "whole" / "masks", tmp_path / "masks"
    whole.parent.mkdir()
    assert command(place, f"{whole}/") == 0
    for host in compute_parts(place, tmp_path, "masks/", 2):
        shutil.copytree(host / "masks", joined, dirs_exist_ok=True)
    masks = sorted(path.relative_to(joined) for path in joined.rglob("*.png"))
    hidden = (joined / masks[0]).rename(tmp_path / "hidden")
    assert vitrail("join", f"{joined}/") == 2
    assert f"lacks 1 of 4 masks, such as {masks[0]}: copy them" in capsys.readouterr().err
    hidden.rename(joined / masks[0])
    assert vitrail("join", f"{joined}/") == 0
    files = {path.relative_to(whole): path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    assert files == {path.relative_to(joined): path.read_bytes() for path in joined.rglob("*") if path.is_file()}


def test_killed_part_resumes_and_the_last_joins_in_a_shared_directory(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resuming, "MAX_PENDING_ROWS", 1)  # every row is synced
    (tmp_path / "whole").mkdir()
    assert command(place, tmp_path / "whole" / "a.csv") == 0
    out = tmp_path / "a.csv"
    with monkeypatch.context() as patch:
        killed_after(patch, 2)
        with pytest.raises(Killed):
            command(place, out, "--part", "2/2")
    assert command(place, out, "--part", "1/2") == 0
    assert "a.csv.part-1-of-2 is complete; the last part joins all, or use: vitrail join" in capsys.readouterr().out
    assert vitrail("join", out) == 2
    error = capsys.readouterr().err
    assert "a.csv.part-2-of-2 is not complete, it has 2 rows: continue it with --part 2/2 --resume" in error
    assert command(place, out, "--part", "2/2") == 2
    assert "use --resume to continue it" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # torchrun repeats the command as it was
    assert command(place, out, "--part", "2/2") == 0
    assert "(2 from the earlier run)" in capsys.readouterr().out
    assert out.read_bytes() == (tmp_path / "whole" / "a.csv").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a.csv", "whole"]


def test_parts_that_do_not_fit_are_refused_and_kept(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.csv"
    hosts = compute_parts(place, tmp_path, "a.csv")

    def refused(*places: Path) -> str:
        capsys.readouterr()
        assert vitrail("join", out, *places) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert not out.exists()
        return error

    assert "no parts of" in refused()
    assert "2 of 3 parts of" in refused(hosts[1])
    assert "are missing: 1, 3; copy them here, or compute one with --part 1/3 --resume" in refused(hosts[1])
    assert "is not a directory" in refused(tmp_path / "nowhere")
    second = hosts[1] / "a.csv.part-2-of-3"
    whole = second.read_bytes()
    second.write_bytes(whole[:-1])
    assert f"has {len(whole) - 1:,} bytes, {len(whole):,} were written: copy it again" in refused(*hosts)
    second.write_bytes(whole)
    assert command(place, hosts[1] / "a.csv", "--part", "2/3", "--force", "--top", 2) == 0
    assert "are of different runs: one was started with --top 1, which is 2 now" in refused(*hosts)
    assert command(place, hosts[1] / "a.csv", "--part", "2/3", "--force") == 0
    out.touch()
    assert vitrail("join", out, *hosts) == 2
    assert "exists: give another name, or --force to replace it" in capsys.readouterr().err
    assert vitrail("join", out, *hosts, "--force", "--keep") == 0
    assert len(out.read_text().splitlines()) == COUNT + 1
    assert second.is_file()


def test_parts_are_given_as_a_number_of_a_count() -> None:
    assert process_share({}, "3/8") == ProcessShare(2, 8)
    for part in ("0/8", "9/8", "3", "a/b", "1/0"):
        with pytest.raises(ValueError, match="must be K/N with 1 <= K <= N, such as 3/8"):
            process_share({}, part)
    with pytest.raises(ValueError, match="--part 1/100000000 has more than 100,000 parts: use fewer"):
        process_share({}, "1/100000000")
    with pytest.raises(ValueError, match="--part 1/2 divides the images, and so does torchrun"):
        process_share({"RANK": "0", "WORLD_SIZE": "2"}, "1/2")
