"""Models of spectrograms: overlapping patches, sizes, names, and weights taken from models of images."""

import pytest
import torch
import torch.nn.functional as F

import vitrail
from vitrail.data.log_mel import LogMel
from vitrail.data.preprocessing import sound_preprocessing
from vitrail.models.base import Unsupported
from vitrail.models.registry import configure
from vitrail.models.spectrograms import configure_spectrograms
from vitrail.nn.embed import Patches
from vitrail.nn.head import NormLinear
from vitrail.nn.pool import OutputMean
from vitrail.training.runs.models import load_for_sounds

DEIT = {
    "patch": 16,
    "width": 32,
    "depth": 2,
    "heads": 2,
    "image_size": 64,
    "classes": 5,
    "prefix": "class+distillation",
}


def make_deit(**more) -> vitrail.Model:
    torch.manual_seed(0)
    model = vitrail.build(**{**DEIT, "init": "deit", **more}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def test_names_stand_for_the_published_model():
    config = configure("AST-Ti/16", classes=35)
    assert config.embed == Patches(16, overlap=6)
    assert (config.shape.grid, config.input_size, config.channels) == ((12, 101), (128, 1024), 1)
    assert (config.pool, config.head, config.classes) == (OutputMean(), NormLinear(), 35)
    assert config.describe() == "AST-Ti/16"
    assert configure("AST-Ti/16", embed=Patches(16, overlap=4)).describe() == "Ti/16, stride 12"
    assert configure("AST-B/16").classes == 527
    assert configure("AST-Ti/8").embed.stride == 5


def test_patches_are_those_of_a_convolution():
    embed = Patches(16, overlap=6).build(1, 32)
    torch.nn.init.normal_(embed.projection.weight)
    sound = torch.randn(2, 1, 128, 57)
    wanted = F.conv2d(sound, embed.projection.weight.unflatten(1, (1, 16, 16)), embed.projection.bias, stride=10)
    assert embed.grid(sound) == (12, 5) == wanted.shape[2:]
    torch.testing.assert_close(embed(sound), wanted.flatten(2).transpose(1, 2), atol=1e-4, rtol=1e-4)


def test_images_smaller_than_a_patch_are_refused():
    with pytest.raises(ValueError, match="image size 128×15 is smaller than the patch size 16: use at least 16 for 15"):
        configure("AST-Ti/16", image_size=(128, 15))
    with pytest.raises(ValueError, match="reads a class and a distillation token, and there is no distillation token"):
        configure("AST-Ti/16", prefix="class")


def test_another_number_of_frames_is_the_resized_model():
    model = vitrail.build(None, **{**DEIT, "image_size": (40, 96)}, channels=1, embed=Patches(16, overlap=6)).eval()
    model = model.resize(resampling="ast")
    for frames in (50, 96, 130):
        sound = torch.randn(1, 1, 40, frames)
        assert model.feature_maps(sound)[0].shape == (1, 32, 3, (frames - 16) // 10 + 1)
        torch.testing.assert_close(model.resize((40, frames))(sound), model(sound), atol=1e-5, rtol=1e-5)


def test_weights_of_images_are_taken_as_published():
    deit = make_deit()
    model = deit.take_spectrograms((128, 45))
    assert model.config == configure_spectrograms(deit.config, (128, 45))
    assert (model.config.shape.grid, model.config.pool) == ((12, 3), OutputMean())
    ours, theirs = model.state_dict(), deit.state_dict()
    summed = theirs["embed.projection.weight"].unflatten(1, (3, 256)).sum(1)
    torch.testing.assert_close(ours["embed.projection.weight"], summed)
    table = theirs["position.weight"][0, 2:].unflatten(0, (4, 4))
    columns = table[:, 2 - 1 : 2 + 2]  # three of four: the middle
    grown = F.interpolate(columns.permute(2, 0, 1)[None], (12, 3), mode="bilinear")[0]
    torch.testing.assert_close(ours["position.weight"][0, 2:], grown.flatten(1).T)
    assert torch.equal(ours["position.weight"][:, :2], theirs["position.weight"][:, :2])
    assert torch.equal(ours["prefix.outputs"], theirs["prefix.outputs"])
    assert all(
        torch.equal(ours[name], tensor) for name, tensor in theirs.items() if name.startswith(("blocks", "pool"))
    )
    features = model(torch.randn(2, 1, 128, 45))
    torch.testing.assert_close(features.mean(1), torch.zeros(2), atol=1e-5, rtol=0)  # normed
    assert not model.replace_head(7)(torch.randn(2, 1, 128, 45)).any()


def test_models_with_one_token_keep_their_pooling():
    for slots in ({"prefix": "class"}, {"pool": "mean", "prefix": "none"}, {"position": "sincos2d"}):
        vit = make_deit(**slots)
        model = vit.take_spectrograms((32, 64), overlap=0)
        assert model(torch.randn(1, 1, 32, 64)).shape == (1, 32)
        assert model.config.prefix == vit.config.prefix


def test_a_run_on_sounds_takes_the_weights_of_images_or_of_sounds(tmp_path):
    vitrail.save(make_deit(), tmp_path / "deit.safetensors")
    config = configure_spectrograms(make_deit().config, (128, 45), overlap=2).with_classes(3)
    model = load_for_sounds(str(tmp_path / "deit.safetensors"), config)
    assert model.config == config.with_classes(None)
    sounds = sound_preprocessing(LogMel(), 45, -4.0, 9.0)
    vitrail.save(model, tmp_path / "sounds.safetensors", preprocessing=sounds)
    longer = load_for_sounds(str(tmp_path / "sounds.safetensors"), config.with_image_size((128, 100)))
    assert longer.config == model.config.with_image_size((128, 100))
    assert torch.equal(longer.embed.projection.weight, model.embed.projection.weight)


def test_models_without_linear_patches_are_refused():
    for model in (vitrail.build("R50x1", classes=2), make_deit(embed="conv-stem")):
        with pytest.raises(Unsupported, match="take_spectrograms does not support"):
            model.take_spectrograms()
