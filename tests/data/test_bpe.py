"""Byte pairs learnt from captions: the same in any order, every text has tokens, the context fits."""

import random
from itertools import pairwise

import pytest

pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'vitrail[text]'")
from vitrail.data.bpe import learn_merges, train_tokenizer
from vitrail.data.tokenizer import Tokenizer

CAPTIONS = [f"a photo of {one} {animal}" for one in ("a", "one", "my") for animal in ("beagle", "pug", "maine coon")]


def count_pairs(words: dict[tuple[str, ...], int]) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for word, count in words.items():
        for pair in pairwise(word):
            counts[pair] = counts.get(pair, 0) + count
    return counts


def test_each_merge_is_a_most_frequent_pair() -> None:
    """Replay the merges on the words, as the algorithm is published."""
    words: dict[tuple[str, ...], int] = {}
    for caption in CAPTIONS:
        for word in caption.split():
            letters = (*word[:-1], word[-1] + "</w>")
            words[letters] = words.get(letters, 0) + 1
    merges = learn_merges(CAPTIONS, 30)
    assert len(merges) > 10
    for first, second in merges:
        counts = count_pairs(words)
        assert counts[first, second] == max(counts.values())
        replaced: dict[tuple[str, ...], int] = {}
        for word, count in words.items():
            parts: list[str] = []
            for letter in word:
                if parts and (parts[-1], letter) == (first, second):
                    parts[-1] += letter
                else:
                    parts.append(letter)
            replaced[tuple(parts)] = count
        words = replaced


def test_order_of_captions_does_not_matter() -> None:
    rng = random.Random(0)
    captions = [" ".join(rng.choices(["cat", "dog", "bird", "börd", "猫", "a", "the", "two"], k=6)) for _ in range(200)]
    assert train_tokenizer(captions) == train_tokenizer(sorted(captions))


def test_every_text_has_tokens_and_is_read_back() -> None:
    tokenizer = train_tokenizer(CAPTIONS)
    assert isinstance(tokenizer, Tokenizer)
    tokens = tokenizer(["a photo of a beagle", "漢字 🐈", "", "zyx " * 25_000])
    assert tokens.shape == (4, 32)
    assert tokens[0].count_nonzero() < 10  # words of the captions are few tokens
    words = tokenizer.library.decode([index for index in tokens[1].tolist() if index]).replace("</w>", " ").split()
    assert words == ["漢字", "🐈"]
    assert tokens[3, -1] == tokenizer.vocabulary - 1  # cut, and the end is kept


def test_context_holds_the_longest_caption() -> None:
    assert train_tokenizer(["word " * 40]).context == 48
    assert train_tokenizer(["word " * 200]).context == 77
    assert train_tokenizer(["word " * 40], context=16).context == 16
