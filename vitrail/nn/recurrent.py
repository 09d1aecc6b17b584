"""Encoders of sequences that came before attention: recurrent networks, and a Neural Turing Machine.

They read the patches of an image one after the other. What they know of a patch has to pass through every later step, while
attention compares any two patches directly.

B images, N patches, D width, M slots of W values each.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.nn.linear import LinearLayer

SHIFTS = 3  # of the focus in one step: back, none, forward


class SequenceEncoder(nn.Module):
    """The interface of an encoder: tokens [B, N, D] to outputs [B, N, F], and these to one vector per image."""

    feature_dim: int

    def last_output(self, y: Tensor) -> Tensor:
        """Return the output after the whole sequence has been read, [B, F]."""
        return y[:, -1]


class RecurrentEncoder(SequenceEncoder):
    """Layers of PyTorch's recurrent networks. In both directions, each has half of the width."""

    def __init__(self, cell: type[nn.RNN] | type[nn.LSTM], width: int, layers: int, bidirectional: bool) -> None:
        super().__init__()
        self.hidden = width // 2 if bidirectional else width
        self.bidirectional, self.feature_dim = bidirectional, width
        options = {"batch_first": True, "bidirectional": bidirectional}
        self.layers = nn.ModuleList(cell(width, self.hidden, **options) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x

    def last_output(self, y: Tensor) -> Tensor:
        """The last output of the forward direction, and the first of the backward one."""
        if not self.bidirectional:
            return y[:, -1]
        return torch.cat((y[:, -1, : self.hidden], y[:, 0, self.hidden :]), -1)


class HeadControls(NamedTuple):
    """What the controller asks of a head, each [B, …] (Graves et al. 2014, section 3.3)."""

    key: Tensor  # k, [B, W]: content that is looked for
    strength: Tensor  # β ≥ 0, [B, 1]: how sharply
    gate: Tensor  # g, 0 to 1: content, or the focus of the step before
    shift: Tensor  # s, [B, 3], adds to 1
    sharpening: Tensor  # γ ≥ 1


def address(memory: Tensor, focus: Tensor, controls: HeadControls) -> Tensor:
    """Return the focus w of a head on the slots of a memory [B, M, W], [B, M], from that of the step before: by content
    (equation 5), interpolated (7), shifted (8), sharpened (9)."""
    norms = memory.norm(dim=-1) * controls.key.norm(dim=-1, keepdim=True) + 1e-8  # [B, M]
    similarity = torch.bmm(memory, controls.key.unsqueeze(-1)).squeeze(-1) / norms  # eq. 6
    content = (controls.strength * similarity).softmax(-1)  # eq. 5
    w = controls.gate * content + (1 - controls.gate) * focus  # eq. 7
    back, stay, forward = controls.shift.unsqueeze(1).unbind(-1)  # [B, 1] each
    w = back * w.roll(-1, -1) + stay * w + forward * w.roll(1, -1)  # eq. 8
    w = (w + 1e-8) ** controls.sharpening
    return w / w.sum(-1, keepdim=True)  # eq. 9


def write_memory(memory: Tensor, focus: Tensor, erase: Tensor, add: Tensor) -> Tensor:
    """Return the memory [B, M, W] after a head has erased (equation 3) and added (equation 4), [B, W] each, where it looks."""
    w = focus.unsqueeze(-1)
    return memory * (1 - w * erase.unsqueeze(1)) + w * add.unsqueeze(1)


def read_memory(memory: Tensor, focus: Tensor) -> Tensor:
    """Return what a head reads, [B, W] (equation 2)."""
    return torch.bmm(focus.unsqueeze(1), memory).squeeze(1)


class TuringMachineEncoder(SequenceEncoder):
    """A Neural Turing Machine (Graves et al. 2014): an LSTM with a memory that one head writes and one head reads.

    In each step the controller sees a token and what was read before; then it writes, then it reads. The memory starts near
    zero, both heads on the first slot.
    """

    def __init__(self, width: int, slots: int, slot_width: int) -> None:
        super().__init__()
        self.slots, self.slot_width, self.feature_dim = slots, slot_width, width + slot_width
        self.controller = nn.LSTMCell(width + slot_width, width)
        controls = slot_width + 3 + SHIFTS  # key, strength, gate, sharpening, shifts
        self.read_head = LinearLayer(width, controls)
        self.write_head = LinearLayer(width, controls + 2 * slot_width)  # and erase, add

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        memory = x.new_full((b, self.slots, self.slot_width), 1e-6)
        hidden, cell = x.new_zeros(b, x.shape[2]), x.new_zeros(b, x.shape[2])
        read = x.new_zeros(b, self.slot_width)
        start = F.one_hot(torch.zeros(b, dtype=torch.long, device=x.device), self.slots).to(x.dtype)
        read_focus = write_focus = start
        outputs = []
        for x_n in x.unbind(1):
            hidden, cell = self.controller(torch.cat((x_n, read), -1), (hidden, cell))
            write, erase, add = self.write_head(hidden).split(
                [self.write_head.out_features - 2 * self.slot_width, self.slot_width, self.slot_width], -1
            )
            write_focus = address(memory, write_focus, self.split_controls(write))
            memory = write_memory(memory, write_focus, erase.sigmoid(), add)
            read_focus = address(memory, read_focus, self.split_controls(self.read_head(hidden)))
            read = read_memory(memory, read_focus)
            outputs.append(torch.cat((hidden, read), -1))
        return torch.stack(outputs, 1)

    def split_controls(self, values: Tensor) -> HeadControls:
        """Return the controls of a head from the values of its layer, in their ranges."""
        key, strength, gate, sharpening, shift = values.split([self.slot_width, 1, 1, 1, SHIFTS], -1)
        return HeadControls(key, F.softplus(strength), gate.sigmoid(), shift.softmax(-1), 1 + F.softplus(sharpening))


@dataclass(frozen=True)
class RNN:
    """The simple recurrent network of Elman (1990), with tanh."""

    bidirectional: bool = True
    cell: ClassVar[type[nn.RNN] | type[nn.LSTM]] = nn.RNN
    max_layers: ClassVar[int | None] = None

    def check(self, width: int) -> None:
        """Raise ValueError for a width that both directions cannot share."""
        if self.bidirectional and width % 2:
            raise ValueError(f"two directions share the width, which must be even, got {width}")

    def build(self, width: int, layers: int) -> SequenceEncoder:
        return RecurrentEncoder(self.cell, width, layers, self.bidirectional)


@dataclass(frozen=True)
class LSTM(RNN):
    """Long short-term memory (Hochreiter and Schmidhuber 1997)."""

    cell: ClassVar[type[nn.RNN] | type[nn.LSTM]] = nn.LSTM


@dataclass(frozen=True)
class TuringMachine:
    """A Neural Turing Machine with a memory of `slots` vectors of `slot_width` values (Graves et al. 2014)."""

    slots: int = 32
    slot_width: int = 16
    max_layers: ClassVar[int | None] = 1

    def check(self, width: int) -> None:
        """Raise ValueError for a memory in which the focus cannot move."""
        if self.slots < SHIFTS or self.slot_width < 1:
            size = f"{self.slots} slots of {self.slot_width} values"
            raise ValueError(f"the memory must have at least {SHIFTS} slots of at least 1 value, got {size}")

    def build(self, width: int, layers: int) -> SequenceEncoder:
        return TuringMachineEncoder(width, self.slots, self.slot_width)


EncoderSlot = RNN | TuringMachine  # RNN stands for its subclasses too
