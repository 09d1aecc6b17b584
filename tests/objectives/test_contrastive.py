"""Contrastive losses: by hand, learnt, and on two processes as on one. `tests/parity/test_towers.py` compares with peers."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'vitrail[text]'")
import vitrail
from tests.checkpoints.towers_made import make_towers
from vitrail.models.base import Unsupported
from vitrail.objectives.contrastive import Contrastive

TEXTS = ["a cat", "a dog", "a photo", "two cats", "of the dog", "photo"]

PROCESSES = """
import torch
import torch.distributed as dist
from tests.checkpoints.towers_made import make_towers
from tests.objectives.test_contrastive import TEXTS
from vitrail.objectives.contrastive import Contrastive

dist.init_process_group("gloo")
rank, images = dist.get_rank(), torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(1))
for kind in ("softmax", "sigmoid"):
    model = make_towers(kind == "sigmoid")
    tokens = model.tokenizer(TEXTS)
    alone = Contrastive(kind).build(model)
    expected = alone(images, tokens)["loss"]
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in alone.named_parameters()}
    alone.zero_grad()
    half = slice(3 * rank, 3 * rank + 3)
    wrapped = torch.nn.parallel.DistributedDataParallel(Contrastive(kind).build(model, dist.group.WORLD))
    loss = wrapped(images[half], tokens[half])["loss"]
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total / 2, expected.detach(), rtol=1e-5, atol=1e-6)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, parameter in alone.named_parameters():
        scale = max(float(gradients[name].abs().max()), 1e-3 * largest)
        assert float((parameter.grad - gradients[name]).abs().max()) <= 1e-4 * scale, (kind, name)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_give_the_loss_and_gradients_of_one(tmp_path) -> None:
    script = tmp_path / "pairs.py"
    script.write_text(PROCESSES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_pairs_are_learnt(kind) -> None:
    model = make_towers(kind == "sigmoid").train()
    loss_module, images = Contrastive(kind).build(model), torch.randn(6, 3, 32, 32)
    tokens = model.tokenizer(TEXTS)
    optimizer = torch.optim.AdamW(loss_module.parameters(), lr=1e-3)
    for step in range(60):
        loss = loss_module(images, tokens)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_module.after_step(step)
    assert model(images, tokens).argmax(1).tolist() == list(range(6))


def test_scale_is_cut_after_a_step() -> None:
    model = make_towers()
    loss_module = Contrastive(max_scale=20).build(model)
    with torch.no_grad():
        model.logits.scale.fill_(9.0)
    loss_module.after_step(1)
    assert float(model.logits.scale.exp().detach()) == pytest.approx(20)


def test_settings_and_models_that_cannot_work_are_refused() -> None:
    model = make_towers()
    with pytest.raises(ValueError, match="unknown loss 'triplet': use softmax or sigmoid"):
        Contrastive("triplet")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_scale must be at least 1 and finite, got 0"):
        Contrastive(max_scale=0)
    with pytest.raises(ValueError, match="the sigmoid loss needs a bias of the logits"):
        Contrastive("sigmoid").build(model)
    with pytest.raises(Unsupported, match="a contrastive loss does not support Vision Transformers"):
        Contrastive().build(vitrail.build(patch=16, width=32, depth=1, heads=2, image_size=32))
    with pytest.raises(ValueError, match="every image has one text, got 2 images and 6 texts"):
        Contrastive().build(model)(torch.randn(2, 3, 32, 32), model.tokenizer(TEXTS))
