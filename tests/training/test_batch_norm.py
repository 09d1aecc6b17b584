"""BatchNorm over two processes equals that of one process with all their images."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.training.batch_norm import SynchronisedBatchNorm, synchronise_batch_norm

CHANNELS, STEPS = 3, 3
NORMS = {
    "plain": nn.BatchNorm2d(CHANNELS),
    "cumulative": nn.BatchNorm2d(CHANNELS, momentum=None),
    "without parameters": nn.BatchNorm2d(CHANNELS, affine=False),
    "without running statistics": nn.BatchNorm2d(CHANNELS, track_running_stats=False),
}
SHAPES = ((3, CHANNELS, 4, 5), (1, CHANNELS, 1, 1))  # of the maps of each process: different images and sizes
WAYS = (*NORMS, "large mean", "compiled", "checkpointed", "bf16")


def build_norm(way: str) -> nn.Module:
    norm = copy.deepcopy(NORMS.get(way, NORMS["plain"]))
    if norm.affine:
        nn.init.normal_(norm.weight, 1.0, generator=torch.Generator().manual_seed(1))
        nn.init.normal_(norm.bias, generator=torch.Generator().manual_seed(2))
    return nn.Sequential(norm)


def draw_maps(way: str, step: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the maps of both processes, and the gradients of their outputs."""
    generator = torch.Generator().manual_seed(step)
    maps = [2 + 3 * torch.randn(shape, generator=generator) for shape in SHAPES]
    gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
    dtype = torch.bfloat16 if way == "bf16" else torch.float32
    return [(x + 1000 * (way == "large mean")).to(dtype) for x in maps], [x.to(dtype) for x in gradients]


def run_steps(way: str, norm: nn.Module, maps: list[list[Tensor]], gradients: list[list[Tensor]]) -> dict[str, Tensor]:
    """Return the outputs, all gradients and the buffers after a few steps, by name."""
    call = norm
    if way == "compiled":
        call = torch.compile(norm, backend="aot_eager")
    found = {}
    for step, (parts, wanted) in enumerate(zip(maps, gradients, strict=True)):
        x = join_pixels(parts).requires_grad_()
        y = checkpoint(call, x, use_reentrant=False) if way == "checkpointed" else call(x)
        y.backward(join_pixels(wanted))
        found |= {f"output {step}": y.detach(), f"gradient {step}": x.grad}
    found |= {f"gradient of {name}": parameter.grad for name, parameter in norm.named_parameters()}
    found |= {name: buffer.clone() for name, buffer in norm.named_buffers()}
    if way != "without running statistics":  # evaluation would use those of the batch of a process
        found["evaluated"] = norm.eval()(join_pixels(maps[0])).detach()
    return found


def join_pixels(parts: list[Tensor]) -> Tensor:
    """Return maps [B, C, h, w] of any size as one, [1, C, pixels, 1]."""
    return torch.cat([x.transpose(0, 1).flatten(1) for x in parts], 1)[None, :, :, None]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    """The results of two processes, each with its own maps."""
    folder = tmp_path_factory.mktemp("two")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(folder)]
    both = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    for process in both:
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def compute_share(folder: Path, rank: int) -> None:
    """Compute the share of one of the processes."""
    from vitrail.__main__ import exit_process

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {}
    for way in WAYS:
        norm = build_norm(way)
        synchronise_batch_norm(norm)
        drawn = [draw_maps(way, step) for step in range(STEPS)]
        found[way] = run_steps(way, norm, *([[parts[index][rank]] for parts in drawn] for index in (0, 1)))
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()
    exit_process(0)  # a plain shutdown may abort inside C++


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_compute_what_one_does_with_all_images(way: str, two: list[dict[str, dict[str, Tensor]]]) -> None:
    drawn = [draw_maps(way, step) for step in range(STEPS)]
    one = run_steps(way, build_norm(way), [maps for maps, _ in drawn], [wanted for _, wanted in drawn])
    first, second = (found[way] for found in two)
    digits = {"bf16": 2e-2, "large mean": 1e-3}.get(way, 1e-5)
    pixels = join_pixels(drawn[0][0][:1]).shape[2]
    for name, expected in one.items():
        if name.startswith("gradient of"):  # of the parts of the loss: DDP and FSDP2 add them
            found = first[name] + second[name]
        elif name.startswith(("output", "gradient")):
            found = torch.cat((first[name], second[name]), 2)
        elif name == "evaluated":
            found, expected = first[name], expected[:, :, :pixels]
        else:
            found = first[name]
            assert torch.equal(found, second[name])
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=digits, atol=digits, msg=lambda m, name=name: f"{name}: {m}")


def test_parameters_and_names_stay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.BatchNorm2d(4), nn.GroupNorm(2, 4)), nn.BatchNorm1d(4))
    names, parameters = list(model.state_dict()), list(model.parameters())
    synchronise_batch_norm(model)
    assert [type(module).__name__ for module in model.modules()].count(SynchronisedBatchNorm.__name__) == 2
    assert list(model.state_dict()) == names
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), parameters, strict=True))


if __name__ == "__main__":
    compute_share(Path(sys.argv[1]), int(sys.argv[2]))
