"""Runs that learn captions: the tokeniser of a run, and evaluation by retrieval."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints.load import load_towers
from vitrail.data.bpe import choose_context, train_tokenizer
from vitrail.data.dataset import Images
from vitrail.data.tokenizer import Tokenizer, encode_texts, read_tokenizer
from vitrail.models.base import Model
from vitrail.models.two_towers import TwoTowers
from vitrail.tasks.base import Sums
from vitrail.training.distributed import Team
from vitrail.training.recipe import Recipe
from vitrail.training.runs.prepare import Prepared
from vitrail.training.runs.supervised import LabelEvaluator, Predictions
from vitrail.training.trainer import Metrics, Trainer

TOKENIZER_FILE = "tokenizer.json"  # of a run directory
TEXT_BATCH = 256
PROBE_CONTEXT = 77  # CLIP's, of a tokeniser whose context is chosen


def choose_tokenizer(train: Images, path: str | None, init: str | None, given: Recipe | None) -> Tokenizer:
    """Return the tokeniser of a run: that of a file, that of the initial checkpoint, or one learnt from the captions."""
    assert train.captions is not None
    if init is not None:
        tokenizer = load_towers(init, tokenizer=path).tokenizer
        if tokenizer is None:
            raise ValueError(f"{init} has no tokeniser: give one with tokenizer=")
        assert isinstance(tokenizer, Tokenizer)
        return tokenizer
    captions = [train.captions[number] for number in np.unique(train.targets).tolist()]
    text = None if given is None else given.model.text_tower
    if path is None:
        shown = [train.captions[number] for number in train.targets.tolist()]
        return train_tokenizer(shown, None if text is None else text.context)
    if text is not None:
        return read_tokenizer(path, text.context)
    return read_tokenizer(path, choose_context(read_tokenizer(path, PROBE_CONTEXT), captions))


def with_tokenizer(prepared: Prepared, tokenizer: Tokenizer) -> Prepared:
    """Return prepared data whose captions are read with this tokeniser."""
    return replace(prepared, tokenizer=tokenizer)


def tokenizer_on_all(
    team: Team, prepared: Prepared, path: str | None, init: str | None, given: Recipe | None
) -> Prepared:
    """Return the data with the tokeniser that the main process chooses, on every process."""
    chosen = choose_tokenizer(prepared.train, path, init, given).to_bytes() if team.is_main else None
    return with_tokenizer(prepared, Tokenizer.from_bytes(team.broadcast_object(chosen)))


def write_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    """Write the tokeniser of a run, so that a resumed run reads the same."""
    text = json.dumps(tokenizer.as_dict(), ensure_ascii=False)
    (directory / TOKENIZER_FILE).write_text(text, encoding="utf-8")


def read_run_tokenizer(directory: Path) -> Tokenizer:
    """Return the tokeniser of a run."""
    data = (directory / TOKENIZER_FILE).read_bytes()
    try:
        return Tokenizer.from_bytes(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    except ValueError as error:
        raise ValueError(f"{directory / TOKENIZER_FILE}: {error}: restore it, or start a new run") from None


class CaptionEvaluator(LabelEvaluator):
    """Validates and finishes a run that learns captions: features of the images and of their captions are compared."""

    texts: Tensor  # [n, F] of the captions of the split that is evaluated
    text_rows: np.ndarray  # [n] of the pairs

    def validate(self, trainer: Trainer) -> Metrics:
        with trainer.autocast():
            self.encode_captions("validation", trainer.loss_module.model.require_towers("captions"))
        return super().validate(trainer)

    def evaluate(self, model: Model, split: str, step: int) -> Predictions:
        self.encode_captions(split, model.require_towers("captions"))
        return super().evaluate(model, split, step)

    @torch.no_grad()
    def encode_captions(self, split: str, model: TwoTowers) -> None:
        """Compute the features of the captions of a split."""
        images, tokenizer = self.setup.prepared.splits[split], self.setup.prepared.tokenizer
        assert images.captions is not None
        assert tokenizer is not None
        used, rows = np.unique(images.targets, return_inverse=True)
        tokens = torch.from_numpy(encode_texts(tokenizer, [images.captions[number] for number in used.tolist()]))
        device = self.setup.team.device
        parts = [model.text(part.to(device)).float() for part in tokens.split(TEXT_BATCH)]
        self.texts, self.text_rows = torch.cat(parts), rows.ravel()

    def reduce(self, split: str, outputs: Tensor, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, Sums]:
        texts = self.texts[torch.from_numpy(self.text_rows[indices]).to(outputs.device)]
        return super().reduce(split, torch.cat((outputs.float(), texts), 1), indices)
