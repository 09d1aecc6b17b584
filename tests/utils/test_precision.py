"""The choice of a precision, from constructed capabilities and timings."""

from types import SimpleNamespace

import pytest
import torch

from vitrail.utils import precision
from vitrail.utils.precision import PACKED, choose_cuda, choose_measured, measure_interleaved, multiplies_bf16

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("seconds", "chosen", "packed", "why"),
    [
        ({"fp32": 1.0, "bf16": 0.5}, "bf16", True, "measured 2.0 times as fast as fp32 on Zen"),
        (
            {"fp32": 1.0, "bf16": 0.95},
            "fp32",
            False,
            "bf16 measured 1.1 times as fast as fp32 on Zen, less than 1.1 times",
        ),
        ({"fp32": 1.0}, "fp32", False, "Zen does not multiply bf16 natively"),
        (
            {"fp32": 1.0, PACKED: 0.5},
            "fp32",
            True,
            "measured 2.0 times as fast with packed weights on Zen; no native bf16",
        ),
        ({"fp32": 1.0, PACKED: 0.5, "bf16": 0.25}, "bf16", True, "measured 4.0 times as fast as fp32 on Zen"),
        # Packed fp32 is nearly as fast: the higher precision is taken.
        ({"fp32": 1.0, PACKED: 0.5, "bf16": 0.48}, "fp32", True, "bf16 gains less than 1.1 times"),
        ({"fp32": 1.0, PACKED: 0.97}, "fp32", False, "does not multiply bf16 natively"),
        ({"fp32": 1.0, PACKED: 2.0, "bf16": 3.0}, "fp32", False, "bf16 measured 0.3 times"),
    ],
)
def test_the_fastest_precision_is_chosen_if_it_gains_enough(seconds, chosen, packed, why):
    choice = choose_measured(seconds, "Zen")
    assert (choice.precision, choice.packed) == (chosen, packed)
    assert why in choice.why
    assert str(choice) == f"precision: {chosen} ({choice.why})"


def test_candidates_take_turns_within_the_time_after_a_warm_up():
    now, calls = [0.0], []

    def run(name: str, cost: float):
        calls.append(name)
        now[0] += cost

    runs = {"fp32": lambda: run("fp32", 0.2), "bf16": lambda: run("bf16", 0.1)}
    assert measure_interleaved(runs, 1.0, lambda: now[0]) == pytest.approx({"fp32": 0.2, "bf16": 0.1})
    assert calls == ["fp32", "bf16"] * 3
    assert now[0] <= 1.0
    calls.clear()
    measure_interleaved(runs, 0.0, lambda: now[0])
    assert calls == ["fp32", "bf16"] * 2  # at least one measurement of each


@pytest.mark.parametrize(
    ("capabilities", "native"),
    [({"avx2": True}, False), ({"avx512_vnni": True, "avx512_bf16": False}, False), ({"avx512_bf16": True}, True)],
)
def test_processors_are_asked_for_bf16(monkeypatch, capabilities, native):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert multiplies_bf16(CPU) is native
    assert not multiplies_bf16(torch.device("meta"))


@pytest.mark.parametrize(("native", "chosen"), [(True, "bf16"), (False, "fp16")])
def test_cuda_takes_bf16_or_else_fp16_and_states_tf32(monkeypatch, native, chosen):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native)
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=True))
    choice = choose_cuda(CUDA, "RTX")
    assert choice.precision == chosen
    assert "on RTX; TF32 on for fp32 matrix products, " in choice.why
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=False))
    assert "TF32 off for fp32 matrix products" in choose_cuda(CUDA, "RTX").why


def test_unknown_precisions_are_errors():
    with pytest.raises(ValueError, match="unknown precision 'fp64': use auto, fp32, bf16, fp16"):
        precision.check_precision("fp64")
