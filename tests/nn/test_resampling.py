"""Rules to resample position tables: the weights of an axis, SciPy's zoom, and values that are refused."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitrail.models.tracing import resample_by_weights
from vitrail.models.vit_config import RESAMPLINGS
from vitrail.nn.position import Learned1D, Learned2D, Relative1D
from vitrail.nn.resampling import Resampling, compute_axis_weights, resample_table

# the geometric rule is for odd tables of offsets: it has tests of its own
PLAIN = {name: rule for name, rule in RESAMPLINGS.items() if rule.kind != "geometric"}
RULES = {**PLAIN, "linear": Resampling("linear"), "linear, plain": Resampling("linear", antialias=False)}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("sizes", [(14, 14), (14, 9), (7, 16), (3, 20), (27, 13), (1, 4), (5, 1)])
def test_weights_of_an_axis_equal_pytorch(rule, sizes):
    source, count = sizes
    table = torch.randn(5, source, 1)
    weights = compute_axis_weights(rule, source, count, table)
    torch.testing.assert_close(weights @ table, resample_table(table, (count, 1), rule), atol=1e-4, rtol=0)
    torch.testing.assert_close(weights.sum(1), torch.ones(count), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_weights_of_both_axes_equal_pytorch(rule):
    table = torch.randn(6, 4, 3)
    for grid in ((6, 4), (6, 7), (9, 4), (3, 2), (1, 5)):  # its own, one side changed, both changed
        wanted = resample_table(table.permute(2, 0, 1), grid, rule).permute(1, 2, 0)
        torch.testing.assert_close(resample_by_weights(table, grid, rule), wanted, atol=1e-4, rtol=0)


def test_geometric_resampling_keeps_near_offsets_and_spaces_far_ones():
    rule = Resampling("geometric", antialias=False)
    offsets = torch.arange(-3.0, 4.0).expand(7, 7)
    column = resample_table(offsets.mT.contiguous(), (9, 7), rule)[:, 3]  # 4 patches become 5: offsets -4 to 4
    torch.testing.assert_close(column, -column.flip(0))
    assert column[4:6].tolist() == [0.0, 1.0]  # the patch itself and its neighbour
    assert column[-1] == pytest.approx(3.0, abs=1e-4)  # the largest offset
    assert (column.diff() > 0).all()
    assert torch.equal(resample_table(offsets, (7, 7), rule), offsets)
    table = torch.randn(7, 5, 3)
    for grid in ((7, 5), (7, 9), (13, 5), (3, 1), (1, 21)):  # its own, one side changed, both changed
        wanted = resample_table(table.permute(2, 0, 1), grid, rule).permute(1, 2, 0)
        torch.testing.assert_close(resample_by_weights(table, grid, rule), wanted, atol=1e-5, rtol=0)


def test_geometric_resampling_is_refused_for_tables_that_are_added():
    for slot in (Learned1D, Learned2D):
        with pytest.raises(ValueError, match="for tables of offsets: use it with relative positions"):
            slot(resampling=RESAMPLINGS["timm-relative"])
    with pytest.raises(ValueError, match="geometric resampling supports none of"):
        Resampling("geometric")
    assert Relative1D(resampling=RESAMPLINGS["timm-relative"])


def test_google_is_the_zoom_of_scipy():
    zoom = pytest.importorskip("scipy.ndimage", reason="SciPy is not installed").zoom
    table = torch.randn(4, 4, 3)
    for h, w in ((2, 2), (7, 7), (3, 6), (1, 1)):
        wanted = zoom(table.numpy(), (h / 4, w / 4, 1), order=1)
        found = resample_table(table.permute(2, 0, 1), (h, w), RESAMPLINGS["google"]).permute(1, 2, 0)
        np.testing.assert_allclose(found.numpy(), wanted, atol=1e-5)


def test_ast_cuts_from_the_middle_and_interpolates_linearly():
    table, rule = torch.randn(2, 12, 101), RESAMPLINGS["ast"]
    assert torch.equal(resample_table(table, (12, 64), rule), table[..., 50 - 32 : 50 + 32])
    assert torch.equal(resample_table(table, (5, 101), rule), table[:, 6 - 2 : 6 + 3])
    wanted = F.interpolate(table[None], (12, 130), mode="bilinear")[0]
    assert torch.equal(resample_table(table, (12, 130), rule), wanted)
    torch.testing.assert_close(resample_table(table, (7, 130), rule), wanted[:, 6 - 3 : 6 + 4])


def test_dino_adds_a_tenth_of_a_patch_to_the_scale():
    table = torch.randn(1, 3, 4, 4)
    wanted = F.interpolate(table, scale_factor=(6.1 / 4, 3.1 / 4), mode="bicubic")
    assert torch.equal(resample_table(table[0], (6, 3), RESAMPLINGS["dino"]), wanted[0])
    assert not torch.allclose(resample_table(table[0], (6, 3), RESAMPLINGS["transformers"]), wanted[0], atol=1e-2)


def test_tables_keep_their_precision():
    table = torch.randn(2, 4, 4).bfloat16()
    for rule in RULES.values():
        assert resample_table(table, (3, 5), rule).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"kind": "cubic"},
            "kind of resampling must be 'bicubic', 'linear', 'geometric', 'nearest' or 'cut', got 'cubic'",
        ),
        ({"kind": "nearest"}, "nearest resampling supports none of antialias, align_corners and an offset"),
        ({"antialias": False, "offset": 1.5}, "offset of resampling must be at least 0 and below 1, got 1.5"),
        ({"offset": 0.1}, "only one of antialias, align_corners and an offset"),
        ({"align_corners": True}, "only one of antialias, align_corners and an offset"),
    ],
)
def test_rules_without_a_meaning_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Resampling(**values)
