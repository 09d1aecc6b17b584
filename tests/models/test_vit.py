"""The Vision Transformer as a whole: equations, features, keep, compile, checkpointing."""

import pytest
import torch
import torch.nn.functional as F

import vitrail
from tests.variants import SMALL, VIT_SLOTS
from vitrail.checkpoints.convert import convert
from vitrail.models.adapt import with_key_bias
from vitrail.models.init import initialise
from vitrail.models.registry import build_from
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import PreNorm
from vitrail.nn.head import Projection

COUNTS = {
    "Ti/16": 5_717_416,
    "S/16": 22_050_664,
    "B/16": 86_567_656,
    "B/32": 88_224_232,
    "L/16": 304_326_632,
    "H/14": 632_045_800,
}


def small(**slots):
    return vitrail.build(**{**SMALL, **slots})


def shaken(model):
    """Randomise every parameter: fresh weights have zero heads and class tokens."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def an_image(model, batch=2):
    return torch.randn(batch, model.config.channels, *model.config.image_size)


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_parameter_counts_are_the_papers(name, count):
    with torch.device("meta"):
        model = vitrail.build(name)
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize(("name", "millions"), [("g/14", 1011), ("G/14", 1843)])
def test_giants_have_the_parameters_of_scaling_vit(name, millions):
    with torch.device("meta"):
        model = vitrail.build(name)
    body = sum(p.numel() for n, p in model.named_parameters() if not n.startswith("head"))
    assert abs(body / 1e6 - millions) <= 1.5


def test_running_example_has_the_shapes_of_the_lecture():
    model = vitrail.build(patch=12, width=128, depth=6, heads=4, image_size=84, classes=10)
    image = torch.randn(5, 3, 84, 84)
    from vitrail.nn.embed import patchify

    assert patchify(image, 12).shape == (5, 49, 432)
    assert model.embed(image).shape == (5, 49, 128)
    assert model.tokens(image).shape == (5, 50, 128)
    assert model.encode(model.tokens(image)).shape == (5, 50, 128)
    assert model(image).shape == (5, 10)


def test_forward_is_equations_1_to_4_written_out():
    model = shaken(small())
    image = an_image(model)
    state = dict(model.named_parameters())
    x_p = F.unfold(image, 8, stride=8).transpose(1, 2)
    z = x_p @ state["embed.projection.weight"].T + state["embed.projection.bias"]
    z = torch.cat((state["prefix.outputs"].expand(2, -1, -1), z), 1) + state["position.weight"]

    def norm(x, name):
        return F.layer_norm(x, (32,), state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)

    for layer in range(2):
        name = f"blocks.{layer}"
        qkv = norm(z, f"{name}.norm1") @ state[f"{name}.msa.qkv.weight"].T + state[f"{name}.msa.qkv.bias"]
        q, k, v = (part.view(2, -1, 2, 16).transpose(1, 2) for part in qkv.split(32, -1))
        attention = (q @ k.transpose(2, 3) / 16**0.5).softmax(-1)
        msa = (attention @ v).transpose(1, 2).reshape(2, -1, 32)
        z = z + msa @ state[f"{name}.msa.out.weight"].T + state[f"{name}.msa.out.bias"]
        h = F.gelu(norm(z, f"{name}.norm2") @ state[f"{name}.mlp.fc1.weight"].T + state[f"{name}.mlp.fc1.bias"])
        z = z + h @ state[f"{name}.mlp.fc2.weight"].T + state[f"{name}.mlp.fc2.bias"]
    y = norm(z, "pool.norm")[:, 0]
    expected = y @ state["head.weight"].T + state["head.bias"]
    torch.testing.assert_close(model(image), expected, rtol=1e-4, atol=1e-5)


def test_post_norm_block_is_the_2017_transformers():
    model = shaken(small(block="post", position="sinusoid1d", depth=1))
    block = model.blocks[0]
    reference = torch.nn.TransformerEncoderLayer(32, 2, 128, dropout=0.0, layer_norm_eps=1e-6, batch_first=True)
    names = {
        "self_attn.in_proj_weight": block.msa.qkv.weight,
        "self_attn.in_proj_bias": block.msa.qkv.bias,
        "self_attn.out_proj.weight": block.msa.out.weight,
        "self_attn.out_proj.bias": block.msa.out.bias,
        "linear1.weight": block.mlp.fc1.weight,
        "linear1.bias": block.mlp.fc1.bias,
        "linear2.weight": block.mlp.fc2.weight,
        "linear2.bias": block.mlp.fc2.bias,
        "norm1.weight": block.norm1.weight,
        "norm1.bias": block.norm1.bias,
        "norm2.weight": block.norm2.weight,
        "norm2.bias": block.norm2.bias,
    }
    reference.load_state_dict(names)
    z = torch.randn(2, 25, 32)
    torch.testing.assert_close(model.encode(z), reference.train()(z), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("slots", VIT_SLOTS.values(), ids=VIT_SLOTS)
def test_every_slot_gives_logits_and_a_gradient_to_every_parameter(slots):
    model = shaken(small(**slots)).train()
    output = model(an_image(model, 3))
    features = 12 if isinstance(model.config.head, Projection) else 32
    assert output.shape == (3, 5 if model.config.classes else features)
    (output * torch.randn_like(output)).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("slots", VIT_SLOTS.values(), ids=VIT_SLOTS)
def test_last_layer_with_n_outputs_gives_the_same_tokens(slots):
    model = shaken(small(**slots))
    image = an_image(model)
    whole = model.pool(model.encode(model.tokens(image), model.embed.grid(image)))
    torch.testing.assert_close(model(image), model.head(whole), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("slots", VIT_SLOTS.values(), ids=VIT_SLOTS)
def test_other_image_sizes_work_on_every_slot(slots):
    model = shaken(small(**slots))
    for size in ((32, 48), (48, 32), (8, 8), (64, 72)):
        output = model(torch.randn(2, model.config.channels, *size))
        assert output.shape[0] == 2
        assert torch.isfinite(output).all()


@pytest.mark.parametrize("slots", VIT_SLOTS.values(), ids=VIT_SLOTS)
def test_keeping_every_patch_in_order_changes_nothing(slots):
    model = shaken(small(**slots))
    image = an_image(model)
    keep = torch.arange(24).expand(2, -1)
    z, kept = model.tokens(image), model.tokens(image, keep)
    torch.testing.assert_close(kept, z)
    torch.testing.assert_close(model.encode(kept, (4, 6), keep), model.encode(z, (4, 6)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("slots", VIT_SLOTS.values(), ids=VIT_SLOTS)
def test_compiles_without_a_graph_break_forward_and_backward(slots):
    torch.compiler.reset()
    random = slots.keys() & {"dropout", "stochastic_depth"} or slots.get("embed") in (
        "conv-stem",
        "conv-pool",
    )  # or moving statistics
    model = shaken(small(**slots)).train(mode=not random)
    image = an_image(model)
    expected = model(image)
    direction = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad((expected * direction).sum(), list(model.parameters()))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = compiled(image)
    gradients = torch.autograd.grad((actual * direction).sum(), list(model.parameters()))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("slots", [{"dropout": 0.1}, {"stochastic_depth": 0.2}], ids=["dropout", "stochastic depth"])
def test_random_layers_compile_in_training_without_a_graph_break(slots):
    torch.compiler.reset()
    model = shaken(small(**slots)).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.isfinite(compiled(an_image(model))).all()


@pytest.mark.parametrize(
    "position",
    [
        *("learned1d", "learned2d", "relative", "relative1d", "relative-mlp"),
        *("rotary2d", "rotary-dinov3", "rotary-eva02", "sincos2d"),
    ],
)
def test_other_image_sizes_compile_without_a_graph_break(position):
    torch.compiler.reset()
    model = shaken(small(position=position))
    image = torch.randn(2, 3, 64, 40)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(image), model(image), rtol=1e-4, atol=1e-5)


def test_activation_checkpointing_compiles_without_a_graph_break():
    torch.compiler.reset()
    model = shaken(small()).train()
    image = an_image(model)
    expected = torch.autograd.grad(model(image).sum(), list(model.parameters()))
    model.activation_checkpointing = True
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(image).sum(), list(model.parameters()))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_compiles_with_the_real_compiler():
    torch.compiler.reset()
    model = shaken(small(position="relative", registers=2))
    image = an_image(model)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(image), model(image), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("slots", VIT_SLOTS.values(), ids=VIT_SLOTS)
def test_activation_checkpointing_gives_the_same_gradients(slots):
    model = shaken(small(**slots)).train()
    if slots.get("embed") in ("conv-stem", "conv-pool"):
        model.embed.eval()
    image = an_image(model)

    def gradients():
        torch.manual_seed(1)
        output = model(image)
        return torch.autograd.grad(output.pow(2).sum(), list(model.parameters()))

    expected = gradients()
    model.activation_checkpointing = True
    for ours, theirs in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "slots"),
    [(None, {**SMALL, "depth": 6}), ("R26+Ti/32", {"depth": 1, "image_size": 64}), ("R26x0.25", {"image_size": 64})],
)
def test_activation_checkpointing_keeps_less_and_gives_the_same_gradients(name, slots):
    model = shaken(vitrail.build(name, **slots)).train()
    image = an_image(model, 8)

    def kept(checkpointing):
        model.activation_checkpointing = checkpointing
        assert model.activation_checkpointing == checkpointing
        found = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            found[storage._cdata] = (storage.nbytes(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(image)
        weights = sum(p.numel() * 4 for p in model.parameters())
        return sum(size for size, _ in found.values()) - weights, torch.autograd.grad(
            output.sum(), list(model.parameters())
        )

    (much, expected), (little, actual) = kept(False), kept(True)
    assert little < much / 2
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_features_of_any_layer():
    model = shaken(small(registers=2))
    image = an_image(model)
    first, middle, last = model.hidden_states(image, [0, 1, -1])
    torch.testing.assert_close(first, model.tokens(image))
    torch.testing.assert_close(last, model.encode(model.tokens(image)))
    assert middle.shape == (2, 27, 32)
    (grid,) = model.feature_maps(image)
    assert grid.shape == (2, 32, 4, 6)
    torch.testing.assert_close(grid[1, :, 2, 5], last[1, 3 + 2 * 6 + 5])
    assert model.hidden_states(image, []) == []
    with pytest.raises(ValueError, match=r"layer 7 of 2: use 0 .* to 2"):
        model.hidden_states(image, [7])


def test_features_run_no_unneeded_layer():
    model = shaken(small(depth=4))
    ran = []
    for layer, block in enumerate(model.blocks, start=1):
        block.register_forward_hook(lambda *_, layer=layer: ran.append(layer))
    model.hidden_states(an_image(model), [0, 2])
    assert ran == [1, 2]


@pytest.mark.parametrize(
    "position",
    ["relative", "relative1d", "relative-mlp", "rotary2d", "rotary-dinov3", "rotary-eva02", "learned1d@every"],
)
def test_tokens_with_other_positions_are_refused(position):
    model = small(position=position)
    keep = torch.arange(5).expand(2, -1)
    z = model.tokens(an_image(model), keep)
    with pytest.raises(ValueError, match="got 6 tokens and positions of 25: pass encode the image"):
        model.encode(z)
    assert model.encode(z, keep=keep).shape == (2, 6, 32)


def test_distilled_head_returns_the_mean_of_both_heads():
    model = shaken(small(prefix="class+distillation"))
    y = model.pool(model.encode(model.tokens(an_image(model))))
    label, teacher = model.head.forward_heads(y)
    assert not torch.allclose(label, teacher)
    torch.testing.assert_close(model.head(y), (label + teacher) / 2)


def test_head_starts_at_zero_for_fine_tuning():
    assert small()(torch.randn(2, 3, 32, 48)).abs().max() == 0


@pytest.mark.parametrize("slots", VIT_SLOTS.values(), ids=VIT_SLOTS)
def test_initialisation_fills_every_parameter_and_buffer(slots):
    model = small(**slots)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
    initialise(model, model.config.init)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert torch.isfinite(tensor).all(), name


def test_initialisation_has_the_published_spread():
    torch.manual_seed(0)
    model = vitrail.build("S/16", depth=1)
    qkv, fc1 = model.blocks[0].msa.qkv.weight, model.blocks[0].mlp.fc1.weight
    assert qkv.abs().max() <= (6 / (384 + 384)) ** 0.5  # Xavier for each D×D matrix
    assert qkv.abs().max() > 0.99 * (6 / (384 + 384)) ** 0.5
    assert fc1.abs().max() <= (6 / (384 + 1536)) ** 0.5
    assert model.embed.projection.weight.std().item() == pytest.approx(768**-0.5, rel=0.02)
    assert model.position.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.prefix.outputs.abs().max() == 0
    deit = vitrail.build("S/16", depth=1, init="deit")
    assert deit.blocks[0].mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert deit.prefix.outputs.std().item() > 0.01


def test_configuration_determines_the_model():
    config = vitrail.configure("Ti/16", depth=1)
    assert config == vitrail.configure("Ti/16", depth=1)
    assert isinstance(config, ViTConfig)
    assert isinstance(vitrail.build_from(config), ViT)


def test_keys_without_a_bias_equal_keys_with_a_bias_of_zero():
    model = shaken(small(block=PreNorm(key_bias=False)))
    config, state = with_key_bias(model.config, dict(model.state_dict()))
    other = build_from(config)
    other.load_state_dict(state)
    assert other.blocks[0].msa.qkv.bias.shape == (96,)
    assert model.blocks[0].msa.qkv.bias.shape == (64,)
    image = an_image(model)
    torch.testing.assert_close(model(image), other.eval()(image), rtol=0, atol=0)


def test_a_bias_of_the_keys_has_no_gradient():
    model = shaken(small())
    model(an_image(model)).pow(2).sum().backward()
    q, k, v = model.blocks[0].msa.qkv.bias.grad.chunk(3)
    assert k.abs().max() < 1e-4 * min(q.abs().max(), v.abs().max())


def test_a_format_with_a_key_bias_gets_zeros(tmp_path):
    model = shaken(small(block=PreNorm(key_bias=False), image_size=32))
    vitrail.save(model, tmp_path / "model.safetensors")
    report = convert(tmp_path / "model.safetensors", tmp_path / "hf", "hf")
    assert report.largest_difference < 1e-5
    assert "the bias of q, k and v has zeros for the keys, which have none here" in report.notes
