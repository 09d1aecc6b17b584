"""record_attention: the right maps, and a model that does not notice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.analysis.made import materialised, pictures, resnet, shaken
from tests.variants import VIT_SLOTS
from vitrail.analysis import record_attention


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("slot", VIT_SLOTS)
@torch.no_grad()
def test_maps_are_the_attention_of_every_variant_and_the_answer_is_the_same_to_the_bit(slot):
    model = shaken(slot)
    x = pictures(model, 2)
    plain = model(x)
    with record_attention(model) as maps:
        answer = model(x)
    assert torch.equal(answer, plain)
    assert hooks(model) == 0
    with materialised() as stored:
        model.encode(model.tokens(x), model.embed.grid(x))
    tokens = model.config.prefix.count + 24
    assert len(stored) == len(maps) == 2
    for layer, expected in enumerate(stored, start=1):
        assert maps[layer].shape == (
            2,
            2,
            tokens,
            tokens,
        )  # all rows, though the last layer computes those that are read
        torch.testing.assert_close(maps[layer], expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_layers_count_from_one_and_from_the_end():
    model = shaken(depth=3)
    x = pictures(model)
    with record_attention(model) as every:
        model(x)
    with record_attention(model, layers=[-1, 1]) as some:
        model(x)
    assert list(every) == [1, 2, 3]
    assert list(some) == [1, 3]
    assert torch.equal(some[-1], every[3])
    assert torch.equal(some[1], every[-3])
    assert not torch.equal(every[1], every[2])
    with pytest.raises(KeyError, match="layer 2 was not recorded"):
        some[2]


@pytest.mark.parametrize("layer", [0, 3, -3])
def test_an_unknown_layer_is_an_error(layer):
    with pytest.raises(ValueError, match="layer must be 1 to 2"), record_attention(shaken(), layers=[layer]):
        pass


def test_maps_without_a_call_say_that_nothing_ran():
    with record_attention(shaken()) as maps:
        pass
    with pytest.raises(KeyError, match="has not run"):
        maps[1]


@torch.no_grad()
def test_queries_record_the_rows_of_these_tokens_alone():
    model = shaken()
    x = pictures(model, 2)
    with record_attention(model) as maps, record_attention(model, queries=[0, 7, -1]) as rows:
        model(x)
    torch.testing.assert_close(rows[2], maps[2][:, :, [0, 7, -1]])
    with pytest.raises(ValueError, match="query must be 0 to 24, got 25"), record_attention(model, queries=[25]):
        model(x)
    assert hooks(model) == 0


@torch.no_grad()
def test_one_layer_and_one_query_need_no_list():
    model = shaken()
    with record_attention(model, 1, queries=0) as one, record_attention(model, [1], queries=[0]) as listed:
        model(pictures(model))
    assert list(one) == [1]
    assert torch.equal(one[1], listed[1])


@torch.no_grad()
def test_reduce_is_kept_in_place_of_the_map():
    model = shaken()
    with record_attention(model, reduce=lambda a: a.mean(1)[:, 0]) as means, record_attention(model) as maps:
        model(pictures(model, 2))
    assert means[1].shape == (2, 25)
    torch.testing.assert_close(means[1], maps[1].mean(1)[:, 0])


@torch.no_grad()
def test_calls_one_after_the_other_are_put_one_after_the_other():
    model = shaken()
    x = pictures(model, 5)
    with record_attention(model) as at_once:
        model(x)
    with record_attention(model) as one_by_one:
        for part in (x[:2], x[2:4], x[4:]):
            model(part)
    torch.testing.assert_close(one_by_one[2], at_once[2])


@torch.no_grad()
def test_pictures_of_several_sizes_do_not_go_together():
    model = shaken()
    with record_attention(model) as maps:
        model(torch.randn(1, 3, 32, 48))
        model(torch.randn(1, 3, 32, 32))
    with pytest.raises(ValueError, match="several sizes"):
        maps[1]


def test_hooks_are_gone_after_an_exception():
    model = shaken()
    with pytest.raises(ZeroDivisionError), record_attention(model):
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="channels"), record_attention(model):
        model(torch.randn(1, 4, 32, 48))
    assert hooks(model) == 0


def test_in_training_maps_are_before_dropout_and_chance_is_left_alone():
    model = shaken(dropout=0.1).train()
    for block in model.blocks:
        block.msa.dropout = 0.5
    x = pictures(model, 2)
    torch.manual_seed(1)
    plain = model(x)
    torch.manual_seed(1)
    with record_attention(model) as maps:
        recorded = model(x)
    assert torch.equal(recorded, plain)
    assert not maps[1].requires_grad
    torch.testing.assert_close(maps[1].sum(-1), torch.ones(2, 2, 25))
    assert (maps[1] > 0).all()


def test_gradients_and_activation_checkpointing_do_not_notice():
    model = shaken()
    x = pictures(model, 2)
    model(x).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.activation_checkpointing = True
    with record_attention(model) as maps:
        model(x).sum().backward()  # computes each block again
    assert maps[1].shape[0] == 2
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@torch.no_grad()
def test_half_precision_gives_maps_in_float32():
    model = shaken()
    x = pictures(model)
    with torch.autocast("cpu", torch.bfloat16), record_attention(model) as maps:
        model(x)
    with record_attention(model) as exact:
        model(x)
    assert maps[1].dtype == torch.float32
    torch.testing.assert_close(maps[1].sum(-1), torch.ones(1, 2, 25))
    torch.testing.assert_close(maps[1], exact[1], rtol=0, atol=0.01)


@torch.no_grad()
def test_features_and_kept_patches_are_recorded_too():
    model = shaken()
    x = pictures(model)
    with record_attention(model) as maps:
        model.hidden_states(x)
    assert maps[2].shape == (1, 2, 25, 25)
    with record_attention(model) as maps:
        model(x, torch.tensor([[3, 5, 8]]))
    assert maps[2].shape == (1, 2, 4, 4)


@pytest.mark.parametrize("how", ["torch.compile", "module.compile", "blocks"])
@torch.no_grad()
def test_a_compiled_model_is_recorded_uncompiled_and_is_compiled_afterwards(how):
    model = shaken()
    x = pictures(model, 2)
    with record_attention(model) as expected:
        plain = model(x)
    compiled_runs, compilations = [], []

    def backend(graph, inputs):
        compilations.append(1)
        return lambda *values: compiled_runs.append(1) or graph(*values)

    called: nn.Module = model
    if how == "torch.compile":
        called = torch.compile(model, backend=backend, fullgraph=True)
    elif how == "module.compile":
        model.compile(backend=backend)
    else:
        for block in model.blocks:
            block.compile(backend=backend)
    called(x)
    before, made = len(compiled_runs), len(compilations)
    assert before > 0
    with record_attention(called) as maps:
        assert torch.equal(called(x), plain)
    assert len(compiled_runs) == before
    for layer in expected:
        assert torch.equal(maps[layer], expected[layer])
    called(x)
    assert len(compiled_runs) == 2 * before
    assert len(compilations) == made
    torch._dynamo.reset()


def test_a_resnet_is_an_error_of_one_line():
    with (
        pytest.raises(ValueError, match="does not support BiT ResNets") as error,
        record_attention(resnet()),
    ):
        pass
    assert "\n" not in str(error.value)


def test_two_models_are_an_error():
    with pytest.raises(ValueError, match="contains 2 models"), record_attention(nn.ModuleList([shaken(), shaken()])):
        pass


@pytest.mark.slow
def test_two_processes_record_the_maps_of_the_plain_model_under_ddp_and_fsdp():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.analysis.sharded"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("maps equal") == 2
