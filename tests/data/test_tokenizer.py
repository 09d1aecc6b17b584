"""Tokenisers: equal to those of OpenCLIP and transformers, stored whole, and one clear line for what cannot be read."""

import gzip
import json
import random
from collections import Counter
from itertools import pairwise

import pytest
import torch

pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'vitrail[text]'")
pytest.importorskip("ftfy", reason="ftfy is not installed: pip install 'vitrail[text]'")
pytest.importorskip("regex", reason="regex is not installed: pip install 'vitrail[text]'")
from vitrail.data.tokenizer import (
    TRANSFORMERS_SPECIALS,
    Tokenizer,
    list_bytes,
    make_open_clip_tokenizer,
    read_tokenizer,
)

SCRIPTS = ((0x20, 0x7F), (0x20, 0x7F), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x6FF))
SCRIPTS += ((0x900, 0x97F), (0xE00, 0xE7F), (0x1100, 0x11FF), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3))
SCRIPTS += ((0x1F300, 0x1FAFF), (0x200B, 0x206F), (0xFE00, 0xFE0F), (0x1D400, 0x1D7FF), (0xFF00, 0xFFEF), (0, 0x20))
HOSTILE = (
    "<start_of_text>",
    "<end_of_text>",
    "!!<end_of_text>",
    "<|endoftext|>",
    "don't",
    "'S",
    "I'LL",
    "’s",
    "\u0345",
)
HOSTILE += (
    "&amp;amp;",
    "&lt;b&gt;",
    "Ã©",
    "ſ",
    "'ſ",
    "\u212a",
    "İ",
    "ß",
    "ǅ",
    "\t",
    "\n",
    "½",
    "Ⅷ",
    "٣",
    "x²",
    "\u2028",
)
HOSTILE += ("a photo of a cat", "👩‍👩‍👧‍👦", "🇩🇪", "e\u0301", "é", "\ufeff", "\x00", "\U0010ffff", "{}", "_", "ﬁ")


def make_texts(count: int, everything: bool = True) -> list[str]:
    """Return texts of many scripts with hostile parts; `everything` adds any code point."""
    source = random.Random(0)
    scripts = (*SCRIPTS, (0, 0x10FFFF)) if everything else SCRIPTS

    def draw_word() -> str:
        low, high = source.choice(scripts)
        letters = (source.randint(low, high) for _ in range(source.randint(1, 9)))
        return "".join(chr(letter) for letter in letters if not 0xD800 <= letter <= 0xDFFF)

    def draw_part() -> str:
        return source.choice((draw_word, draw_word, lambda: source.choice(HOSTILE)))() + source.choice(("", " "))

    return ["".join(draw_part() for _ in range(source.randint(0, 25))) for _ in range(count)]


def make_merges(count: int = 60) -> list[tuple[str, str]]:
    """Return the most frequent pairs of a few English words, as byte-pair encoding learns them."""
    words = ("a", "photo", "of", "the", "cat", "and", "the", "dog", "in", "the", "house", "with", "other")
    words += ("photographs", "of", "cats", "dogs", "and", "houses")
    split = [[*word[:-1], word[-1] + "</w>"] for word in words]
    merges: list[tuple[str, str]] = []
    for _ in range(count):
        pairs = Counter(pair for word in split for pair in pairwise(word))
        if not pairs:
            break
        best = max(sorted(pairs), key=lambda pair: pairs[pair])
        merges.append(best)
        for word in split:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == best:
                    word[at : at + 2] = ["".join(best)]
                at += 1
    return merges


def write_vocabulary(folder) -> None:
    """Write vocab.json and merges.txt, as transformers names them."""
    letters = list_bytes()
    merges = make_merges()
    words = [*letters, *(letter + "</w>" for letter in letters), *map("".join, merges), *TRANSFORMERS_SPECIALS]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    lines = ["#version: 0.2", *map(" ".join, merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n")


def test_openai_file_gives_open_clips_tokens_on_2000_texts() -> None:
    open_clip = pytest.importorskip("open_clip", reason="open_clip_torch is not installed")
    ours, texts = read_tokenizer(open_clip.tokenizer.default_bpe(), 77), make_texts(2_000)
    assert ours.vocabulary == 49_408
    assert torch.equal(ours(texts), open_clip.tokenizer.SimpleTokenizer()(texts))


def test_small_vocabulary_gives_transformers_tokens(tmp_path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    write_vocabulary(tmp_path)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    theirs = transformers.CLIPTokenizer(vocab=vocabulary, merges=make_merges())
    texts = make_texts(2_000)
    expected = theirs(texts, padding="max_length", max_length=16, truncation=True, return_tensors="pt").input_ids
    assert torch.equal(read_tokenizer(tmp_path, 16)(texts), expected)
    theirs.save_pretrained(tmp_path / "saved")
    assert torch.equal(read_tokenizer(tmp_path / "saved", 16)(texts), expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_siglip2s_tokeniser_gives_transformers_tokens(tmp_path, side) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", *"abcdefghijklmnopqrstuvwxyz", "ca", "cat", "▁a"]
    vocabulary = {word: index for index, word in enumerate(words)}
    merges = [("c", "a"), ("ca", "t"), ("▁", "a")]
    options = {"padding_side": side, "add_bos_token": False, "add_eos_token": True}
    theirs = transformers.Siglip2Tokenizer(vocab=vocabulary, merges=merges, **options)
    theirs.save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = make_texts(2_000)
    expected = theirs(texts, padding="max_length", max_length=20, truncation=True, return_tensors="pt").input_ids
    assert torch.equal(read_tokenizer(tmp_path, 20)(texts), expected)


def test_unigram_tokeniser_gives_transformers_tokens(tmp_path) -> None:
    """SigLIP's kind: pieces with scores, an end of the text, unknown pieces."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tokenizers import Tokenizer as Library
    from tokenizers import models, normalizers, pre_tokenizers, processors

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁a", -3.0), ("▁cat", -4.0)]
    pieces += [(letter, -6.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    library = Library(models.Unigram(pieces, unk_id=2))
    library.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library, **special)
    theirs.save_pretrained(tmp_path)
    texts = make_texts(2_000)
    expected = theirs(texts, padding="max_length", max_length=20, truncation=True, return_tensors="pt").input_ids
    assert torch.equal(read_tokenizer(tmp_path, 20)(texts), expected)


def test_sentencepiece_model_gives_the_tokens_of_transformers_conversion(tmp_path) -> None:
    pytest.importorskip("google.protobuf", reason="protobuf is not installed")
    converting = pytest.importorskip("transformers.convert_slow_tokenizer", reason="transformers is not installed")
    proto = converting.import_protobuf().ModelProto()
    pieces = [("<pad>", 0.0, 3), ("</s>", 0.0, 3), ("<unk>", 0.0, 2), ("▁", -2.0, 1), ("▁a", -3.0, 1), ("cat", -3.5, 1)]
    pieces += [("▁photo", -4.0, 1), ("wow", -1.0, 4), *((letter, -6.5, 1) for letter in "abcdefghijklmnopqrstuvwxyz")]
    for text, score, kind in pieces:
        proto.pieces.add(piece=text, score=score, type=kind)
    proto.trainer_spec.model_type, proto.trainer_spec.unk_id = 1, 2
    proto.normalizer_spec.name = "identity"
    (tmp_path / "spiece.model").write_bytes(proto.SerializeToString())

    class Slow:
        vocab_file, _extra_ids, legacy, add_prefix_space = str(tmp_path / "spiece.model"), 0, True, True

        def convert_tokens_to_ids(self, token: str) -> int:
            return [text for text, *_ in pieces].index(token)

    theirs, ours = converting.T5Converter(Slow()).converted(), read_tokenizer(tmp_path, 20)
    theirs.enable_truncation(20)
    theirs.enable_padding(length=20, pad_id=1, pad_token="</s>")
    texts = make_texts(2_000)
    assert ours.clean == "siglip"
    expected = [encoding.ids for encoding in theirs.encode_batch([ours.prepare(text) for text in texts])]
    assert ours(texts).tolist() == expected
    assert ours("A  Photo, cat!").tolist() == ours("a photo cat").tolist()
    assert ours("").tolist() == [[1] * 20]
    assert Tokenizer.from_bytes(ours.to_bytes()) == ours


def test_stored_tokeniser_is_the_same(tmp_path) -> None:
    write_vocabulary(tmp_path)
    for ours in (make_open_clip_tokenizer(make_merges(), 12), read_tokenizer(tmp_path, 12)):
        again = Tokenizer.from_bytes(ours.to_bytes())
        assert again == ours
        assert torch.equal(again(HOSTILE), ours(HOSTILE))


def test_texts_are_cut_and_padded_and_end_with_their_end() -> None:
    ours = make_open_clip_tokenizer(make_merges(), 8)
    start, end = ours.vocabulary - 2, ours.vocabulary - 1
    assert ours("").tolist() == [[start, end, 0, 0, 0, 0, 0, 0]]
    assert ours([]).shape == (0, 8)
    long = ours(["a" * 100_000, "the dog " * 12_500])
    assert long.shape == (2, 8)
    assert long[:, 0].tolist() == [start, start]
    assert long[:, -1].tolist() == [end, end]


def test_texts_that_are_none_are_refused(tmp_path) -> None:
    write_vocabulary(tmp_path)
    ours = read_tokenizer(tmp_path, 8)
    with pytest.raises(ValueError, match="texts must be strings, got int"):
        ours(["a cat", 3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"at most 1,000,000 characters, got 1,000,001: shorten them"):
        ours("a" * 1_000_001)
    with pytest.raises(ValueError, match=r"valid Unicode, got '\\ud800' at character 2: remove it"):
        ours("a \ud800")


def test_files_that_are_no_tokeniser_are_refused(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokeniser: it has neither tokenizer.json nor"):
        read_tokenizer(tmp_path, 8)
    for data in (b"", b"\n", b"\xff" * 20, b"\x08\x01", b"\x0a\x02\x0a\x05", b"\x0a\x03\x0a\x01a", b"\x0f"):
        (tmp_path / "spiece.model").write_bytes(data)
        with pytest.raises(ValueError, match=r"not a SentencePiece model|it has no unknown piece"):
            read_tokenizer(tmp_path, 8)
    (tmp_path / "spiece.model").unlink()
    write_vocabulary(tmp_path)
    with pytest.raises(ValueError, match="a context of 2 has no room"):
        read_tokenizer(tmp_path, 2)
    for text, message in (
        ("[]", "must be a JSON object"),
        ("{", "not readable as JSON"),
        ("{}", "cannot read the token"),
    ):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_tokenizer(tmp_path, 8)
    (tmp_path / "tokenizer.json").unlink()
    good = (tmp_path / "vocab.json").read_text()
    for text, message in (('{"a": 0}', "lacks"), ('{"a": 0, "b": 0}', "two tokens the same id"), ('{"a": "x"}', "ids")):
        (tmp_path / "vocab.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_tokenizer(tmp_path, 8)
    (tmp_path / "vocab.json").write_text(good)
    (tmp_path / "merges.txt").write_text("a b c\n")
    with pytest.raises(ValueError, match="every line must have two tokens, got 'a b c'"):
        read_tokenizer(tmp_path, 8)
    (tmp_path / "merges.txt").write_text("nothere either\n")
    with pytest.raises(ValueError, match="the merges do not fit the vocabulary"):
        read_tokenizer(tmp_path, 8)
    with gzip.open(tmp_path / "bpe.txt.gz", "wb") as file:
        file.write(b"\xff\xfe")
    with pytest.raises(ValueError, match="not a list of merges"):
        read_tokenizer(tmp_path / "bpe.txt.gz", 8)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b'{"version": 1, "clean": "none"}'])
def test_damaged_stored_tokeniser_is_refused(data) -> None:
    with pytest.raises(ValueError, match=r"version|damaged tokeniser"):
        Tokenizer.from_bytes(torch.tensor(list(data), dtype=torch.uint8))
