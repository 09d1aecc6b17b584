"""`RUN/adapter/`: what LoRA added by itself, in PEFT's form, beside the model that it is merged into."""

import shutil
from typing import TYPE_CHECKING

from vitrail.checkpoints.adapter import write_adapter
from vitrail.checkpoints.convert import expressible
from vitrail.models.vit import ViT

if TYPE_CHECKING:
    from vitrail.run.running import Run


def save_adapter(run: "Run") -> str | None:
    """Writes the additions as they stand now, where transformers has names for them; says where, or why not.

    None for a run without LoRA.
    """
    recipe = run.recipe
    if not recipe.tune.startswith("lora"):
        return None
    model = run.tuned()  # all processes take part in putting it together
    if not run.team.leads:
        return None
    assert isinstance(model, ViT)
    try:
        expressible("hf", recipe.model)
    except ValueError as reason:
        return f"not written: {reason}"
    place = run.directory / "adapter"
    shutil.rmtree(place, ignore_errors=True)  # of a run that was killed after this, and went on
    base = recipe.init.removeprefix("hf://") if recipe.init else None
    write_adapter(place, model, base=base, labels=run.prepared.labels.names, preprocessing=recipe.preprocessing)
    return f"{place.name}, in PEFT's form"
