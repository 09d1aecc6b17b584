"""Downloads from the Hugging Face Hub through `huggingface_hub`: its cache, revisions, offline mode and tokens."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vitrail.checkpoints.io import INDEX_FILES, OPEN_CLIP_CONFIG, WEIGHT_FILES, list_folder, rank_weights
from vitrail.checkpoints.known_models import describe_offline, find_local_model

ADDRESS_PATTERN = re.compile(r"(?:hf://)?(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
CONFIG_FILES = ("config.json", "preprocessor_config.json", OPEN_CLIP_CONFIG, "README.md")
CONNECTION_SECONDS = 10.0


def parse_address(address: str, revision: str | None = None) -> tuple[str, str | None]:
    """Return the repository and revision of `hf://owner/name` or `hf://owner/name@revision`."""
    match = ADDRESS_PATTERN.fullmatch(address)
    if match is None:
        raise ValueError(f"invalid Hub address {address!r}: use hf://owner/name or hf://owner/name@revision")
    if revision and match["revision"] and revision != match["revision"]:
        raise ValueError(f"{address} and revision={revision!r} differ: give one of them")
    return match["repo"], revision or match["revision"]


def import_hub() -> Any:
    """Return the library; raise with the install command if it is missing."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
    except ImportError:
        raise ValueError("the Hub needs huggingface_hub: pip install 'vitrail[hub]'") from None
    return huggingface_hub


def choose_weights(files: Iterable[str]) -> str:
    """Return the weights among a repository's files, in the safest available format."""
    files = list(files)
    if standard := rank_weights(files):
        return standard[0]
    for suffix in (".safetensors", ".npz", ".pth", ".pt", ".bin"):
        found = [name for name in files if name.endswith(suffix) and "/" not in name]
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(f"several weights files, {', '.join(sorted(found)[:6])}: download one of them")
    raise ValueError("no weights among its files: no safetensors, PyTorch or NumPy file")


def download_weights(address: str, revision: str | None = None, more: Sequence[str] = ()) -> Path:
    """Download the weights of a repository, their settings and the files `more` to the Hub's cache, and return their path.

    Without a revision, weights in the directory VITRAIL_MODELS come first; without a connection, those in the cache are used.
    """
    repo, revision = parse_address(address, revision)
    local = find_local_model(repo) if revision is None else None
    if local is not None:
        return local
    library = import_hub()
    try:
        files = None if library.constants.HF_HUB_OFFLINE else list_files(library, repo, revision)
        if files is None:
            folder = find_cached(library, repo, revision)
            weights = choose_weights(list_folder(folder))
        else:
            weights = choose_weights(files)
            shards = weights.replace(".index.json", "").rpartition(".")
            wanted = [
                weights,
                *CONFIG_FILES,
                *more,
                *([f"{shards[0]}-*.{shards[2]}"] if weights in INDEX_FILES else []),
            ]
            folder = Path(library.snapshot_download(repo, revision=revision, allow_patterns=wanted))
    except ValueError as error:
        raise ValueError(f"hf://{repo}: {format_error(error)}") from None
    except (OSError, connection_error(library)) as error:
        raise OSError(f"hf://{repo}: {format_error(error)}") from None
    return folder if weights in (*WEIGHT_FILES, *INDEX_FILES) else folder / weights


def connection_error(library: Any) -> type[Exception]:
    """Return the base class of the errors of the Hub's HTTP library, which are not OSErrors in all of its versions."""
    return library.errors.HfHubHTTPError.__mro__[1]


def list_files(library: Any, repo: str, revision: str | None) -> list[str] | None:
    """Return the files of a repository, by one request without repetition; None if the Hub cannot be reached."""
    try:
        found = library.HfApi().model_info(repo, revision=revision, timeout=CONNECTION_SECONDS)
    except library.errors.HfHubHTTPError:  # the Hub's own answer: no such repository, no permission
        raise
    except (OSError, connection_error(library)):
        return None
    return [file.rfilename for file in found.siblings or ()]


def find_cached(library: Any, repo: str, revision: str | None) -> Path:
    """Return the cache folder of a repository, without network access."""
    for name in (*WEIGHT_FILES, *INDEX_FILES, *CONFIG_FILES):
        found = library.try_to_load_from_cache(repo, name, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    home = Path(library.constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    named = home / "refs" / (revision or "main")
    commit = named.read_text().strip() if named.is_file() else revision or ""
    if commit and (home / "snapshots" / commit).is_dir():
        return home / "snapshots" / commit
    reason = "the Hub's offline mode is on (HF_HUB_OFFLINE)"
    if not library.constants.HF_HUB_OFFLINE:
        reason = f"{library.constants.ENDPOINT} cannot be reached"
    raise FileNotFoundError(f"not in the cache, and {reason}: {describe_offline(repo)}")


def format_error(error: Exception) -> str:
    """Return the first line of the Hub's error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
