"""Tokenisers of models with a text tower: texts to token ids, as the model was trained with.

A tokeniser is the JSON of the `tokenizers` library, which includes how texts are cut to the context and padded, and the
cleaning of texts before it. It is read from a checkpoint's own files and stored in the model file.

B texts, T tokens: the context of the model.
"""

import gzip
import html
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vitrail.data.sentencepiece import read_sentencepiece

Clean = Literal["none", "whitespace", "lower", "canonicalize", "siglip"]
JSON_FILE, CONFIG_FILE, VOCABULARY_FILE, MERGES_FILE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
)
PIECE_FILES = ("spiece.model", "tokenizer.model")
TOKENIZER_FILES = (JSON_FILE, CONFIG_FILE, VOCABULARY_FILE, MERGES_FILE, *PIECE_FILES)
MAX_CHARACTERS = 1_000_000  # of one text
MAX_BYTES = 100_000_000  # of a tokeniser's file; the largest known have 34 million
VERSION = 1
# CLIP's words, before they are cut into pairs of bytes: English contractions, letters, single digits, runs of other signs.
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
OPEN_CLIP_SPECIALS = ("<start_of_text>", "<end_of_text>")
TRANSFORMERS_SPECIALS = ("<|startoftext|>", "<|endoftext|>")
OPENAI_MERGES = 49_152 - 256 - 2  # of the first lines of OpenAI's file, after its header


class Tokenizer:
    """Texts to token ids [B, T]. `spec` and `clean` are all that it is; two with equal ones are equal."""

    def __init__(self, spec: str, clean: Clean = "none", splits: bool = False) -> None:
        """`splits`: cut texts into words with the `regex` package, as OpenCLIP does: the library knows an older Unicode."""
        if clean not in CLEANERS:
            raise ValueError(f"unknown cleaning {clean!r} of texts: use {', '.join(CLEANERS)}")
        self.spec, self.clean, self.splits = spec, clean, splits
        self.library = parse_spec(spec)
        truncation, padding = self.library.truncation, self.library.padding
        if not truncation or not padding or padding["length"] != truncation["max_length"]:
            raise ValueError("the tokeniser must cut and pad texts to one context: read it with read_tokenizer")
        self.context: int = truncation["max_length"]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        return hash(self.spec)

    def __call__(self, texts: str | Sequence[str]) -> Tensor:
        """Return the token ids of one text or several, int64 [B, T]. Texts longer than the context are cut."""
        texts = [texts] if isinstance(texts, str) else list(texts)
        inputs: list[Any] = [self.prepare(text) for text in texts]
        if self.splits:
            words = compile_words()
            inputs = [words.findall(text) for text in inputs]
        rows = [encoding.ids for encoding in self.library.encode_batch(inputs, is_pretokenized=self.splits)]
        return torch.tensor(rows, dtype=torch.int64).view(len(texts), self.context)

    def prepare(self, text: str) -> str:
        """Return a cleaned text; raise ValueError for what is no text."""
        if not isinstance(text, str):
            raise ValueError(f"texts must be strings, got {type(text).__name__}")
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"texts must have at most {MAX_CHARACTERS:,} characters, got {len(text):,}: shorten them")
        text = CLEANERS[self.clean](text)
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair
            half = f"{text[error.start]!a} at character {error.start}"
            raise ValueError(f"texts must be valid Unicode, got {half}: remove it") from None
        return text

    def is_cut(self, text: str) -> bool:
        """Return True if a text has more tokens than the context, so that its end is not read."""
        prepared: Any = self.prepare(text)
        if self.splits:
            prepared = compile_words().findall(prepared)
        return bool(self.library.encode(prepared, is_pretokenized=self.splits).overflowing)

    @property
    def vocabulary(self) -> int:
        """Return the highest token id plus one."""
        return max(self.library.get_vocab().values(), default=-1) + 1

    def as_dict(self) -> dict[str, Any]:
        """Return what is stored, as JSON values."""
        settings = {"version": VERSION, "clean": self.clean, "splits": self.splits}
        return settings | {"tokenizer": json.loads(self.spec)}

    def as_transformers(self) -> dict[str, Any]:
        """Return the library's JSON for transformers, which has its own cleaning and other names of start and end."""
        spec = json.loads(self.spec)
        if not self.splits:
            return spec
        vocabulary: dict[str, int] = dict(spec["model"]["vocab"])
        for name, theirs in zip(OPEN_CLIP_SPECIALS, TRANSFORMERS_SPECIALS, strict=True):
            vocabulary[theirs] = vocabulary.pop(name)
        new = make_transformers_tokenizer(vocabulary, [(a, b) for a, b in spec["model"]["merges"]])
        return json.loads(set_context(new, {"pad_token": TRANSFORMERS_SPECIALS[1]}, self.context))

    def to_bytes(self) -> Tensor:
        """Return the tokeniser as a uint8 tensor, for the model file."""
        text = json.dumps(self.as_dict(), ensure_ascii=False, separators=(",", ":"))
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    @classmethod
    def from_bytes(cls, data: Tensor) -> "Tokenizer":
        """Return the tokeniser that `to_bytes` wrote; raise ValueError for anything else."""
        try:
            stored = json.loads(bytes(data.numpy()).decode())
            if not isinstance(stored, dict) or stored.get("version") != VERSION:
                raise ValueError(f"its version is not {VERSION}")
            spec = json.dumps(stored["tokenizer"], ensure_ascii=False)
            return cls(spec, stored["clean"], stored["splits"] is True)
        except (KeyError, TypeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"damaged tokeniser ({type(error).__name__}: {error})") from None


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], batch: int = 4096) -> np.ndarray:
    """Return the token ids of many texts, int32 [n, T]."""
    rows = np.empty((len(texts), tokenizer.context), dtype=np.int32)
    for start in range(0, len(texts), batch):
        rows[start : start + batch] = tokenizer(texts[start : start + batch]).numpy()
    return rows


def import_tokenizers() -> Any:
    """Return the library; raise with the install command if it is missing."""
    try:
        import tokenizers
    except ImportError:
        raise ValueError("tokenisers need the tokenizers library: pip install 'vitrail[text]'") from None
    return tokenizers


@cache
def compile_words() -> Any:
    """Return OpenCLIP's pattern of words; raise with the install command if its library is missing."""
    try:
        import regex
    except ImportError:
        raise ValueError("this tokeniser needs the regex library: pip install 'vitrail[text]'") from None
    return regex.compile("|".join((*OPEN_CLIP_SPECIALS, WORDS)), regex.IGNORECASE)


def parse_spec(spec: str) -> Any:
    """Return the library's tokeniser; raise ValueError for a file that it cannot read."""
    try:
        return import_tokenizers().Tokenizer.from_str(spec)
    except (KeyboardInterrupt, SystemExit, ValueError):
        raise
    except BaseException as error:  # the library raises Exception itself, and panics of its Rust code are no Exception
        raise ValueError(f"the tokenizers library cannot read the tokeniser: {str(error)[:200]}") from None


# --- cleaning, as OpenCLIP's ---


def clean_basic(text: str) -> str:
    """Return a text with broken encodings repaired (ftfy) and HTML entities resolved, twice."""
    try:
        import ftfy
    except ImportError:
        raise ValueError("this tokeniser cleans texts with ftfy: pip install 'vitrail[text]'") from None
    return html.unescape(html.unescape(ftfy.fix_text(text))).strip()


def clean_whitespace(text: str) -> str:
    """Return a cleaned text with single spaces between words."""
    return " ".join(clean_basic(text).split())


def canonicalize(text: str) -> str:
    """Return a cleaned text in lower case without ASCII punctuation, as SigLIP's in OpenCLIP."""
    bare = clean_basic(text).replace("_", " ").translate(str.maketrans("", "", string.punctuation))
    return " ".join(bare.lower().split())


def remove_punctuation(text: str) -> str:
    """Return a text in lower case without ASCII punctuation, as transformers' `SiglipTokenizer`."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\s+", " ", bare).strip()


CLEANERS: Mapping[str, Callable[[str], str]] = {
    "none": lambda text: text,
    "whitespace": clean_whitespace,
    "lower": lambda text: clean_whitespace(text).lower(),
    "canonicalize": canonicalize,
    "siglip": remove_punctuation,
}


# --- reading ---


def read_tokenizer(
    path: str | Path, context: int, *, open_clip: bool = False, settings: Mapping[str, Any] | None = None
) -> Tokenizer:
    """Return the tokeniser in a file or directory, for texts of `context` tokens.

    A directory has tokenizer.json, vocab.json and merges.txt, or SigLIP's spiece.model. A file is a tokenizer.json, or
    OpenAI's list of merges, `bpe_simple_vocab_16e6.txt.gz`. `open_clip` makes CLIP's tokeniser as OpenCLIP does, which cleans
    texts and pads with zeros; otherwise as transformers does. `settings` is `text_cfg` of open_clip_config.json.
    """
    path, settings = Path(path), settings or {}
    if context < 3:
        raise ValueError(f"a context of {context} has no room for a word between start and end: use at least 3")
    if path.is_file() and path.name.endswith((".txt", ".txt.gz")):
        return make_open_clip_tokenizer(read_openai_merges(path), context)
    folder = path if path.is_dir() else path.parent
    spec_path = path / JSON_FILE if path.is_dir() else path
    config = read_json_file(folder / CONFIG_FILE) if (folder / CONFIG_FILE).is_file() else {}
    if spec_path.is_file():
        spec = read_json_file(spec_path)
        parse_spec(json.dumps(spec, ensure_ascii=False))  # raises for what is no tokeniser
    elif (folder / VOCABULARY_FILE).is_file() and (folder / MERGES_FILE).is_file() and path.is_dir():
        merges = read_merges((folder / MERGES_FILE).read_text(encoding="utf-8").splitlines(), MERGES_FILE)
        vocabulary = check_vocabulary(read_json_file(folder / VOCABULARY_FILE), VOCABULARY_FILE)
        spec = make_transformers_tokenizer(vocabulary, merges)
        config = {"pad_token": TRANSFORMERS_SPECIALS[1]} | config
    elif pieces := next((folder / name for name in PIECE_FILES if (folder / name).is_file() and path.is_dir()), None):
        spec = read_sentencepiece(pieces, import_tokenizers())
        config = {"pad_token": "</s>"} | config
        if config.get("tokenizer_class", "SiglipTokenizer") == "SiglipTokenizer":
            return Tokenizer(set_context(spec, config, context), "siglip" if not open_clip else "canonicalize")
    else:
        raise FileNotFoundError(
            f"{path}: no tokeniser: it has neither {JSON_FILE} nor {VOCABULARY_FILE} and {MERGES_FILE}"
        )
    if open_clip and not settings.get("hf_tokenizer_name"):
        model = spec.get("model", {})
        pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model.get("merges", [])]
        if model.get("type") != "BPE" or not all(len(pair) == 2 for pair in pairs):
            raise ValueError(f"{spec_path}: OpenCLIP's own tokeniser is byte-pair encoding, got {model.get('type')}")
        return make_open_clip_tokenizer(pairs, context)
    arguments = settings.get("tokenizer_kwargs") or {}
    clean = arguments.get("clean", "whitespace") if open_clip else "none"
    return Tokenizer(set_context(spec, config, context), clean)


def read_json_file(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of limited size."""
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path}: too large for a tokeniser: {path.stat().st_size:,} bytes")
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: must be a JSON object, got {type(data).__name__}")
    return data


def check_vocabulary(data: dict[str, Any], where: str) -> dict[str, int]:
    """Return a vocabulary; raise ValueError unless it maps tokens to different ids."""
    if not data or not all(type(index) is int and index >= 0 for index in data.values()):
        raise ValueError(f"{where} must map tokens to ids from 0")
    if len(set(data.values())) != len(data):
        raise ValueError(f"{where} gives two tokens the same id")
    return data


def read_merges(lines: Sequence[str], where: str) -> list[tuple[str, str]]:
    """Return the pairs in the lines of a list of merges, without its header."""
    pairs = [tuple(line.split()) for line in lines if line.strip() and not line.startswith("#version")]
    if strange := next((pair for pair in pairs if len(pair) != 2), None):
        raise ValueError(f"{where}: every line must have two tokens, got {' '.join(strange)[:60]!r}")
    return pairs  # pyright: ignore[reportReturnType]


def read_openai_merges(path: Path) -> list[tuple[str, str]]:
    """Return the merges of OpenAI's file, of which CLIP uses the first 48,894."""
    try:
        if path.name.endswith(".gz"):
            with gzip.open(path) as file:
                data = file.read(MAX_BYTES + 1)
        else:
            data = path.read_bytes()
        lines = data[:MAX_BYTES].decode().split("\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a list of merges ({error})") from None
    return read_merges(lines[1 : OPENAI_MERGES + 1], path.name)


def list_bytes() -> list[str]:
    """Return a printable character for each byte, in the order of CLIP's vocabulary: printable bytes first."""
    printable = list(chain(range(33, 127), range(161, 173), range(174, 256)))
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(256 - len(printable))]


def make_bpe(vocabulary: Mapping[str, int], merges: list[tuple[str, str]], specials: tuple[str, str]) -> Any:
    """Return CLIP's byte-pair encoding of words in the library, with start and end."""
    library = import_tokenizers()
    from tokenizers import decoders, models, pre_tokenizers, processors

    if lacking := [special for special in specials if special not in vocabulary]:
        raise ValueError(f"the vocabulary lacks {' and '.join(lacking)}")
    start, end = specials
    try:
        model = models.BPE(
            vocab=dict(vocabulary),
            merges=merges,
            unk_token=end,
            end_of_word_suffix="</w>",
            continuing_subword_prefix="",
        )
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"the merges do not fit the vocabulary: {error}") from None
    tokenizer = library.Tokenizer(model)
    tokenizer.add_special_tokens(list(specials))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", special_tokens=[(special, vocabulary[special]) for special in specials]
    )
    return tokenizer


def make_transformers_tokenizer(vocabulary: Mapping[str, int], merges: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the JSON of `CLIPTokenizer`, which normalises and cuts texts into words by itself."""
    tokenizer = make_bpe(vocabulary, merges, TRANSFORMERS_SPECIALS)
    from tokenizers import Regex, normalizers, pre_tokenizers

    steps = [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    tokenizer.normalizer = normalizers.Sequence(steps)
    words = r"<\|startoftext\|>|<\|endoftext\|>|" + WORDS
    split = pre_tokenizers.Split(Regex(words), behavior="removed", invert=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return json.loads(tokenizer.to_str())


def make_open_clip_tokenizer(merges: Sequence[tuple[str, ...]], context: int) -> Tokenizer:
    """Return CLIP's tokeniser as OpenAI and OpenCLIP have it: bytes, bytes that end words, merges, start and end."""
    letters = list_bytes()
    words = [*letters, *(letter + "</w>" for letter in letters), *("".join(pair) for pair in merges)]
    vocabulary = {word: index for index, word in enumerate([*words, *OPEN_CLIP_SPECIALS])}
    library = make_bpe(vocabulary, [(a, b) for a, b in merges], OPEN_CLIP_SPECIALS)
    library.enable_truncation(context)
    library.enable_padding(length=context, pad_id=0, pad_token=letters[0])
    return Tokenizer(library.to_str(), "lower", splits=True)


def set_context(spec: dict[str, Any], config: Mapping[str, Any], context: int) -> str:
    """Return the library's JSON with start, end, cutting and padding as tokenizer_config.json says."""
    library = parse_spec(json.dumps(spec, ensure_ascii=False))
    names = {kind: read_special(config, kind) for kind in ("bos_token", "eos_token", "pad_token")}
    for kind in ("bos", "eos"):
        flag = config.get(f"add_{kind}_token")
        if isinstance(flag, bool):
            set_special(library, kind, names[f"{kind}_token"], flag)
    pad = names["pad_token"] or (library.padding or {}).get("pad_token")
    index = None if pad is None else library.token_to_id(pad)
    if index is None:
        raise ValueError(f"the tokeniser has no padding token ({pad!r}): set pad_token in {CONFIG_FILE}")
    left = config.get("tokenizer_class") == "Siglip2Tokenizer"
    side = config.get("padding_side") or ("left" if left else "right")
    library.enable_truncation(context)
    library.enable_padding(length=context, pad_id=index, pad_token=pad, direction=side)
    return library.to_str()


def read_special(config: Mapping[str, Any], kind: str) -> str | None:
    """Return a special token of tokenizer_config.json, where it is a string or an object with its content."""
    token = config.get(kind)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def set_special(library: Any, kind: str, token: str | None, wanted: bool) -> None:
    """Make the library add a start or end token, or not, whatever its own JSON says."""
    from tokenizers import processors

    probe = library.encode("a").ids
    bare = library.encode("a", add_special_tokens=False).ids
    extra = len(probe) - len(bare)
    before = next(at for at in range(extra + 1) if probe[at : at + len(bare)] == bare)
    current = {"bos": probe[:before], "eos": probe[before + len(bare) :]}
    if wanted and not current[kind]:
        index = None if token is None else library.token_to_id(token)
        if index is None:
            raise ValueError(f"the tokeniser adds {kind}_token and has none ({token!r}): correct {CONFIG_FILE}")
        current[kind] = [index]
    elif not wanted:
        current[kind] = []
    names = {index: library.id_to_token(index) for index in (*current["bos"], *current["eos"])}
    template = " ".join([*(names[i] for i in current["bos"]), "$A", *(names[i] for i in current["eos"])])
    library.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(name, index) for index, name in names.items()]
    )
