"""What to do with a run that learnt without labels: commands to copy."""

import re
import shlex
from typing import Any

from vitrail.report.markup import Markup, h, join
from vitrail.report.run import Run

OPTION = re.compile(r"--(?:set \S+=\S+|[a-z-]+ \S+)(?<![.,;:])")  # as an advice names one: --set objective.centre=0.9


def next_steps(run: Run) -> list[Markup | None]:
    """With labels, with few, without: what the weights are good for. Of a collapse, how to try again."""
    if run.collapse:
        again = tried_again(run.part("command"), str(run.collapse.get("advice", "")))
        return [
            h("p", "The weights of a collapsed run are worth little. Try again, with the advice followed:")
            if again
            else None,
            h("pre", h("code", again), tabindex="0") if again else None,
        ]
    if not run.finished:
        return []
    data, model = str(run.part("data", "where") or "DATA"), str(run.directory / "model.safetensors")
    labels = run.part("labels")
    known = data if isinstance(labels, list) and labels else "LABELLED"
    steps = [
        ("Train it on, with labels; a few of each class may do.", ["train", known, "--init", model]),
        ("Ask what the frozen features know of classes.", ["evaluate", model, known, "--probe", "knn,linear"]),
        ("Look at what it attends to.", ["inspect", model, "PICTURE.jpg", "--out", "looked"]),
        ("Take the weights elsewhere.", ["convert", model, "features.safetensors", "--to", "timm"]),
    ]
    made = [
        h("div", h("p", why), h("pre", h("code", shlex.join(["vitrail", *words])), tabindex="0"), class_="step")
        for why, words in steps
    ]
    lacking = "LABELLED is a folder with a folder of pictures for each class." if known == "LABELLED" else ""
    return [*made, h("p", lacking, class_="note") if lacking else None]


def tried_again(command: Any, advice: str) -> str:
    """The command of a run with the advised options in place of what it had, and without its directory, which is taken."""
    options = [option.split(" ", 1) for option in OPTION.findall(advice)]
    if not isinstance(command, list) or not command or not options:
        return ""
    words = [str(word) for word in command]
    for flag, value in [*options, ["--out", ""]]:
        words = without(words, flag, value.partition("=")[0] if flag == "--set" else "")
    return shlex.join([*words, *(word for option in options for word in option)])


def without(words: list[str], flag: str, field: str) -> list[str]:
    """Words without an option, `--lr 3 ` or `--lr=3`; of --set, without the one of that field."""
    kept, place = [], 0
    while place < len(words):
        word, value = words[place], words[place + 1] if place + 1 < len(words) else ""
        joined = word.partition("=")[2] if word.startswith(f"{flag}=") else None
        given = joined if joined is not None else value
        if (word == flag or joined is not None) and (not field or given.partition("=")[0] == field):
            place += 1 if joined is not None else 2
            continue
        kept.append(word)
        place += 1
    return kept


def advised(text: str) -> Markup:
    """An advice, with the options in it set as code."""
    made, end = [], 0
    for found in OPTION.finditer(text):
        made += [text[end : found.start()], h("code", found.group())]
        end = found.end()
    return join([*made, text[end:]])
