"""Search an index by texts: for vectors of an image tower, whose text tower encodes the query."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vitrail.checkpoints.load import compute_checksum, find_weights, inspect_checkpoint, load_towers
from vitrail.data.tokenizer import Tokenizer
from vitrail.deploy.runtimes.exported import is_exported
from vitrail.deploy.runtimes.select import MessageCallback
from vitrail.deploy.search.index import SearchIndex
from vitrail.deploy.search.neighbours import normalise_rows
from vitrail.deploy.search.search import Neighbour, SearchResult, list_neighbours
from vitrail.models.two_towers import TwoTowers
from vitrail.prompts import encode_texts

MAX_SHOWN = 60  # characters of a text in a message


def open_text_model(
    index: SearchIndex,
    where: str | None = None,  # None: the model of the index
    *,
    tokenizer: str | Path | None = None,
    assume: Mapping[str, str] | None = None,
    take: str | None = None,
) -> TwoTowers:
    """Return both towers of the model of an index; raise ValueError if it has no text tower, or is another model."""
    model, path = index.model, where or index.model.where
    if is_exported(path):
        raise ValueError(f"{path} is an exported image tower: give the checkpoint with both towers with --model")
    if where is None and not path.startswith("hf://") and not Path(path).exists():
        raise ValueError(f"{path}, the model of {index.directory}, does not exist: give its new path with --model")
    assume, take = dict(assume or model.assume), take or model.take
    weights = find_weights(path, towers=True)
    check_has_texts(index, path, weights, assume, take)
    if compute_checksum(weights) != model.checksum:
        raise ValueError(
            f"{path} differs from {model.name}, the model of {index.directory}, in weights: use {model.where}, or index "
            "the folder with this model"
        )
    towers = load_towers(weights, tokenizer=tokenizer, assume=assume, take=take)
    if towers.tokenizer is None:
        raise ValueError(f"{path} has no tokeniser: give one with --tokenizer")
    return towers


def check_has_texts(index: SearchIndex, path: str, weights: Path, assume: Mapping[str, str], take: str | None) -> None:
    """Raise ValueError if a model that can be read has no text tower."""
    try:
        with inspect_checkpoint(weights, dict(assume), take, towers=True):
            return
    except ValueError as error:
        try:
            with inspect_checkpoint(weights, dict(assume), take):
                pass
        except ValueError:
            raise error from None
    raise ValueError(
        f"{index.directory} was made with {index.model.name} ({path}), which has no text tower: index the folder with a "
        "model such as CLIP"
    )


def find_texts(
    index: SearchIndex,
    towers: TwoTowers,
    texts: Sequence[str],
    top: int = 10,
    exact: bool = False,
    report: MessageCallback | None = None,
) -> list[SearchResult]:
    """Return the images whose features are nearest to those of each text."""
    assert isinstance(towers.tokenizer, Tokenizer)
    for text in texts:
        if not text.strip():
            raise ValueError("the text is empty: give words, such as 'red shoes'")
        if report is not None and towers.tokenizer.is_cut(text):
            shown = text[:MAX_SHOWN] + "…" * (len(text) > MAX_SHOWN)
            report(
                f"only the first {towers.tokenizer.context} tokens of a text of {len(text):,} characters are read: {shown}"
            )
    features = normalise_rows(encode_texts(towers, texts).cpu().numpy())
    if features.shape[1] != index.vectors.shape[1]:
        raise ValueError(
            f"texts have {features.shape[1]} features, {index.directory} {index.vectors.shape[1]}: index again"
        )
    cosines, rows = index.searcher(exact)(features, min(top, len(index.images)))
    found: list[list[Neighbour]] = list_neighbours(index, cosines, rows)
    return [SearchResult(text, tuple(neighbours[:top])) for text, neighbours in zip(texts, found, strict=True)]
