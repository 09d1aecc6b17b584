"""Pictures that were hidden in part, and what the model made of the rest."""

from dataclasses import dataclass
from pathlib import Path

from vitrail.report.markup import Markup, h
from vitrail.report.mistakes import shown_picture
from vitrail.report.run import Run

MOST = 12
PARTS = {"original": "the picture", "masked": "what it saw", "reconstructed": "its guess"}
TOLD = {
    "mae": "Grey patches were hidden, and guessed from the others. Rough shapes and colours in the right places are good, "
    "however blurred; the same grey everywhere is bad. The loss counts hidden patches only.",
    "mpp": "Some patches were hidden or swapped. The guess is the mean colour of each patch: it should be near the "
    "picture’s, also where that was hidden.",
}


@dataclass(frozen=True)
class Triple:
    """One picture's files, by part."""

    number: str
    files: dict[str, Path]


def triples(directory: Path) -> list[Triple]:
    """The pictures that a run kept, in order."""
    found: dict[str, dict[str, Path]] = {}
    for path in sorted((directory / "evaluation" / "reconstructions").glob("*.png")):
        number, _, part = path.stem.partition("-")
        if part in PARTS and number.isdecimal():
            found.setdefault(number, {})[part] = path
    return [Triple(number, files) for number, files in sorted(found.items(), key=lambda pair: int(pair[0]))]


def reconstructions(run: Run) -> list[Markup | None]:
    """Each picture, what the model saw of it, and what it made of that, side by side."""
    kept = triples(run.directory)[:MOST]
    if not kept:
        return []
    return [h("p", TOLD.get(run.method, "")), h("div", [_shown(triple) for triple in kept], class_="triples")]


def _shown(triple: Triple) -> Markup:
    parts = []
    for part, told in PARTS.items():
        picture = shown_picture(triple.files.get(part), f"Picture {int(triple.number)}: {told}")
        frame = h("div", picture or h("span", "not kept", class_="lacking"), class_="frame")
        parts.append(h("figure", frame, h("figcaption", told)))
    return h("div", parts, class_="triple")
