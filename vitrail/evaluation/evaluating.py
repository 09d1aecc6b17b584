"""`evaluate`: models and pictures in, their numbers and whether they differ out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.checkpoints.files.atomic import atomic
from vitrail.data.labels import named
from vitrail.data.pictures import Pictures
from vitrail.engine.distributed import Team
from vitrail.evaluate.paired import compare_map, compare_right
from vitrail.evaluation.answering import Computing, Progress, answer
from vitrail.evaluation.choosing import Chosen, Wanted, choose
from vitrail.evaluation.judged import Judged
from vitrail.evaluation.matching import Matching, match
from vitrail.evaluation.opening import Opened, open_judged
from vitrail.evaluation.predictions import write_predictions
from vitrail.evaluation.translation import read_translation
from vitrail.report.compare import Pair, pair_as_dict
from vitrail.report.evaluated import Told, page
from vitrail.report.page import write_page
from vitrail.report.side_by_side import many, verdict
from vitrail.run.environment import environment

RECORD = "evaluation.json"


@dataclass(frozen=True)
class Evaluated:
    """The model, what it is held against, and how they compare."""

    judged: list[Judged]  # the model first
    names: list[str]  # what to call them, each otherwise
    pairs: list[Pair] = field(default_factory=list)  # the model with each of the others
    command: tuple[str, ...] = ()

    @property
    def verdicts(self) -> list[str]:
        """Whether the differences are more than chance, each in a sentence."""
        return [verdict(pair, self.names) for pair in self.pairs]

    @property
    def caution(self) -> str:
        """What several comparisons come to together."""
        return many(len(self.pairs))

    def as_dict(self) -> dict[str, Any]:
        """Everything for machines: the model's numbers at the top, the others' below `against`."""
        first, *others = [judged.as_dict() for judged in self.judged]
        compared = [
            pair_as_dict(pair, self.names) | {"verdict": said}
            for pair, said in zip(self.pairs, self.verdicts, strict=True)
        ]
        more = {"against": others, "comparisons": compared, "caution": self.caution or None}
        return first | (more if others else {})

    def write(self, out: Path) -> list[Path]:
        """predictions.csv, evaluation.json and report.html in a directory; the page last, when all else is there."""
        out.mkdir(parents=True, exist_ok=True)
        files = [out / "predictions.csv"]
        files += [out / f"predictions-{place}.csv" for place in range(2, len(self.judged) + 1)]
        with atomic(out / RECORD) as file:  # first: a directory that was left half written is known by it
            told = json.dumps(self.as_dict(), indent=2, ensure_ascii=False)
            file.write((told + "\n").encode("utf-8", "backslashreplace"))
        for judged, path in zip(self.judged, files, strict=True):
            write_predictions(judged, path)
        files += [out / RECORD, out / "report.html"]
        write_page(page(self.told()), files[-1])
        return files

    def told(self) -> Told:
        """What the page shows."""
        first = self.judged[0]
        root = first.chosen.where.rstrip("/") + "/"
        names = [name.removeprefix(root) for name in first.evaluation.names]
        return Told(
            names=self.names,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            evaluation=replace(first.evaluation, names=names, pictures=first.pictures()),
            labels=first.labels,
            measures=[judged.measures for judged in self.judged],
            models=[judged.model() for judged in self.judged],
            speeds=[judged.speed() for judged in self.judged],
            data=first.data(),
            unreadable=first.unreadable,
            environment=first.environment,
            verdicts=[
                (said, pair.found is not None and pair.found.beyond_chance)
                for pair, said in zip(self.pairs, self.verdicts, strict=True)
            ],
            caution=self.caution,
            command=self.command,
        )


def written_in(directory: Path) -> bool:
    """Whether an earlier evaluation was written there."""
    try:
        told = json.loads((directory / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(told, dict) and {"n", "split", "model", "data", "per_class", "reliability"} <= set(told)


def evaluate(
    model: str | Path,
    data: str | Wanted,
    *,
    against: Sequence[str | Path] = (),
    translate: str | Path | None = None,
    only_present: bool = False,
    size: tuple[int, int] | None = None,
    assume: Mapping[str, Any] | None = None,
    take: str | None = None,
    runtime: str = "torch",
    merge: int = 0,
    how: Computing = Computing(),  # noqa: B008 (a value)
    command: Sequence[str] = (),
    progress: Progress | None = None,
) -> Evaluated:
    """Judges a model on pictures, and holds it against others on the same ones.

    `model` is a file, a directory, a run or `hf://owner/name`; `data` a folder, a file or a name, or a `Wanted` that says more.
    `runtime` and `merge` are for `model` alone, so that it can be held against itself without them.
    `translate` is a file for classes that are called otherwise, or "index" where the data's classes are the model's indices.
    """
    wanted = Wanted(data) if isinstance(data, str) else data
    opened = [
        open_judged(
            where,
            device=how.device,
            size=size,
            assume=assume if not place else None,
            take=take if not place else None,
            runtime=runtime if not place else "torch",
            merge=merge if not place else 0,
            precision=how.precision,
        )
        for place, where in enumerate((model, *against))
    ]
    for each in opened:
        if outputs_of(each) is None:
            raise ValueError(f"{each.where} has no classes: it gives features; use --probe knn, linear or few-shot")

    def matched_to(pictures: Pictures) -> list[Matching]:
        return [matching(each, pictures, translate) for each in opened]

    names = told_apart([each.name for each in opened])
    trained = {name: each.trained for name, each in zip(names, opened, strict=True)}
    chosen = choose(wanted, trained, progress, matched_to)
    matched = matched_to(chosen.pictures)
    if only_present and not chosen.pictures.several and min(len(found.present) for found in matched) < 2:
        raise ValueError("--only-present leaves one class, which would always be right: leave it out")
    around = environment(Team(0, 1, how.device), how.precision) | {"batch size": how.batch_size}
    judged = [
        judge(each, chosen, found, only_present, how, around, progress)
        for each, found in zip(opened, matched, strict=True)
    ]
    pairs = [compared(judged, place) for place in range(1, len(judged))]
    return Evaluated(judged, names, pairs, tuple(command))


def outputs_of(opened: Opened) -> int | None:
    """How many classes a model answers with."""
    return opened.model.config.classes


def matching(opened: Opened, pictures: Pictures, translate: str | Path | None) -> Matching:
    """The data's classes in this model's outputs; what does not match is an error that names the model."""
    outputs = outputs_of(opened)
    assert outputs is not None
    labels = opened.model.labels
    try:
        if translate is None or str(translate) == "index":
            return match(pictures, labels, outputs, translate and "index")
        return match(pictures, labels, outputs, read_translation(translate, named(labels), outputs))
    except ValueError as error:
        raise ValueError(f"{opened.name}: {error}") from None


def judge(
    opened: Opened,
    chosen: Chosen,
    found: Matching,
    only_present: bool,
    how: Computing,
    around: dict[str, Any],
    progress: Progress | None,
) -> Judged:
    """One model on all pictures."""
    answers = answer(opened, chosen.pictures, how, progress)
    return Judged(opened, chosen, found, answers, only_present, around)


def compared(judged: list[Judged], place: int) -> Pair:
    """The model and another, on the pictures that both could be asked about."""
    first, second = judged[0], judged[place]
    both = first.answers.read & second.answers.read
    split = first.chosen.word
    if not first.evaluation.several:
        one, two = (each.evaluation.verdicts.right[both[each.answers.read]] for each in (first, second))
        return Pair(0, place, split, compare_right(one, two))
    # Classes of the data that a map makes one output of both models are one class, as in the measures.
    used = np.flatnonzero(first.matching.places >= 0)
    joint, column = np.unique(
        np.stack([each.matching.places[used] for each in (first, second)]), axis=1, return_inverse=True
    )
    held, targets = first.chosen.pictures.targets[both], np.zeros((int(both.sum()), joint.shape[1]), np.uint8)
    for of_data, of_both in zip(used, column.ravel(), strict=True):
        targets[:, of_both] |= held[:, of_data]
    one, two = (each.answers.logits[both][:, places] for each, places in zip((first, second), joint, strict=True))
    return Pair(0, place, split, compare_map(one, two, targets))


def told_apart(names: list[str]) -> list[str]:
    """Names, with a number where one is another's."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found
