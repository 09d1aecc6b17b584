"""Precision of a training run: the fastest by a measurement on its model, recorded in the recipe, the same on all processes."""

import torch
from torch import Tensor, nn

from vitrail.models.flops import count as count_cost
from vitrail.models.lora import tune
from vitrail.models.registry import build_from
from vitrail.training.distributed import Team
from vitrail.training.recipe import Recipe
from vitrail.utils.devices import device_name
from vitrail.utils.precision import (
    MEASURING_SECONDS,
    PrecisionChoice,
    autocast,
    choose_cuda,
    choose_measured,
    measure_interleaved,
    multiplies_bf16,
)

MIN_TRAINING_MACS = 5e12  # multiply-adds of a run, a minute or two; shorter runs are not measured
MEASURED_IMAGES = 256  # of a step at most; fewer if they take long


def choose_training_precision(recipe: Recipe, n_images: int, team: Team) -> PrecisionChoice | None:
    """Return the fastest precision for a recipe on so many training images, as the main process measures it.

    None, without measuring, for a run that is too short for the choice to matter, for a locked image tower, and for devices
    other than CPU and CUDA.
    """
    batch = min(recipe.batch_size, n_images)
    images = batch * recipe.total_steps(max(1, n_images // batch))
    if team.device.type == "cuda":
        return choose_cuda(team.device, device_name(team.device))
    if (
        recipe.tune == "text"
        or team.device.type != "cpu"
        or 3 * images * count_cost(recipe.model.image_tower).macs < MIN_TRAINING_MACS
    ):
        return None
    return team.broadcast_object(measure_precision(recipe, batch) if team.is_main else None)


def measure_precision(recipe: Recipe, batch: int, seconds: float = MEASURING_SECONDS) -> PrecisionChoice:
    """Return the faster of fp32 and bf16 for the gradients of a recipe's model on the CPU."""
    device = torch.device("cpu")
    name = device_name(device)
    if not multiplies_bf16(device):
        return choose_measured({"fp32": 1.0}, name)
    with torch.random.fork_rng(devices=[]):
        model = build_from(recipe.model.image_tower).train()  # captions cost little beside images
        tune(model, recipe.tune)
        shape = (recipe.model.channels, *recipe.model.input_size)
        few = torch.randn(min(2, batch), *shape)  # one image alone has no batch statistics
        first = measure_interleaved({"fp32": lambda: compute_gradients(model, few, "fp32")}, 0.0)["fp32"] / len(few)
        # A warm-up and a measurement of both have to fit into the time.
        pixels = torch.randn(max(len(few), min(batch, MEASURED_IMAGES, int(seconds / (4 * first)))), *shape)
        runs = {
            precision: lambda precision=precision: compute_gradients(model, pixels, precision)
            for precision in ("fp32", "bf16")
        }
        return choose_measured(measure_interleaved(runs, seconds), name)


def compute_gradients(model: nn.Module, images: Tensor, precision: str) -> None:
    """Compute a forward and a backward pass."""
    with autocast("cpu", precision):
        outputs = model(images)
    outputs.float().square().mean().backward()
    model.zero_grad(set_to_none=True)
