"""Segmentation models: every family with every decoder, through the interface that all models share."""

from types import SimpleNamespace

import pytest
import torch

import vitrail
from tests.models.test_bit import assert_compiles
from tests.models.test_cost import counted_by_torch, kept_by_autograd
from vitrail.models import segmenter
from vitrail.models.adapt import segment_from
from vitrail.models.base import Unsupported
from vitrail.models.eomt import EoMT
from vitrail.models.flops import count
from vitrail.models.lora import merge_lora, tune
from vitrail.models.registry import build_from, build_segmenter, config_from_json, configure, configure_segmenter
from vitrail.models.segmenter import SegmenterConfig
from vitrail.models.sizes import DECODER_NAMES
from vitrail.nn.decoder import LinearDecoder, UPerNet
from vitrail.objectives.segmentation import Segmentation
from vitrail.training.runs.models import load_initial_model
from vitrail.utils.json import to_json

VIT = {"patch": 8, "width": 32, "depth": 4, "heads": 2, "image_size": 32}
FAMILIES = {
    "class token": VIT,
    "registers": {**VIT, "registers": 3},
    "relative": {**VIT, "position": "relative", "pool": "mean"},
    "rotary": {**VIT, "position": "rotary-dinov3", "registers": 2},
    "conv stem": {**VIT, "embed": "conv-stem"},
    "post norm": {**VIT, "block": "post"},
    "hybrid": {"name": "R14+Ti/16", "depth": 4, "image_size": 64},
    "bit": {"name": "R14x0.25", "image_size": 64},
    "swin": {"family": "swin", "width": 16, "depths": (2, 2), "heads": (1, 2), "window": 4, "image_size": 32},
    "mvit": {"family": "mvit", "width": 16, "depths": (1, 2), "heads": (1, 2), "image_size": 32},
    "mvit mlp": {
        "family": "mvit",
        "width": 16,
        "depths": (1, 2),
        "heads": (1, 2),
        "image_size": 32,
        "expand": "mlp",
        "class_token": True,
    },
}
DECODERS = {"linear": LinearDecoder(), "upernet": UPerNet(8, scales=(1, 2))}
EVERY_FAMILY = pytest.mark.parametrize("options", FAMILIES.values(), ids=FAMILIES)
PLAIN = [name for name, options in FAMILIES.items() if "family" not in options and name != "bit"]
EVERY_DECODER = pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)


def build(options=VIT, decoder=DECODERS["linear"], classes=5):
    torch.manual_seed(0)
    return build_segmenter(decoder=decoder, classes=classes, **options)


def draw_images(model, *size, n=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, model.config.channels, *(size or model.config.image_size), generator=generator)


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@EVERY_DECODER
@EVERY_FAMILY
def test_logits_have_the_size_of_the_images(options, decoder):
    model = build(options, decoder).eval()
    height, width = model.config.image_size
    for size in ((height, width), (2 * height, 2 * width), (height, 2 * width)):
        assert model(draw_images(model, *size)).shape == (2, 5, *size)


@EVERY_DECODER
@EVERY_FAMILY
def test_gradients_reach_every_trained_parameter(options, decoder):
    model = build(options, decoder).train()
    model(draw_images(model)).square().mean().backward()
    without = {name for name in trained(model) if model.get_parameter(name).grad is None}
    assert not without
    assert trained(model) == {name for name, _ in model.named_parameters()}


@EVERY_DECODER
@EVERY_FAMILY
def test_a_saved_model_is_the_same(options, decoder, tmp_path):
    model = build(options, decoder).eval()
    assert config_from_json(to_json(model.config)) == model.config
    vitrail.save(model, tmp_path / "model.safetensors", labels="abcde", colours=["#000000"] * 5)
    loaded = vitrail.load(tmp_path / "model.safetensors")
    assert loaded.config == model.config
    assert loaded.labels == tuple("abcde")
    assert loaded.card["colours"] == ["#000000"] * 5
    images = draw_images(model)
    torch.testing.assert_close(loaded(images), model(images), rtol=1e-4, atol=1e-5)
    features = vitrail.load(tmp_path / "model.safetensors", classes=None)
    assert features.config == model.config.backbone
    torch.testing.assert_close(features(images), model.embed_images(images), rtol=1e-4, atol=1e-5)


@EVERY_DECODER
@EVERY_FAMILY
def test_multiply_adds_agree_with_torchs_counter(options, decoder):
    config = build(options, decoder).config
    cost = count(config, 2)
    assert cost.macs == counted_by_torch(config, 2)
    assert cost.stages[-1].shape == (2, 5, *config.image_size)
    assert [stage.name for stage in cost.stages] == ["image", "backbone", "decoder", "logits"]


@EVERY_DECODER
@pytest.mark.parametrize("family", ["class token", "swin", "bit"])
def test_activation_bytes_are_what_autograd_keeps(family, decoder):
    config = build(FAMILIES[family], decoder).config
    assert count(config, 4).activation_bytes == pytest.approx(kept_by_autograd(config, 4), rel=0.1)


@EVERY_FAMILY
def test_tuning_keeps_the_decoder_trained(options):
    model = build(options)
    tune(model, "head")
    assert trained(model) == {name for name, _ in model.named_parameters() if name.startswith("head.")}
    model = build(options)
    tune(model, "last-2")
    depth = model.config.depth
    assert {model.layer_index(name) for name in trained(model)} == {depth - 1, depth, depth + 1}
    assert all(name.startswith(("backbone.", "head.")) for name in trained(model))


@pytest.mark.parametrize("family", ["class token", "swin", "mvit"])
def test_lora_adds_to_the_backbone_and_merges(family):
    model = build(FAMILIES[family]).eval()
    images, names = draw_images(model), set(model.state_dict())
    expected = model(images)
    tune(model, "lora-2")
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)
    assert all(name.startswith("head.") or "parametrizations" in name for name in trained(model))
    merge_lora(model)
    assert set(model.state_dict()) == names


@EVERY_FAMILY
def test_layers_of_parameters_are_those_of_the_backbone(options):
    model = build(options, DECODERS["upernet"])
    for name, parameter in model.backbone.named_parameters():
        assert model.layer_index(f"backbone.{name}") == model.backbone.layer_index(name)
        assert model.decays(f"backbone.{name}", parameter) == model.backbone.decays(name, parameter)
    heads = [name for name, _ in model.named_parameters() if name.startswith("head.")]
    assert {model.layer_index(name) for name in heads} == {model.config.depth + 1}
    assert not model.decays("head.classifier.bias", model.head.classifier.bias)
    assert [layer.name for layer in model.layers()] == [f"backbone.{layer.name}" for layer in model.backbone.layers()]


def test_the_stem_is_that_of_the_backbone():
    model = build()
    assert "backbone.embed." in model.STEM
    assert model.layer_index("backbone.embed.projection.weight") == 0


@EVERY_DECODER
@EVERY_FAMILY
def test_traced_models_compute_the_same(options, decoder):
    model = build(options, decoder).eval()
    images = draw_images(model)
    expected = model(images)
    for copy in (model.for_tracing(), model.with_constants()):
        torch.testing.assert_close(copy(images), expected, rtol=1e-4, atol=1e-5)
        program = torch.export.export(copy, (images,))
        torch.testing.assert_close(program.module()(images), expected, rtol=1e-4, atol=1e-5)


def test_a_linear_one_is_exported_for_any_size():
    model = build().eval()
    size = {2: 8 * torch.export.Dim("rows", min=2, max=16), 3: 8 * torch.export.Dim("columns", min=2, max=16)}
    copy = model.for_tracing(any_size=True)
    program = torch.export.export(copy, (draw_images(model, 40, 48),), dynamic_shapes=(size,))
    images = draw_images(model, 64, 24)
    torch.testing.assert_close(program.module()(images), model(images), rtol=1e-4, atol=1e-4)
    with pytest.raises(Unsupported, match="dynamic_size= does not support UPerNet"):
        build(decoder=DECODERS["upernet"]).for_tracing(any_size=True)


@EVERY_DECODER
def test_compiles_without_a_graph_break(decoder):
    torch.compiler.reset()
    model = build(VIT, decoder).eval()
    assert_compiles(model, draw_images(model))


@EVERY_FAMILY
def test_recomputed_activations_give_the_same_gradients(options):
    gradients = []
    for recompute in (False, True):
        model = build(options, DECODERS["upernet"]).eval()
        model.activation_checkpointing = recompute
        assert model.backbone.activation_checkpointing is recompute
        model(draw_images(model)).square().mean().backward()
        gradients.append(next(iter(model.backbone.parameters())).grad)
    torch.testing.assert_close(*gradients)


@EVERY_FAMILY
def test_a_loaded_model_becomes_the_backbone(options):
    source = vitrail.build_from(configure(classes=7, **options)).eval()
    model = segment_from(source, "linear", 5)
    assert not model.training
    images = draw_images(model)
    torch.testing.assert_close(model.forward_features(images), source.forward_features(images))
    torch.testing.assert_close(model.embed_images(images), source.embed_images(images))
    assert segment_from(model, DECODERS["upernet"], 3).config.backbone == model.config.backbone


@pytest.mark.parametrize("slots", [{"pool": "map"}, {"head": "pre-logits"}, {"prefix": "class+distillation"}])
def test_pooling_and_heads_of_the_source_are_dropped(slots):
    source = vitrail.build(classes=7, **VIT, **slots).eval()
    model = segment_from(source, "linear", 5)
    names = {name for name, _ in model.backbone.named_parameters()}
    assert {name for name in names if name.startswith(("head.", "pool."))} == {"pool.norm.weight", "pool.norm.bias"}
    torch.testing.assert_close(model.forward_features(draw_images(model)), source.forward_features(draw_images(model)))


def test_adapted_models():
    model = build(VIT, DECODERS["upernet"]).eval()
    other = model.replace_head(3)
    assert not other.head.classifier.weight.any()
    torch.testing.assert_close(other.head.fusion[0].weight, model.head.fusion[0].weight)
    assert other(draw_images(model)).shape == (2, 3, 32, 32)
    assert model.replace_head(None).config == model.config.backbone
    larger = model.resize((64, 48))
    assert larger.config.image_size == (64, 48)
    images = draw_images(model, 64, 48)
    torch.testing.assert_close(larger(images), model(images), rtol=1e-4, atol=1e-4)
    grey = model.adapt_channels(1)
    image = draw_images(grey)
    expected = model(image.expand(-1, 3, -1, -1))
    torch.testing.assert_close(grey(image), expected, rtol=1e-4, atol=1e-5)


def test_a_temperature_divides_the_logits():
    model = build(decoder=DECODERS["upernet"]).eval()
    images = draw_images(model)
    expected = model(images) / 3
    model.divide_logits(3.0)
    torch.testing.assert_close(model(images), expected)


def test_capabilities_of_classifiers_are_refused():
    model = build()
    with pytest.raises(Unsupported, match="does not support segmentation models"):
        model.set_classifier(torch.zeros(5, 32), torch.zeros(5))
    for call in (model.dense_logits, model.classify, model.forward_head):
        with pytest.raises(Unsupported, match="does not support segmentation models"):
            call(draw_images(model))
    with pytest.raises(Unsupported, match="purpose does not support segmentation models"):
        model.require_tokens("purpose")


@pytest.mark.parametrize(
    ("options", "decoder", "message"),
    [
        (VIT, LinearDecoder(layers=(9,)), "layer 9 of 4"),
        (FAMILIES["swin"], LinearDecoder(layers=(2, -1), norm="all"), "norm='all' needs layers of one width"),
        (FAMILIES["swin"], UPerNet(layers=(4, 2)), "from fine to coarse"),
        (VIT, "fpn", "unknown decoder 'fpn'"),
    ],
)
def test_decoders_that_do_not_fit_are_refused(options, decoder, message):
    with pytest.raises(ValueError, match=message):
        build(options, decoder)


@pytest.mark.parametrize("settings", [{"dropout": 1.0}, {"layers": ()}])
def test_wrong_settings_of_decoders_are_refused(settings):
    with pytest.raises(ValueError, match=r"must be|at least"):
        LinearDecoder(**settings)
    with pytest.raises(ValueError, match=r"must be|at least"):
        UPerNet(**settings)


def test_wrong_backbones_are_refused():
    with pytest.raises(ValueError, match="classes must be at least 1"):
        build(classes=0)
    with pytest.raises(ValueError, match="ends in features"):
        SegmenterConfig(configure(**VIT, classes=3), LinearDecoder(), 5)
    with pytest.raises(Unsupported, match="segmentation does not support segmentation models"):
        SegmenterConfig(build().config, LinearDecoder(), 5)


@pytest.mark.parametrize("norm", ["new", "none"])
def test_what_the_decoder_does_not_read_is_frozen(norm):
    model = build(decoder=LinearDecoder(layers=(3,), norm=norm))
    tune(model, "last-2")
    model.train()(draw_images(model)).sum().backward()
    assert all(model.get_parameter(name).grad is not None for name in trained(model))
    assert not any(name.startswith(("backbone.blocks.3", "backbone.pool")) for name in trained(model))


def test_norms_of_maps():
    images, maps = draw_images(build()), {}
    for norm in ("last", "all", "none"):
        model = build(decoder=LinearDecoder(layers=(2, -1), norm=norm)).eval()
        maps[norm] = model.head.read_maps(model.backbone, images)
    raw = model.feature_maps(images, (2, -1))
    assert [len(found) for found in maps.values()] == [2, 2, 2]
    torch.testing.assert_close(maps["none"], raw)
    torch.testing.assert_close(maps["all"], [model.normalise_map(x) for x in raw])
    torch.testing.assert_close(maps["last"], [raw[0], model.normalise_map(raw[1])])
    torch.testing.assert_close(maps["all"][1].mean(1), torch.zeros(2, 4, 4), rtol=0, atol=1e-5)


def test_four_layers_of_a_plain_vit_are_rescaled():
    model = build(VIT, DECODERS["upernet"]).eval()
    maps = model.head.read_maps(model.backbone, draw_images(model))
    sizes = [rescale(x).shape[2] for rescale, x in zip(model.head.rescaling, maps, strict=True)]
    assert sizes == [16, 8, 4, 2]
    assert configure("B/16").pyramid_layers == (3, 6, 9, 12)
    assert len(build(FAMILIES["swin"], DECODERS["upernet"]).head.rescaling) == 0


def start(init, config, labels):
    preprocessing = SimpleNamespace(sound=None)
    recipe = SimpleNamespace(
        model=config, init=str(init), seed=3, objective=Segmentation(), preprocessing=preprocessing
    )
    notes = []
    prepared = SimpleNamespace(labels=SimpleNamespace(names=labels), train=SimpleNamespace(target_kind="masks"))
    setup = SimpleNamespace(recipe=recipe, prepared=prepared, note=notes.append)
    return load_initial_model(setup), notes


def test_training_starts_from_a_classification_checkpoint(tmp_path):
    source = vitrail.build(classes=7, head="pre-logits", **VIT)
    vitrail.save(source, tmp_path / "init.safetensors", labels="abcdefg")
    config = configure_segmenter(decoder="linear", classes=7, **VIT)
    model, notes = start(tmp_path / "init.safetensors", config, tuple("abcdefg"))
    assert not notes  # its head is of another kind
    images = draw_images(model)
    torch.testing.assert_close(model.eval().forward_features(images), source.eval().forward_features(images))
    torch.manual_seed(3)
    fresh = vitrail.build_from(config)
    torch.testing.assert_close(model.head.state_dict(), fresh.head.state_dict())
    assert model.head.classifier.weight.any()


def test_training_refuses_another_backbone(tmp_path):
    vitrail.save(vitrail.build(classes=7, **VIT), tmp_path / "init.safetensors")
    config = configure_segmenter(classes=5, **{**VIT, "registers": 2})
    with pytest.raises(ValueError, match=r"another model than the recipe's: 1 tensors differ, e.g. prefix.registers"):
        start(tmp_path / "init.safetensors", config, tuple("abcde"))


@pytest.mark.parametrize("labels", ["abcde", "abcdf", "abc"])
def test_training_starts_from_a_segmentation_model(tmp_path, labels):
    source = build(VIT, DECODERS["upernet"])
    vitrail.save(source, tmp_path / "init.safetensors", labels="abcde")
    model, notes = start(tmp_path / "init.safetensors", source.config.with_classes(len(labels)), tuple(labels))
    same = labels == "abcde"
    assert len(notes) == same
    assert bool(model.head.classifier.weight.any()) is same
    torch.testing.assert_close(model.head.fusion.state_dict(), source.head.fusion.state_dict())
    torch.testing.assert_close(model.backbone.state_dict(), source.backbone.state_dict())


# --- EoMT: on every plain Vision Transformer ---

EOMT = EoMT(queries=3, blocks=2, upscales=1)
EVERY_PLAIN_VIT = pytest.mark.parametrize("options", [FAMILIES[name] for name in PLAIN], ids=PLAIN)


@EVERY_PLAIN_VIT
def test_eomt_takes_images_of_any_size(options):
    model = build(options, EOMT).eval()
    height, width = model.config.image_size
    for size in ((height, width), (2 * height, width)):
        logits = model(draw_images(model, *size))
        assert logits.shape == (2, 5, *size)
        assert torch.isfinite(logits).all()
    larger = model.resize((2 * height, width))
    images = draw_images(larger)
    torch.testing.assert_close(larger(images), model(images), rtol=1e-4, atol=1e-4)


@EVERY_PLAIN_VIT
def test_eomt_is_saved_counted_and_traced(options, tmp_path):
    model = build(options, EOMT).eval()
    images = draw_images(model)
    assert count(model.config, 2).macs == counted_by_torch(model.config, 2)
    expected = model(images)
    vitrail.save(model, tmp_path / "model.safetensors")
    loaded = vitrail.load(tmp_path / "model.safetensors")
    for copy in (loaded, model.for_tracing(), model.with_constants()):
        torch.testing.assert_close(copy(images), expected, rtol=1e-4, atol=1e-5)
    program = torch.export.export(model.for_tracing(), (images,))
    torch.testing.assert_close(program.module()(images), expected, rtol=1e-4, atol=1e-5)
    assert model.replace_head(2)(images).shape[:2] == (2, 2)


@EVERY_PLAIN_VIT
def test_masked_queries_train_every_parameter(options):
    model = build(options, EOMT).train()
    masked = torch.ones(2, 2, 3, dtype=torch.bool)
    predictions = model.predict_queries(draw_images(model), masked)
    assert len(predictions) == 3
    sum(part.square().mean() for prediction in predictions for part in prediction).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not model.decays("head.queries", model.head.queries)


def test_eomt_compiles_without_a_graph_break():
    torch.compiler.reset()
    model = build(VIT, EOMT).eval()
    assert_compiles(model, draw_images(model))


def test_queries_without_masks_do_not_depend_on_training_mode():
    model = build(VIT, EOMT)
    images = draw_images(model)
    torch.testing.assert_close(model.train()(images), model.eval()(images))


@pytest.mark.parametrize(
    ("options", "decoder", "message"),
    [
        (FAMILIES["swin"], EOMT, "EoMT does not support Swin Transformers"),
        (VIT, EoMT(blocks=5), "at least 5 layers, got 4"),
        ({**VIT, "position": "relative1d"}, EOMT, "does not support relative1d"),
    ],
)
def test_models_without_a_way_for_queries_are_refused(options, decoder, message):
    with pytest.raises(ValueError, match=message):
        build(options, decoder)


def test_eomt_refuses_what_it_cannot_do():
    with pytest.raises(Unsupported, match="calibration does not support EoMT"):
        build(VIT, EOMT).divide_logits(2.0)
    with pytest.raises(Unsupported, match="needs queries: use decoder='eomt'"):
        build().predict_queries(draw_images(build()))
    with pytest.raises(Unsupported, match="does not support Vision Transformers"):
        vitrail.build(**VIT).predict_queries(draw_images(build()))
    with pytest.raises(ValueError, match="must be at least 1"):
        EoMT(queries=0)


def test_names_of_decoders_are_known_without_importing_torch() -> None:
    assert tuple(segmenter.DECODERS) == DECODER_NAMES


def test_a_classifier_starts_from_the_backbone_of_a_segmentation_model():
    source = build_segmenter(classes=3, patch=8, width=32, depth=1, heads=2, image_size=32)
    for classes in (3, 5):
        config = source.config.as_backbone().with_classes(classes)
        model = build_from(config)
        model.start_from(source, keep_classifier=False)
        wanted = source.backbone.state_dict()
        found = model.state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        assert not found["head.weight"].any()
        assert (config.find_decoder(), source.config.find_decoder()) == (None, LinearDecoder())
