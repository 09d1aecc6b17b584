"""Vision Transformers of clips: every slot, sizes, masking, costs, export and inflation."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vitrail
from tests.models.test_cost import counted_by_torch
from tests.objectives.made import draw
from tests.variants import CLIP, CLIP_SLOTS, DIVIDED, SMALL
from vitrail.cli import main
from vitrail.data.clip import Clip
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.base import Unsupported
from vitrail.models.flops import count
from vitrail.models.registry import build_from, build_segmenter, config_from_json, configure
from vitrail.nn.embed import Tubelets
from vitrail.nn.packing import pack_module
from vitrail.nn.resampling import resample_steps
from vitrail.objectives.classification import Classification, mix_pairs
from vitrail.utils.json import to_json

JOINT = {name: slots for name, slots in CLIP_SLOTS.items() if slots.get("block") != "divided"}


def randomise(model):
    """Return the model in evaluation mode with no weight at zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def clips(*size, channels=3):
    return torch.randn(2, channels, *size, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=CLIP_SLOTS.values(), ids=CLIP_SLOTS)
def config(request):
    torch.manual_seed(0)
    return configure(**{**CLIP, **request.param})


@pytest.mark.parametrize(("frames", "patch"), [(1, 16), (2, 16), (3, 8), (4, 4)])
def test_tubelets_are_a_convolution_in_three_dimensions(frames, patch):
    embed = Tubelets(frames, patch).build(3, 20)
    conv = nn.Conv3d(3, 20, (frames, patch, patch), stride=(frames, patch, patch))
    with torch.no_grad():
        conv.weight.copy_(embed.projection.weight.view_as(conv.weight))
        conv.bias.copy_(embed.projection.bias)
    x = clips(12, 32, 48)
    torch.testing.assert_close(embed(x), conv(x).flatten(2).transpose(1, 2), rtol=1e-4, atol=1e-5)
    assert embed.grid(x) == (12 // frames, 32 // patch, 48 // patch)


def test_forward_is_features_then_head_and_the_last_layer_may_be_short(config):
    model, x = randomise(build_from(config)), clips(4, 16, 24)
    torch.testing.assert_close(model(x), model.forward_head(model.forward_features(x)), rtol=1e-4, atol=1e-5)
    assert model.feature_maps(x)[0].shape == (2, 48, *config.shape.grid)


def test_multiply_adds_and_parameters_are_those_of_the_built_model(config):
    cost = count(config, 3)
    assert cost.macs == counted_by_torch(config, 3)
    assert cost.params == sum(p.numel() for p in build_from(config).parameters())


def test_published_models_have_the_published_costs():
    """The papers count the multiply-adds of a clip as 180 G (VideoMAE, ViT-B) and 0.59 T in three crops (TimeSformer)."""
    cost = count(configure("B/16", frames=16, position="sinusoid1d", pool="mean-norm", key_bias=False, classes=400))
    assert round(cost.macs_every_token / 1e9) == 180
    assert round(cost.params / 1e6) == 87
    cost = count(configure("B/16", frames=8, tubelet=1, **DIVIDED, classes=400))
    assert round(3 * cost.macs_every_token / 1e12, 2) == 0.59
    assert round(cost.params / 1e6, 0) == 122
    assert cost.attention_bytes_total == 12 * 12 * (8 * 196**2 + 196 * 8**2) * 4


def test_another_size_gives_what_the_resized_model_gives(config):
    model, x = randomise(build_from(config)), clips(8, 24, 32)
    resized = model.resize((24, 32), frames=8)
    assert resized.config.input_size == (8, 24, 32)
    torch.testing.assert_close(resized(x), model(x), rtol=1e-4, atol=1e-5)


def test_configurations_come_back_from_json_and_models_from_files(config, tmp_path):
    assert config_from_json(to_json(config)) == config
    model, x = randomise(build_from(config)), clips(4, 16, 24)
    vitrail.save(model, tmp_path / "clip.safetensors")
    back = vitrail.load(tmp_path / "clip.safetensors")
    assert back.config == config
    torch.testing.assert_close(back(x), model(x))
    assert vitrail.load(tmp_path / "clip.safetensors", frames=8)(clips(8, 16, 24)).isfinite().all()


@pytest.mark.parametrize("name", ["ViViT", "VideoMAE", "divided, registers", "rotary3d, mean"])
def test_traced_models_have_the_same_logits(name):
    torch.manual_seed(0)
    model, x = randomise(build_from(configure(**{**CLIP, **CLIP_SLOTS[name]}))), clips(4, 16, 24)
    program = torch.export.export(model.with_constants(), (x,)).module()
    torch.testing.assert_close(program(x), model(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(Unsupported, match="dynamic_size= does not support models of clips"):
        model.for_tracing(any_size=True)


@pytest.mark.parametrize("slots", JOINT.values(), ids=JOINT)
def test_masking_equals_leaving_tokens_out(slots):
    torch.manual_seed(0)
    model, x = randomise(build_from(configure(**{**CLIP, **slots}))), clips(4, 16, 24)
    patches = model.config.shape.patches
    every = torch.arange(patches).expand(2, -1)
    torch.testing.assert_close(model(x, every), model(x), rtol=1e-4, atol=1e-5)
    keep = torch.stack([torch.randperm(patches)[:3] for _ in range(2)])
    x_p = model.embed(x)[torch.arange(2)[:, None], keep]
    torch.testing.assert_close(model.add_positions(x_p, model.config.shape.grid, keep), model.tokens(x, keep))
    assert model(x, keep).isfinite().all()


def test_positions_in_time_are_interpolated_linearly():
    table = torch.tensor([[0.0, 10.0], [1.0, 20.0], [4.0, 30.0]])
    expected = F.interpolate(table.T[None], size=7, mode="linear")[0].T
    torch.testing.assert_close(resample_steps(table, 7), expected)
    model = build_from(configure(**CLIP))
    longer = model.resize(frames=8).position.weight[0, 1:].view(4, 6, 48)
    torch.testing.assert_close(longer, resample_steps(model.position.weight[0, 1:].view(2, 6, 48), 4))
    wide = model.resize((16, 48)).position.weight[0, 1:].view(2, 2, 6, 48)
    frame = build_from(configure(**{**SMALL, "width": 48, "image_size": (16, 24)}))
    with torch.no_grad():
        frame.position.weight[0, 1:] = model.position.weight[0, 1:7]
    torch.testing.assert_close(wide[0].flatten(0, 1), frame.resize((16, 48)).position.weight[0, 1:])


def test_rotary_positions_depend_on_offsets_in_time():
    """With no position but the rotation, moving the content by one step moves the tokens with it."""
    torch.manual_seed(0)
    settings = {**CLIP, "position": "rotary3d", "prefix": "none", "pool": "mean"}
    early = randomise(build_from(configure(**settings)))
    rotation = early.position.compute_rotation((3, 2, 3), None)
    q, k = torch.randn(2, 1, 1, 18, 24)
    from vitrail.nn.position import rotate

    scores = (rotate(q[:, :, :6].repeat(1, 1, 3, 1), rotation) @ rotate(k[:, :, :6].repeat(1, 1, 3, 1), rotation).mT)[
        0, 0
    ]
    torch.testing.assert_close(scores[:6, 6:12], scores[6:12, 12:], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores[:6, :6], scores[:6, 6:12], atol=1e-3)


def test_divided_attention_without_time_is_the_image_model_of_each_frame():
    """Its projection starts at zero: the class token is the mean over frames of what each frame adds."""
    torch.manual_seed(0)
    model = build_from(configure(**{**CLIP, **DIVIDED, "depth": 1, "tubelet": 1}))
    assert not model.blocks[0].time_projection.weight.any()
    x = clips(4, 16, 24)
    y = model.forward_features(x)[:, 1:].unflatten(1, (4, 6))
    torch.testing.assert_close(y[:, 1], model.forward_features(x[:, :, [1] * 4])[:, 7:13], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["mean", "centre"])
@pytest.mark.parametrize("tubelet", [1, 2, 4])
@pytest.mark.parametrize(
    "slots",
    [
        {},
        {"registers": 2},
        {"prefix": "class+distillation"},
        {"pool": "mean"},
        {"pool": "map", "position": "sincos2d"},
        {"pool": "mean", "position": "none", "block": "parallel"},
    ],
    ids=["class token", "registers", "distillation", "mean", "map", "parallel"],
)
def test_a_still_clip_gives_the_logits_of_the_image(slots, tubelet, mode):
    torch.manual_seed(0)
    model = randomise(vitrail.build(**{**SMALL, **slots}))
    image = torch.randn(2, 3, 32, 48)
    clip = model.inflate(frames=4, tubelet=tubelet, mode=mode)
    assert clip.config.input_size == (4, 32, 48)
    still = image.unsqueeze(2).expand(-1, -1, 4, -1, -1)
    torch.testing.assert_close(clip(still), model(image), rtol=1e-5, atol=1e-5)
    moving = still + torch.randn(2, 3, 4, 1, 1)
    assert not torch.allclose(clip(moving), model(image), atol=1e-3)


def test_centre_reads_one_frame_of_a_tubelet_and_mean_all_of_them():
    model = randomise(vitrail.build(**SMALL, pool="mean"))
    x = clips(2, 32, 48)
    torch.testing.assert_close(model.inflate(2, mode="centre")(x), model(x[:, :, 1]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.inflate(2, mode="mean")(x), model(x.mean(2)), rtol=1e-4, atol=1e-5)


def refused(call, *words, error=ValueError):
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text, text
    assert all(word in text for word in words), text


def test_bad_input_is_refused_in_one_line(tmp_path):
    image, clip = vitrail.build(**SMALL), build_from(configure(**CLIP))
    refused(lambda: configure(**{**CLIP, "frames": 5}), "5 frames", "tubelets of 2", "use 4 or 6")
    refused(lambda: configure(**{**CLIP, "frames": 1}), "1 frames", "use 2")
    refused(lambda: configure(**SMALL, tubelet=2), "tubelet=2", "give frames=16 too")
    refused(lambda: configure(**CLIP, embed="conv-stem"), "frames=4", "ConvStem", "Tubelets")
    refused(lambda: configure(**SMALL, embed=Tubelets(2, 8)), "frames=None", "give frames")
    refused(lambda: configure(**CLIP, position="relative"), "Relative positions are not for clips", error=Unsupported)
    refused(lambda: configure(**SMALL, position="rotary3d"), "Rotary3D positions are not for images", error=Unsupported)
    refused(lambda: configure(**SMALL, block="divided"), "give frames", error=Unsupported)
    refused(
        lambda: configure(**CLIP, block="divided", position="rotary3d"), "Rotary3D", "factorised", error=Unsupported
    )
    refused(lambda: clip(torch.zeros(1, 3, 16, 24)), "[B, C, T, H, W]", "[1, 3, 16, 24]")
    refused(lambda: clip(torch.zeros(1, 1, 4, 16, 24)), "3 channels, got clips of 1")
    refused(lambda: clip(torch.zeros(1, 3, 3, 16, 24)), "3 frames", "use 2 or 4")
    refused(lambda: image.resize(frames=4), "frames=", "model.inflate(frames=…)", error=Unsupported)
    refused(lambda: image.inflate(4, mode="median"), "mean or centre", "'median'")
    refused(lambda: image.inflate(5), "5 frames", "use 4 or 6")
    refused(lambda: clip.inflate(4), "linear patches", error=Unsupported)
    refused(lambda: vitrail.build(**SMALL, position="rotary2d").inflate(4), "Rotary2D", error=Unsupported)
    refused(lambda: vitrail.build("R14x0.25").inflate(4), "inflate does not support", error=Unsupported)
    divided = build_from(configure(**CLIP, block="divided"))
    keep = torch.zeros(1, 2, dtype=torch.long)
    refused(lambda: divided(torch.zeros(1, 3, 4, 16, 24), keep), "keep leaves some out", error=Unsupported)
    refused(lambda: divided.merge_tokens(1), "token merging", "divided", error=Unsupported)
    refused(lambda: clip.merge_tokens(-1), "at least 0")
    backbone = {**CLIP, "decoder": "linear"}
    refused(lambda: build_segmenter(**backbone), "segmentation", "model of images", error=Unsupported)
    vitrail.save(clip, tmp_path / "clip.safetensors")
    refused(lambda: vitrail.load(tmp_path / "clip.safetensors", frames=3), "3 frames", "use 2 or 4")


def test_tokens_of_clips_are_merged():
    torch.manual_seed(0)
    model, x = randomise(build_from(configure(**{**CLIP, "depth": 4}))), clips(4, 16, 24)
    torch.testing.assert_close(model.merge_tokens(0)(x), model(x), rtol=1e-4, atol=1e-5)
    merged = model.merge_tokens(3)
    assert merged.tokens_per_layer() == (13, 13, 10, 7)
    assert merged(x).isfinite().all()


def test_attention_of_joint_models_is_recorded_and_image_analysis_refused():
    from vitrail.analysis.record import find_vit, record_attention

    clip, x = randomise(build_from(configure(**CLIP))), clips(4, 16, 24)
    with record_attention(clip) as maps:
        clip(x)
    assert maps[1].shape == (2, 2, 13, 13)
    refused(lambda: find_vit(clip, "rollout"), "rollout does not support models of clips", error=Unsupported)
    divided = build_from(configure(**CLIP, **DIVIDED))
    with pytest.raises(Unsupported, match="divided attention"), record_attention(divided):
        divided(x)


def test_packed_and_checkpointed_models_compute_the_same(config):
    model, x = randomise(build_from(config)), clips(4, 16, 24)
    with torch.inference_mode():
        expected = model(x)
        torch.testing.assert_close(pack_module(model, torch.float32)(x), expected, rtol=1e-4, atol=1e-5)
    model.train().activation_checkpointing = True
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    model(x).sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters())


@pytest.mark.parametrize("slots", [{}, {**DIVIDED, "tubelet": 1}], ids=["joint", "divided"])
def test_labels_of_clips_are_learnt_with_mixing(slots):
    """Two classes that differ in their motion only: which of the halves of a clip is bright."""
    torch.manual_seed(0)
    spec = Classification(mixup=0.2, cutmix=1.0, patch_dropout=0.0 if slots else 0.25)
    config = configure(**{**CLIP, **slots, "classes": 2, "init": "deit"})
    loss = spec.build(build_from(config))
    optimizer = torch.optim.AdamW(loss.parameters(), lr=2e-3)
    targets = torch.arange(16) % 2
    bright = torch.stack((1 - targets, 1 - targets, targets, targets), 1)[:, None, :, None, None]
    x = bright.float().expand(16, 3, 4, 16, 24) + 0.1 * torch.randn(16, 3, 4, 16, 24)
    for step in range(40):
        loss(x, targets, draw(16, step=step))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        assert (
            F.cross_entropy(loss.model.eval()(x), targets) < 0.8 * 0.69
        )  # 0.69 is chance; 0.16 and 0.21 where measured


def test_mixing_cuts_the_same_box_from_every_frame():
    x = torch.stack((torch.zeros(3, 4, 16, 24), torch.ones(3, 4, 16, 24)))
    mixed, _ = mix_pairs(x, torch.eye(2), 0.0, 1.0, draw(2))
    assert torch.equal(mixed, mixed[:, :, :1].expand_as(mixed))
    image, _ = mix_pairs(x[:, :, 0], torch.eye(2), 0.0, 1.0, draw(2))
    assert torch.equal(mixed[:, :, 0], image)


def test_describe_counts_a_clip_and_refuses_frames_that_do_not_fit(capsys):
    assert main(["describe", "S/16", "--frames", "8", "--tubelet", "2", "--size", "32", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["frames"] == 8
    assert described["macs"] == counted_by_torch(configure("S/16", frames=8, image_size=32), 1)
    assert described["tokens"] == 1 + 4 * 2 * 2
    assert main(["describe", "S/16", "--frames", "8", "--size", "32"]) == 0
    assert "S/16: 1 clip of 8×32×32" in capsys.readouterr().out
    assert main(["describe", "S/16", "--frames", "9"]) == 2
    assert capsys.readouterr().err == "vitrail describe: 9 frames are not divisible into tubelets of 2: use 8 or 10\n"
    assert main(["describe", "S/16", "--tubelet", "2"]) == 2
    assert "give --frames 16 too" in capsys.readouterr().err


def test_preprocessing_has_the_frames_of_the_model(tmp_path):
    path, pipeline = tmp_path / "clip.safetensors", Preprocessing((16, 24), (16, 24), clip=Clip(4, 8))
    model = build_from(configure(**CLIP))
    vitrail.save(model, path, preprocessing=pipeline)
    longer = vitrail.load(path).resize(frames=8)
    assert longer.preprocessing.clip == vitrail.load(path, frames=8).preprocessing.clip == Clip(8, 8)
    vitrail.save(longer, path)
    images = vitrail.build(**SMALL)
    images.preprocessing = Preprocessing((32, 48), (32, 48))
    assert images.inflate(4).preprocessing is None
    refused(lambda: vitrail.save(longer, path, preprocessing=pipeline), "clips of 4 frames", "clips of 8 frames")
    refused(lambda: vitrail.save(images, path, preprocessing=pipeline), "clips of 4 frames", "takes images")
    refused(lambda: vitrail.save(model, path, preprocessing=images.preprocessing), "gives images", "clips of 4 frames")
