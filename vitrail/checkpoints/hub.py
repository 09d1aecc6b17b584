"""The Hugging Face Hub, through `huggingface_hub`: its cache, its revisions, its offline mode, its tokens."""

import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from vitrail.checkpoints.card import card
from vitrail.checkpoints.checkpoint import open_and_recognise
from vitrail.checkpoints.files.opened import INDEXES, WHOLE
from vitrail.checkpoints.loading import load, save
from vitrail.models.bit import BiT
from vitrail.models.vit import ViT

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
    for name in (*WHOLE[:2], INDEXES[0], *WHOLE[2:], INDEXES[1]):
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
        raise ValueError(f"hf://{repo}: {_line(error)}") from None
    except OSError as error:
        raise OSError(f"hf://{repo}: {_line(error)}") from None
    return folder if weights in (*WHOLE, *INDEXES) else folder / weights


def cached(library: Any, repo: str, revision: str | None) -> Path:
    """The folder of the cache that holds a repository, without asking the Hub."""
    for name in (*WHOLE, *INDEXES, *BESIDE):
        found = library.try_to_load_from_cache(repo, name, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    raise FileNotFoundError("not in the cache, and the Hub's offline mode is on (HF_HUB_OFFLINE)")


def push(
    model: ViT | BiT | str | Path,
    address: str,
    *,
    private: bool = False,
    message: str | None = None,
    assume: Mapping[str, Any] | None = None,
    take: str | None = None,
    **about: Any,
) -> str:
    """A model, or a checkpoint of any form, to `owner/name` on the Hub as the artifact with a model card. Gives the address.

    `about` adds to the card: `licence`, `data`, `recipe`, `metrics`.
    """
    repo, revision = parse(address)
    library = hub()
    given = load(model, dtype=None, assume=assume, take=take) if isinstance(model, str | Path) else model
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(given, folder / "model.safetensors", **about)
        with open_and_recognise(folder / "model.safetensors") as checkpoint:
            contract = checkpoint.contract
        params = sum(tensor.numel() for tensor in given.state_dict().values() if tensor.dtype is not torch.int64)
        (folder / "README.md").write_text(card(contract, repo, params), encoding="utf-8")
        try:
            api = library.HfApi()
            api.create_repo(repo, private=private, exist_ok=True)
            done = api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                revision=revision,
                commit_message=message or "Model and card, written by vitrail",
            )
        except (OSError, ValueError) as error:
            raise OSError(f"hf://{repo} was not written: {_line(error)}") from None
    return str(getattr(done, "commit_url", done))


def _line(error: Exception) -> str:
    """The first sentence of the Hub's answer."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
