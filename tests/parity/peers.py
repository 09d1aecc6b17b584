"""Comparison of a peer's model with ours: same weights, same logits, same gradients."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from vitrail.checkpoints.keys import KeyTable, export_state, import_state

TOLERANCE = 1e-4  # of the largest value compared


def spread(model: nn.Module, std: float = 0.05) -> nn.Module:
    """Randomise the peer's weights, so that no tensor is zero or one."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * std)
    return model


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the peer's tensors by its own names, without buffers."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def saved_state(model) -> dict[str, Tensor]:
    """Return the tensors as transformers' `save_pretrained` writes them to disk."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12))


def assert_same(
    ours: nn.Module,
    theirs: nn.Module,
    table: KeyTable,
    image: Tensor,
    state: Callable[[nn.Module], dict[str, Tensor]] = plain_state,
    output: Callable[[object], Tensor] = lambda answer: answer,  # type: ignore[assignment,return-value]
) -> None:
    """Assert the same logits and gradients for the same weights, and that the weights convert back bit for bit."""
    ours.eval()
    theirs.eval()
    weights = state(theirs)
    ours.load_state_dict(import_state(table, weights), strict=True)
    written = export_state(table, dict(ours.named_parameters()))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in written.items())

    image_ours, image_theirs = image.clone().requires_grad_(), image.clone().requires_grad_()
    expected, actual = output(theirs(image_theirs)), ours(image_ours)
    assert actual.shape == expected.shape
    assert relative_difference(actual, expected) <= TOLERANCE

    direction = torch.randn_like(expected)
    (expected * direction).sum().backward()
    (actual * direction).sum().backward()
    assert relative_difference(image_ours.grad, image_theirs.grad) <= TOLERANCE
    with torch.no_grad():
        for parameter in theirs.parameters():  # their gradients under their names, through the same table
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    expected_gradients = import_state(table, state(theirs))
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        difference = float((parameter.grad - expected_gradients[name]).abs().max())
        scale = max(float(expected_gradients[name].abs().max()), 1e-3 * largest)
        assert difference <= TOLERANCE * scale, f"{name}: {difference / scale:.2g}"
