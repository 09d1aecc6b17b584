"""Token merging equals the paper's algorithm, written in NumPy, and changes nothing else."""

import math
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import vitrail
from tests.variants import SMALL, VIT_SLOTS
from vitrail.models.token_merging import Merged, format_token_counts, merge_model, tokens_per_layer
from vitrail.models.vit import ViT
from vitrail.nn.position import NO_POSITION

WEIGHTS = Path(__file__).parents[3] / "shared" / "weights" / "deit_tiny_patch16_224.safetensors"
SAMPLES = Path(__file__).parents[3] / "shared" / "data" / "imagenet-samples"

# Positions inside the layers; merged tokens have no single position.
INSIDE = (
    "relative",
    "relative1d",
    "relative-mlp",
    "relative@shared",
    "rotary2d",
    "rotary-dinov3",
    "rotary-eva02",
    "learned1d@every",
    "learned2d@shared",
    "sincos2d@shared",
)


def small(**slots) -> ViT:
    """Return a small model without zero weights, including the head."""
    model = vitrail.build(**{**SMALL, **slots}).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.15 * torch.randn_like(parameter))
    return model


def make_images(model: ViT, count: int = 2) -> torch.Tensor:
    return torch.randn(count, model.config.channels, *model.config.image_size)


def has_layer_positions(slots: dict) -> bool:
    model = vitrail.build(**{**SMALL, **slots})
    return any(p is not NO_POSITION for p in model.position.layer_positions(model.config.shape.grid, None))


# --- the paper's algorithm, in loops ---


def norm(x, layer):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + layer.eps) * np64(layer.weight) + np64(layer.bias)


def np64(tensor):
    return tensor.detach().numpy().astype(np.float64)


def linear(x, layer):
    return x @ np64(layer.weight).T + np64(layer.bias)


def gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def paper_logits(vit: ViT, z: np.ndarray, r: int, after: int, protected: int, reads_class: bool) -> np.ndarray:
    """Return the logits of one image's z_0 [T, D]: Bolya et al. 2023, section 3, for one image and one token at a time."""
    size = np.ones(len(z))
    for layer, block in enumerate(vit.blocks, start=1):
        x, heads = norm(z, block.norm1), block.msa.heads
        q, k, v = (part.reshape(len(z), heads, -1) for part in np.split(linear(x, block.msa.qkv), 3, axis=-1))
        y = np.zeros_like(q)
        for head in range(heads):
            scores = q[:, head] @ k[:, head].T / math.sqrt(q.shape[-1]) + np.log(size)  # proportional attention
            share = np.exp(scores - scores.max(-1, keepdims=True))
            y[:, head] = share / share.sum(-1, keepdims=True) @ v[:, head]
        z = z + linear(y.reshape(len(z), -1), block.msa.out)
        if layer > after and not (
            reads_class and layer == len(vit.blocks)
        ):  # of the last layer, only the class token is read
            z, size = paper_merging(z, size, k.mean(1), r, protected)
        z = z + linear(gelu(linear(norm(z, block.norm2), block.mlp.fc1)), block.mlp.fc2)
    z = norm(z, vit.pool.norm)
    pooled = z[0] if reads_class else (z[protected:] * size[protected:, None]).sum(0) / size[protected:].sum()
    return linear(pooled, vit.head)


def paper_merging(z, size, keys, r, protected):
    """Assign tokens alternately to A and B; each of A finds the most similar of B; merge the r best pairs; A, then B."""
    r = min(r, (len(z) - protected) // 2)
    a, b = list(range(0, len(z), 2)), list(range(1, len(z), 2))
    edges = []
    for i in a:
        cosines = [
            -np.inf if min(i, j) < protected else keys[i] @ keys[j] / np.linalg.norm(keys[i]) / np.linalg.norm(keys[j])
            for j in b
        ]
        edges.append((max(cosines), i, b[int(np.argmax(cosines))]))
    gone, total, sizes = set(), {j: z[j] * size[j] for j in b}, {j: size[j] for j in b}
    for _, i, j in sorted(edges, key=lambda edge: -edge[0])[:r]:
        gone.add(i)
        total[j], sizes[j] = total[j] + z[i] * size[i], sizes[j] + size[i]
    kept = [(z[i], size[i], i) for i in a if i not in gone] + [(total[j] / sizes[j], sizes[j], j) for j in b]
    kept = sorted((k for k in kept if k[2] < protected), key=lambda k: k[2]) + [k for k in kept if k[2] >= protected]
    return np.stack([k[0] for k in kept]), np.array([k[1] for k in kept])


@pytest.mark.parametrize(("r", "after"), [(1, 0), (3, 0), (5, None), (40, 2)])
@pytest.mark.parametrize(
    ("slots", "protected", "reads_class"),
    [
        ({}, 1, True),
        ({"registers": 2}, 3, True),
        ({"registers": 3}, 4, True),
        ({"pool": "mean"}, 0, False),
        ({"pool": "mean", "prefix": "class"}, 1, False),
    ],
    ids=["class", "two registers", "three registers", "mean", "mean beside a class token"],
)
def test_merging_equals_the_papers_algorithm(slots, protected, reads_class, r, after):
    model = small(depth=4, **slots)
    image = make_images(model)
    found = merge_model(model, r, after)(image).numpy()
    for given, z in zip(found, model.tokens(image).numpy().astype(np.float64), strict=True):
        wanted = paper_logits(model, z, r, 1 if after is None else after, protected, reads_class)
        assert np.allclose(given, wanted, atol=2e-4, rtol=1e-3)
    assert not np.allclose(found, model(image).numpy(), atol=1e-3)  # it did merge


# --- every slot ---


@pytest.mark.parametrize("slots", [s for s in VIT_SLOTS.values() if not has_layer_positions(s)], ids=str)
def test_without_merging_outputs_are_bit_exact(slots):
    model = small(**slots)
    image = make_images(model)
    assert torch.equal(merge_model(model, 0)(image), model(image))


MERGED = [
    s for s in VIT_SLOTS.values() if "position" not in s and s.get("embed") != "conv-pool"
]  # whose borders differ


@pytest.mark.parametrize("slots", MERGED, ids=str)
def test_merging_identical_tokens_changes_nothing(slots):
    model = small(**{**slots, "position": "none", "image_size": (64, 48)})
    patch = 8
    if slots.get("embed") == "conv-stem" or getattr(slots.get("embed"), "overlap", 0):
        # Patches that see their neighbours are the same everywhere only in an image of a single colour.
        image = torch.randn(2, model.config.channels, 1, 1).expand(-1, -1, 64, 48)
    else:
        kinds = torch.randn(3, model.config.channels, patch, patch)
        which = torch.arange(48).reshape(2, 8, 3).permute(0, 2, 1).reshape(48) % 3  # each kind often, in both sets
        tiles = kinds[which].unflatten(0, (8, 6)).permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
        image = tiles.expand(2, -1, -1, -1)
    found = merge_model(model, 4)
    assert found.tokens_per_layer((8, 6))[-1] < found.tokens_per_layer((8, 6))[0]
    assert torch.allclose(found(image), model(image), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("position", INSIDE)
def test_positions_inside_layers_are_refused_by_name(position):
    kinds = {"relative": "Relative", "relative1d": "Relative1D", "relative-mlp": "RelativeMLP"}
    kinds |= {"rotary2d": "Rotary2D", "rotary-dinov3": "RotaryDINOv3", "rotary-eva02": "RotaryEVA02"}
    kind = kinds.get(position.split("@")[0], "at=")
    with pytest.raises(ValueError, match=rf"does not support .*{kind}.*at the stem"):
        merge_model(small(position=position), 4)


def test_resnets_and_negative_r_are_refused():
    with pytest.raises(ValueError, match="merge= does not support BiT ResNets"):
        vitrail.build("R14x0.25", image_size=32, classes=3).merge_tokens(4)
    with pytest.raises(ValueError, match="must be at least 0, got -1"):
        merge_model(small(), -1)


# --- how many tokens ---


@contextmanager
def record_tokens(model: ViT, seen: list[int]):
    """Record the number of tokens at each layer's attention."""

    def note(_module, given, _out) -> None:
        seen.append(given[0].shape[1])

    hooks = [block.msa.qkv.register_forward_hook(note) for block in model.blocks]
    yield
    for hook in hooks:
        hook.remove()


def test_tokens_per_layer_match_the_layers_inputs():
    for slots in ({}, {"registers": 2}, {"pool": "mean"}, {"block": "parallel"}, {"block": "post"}):
        model = small(depth=5, **slots)
        for r, after in ((0, 0), (2, None), (3, 2), (7, 0), (100, None)):
            seen: list[int] = []
            found = merge_model(model, r, after)
            with record_tokens(model, seen):
                found(make_images(model))
            assert tuple(seen) == found.tokens_per_layer()


def test_layer_merges_at_most_half_of_its_patches_and_no_prefix():
    model = small(depth=8, prefix="class+distillation", registers=1)
    found = merge_model(model, 1000)
    assert found.tokens_per_layer((4, 6)) == (27, 27, 27, 15, 9, 6, 5, 4)
    assert merge_model(model, 1000, after=0).tokens_per_layer((4, 6)) == (27, 15, 9, 6, 5, 4, 4, 4)
    assert found.tokens_per_layer((1, 1)) == (4,) * 8
    tokens = tokens_per_layer(vitrail.configure("Ti/16"), 16)
    assert tokens == (197, 197, 197, *range(197, 68, -16))
    assert format_token_counts(tokens).endswith("197 197 197 197 181 165 149 133 117 101 85 69 (76 % of all)")
    assert tokens_per_layer(vitrail.configure("Ti/16"), 16, after=0) == tuple(range(197, 20, -16))


# --- features, other sizes, other hands ---


@pytest.mark.parametrize(
    "slots", [{}, {"head": "pre-logits"}, {"prefix": "class+distillation"}, {"pool": "class+mean"}]
)
def test_features_are_those_of_the_same_model_without_classes(slots):
    model = small(**slots)
    bare = vitrail.build(**{**SMALL, **slots, "classes": None}).eval()
    bare.load_state_dict({k: v for k, v in model.state_dict().items() if k in bare.state_dict()})
    image = make_images(model)
    found = merge_model(model, 3).features(image)
    assert torch.equal(found, merge_model(bare, 3)(image))
    assert torch.equal(found, merge_model(bare, 3).features(image))
    assert not torch.equal(found, bare(image))


def test_images_are_merged_independently_of_size_and_batch():
    model = small()
    found = merge_model(model, 3)
    image = torch.randn(5, 3, 48, 64)
    assert torch.allclose(found(image), torch.cat([found(each[None]) for each in image]), atol=1e-5)


def test_an_exported_program_takes_any_batch():
    model = small(prefix="class+distillation", registers=1)
    image = make_images(model, 3)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(merge_model(model, 3), (image,), dynamic_shapes=({0: batch},))
    for count in (1, 7):
        other = make_images(model, count)
        assert torch.allclose(program.module()(other), merge_model(model, 3)(other), atol=1e-5)


def test_onnx_merges_the_same_tokens(tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="it is not installed: pip install 'vitrail[onnx]'")
    pytest.importorskip("onnxscript", reason="it is not installed: pip install 'vitrail[onnx]'")
    model = small(pool="class+mean")
    image, path = make_images(model, 3), tmp_path / "merged.onnx"
    batch = torch.export.Dim("batch", min=1, max=64)
    torch.onnx.export(merge_model(model, 3), (image,), path, dynamo=True, dynamic_shapes=({0: batch},), verbose=False)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for count in (1, 5):
        other = make_images(model, count)
        (found,) = session.run(None, {session.get_inputs()[0].name: other.numpy()})
        assert np.allclose(found, merge_model(model, 3)(other).numpy(), atol=1e-4)


@pytest.mark.skipif(not WEIGHTS.exists(), reason="the DeiT-Ti weights are not beside this checkout (../shared/weights)")
@pytest.mark.skipif(not SAMPLES.exists(), reason="the 200 photographs are not beside this checkout (../shared/data)")
def test_deit_tiny_predictions_agree_with_a_quarter_fewer_tokens():
    from PIL import Image

    model = vitrail.load(WEIGHTS).eval()
    assert isinstance(model, ViT)
    assert model.preprocessing is not None
    files = sorted(SAMPLES.glob("*.JPEG"))[::10]
    image = torch.stack([model.preprocessing(Image.open(file)) for file in files])
    found: Merged = merge_model(model, 16)
    assert sum(found.tokens_per_layer()) / (12 * 197) < 0.76
    with torch.inference_mode():
        same = found(image).argmax(1) == model(image).argmax(1)
    assert same.float().mean() >= 0.9
