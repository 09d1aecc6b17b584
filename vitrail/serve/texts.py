"""Words in requests: classes that a request names, for a model with a text tower, and the search of an index by text.

Texts are encoded in a thread of their own, because they take milliseconds to seconds. The classifiers of the latest lists of
classes are kept, so that the bars of a list move as fast as those of a trained classifier.
"""

import asyncio
import base64
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse, Response

from vitrail.checkpoints.load import find_weights, inspect_checkpoint, load_towers
from vitrail.data.decode import IMAGE_ERRORS
from vitrail.deploy.runtimes.exported import is_exported
from vitrail.deploy.search.contact_sheet import NEIGHBOUR_SIZE, make_thumbnail
from vitrail.deploy.search.index import SearchIndex, read_index
from vitrail.deploy.search.search import Neighbour
from vitrail.deploy.search.texts import find_texts, open_text_model
from vitrail.models.two_towers import TwoTowers
from vitrail.prompts import check_templates, encode_classes, read_classes
from vitrail.serve import openapi
from vitrail.serve.limits import RequestRefused

T = TypeVar("T")
MAX_NAMES, MAX_CHARACTERS = 200, 4_000  # of a request: as a URL, a character can take 12 bytes
KEPT = 32  # classifiers
MAX_RESULTS = 50  # images of a search
MAX_WAITING = 32  # texts

ClassesQuery = Annotated[
    str | None,
    Query(description="of a model with a text tower: names with commas between them", max_length=MAX_CHARACTERS),
]
TemplateQuery = Annotated[str, Query(description="text with {} for the name of a class", max_length=500)]
TextQuery = Annotated[str, Query(description="what the images show", max_length=MAX_CHARACTERS)]
ResultsQuery = Annotated[int, Query(description="number of images", ge=1, le=MAX_RESULTS)]
ThumbnailsQuery = Annotated[bool, Query(description="with a small copy of each image, as a data URI")]


@dataclass(frozen=True)
class WordClassifier:
    """The classifier of a list of names: logits are the products of unit vectors, times a scale, plus a bias."""

    labels: tuple[str, ...]
    weight: np.ndarray  # [F, K]
    bias: float

    def compute_logits(self, features: np.ndarray, size: tuple[int, int] = (0, 0)) -> np.ndarray:
        """Return the logits [K] of the features [F] of an image."""
        return features / max(float(np.linalg.norm(features)), 1e-12) @ self.weight + self.bias


class TextTower:
    """The text tower of a served model."""

    def __init__(self, towers: TwoTowers) -> None:
        self.towers, self.lock = towers, threading.Lock()
        self.kept: OrderedDict[tuple[str, str], WordClassifier] = OrderedDict()  # the latest last

    def classify(self, classes: str, template: str) -> WordClassifier:
        """Return the classifier of names with commas between them; raise RequestRefused for names that are no classes."""
        with self.lock:
            key = (classes, template)
            if key not in self.kept:
                self.kept[key] = self._encode(classes, template)
                while len(self.kept) > KEPT:
                    self.kept.popitem(last=False)
            self.kept.move_to_end(key)
            return self.kept[key]

    def _encode(self, classes: str, template: str) -> WordClassifier:
        given = classes.split(",")  # a list of names is never the path of a file
        if len(given) > MAX_NAMES:
            raise RequestRefused(413, f"classes has {len(given)} names, at most {MAX_NAMES} are accepted")
        try:
            labels, names = read_classes([name.strip() for name in given])
            weight = encode_classes(self.towers, names, check_templates(template))
        except ValueError as error:
            raise RequestRefused(422, str(error)) from None
        logits = self.towers.logits
        bias = 0.0 if logits.bias is None else logits.bias.item()
        return WordClassifier(labels, (logits.scale.exp().item() * weight.cpu().numpy()).T, bias)


def open_text_tower(where: str, assume: Any, take: str | None) -> TextTower | None:
    """Return the text tower of a model's file; None if it has none, or no tokeniser."""
    if is_exported(where):
        return None
    weights = find_weights(where, towers=True)
    try:
        with inspect_checkpoint(weights, assume, take, towers=True):
            pass
    except ValueError:
        return None  # the model itself was read: it is a tower of images alone
    towers = load_towers(weights, assume=assume, take=take)
    return None if towers.tokenizer is None else TextTower(towers)


class IndexSearch:
    """An index of images that the service searches by text."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.index: SearchIndex = read_index(directory)
        self.towers = open_text_model(self.index)

    def find(self, text: str, top: int, thumbnails: bool) -> dict[str, Any]:
        """Return the images nearest to a text."""
        notes: list[str] = []
        try:
            (result,) = find_texts(self.index, self.towers, [text], top, report=notes.append)
        except ValueError as error:
            raise RequestRefused(422, str(error)) from None
        neighbours = [describe_neighbour(item, thumbnails) for item in result.neighbours]
        return {
            "images": len(self.index.images),
            "model": self.index.model.name,
            "notes": notes,
            "neighbours": neighbours,
        }


def describe_neighbour(neighbour: Neighbour, thumbnail: bool) -> dict[str, Any]:
    """Return the path below the indexed folder and the cosine; with `thumbnail` a small copy of the image, or None."""
    about: dict[str, Any] = {"image": neighbour.relative_path, "cosine": round(neighbour.cosine, 6)}
    if not thumbnail:
        return about
    try:
        data, kind, _ = make_thumbnail(neighbour.path, NEIGHBOUR_SIZE)
    except IMAGE_ERRORS:
        return about | {"thumbnail": None}  # the file is gone or unreadable since it was indexed
    return about | {"thumbnail": f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"}


class TextService:
    """The thread that encodes texts, and the index that is searched."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.waiting = seconds, 0
        self.index: IndexSearch | None = None
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="texts")

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work in the thread; refuse it where too many texts wait, or it takes longer than a request may."""
        if self.waiting >= MAX_WAITING:
            raise RequestRefused(503, f"{self.waiting} texts wait already: try again later", 5)
        self.waiting += 1
        try:
            future = asyncio.get_running_loop().run_in_executor(self.pool, work, *arguments)
            return await asyncio.wait_for(future, self.seconds)
        except TimeoutError:
            raise RequestRefused(503, f"no response within {self.seconds:g} s: try again later", 5) from None
        finally:
            self.waiting -= 1

    def close(self) -> None:
        """Stop the thread."""
        self.pool.shutdown(wait=False, cancel_futures=True)


def add_search_routes(app: FastAPI, texts: TextService, allowed: Any) -> None:
    """Add the route that searches an index by text."""

    @app.get(
        "/search",
        responses={200: {"model": openapi.SearchResponse}, **openapi.error_responses(401, 409, 422, 503)},
        dependencies=allowed,
    )
    async def search(text: TextQuery, top: ResultsQuery = 12, thumbnails: ThumbnailsQuery = False) -> Response:
        """Return the images of the index that are nearest to a text, by the cosine of their features."""
        if texts.index is None:
            raise RequestRefused(409, "there is no index to search: start the service with --index INDEX")
        return JSONResponse(await texts.run(texts.index.find, text, top, thumbnails))
