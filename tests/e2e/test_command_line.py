"""Tests of the command line as a whole, and of `vitrail describe MODEL`."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from vitrail.cli import build_parser
from vitrail.models.sizes import SLOT_NAMES


def vitrail(*arguments, check=True):
    result = subprocess.run([sys.executable, "-m", "vitrail", *arguments], capture_output=True, text=True, timeout=120)
    if check:
        assert result.returncode == 0, result.stderr
    return result


def test_help_lists_commands_and_examples():
    text = vitrail("--help").stdout
    assert "describe" in text
    assert "vitrail describe B/16" in text


def test_help_and_import_do_not_import_torch():
    script = (
        "import sys, vitrail, vitrail.cli; vitrail.cli.build_parser().format_help(); dir(vitrail); vitrail.__version__; "
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_describe_prints_the_stages():
    result = vitrail("describe", "B/16", "--size", "384", "--batch", "8")
    assert result.stderr == ""
    text = result.stdout
    assert "[8, 576, 768]" in text
    assert "layers 1 to 11 (eq. 2, 3)" in text
    assert "86,859,496" in text
    assert "577 per image" in text


def test_describe_json_has_the_costs():
    cost = json.loads(vitrail("describe", "B/16", "--json").stdout)
    assert cost["model"] == "B/16"
    assert cost["params"] == 86_567_656
    assert cost["tokens"] == 197
    assert cost["attention_entries"] == 38_416
    assert cost["attention_bytes_per_matrix"] == 153_664
    assert cost["attention_bytes_total"] == 144 * 153_664
    assert cost["macs"] > 16e9
    assert [stage["name"] for stage in cost["stages"]][:2] == ["image", "patches x_p E"]


def test_describe_accepts_slots():
    slots = "--position sincos2d --pool mean --registers 4 --channels 1 --size 160x224 --classes 10 --block parallel"
    cost = json.loads(vitrail("describe", "S/16", *slots.split(), "--mlp", "swiglu", "--qk-norm", "--json").stdout)
    assert cost["tokens"] == 4 + 10 * 14
    assert cost["image_size"] == [160, 224]


def test_describe_accepts_resnets():
    cost = json.loads(vitrail("describe", "R50x1", "--classes", "none", "--json").stdout)
    assert cost["params"] == 25_549_352 - 2_049_000
    assert cost["tokens"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["describe", "B/16", "--size", "225"], "vitrail describe: image size 225×225 is not divisible"),
        (["describe", "X/16"], "vitrail describe: unknown size 'X'"),
        (["describe", "B/16", "--pool", "men"], "did you mean 'mean'"),
        (["describe", "B/16", "--size", "big"], "'big' is not a size"),
        (["describe", "B/16", "--classes", "many"], "'many' is not a number of classes"),
        (["describe", "B/16", "--batch", "0"], "batch must be at least 1, got 0"),
        (["describe"], "MODEL"),
        (["descrbe"], "vitrail: unknown command 'descrbe': did you mean describe?"),
        (["zzz"], "vitrail: unknown command 'zzz': see vitrail --help"),
        (["train", "photos", "--epoch", "3"], "vitrail train: unknown option --epoch: did you mean --epochs?"),
        (["train", "photos", "--epoch=3"], "vitrail train: unknown option --epoch: did you mean --epochs?"),
        (
            ["check", "photos", "--lable-from", "x"],
            "vitrail check: unknown option --lable-from: did you mean --label-from?",
        ),
        (["check", "photos", "--zzzzzz"], "vitrail check: unknown option --zzzzzz: see vitrail check --help"),
        (["train", "photos", "--width", "9"], "vitrail train: unknown option --width: see vitrail train --help"),
        (["check", "photos", "more"], "vitrail check: unexpected argument 'more': see vitrail check --help"),
        (["--zzz"], "vitrail: "),
        ([], "COMMAND"),
    ],
)
def test_user_errors_are_one_line_with_exit_code_2(arguments, message):
    result = vitrail(*arguments, check=False)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert message in line
    assert result.stdout == ""


def test_a_run_is_not_data(tmp_path):
    run = tmp_path / "photos-finetune-1"
    run.mkdir()
    (run / "recipe.json").write_text("{}")
    (line,) = vitrail("train", str(run), check=False).stderr.splitlines()
    assert line == f"vitrail train: {run} is a run, not data: use vitrail train --resume {run} to continue it"


def test_traceback_option_shows_the_traceback():
    assert "Traceback" in vitrail("describe", "X/16", "--traceback", check=False).stderr


def test_closed_pipe_is_not_an_error():
    command = f"{sys.executable} -m vitrail describe G/14 --json | head -1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert result.stdout == "{\n"
    assert "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr


def test_help_lists_the_names_of_every_slot():
    text = " ".join(vitrail("describe", "--help").stdout.split())
    for slot, (names, _) in SLOT_NAMES.items():
        assert f"--{slot}" in text
        assert ", ".join(names) in text


# Options whose value has another meaning in another command, such as the file that the command writes.
OTHER_MEANINGS = {
    *("out", "format", "resume", "force", "top", "recipe", "limit", "workers", "batch-size", "model"),
    *("quiet", "quarantine", "threads", "to", "minutes", "tolerance", "classes", "index", "text-tower", "slurm"),
    *("split", "init", "neighbours", "unlabelled", "method", "per-class", "root"),  # of `vitrail label`
}


def list_help(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield every option of a parser and its subcommands, with its help up to the default in brackets."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from list_help(sub)
        for flag in action.option_strings:
            yield flag, str(action.help).partition(" [")[0]


def test_an_option_has_the_same_help_in_every_command():
    texts: dict[str, set[str]] = {}
    for flag, text in list_help(build_parser()):
        texts.setdefault(flag.strip("-"), set()).add(text)
    assert {flag: found for flag, found in texts.items() if len(found) > 1 and flag not in OTHER_MEANINGS} == {}
    assert {flag for flag in OTHER_MEANINGS if len(texts[flag]) == 1} == set()
