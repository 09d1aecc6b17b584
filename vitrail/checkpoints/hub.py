"""The Hugging Face Hub, through `huggingface_hub`: its cache, its revisions, its offline mode, its tokens."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vitrail.checkpoints.files.opened import BY_SAFETY, INDEXES, WHOLE

ADDRESS = re.compile(r"(?:hf://)?(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
BESIDE = ("config.json", "preprocessor_config.json", "open_clip_config.json", "README.md")


def parse(address: str, revision: str | None = None) -> tuple[str, str | None]:
    """`hf://owner/name` or `hf://owner/name@revision`."""
    match = ADDRESS.fullmatch(address)
    if match is None:
        raise ValueError(f"{address!r} is no address on the Hub: use hf://owner/name or hf://owner/name@revision")
    if revision and match["revision"] and revision != match["revision"]:
        raise ValueError(f"{address} and the revision {revision}: say one of them")
    return match["repo"], revision or match["revision"]


def hub() -> Any:
    """The library, or an error that says how to get it."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
    except ImportError:
        raise ValueError("the Hub needs huggingface_hub: pip install 'vitrail[hub]'") from None
    return huggingface_hub


def choose(files: Iterable[str]) -> str:
    """Of a repository's files, the weights: the safest form that is there."""
    files = list(files)
    for name in BY_SAFETY:
        if name in files:
            return name
    for suffix in (".safetensors", ".npz", ".pth", ".pt", ".bin"):
        found = [name for name in files if name.endswith(suffix) and "/" not in name]
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(f"several files of weights, {', '.join(sorted(found)[:6])}: download the one you mean")
    raise ValueError("no weights among its files: neither safetensors, nor PyTorch's, nor NumPy's")


def download(address: str, revision: str | None = None) -> Path:
    """The weights of a repository in the Hub's cache, with the settings beside them. Only what is needed is fetched."""
    repo, revision = parse(address, revision)
    library = hub()
    try:
        if library.constants.HF_HUB_OFFLINE:
            folder = cached(library, repo, revision)
            weights = choose(path.name for path in folder.iterdir() if path.is_file())
        else:
            weights = choose(library.HfApi().list_repo_files(repo, revision=revision))
            shards = weights.replace(".index.json", "").rpartition(".")
            wanted = [weights, *BESIDE, *([f"{shards[0]}-*.{shards[2]}"] if weights in INDEXES else [])]
            folder = Path(library.snapshot_download(repo, revision=revision, allow_patterns=wanted))
    except ValueError as error:
        raise ValueError(f"hf://{repo}: {first_line(error)}") from None
    except OSError as error:
        raise OSError(f"hf://{repo}: {first_line(error)}") from None
    return folder if weights in (*WHOLE, *INDEXES) else folder / weights


def cached(library: Any, repo: str, revision: str | None) -> Path:
    """The folder of the cache that holds a repository, without asking the Hub."""
    for name in (*WHOLE, *INDEXES, *BESIDE):
        found = library.try_to_load_from_cache(repo, name, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    home = Path(library.constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    named = home / "refs" / (revision or "main")
    commit = named.read_text().strip() if named.is_file() else revision or ""
    if commit and (home / "snapshots" / commit).is_dir():
        return home / "snapshots" / commit
    raise FileNotFoundError("not in the cache, and the Hub's offline mode is on (HF_HUB_OFFLINE)")


def first_line(error: Exception) -> str:
    """The first sentence of the Hub's answer."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
