"""A model to the Hugging Face Hub, with its card."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.checkpoints.card import card
from vitrail.checkpoints.checkpoint import open_and_recognise
from vitrail.checkpoints.hub import first_line, hub, parse
from vitrail.checkpoints.loading import load, save
from vitrail.models.bit import BiT
from vitrail.models.vit import ViT


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
        params = sum(parameter.numel() for parameter in given.parameters())
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
            raise OSError(f"hf://{repo} was not written: {first_line(error)}") from None
    return str(getattr(done, "commit_url", done))
