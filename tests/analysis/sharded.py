"""Run by torchrun in two processes: maps of models under DDP and FSDP2 are those of the plain model."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vitrail
from tests.variants import SMALL
from vitrail.__main__ import exit_process
from vitrail.analysis import record_attention, trace_image
from vitrail.data.rng import StepRandom
from vitrail.objectives.classification import Classification
from vitrail.training.distributed import Team


def made() -> nn.Module:
    torch.manual_seed(0)
    return vitrail.build(**SMALL, qk_norm=True, position="relative", init="deit")


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.randn(3, 3, 32, 48, generator=torch.Generator().manual_seed(rank))
    plain = made()
    with record_attention(plain) as expected:  # with gradients, for which PyTorch takes another kernel
        answer = plain.eval()(x).detach()
    for parallel in ("ddp", "fsdp"):
        task = Classification().build(made().eval())  # pyright: ignore[reportArgumentType]
        wrapped = Team(rank, 2, torch.device("cpu"), parallel).wrap(task)
        labels = torch.tensor([0, 1, 2])
        with record_attention(wrapped) as maps:
            losses = wrapped(x, labels, StepRandom(0, 0, 0, 3, 3, x.device))  # forward and backward, as in training
            losses["loss"].backward()
        for layer in expected:
            assert torch.equal(maps[layer], expected[layer]), f"{parallel}, layer {layer}"
        torch.testing.assert_close(losses["loss"].detach(), nn.functional.cross_entropy(answer, labels))
        if parallel == "fsdp":
            with pytest.raises(ValueError, match="sharded over processes"):
                trace_image(wrapped, x[:1])
    dist.destroy_process_group()
    print(f"process {os.environ['RANK']}: maps equal")


if __name__ == "__main__":
    main()
    exit_process(0)  # a plain shutdown may abort inside C++ and fail the other process
