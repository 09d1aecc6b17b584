"""Key tables are strict and work in both directions."""

import pytest
import torch

import vitrail
from vitrail.checkpoints.formats import timm as timm_names
from vitrail.checkpoints.formats import torchvision as torchvision_names
from vitrail.checkpoints.formats import transformers as transformers_names
from vitrail.checkpoints.keys import (
    IgnoredKeys,
    concatenate,
    export_state,
    import_state,
    map_key,
    reorder_patches,
    reshape,
)
from vitrail.models.registry import configure

TABLE = [
    map_key("a", ("x", "y"), concatenate(0, [1, 2])),
    map_key("b", "z", reshape((2, 2), (4,))),
    IgnoredKeys("unused", "made for the test"),
]
THEIRS = {"x": torch.zeros(1), "y": torch.ones(2), "z": torch.arange(4.0).view(2, 2), "unused": torch.ones(1)}


def test_table_round_trip():
    ours = import_state(TABLE, THEIRS)
    assert ours["a"].tolist() == [0, 1, 1]
    assert ours["b"].tolist() == [0, 1, 2, 3]
    back = export_state(TABLE, ours)
    assert set(back) == {"x", "y", "z"}
    assert all(torch.equal(back[name], THEIRS[name]) for name in back)


def test_missing_and_unexpected_tensors_are_listed():
    with pytest.raises(ValueError, match=r"(?s)missing 1: y.*unexpected 1: w"):
        import_state(TABLE, {name: tensor for name, tensor in THEIRS.items() if name != "y"} | {"w": torch.ones(1)})
    with pytest.raises(ValueError, match="missing 1: b"):
        export_state(TABLE, {"a": torch.ones(3)})


def test_pixel_order_round_trip():
    change = reorder_patches(channels=3, patch=2)
    ours = torch.arange(12.0).view(1, 12)  # channel by channel
    (theirs,) = change.write([ours])
    assert theirs[0, :3].tolist() == [0, 4, 8]  # the three channels of the first pixel
    assert torch.equal(change.read([theirs])[0], ours)


def test_every_parameter_of_a_model_is_named_once():
    config = configure("Ti/16", depth=2, registers=2, layer_scale=0.1)
    table = timm_names.map_vit(config)
    with torch.device("meta"):
        names = [name for name, _ in vitrail.build_from(config).named_parameters()]
    ours = [name for entry in table for name in entry.ours]
    assert sorted(ours) == sorted(names)


def test_format_refuses_unsupported_models():
    with pytest.raises(ValueError, match="timm cannot express this model: it has no ConvStem"):
        timm_names.map_vit(configure("Ti/16", embed="conv-stem"))
    for slots in ({"position": "learned2d"}, {"position": "learned1d@every"}, {"block": "post"}, {"block": "parallel"}):
        with pytest.raises(ValueError, match="timm cannot express this model: "):
            timm_names.map_vit(configure("Ti/16", depth=2, **slots))
    with pytest.raises(ValueError, match=r"transformers' vit cannot express this model: .*position"):
        transformers_names.map_vit(configure("Ti/16", depth=2, position="sincos2d"), "vit")
    with pytest.raises(ValueError, match=r"torchvision cannot express this model: .*prefix\.registers"):
        torchvision_names.map_vit(configure("Ti/16", depth=2, registers=4))
