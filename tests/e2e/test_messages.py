"""Messages name parameters as Python does below `cli/`, and as options on the command line."""

import ast
import re
from pathlib import Path

import pytest

import vitrail
from vitrail.cli import build_parser, list_flags, main
from vitrail.cli.text.messages import spell_options

FLAGS = {"batch_size": "--batch-size", "method": "--method", "fractions": "--fractions", "out": "--out", "map": "--map"}
FLAGS |= {
    "data": "--data",
    "label_from": "--label-from",
    "only_present": "--only-present",
    "set": "--set",
    "lr": "--lr",
}
PACKAGE = Path(vitrail.__file__).parent
PYTHON_INTERFACE = ("data", "objectives", "training", "models", "evaluation/evaluate.py", "evaluation/selection.py")
PYTHON_INTERFACE += ("evaluation/loading.py", "evaluation/class_mapping.py", "deploy/predict/predict.py", "utils")


@pytest.mark.parametrize(
    ("message", "spelt"),
    [
        ("use batch_size=2 or more", "use --batch-size 2 or more"),
        ("give method='mae'", "give --method mae"),
        ("give fractions=(0.8, 0.2, 0) or a split", "give --fractions 0.8,0.2,0 or a split"),
        ("give another name as out=, or leave", "give another name as --out, or leave"),
        ("or label_from='^(.+?)_'", "or --label-from '^(.+?)_'"),
        ("only_present=True leaves one", "--only-present leaves one"),
        ("use class_map=FILE", "use --map FILE"),
        ("does not support Object(lr=3), got lr=3", "does not support Object(lr=3), got --lr 3"),
        ("settings=['a.lr=3', 'ema=none']: no", "--set a.lr=3 --set ema=none: no"),
        ("settings=['augment.0.scale=[0.3,1]']: no", "--set augment.0.scale=[0.3,1]: no"),
        ("leave it out, or use settings=", "leave it out, or use --set"),
        ("give assume={'size': 'HxW'}", "give --assume size=HxW"),
        ("give assume={'heads': …}", "give --assume heads=…"),
        ("use vitrail.resume('runs/a')", "use vitrail train --resume runs/a"),
        ("give the object, vitrail.resume(RUN, data=OBJECT)", "give the object, vitrail.resume(RUN, data=OBJECT)"),
        ("use vitrail.pretrain with method='dino'", "use vitrail pretrain with --method dino"),
        ("set optimizer.lr=3, or other=4", "set optimizer.lr=3, or other=4"),
        ("--set lr=3 is wrong", "--set lr=3 is wrong"),
        ("photos/lr=3/x.jpg: no such file", "photos/lr=3/x.jpg: no such file"),
    ],
)
def test_parameters_become_options(message: str, spelt: str) -> None:
    assert spell_options(message, FLAGS) == spelt


def test_options_of_parts_of_a_command_are_known() -> None:
    parts = next(action for action in build_parser()._actions if action.dest == "command")
    assert isinstance(parts.choices, dict)
    assert list_flags(parts.choices["search"])["update"] == "--update"
    assert list_flags(parts.choices["train"])["per_class"] == "--per-class"


def test_the_same_error_in_python_and_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"^no method: give method='mpp', .* or method='features'$"):
        vitrail.pretrain("digits")
    assert main(["pretrain", "digits"]) == 2
    assert (
        "no method: give --method mpp, --method mae, --method videomae, --method dino or --method features"
        in capsys.readouterr().err
    )
    with pytest.raises(ValueError, match=r"^mae trains without labels: use vitrail\.pretrain with method='mae'$"):
        vitrail.train("digits", recipe="mae")
    assert main(["train", "digits", "--recipe", "mae"]) == 2
    assert "mae trains without labels: use vitrail pretrain with --method mae" in capsys.readouterr().err


def iter_raised_texts(path: Path) -> list[tuple[int, str]]:
    """Return the line and the constant parts of every text in a `raise` of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    raised = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    constants = [part for node in raised for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return [(part.lineno, part.value) for part in constants if isinstance(part.value, str)]


@pytest.mark.parametrize("where", PYTHON_INTERFACE)
def test_errors_below_the_command_line_name_no_options(where: str) -> None:
    files = sorted((PACKAGE / where).rglob("*.py")) or [PACKAGE / where]
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text}"
        for path in files
        for line, text in iter_raised_texts(path)
        if re.search(r"(?<![\w-])--[a-z]", text)
    ]
    assert found == []
