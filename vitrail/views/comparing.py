"""Two models over the same pictures: what each layer's attention and tokens are like, and what a probe reads from them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail import __version__
from vitrail.analysis.compare import pooled, profile
from vitrail.data.pictures import Pictures
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluate.linear_probe import linear_probe
from vitrail.models.vit import ViT
from vitrail.views.compared import LETTERS, Comparison, Probe, Side, arrays_of, as_dict
from vitrail.views.comparison import draw, draw_all, panels
from vitrail.views.comparison_page import page
from vitrail.views.folder import Folder
from vitrail.views.gathered import Gathered, Reading, check_enough
from vitrail.views.inspecting import quiet

Tell = Callable[[str, int, int], None]
GRID = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of C: there are many layers, and weaker penalties take longest and rarely win


@dataclass(frozen=True)
class Compared:
    """A model that is to be compared, with its pipeline."""

    model: ViT
    preprocessing: Preprocessing
    name: str

    def reading(self, pictures: Pictures) -> Reading:
        device = next(self.model.parameters()).device
        height, width = (side // self.model.embed.stride for side in self.preprocessing.size)
        return Reading(pictures, self.preprocessing, height * width, device)


def compare(models: Sequence[Compared], pictures: Gathered, tell: Tell = quiet, layers: Tell = quiet) -> Comparison:
    """Measures both models, one after the other, each as its own preprocessing shows it the pictures.

    `tell` hears how many pictures are done, `layers` how many layers are probed.
    """
    skipped: list[str] = []
    no_probe, profiles, probes = pictures.no_probe, [], []
    for letter, each in zip(LETTERS, models, strict=True):
        reading = each.reading(pictures.measured)
        try:
            profiles.append(profile(each.model, reading.batches(tell, f"{letter}, attention and frequencies")))
        except ValueError as error:
            raise ValueError(f"{each.name}: {error}") from error
        skipped += reading.skipped
    for letter, each in zip(LETTERS, models, strict=True):
        if no_probe or pictures.fitted is None or pictures.judged is None:
            break
        try:
            probes.append(probed(each, pictures.fitted, pictures.judged, letter, tell, layers, skipped))
        except TooFewError as error:
            no_probe, probes = str(error), []
    both = [
        Side(letter, each.name, found, probes[place] if probes else None)
        for place, (letter, each, found) in enumerate(zip(LETTERS, models, profiles, strict=True))
    ]
    return Comparison((both[0], both[1]), pictures.where, no_probe, pictures.notes, list(dict.fromkeys(skipped)))


class TooFewError(ValueError):
    """Of the pictures for a probe too few could be read."""


def probed(
    each: Compared, fitted: Pictures, judged: Pictures, letter: str, tell: Tell, layers: Tell, skipped: list[str]
) -> Probe:
    """Fits a probe to every layer's pooled patch tokens, and counts what it gets right."""
    readings = [each.reading(pictures) for pictures in (fitted, judged)]
    train, test = (
        pooled(each.model, reading.batches(tell, f"{letter}, tokens of {reading.pictures.split} pictures"))
        for reading in readings
    )  # [n, L+1, D], [m, L+1, D]
    for reading in readings:
        skipped += reading.skipped
    targets, truth = (reading.targets for reading in readings)
    try:
        check_enough(targets, truth)
    except ValueError as error:
        raise TooFewError(str(error)) from error
    right, chosen = [], []
    for layer in range(train.shape[1]):
        found = linear_probe(train[:, layer], targets, test[:, layer], len(fitted.classes), GRID)
        right.append(int((found.logits.argmax(1) == truth).sum()))
        chosen.append(found.c)
        layers(f"{letter}, linear probes", layer + 1, train.shape[1])
    commonest = float((truth == np.bincount(targets).argmax()).mean())
    classes = len(np.unique(targets))
    return Probe(tuple(right), tuple(chosen), len(targets), len(truth), classes, commonest)


def write(comparison: Comparison, folder: Folder) -> None:
    """Figures, arrays, numbers and the page."""
    about: dict[str, Any] = {"vitrail": __version__, "compared": [side.name for side in comparison.sides]}
    made = panels(comparison)
    drawn = {panel.file: draw(panel, comparison) for panel in made}
    for file, png in {**drawn, "comparison.png": draw_all(comparison)}.items():
        folder.write(file, png)
    folder.save("comparison.npz", arrays_of(comparison))
    folder.write("comparison.json", json.dumps(as_dict(comparison), indent=2).encode("utf-8"))
    folder.write("index.html", page(comparison, made, drawn).encode("utf-8"))
    folder.record(about, done=True)
