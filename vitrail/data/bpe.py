"""Byte-pair encoding learnt from captions (Sennrich et al. 2016), in the form of CLIP's tokeniser."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from vitrail.data.tokenizer import (
    CLEANERS,
    WORDS,
    Tokenizer,
    import_tokenizers,
    list_bytes,
    make_open_clip_tokenizer,
)

MAX_MERGES = 8_000  # CLIP has 48,894, of hundreds of millions of captions
MIN_COUNT = 2  # of a pair, to be merged
CLIP_CONTEXT, MIN_CONTEXT, CONTEXT_STEP = 77, 32, 8


def train_tokenizer(captions: Iterable[str], context: int | None = None, merges: int = MAX_MERGES) -> Tokenizer:
    """Return a tokeniser with at most so many merges, learnt from captions; every text has tokens, byte by byte at worst.

    Without a context it has room for the longest caption, from 32 to CLIP's 77 tokens.
    """
    captions = list(captions)
    made = make_open_clip_tokenizer(learn_merges(captions, merges), context or CLIP_CONTEXT)
    return made if context else make_open_clip_tokenizer(read_merges(made), choose_context(made, captions))


def learn_merges(captions: Iterable[str], count: int) -> list[tuple[str, str]]:
    """Return the merges of the most frequent pairs, the most frequent first."""
    library = import_tokenizers()
    from tokenizers import Regex, models, pre_tokenizers, trainers

    tokenizer = library.Tokenizer(models.BPE(end_of_word_suffix="</w>", continuing_subword_prefix=""))
    words = pre_tokenizers.Split(Regex(WORDS), behavior="removed", invert=True)
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, in_bytes])
    alphabet = [*list_bytes(), *(letter + "</w>" for letter in list_bytes())]
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + count,
        min_frequency=MIN_COUNT,
        special_tokens=alphabet,  # known beforehand, so that their order, which decides between equal counts, is not random
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    clean = CLEANERS["lower"]
    tokenizer.train_from_iterator(map(clean, captions), trainer)
    return read_model_merges(tokenizer)[:count]


def read_merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Return the merges of a tokeniser of byte pairs."""
    return read_model_merges(tokenizer.library)


def read_model_merges(library: Any) -> list[tuple[str, str]]:
    """Return the merges of a tokeniser of the library."""
    merges = json.loads(library.to_str())["model"]["merges"]
    pairs = (tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in merges)
    return [(first, second) for first, second in pairs]


def choose_context(tokenizer: Tokenizer, captions: Sequence[str]) -> int:
    """Return the context for the longest caption, a multiple of 8 from 32 to 77 or that of `tokenizer`."""
    library = tokenizer.library
    pad = library.padding["pad_id"]
    longest = 0
    for start in range(0, len(captions), 4096):
        rows = tokenizer(captions[start : start + 4096])
        used = (rows != pad).long() * (1 + rows.new_tensor(range(rows.shape[1])))
        longest = max(longest, int(used.max()))
    return min(tokenizer.context, max(MIN_CONTEXT, -(-longest // CONTEXT_STEP) * CONTEXT_STEP))
