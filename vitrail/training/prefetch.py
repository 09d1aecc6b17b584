"""Prefetch batches to the device: the copy of the next batch runs beside the computation of this one."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from vitrail.data.loader import Batch
from vitrail.utils.devices import send_to_device

Numbered = tuple[int, int, Batch]  # step, epoch, batch


def prefetch_batches(batches: Iterator[Numbered], device: torch.device) -> Iterator[Numbered]:
    """Yield batches whose pixels and targets are on the device.

    On CUDA the next batch is copied from pinned memory on a stream of its own, while the model computes; the host waits for
    neither. Elsewhere batches pass unchanged, one at a time.
    """
    if device.type != "cuda":
        yield from batches
        return
    stream, ahead = torch.cuda.Stream(device), None
    for step, epoch, batch in batches:
        with torch.cuda.stream(stream):
            sent = replace(
                batch, pixels=send_to_device(batch.pixels, device), targets=send_to_device(batch.targets, device)
            )
        if ahead is not None:
            yield hand_over(ahead, stream)
        ahead = step, epoch, sent
    if ahead is not None:
        yield hand_over(ahead, stream)


def hand_over(numbered: Numbered, stream: torch.cuda.Stream) -> Numbered:
    """Let the computing stream wait for the copies, and keep their memory until it has read them."""
    current = torch.cuda.current_stream()
    current.wait_stream(stream)
    for tensor in (numbered[2].pixels, numbered[2].targets):
        tensor.record_stream(current)
    return numbered
