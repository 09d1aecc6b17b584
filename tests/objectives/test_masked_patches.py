"""Masked patch prediction: what is corrupted, what is asked, and of which patches."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.objectives.made import draw, encoder, pictures
from vitrail.data.preprocessing import IMAGENET_STATS
from vitrail.models.hybrid import Hybrid
from vitrail.nn.embed import select_tokens
from vitrail.objectives.masked_patches import MaskedPatches, MaskedPatchPredictor
from vitrail.objectives.masking import unpatchify
from vitrail.training.optim import parameter_rules
from vitrail.utils.json import dataclass_from_json, to_json


def task(spec: MaskedPatches = MaskedPatches(), **slots: object) -> MaskedPatchPredictor:  # noqa: B008
    return spec.build(encoder(**slots), 10)


def test_colours_have_three_bits_a_channel_before_normalisation() -> None:
    wanted = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.99, 0.13, 0.5], [0.12, 0.126, 0.874]])  # [N, C]
    image = unpatchify(wanted.unsqueeze(0).repeat_interleave(64, 2), (2, 2), 3)  # [1, 3, 16, 16]
    mean, std = (torch.tensor(IMAGENET_STATS[name]).view(-1, 1, 1) for name in ("mean", "std"))
    made = MaskedPatches().build(encoder(image_size=16), 1, mean=IMAGENET_STATS["mean"], std=IMAGENET_STATS["std"])
    assert made.patch_targets((image - mean) / std).flatten().tolist() == [
        0,
        511,
        7 * 64 + 1 * 8 + 4,
        0 * 64 + 1 * 8 + 6,
    ]


def test_down_predicts_the_colours_of_sixteen_cells() -> None:
    cells = torch.arange(16).view(4, 4) // 2  # each grey level twice, cell by cell
    grey = (cells.repeat_interleave(2, 0).repeat_interleave(2, 1) + 0.5) / 8  # one patch of 8×8
    image = (grey.tile(2, 2).expand(1, 3, 16, 16) - 0.5) / 0.5
    made = task(MaskedPatches("down"), image_size=16)
    assert made.head.out_features == 16 * 512
    expected = (cells * (64 + 8 + 1)).flatten()
    assert torch.equal(made.patch_targets(image), expected.expand(1, 4, 16))


def test_down_works_where_four_cells_do_not_divide_a_patch() -> None:
    made = task(MaskedPatches("down"), patch=6, image_size=24)
    image = unpatchify(torch.rand(2, 16, 3, 1).expand(-1, -1, -1, 36).flatten(2), (4, 4), 3)  # one colour a patch
    number = made.patch_targets(image)
    assert torch.equal(number, number[:, :, :1].expand(-1, -1, 16))


def test_grey_images_have_eight_colours() -> None:
    made = task(channels=1)
    assert made.head.out_features == 8
    assert made.patch_targets(torch.linspace(-1, 1, 32 * 32).view(1, 1, 32, 32)).unique().tolist() == list(range(8))


def test_half_of_the_patches_are_corrupted_in_the_papers_proportions() -> None:
    made = task(patch=2)  # 256 patches
    images = pictures(64)
    found = made.draw_corruption(images, draw(64))
    own = torch.arange(256).expand(64, 256)
    exchanged = found.source != own
    chosen = torch.zeros(64, 256, dtype=torch.bool).scatter(1, found.patches, True)
    assert chosen.sum(1).tolist() == [128] * 64
    assert not (exchanged & found.masked).any()
    assert chosen[exchanged | found.masked].all(), "a patch that was not chosen is left as it is"
    shares = [float(part.sum() / chosen.sum()) for part in (found.masked, exchanged)]
    assert shares == pytest.approx([0.8, 0.1], abs=0.02)


def test_fifteen_percent_can_be_corrupted() -> None:
    made = task(MaskedPatches(corrupt=0.15), patch=2)
    assert made.draw_corruption(pictures(), draw()).patches.shape == (4, 38)


def test_loss_is_cross_entropy_over_corrupted_patches_alone() -> None:
    made, images = task().eval(), pictures()
    found = made.draw_corruption(images, draw())
    answers = made.predict_corrupted(images, found)  # [B, n, 512]
    numbers = select_tokens(made.patch_targets(images), found.patches)[..., 0]
    expected = -answers.log_softmax(-1).gather(-1, numbers.unsqueeze(-1)).mean()
    torch.testing.assert_close(made(images, None, draw())["loss"], expected)
    assert answers.shape == (4, 8, 512)


def test_pixel_loss_is_the_mean_squared_error_of_corrupted_patches() -> None:
    made, images = task(MaskedPatches("pixels")).eval(), pictures()
    found = made.draw_corruption(images, draw())
    patches = F.unfold(images, 8, stride=8).transpose(1, 2)  # [B, N, C·P²], by another way than ours
    expected = (made.predict_corrupted(images, found) - select_tokens(patches, found.patches)).square().mean()
    torch.testing.assert_close(made(images, None, draw())["loss"], expected)


def test_pixels_of_masked_patches_do_not_reach_the_model() -> None:
    made, images = task().eval(), pictures()
    found = made.draw_corruption(images, draw())
    used = torch.zeros_like(found.masked).scatter(
        1, torch.where(found.masked, found.source[:, :1] * 0, found.source), True
    )
    hidden = found.masked & ~used  # neither seen in its own place nor in another's
    hidden[:, 0] = False
    assert hidden.any()
    noise = unpatchify(hidden.unsqueeze(-1).expand(-1, -1, 3 * 64).float(), (4, 4), 3) * torch.randn_like(images)
    torch.testing.assert_close(made.predict_corrupted(images + noise, found), made.predict_corrupted(images, found))
    seen = (~hidden).unsqueeze(-1).expand(-1, -1, 3 * 64).float()
    other = images + unpatchify(seen, (4, 4), 3) * torch.randn_like(images)
    assert not torch.allclose(made.predict_corrupted(other, found), made.predict_corrupted(images, found))


def test_untrained_loss_is_that_of_guessing() -> None:
    loss = task().eval().signals(pictures(), draw())["loss"]
    assert float(loss) == pytest.approx(math.log(512), abs=0.2)


@pytest.mark.parametrize("target", ["colour", "down", "pixels"])
@pytest.mark.parametrize("embed", ["patches", "conv-stem"])
@pytest.mark.parametrize("position", ["learned1d", "relative", "rotary2d", "rotary-dinov3"])
def test_every_parameter_learns(target, embed, position) -> None:
    made = task(MaskedPatches(target), embed=embed, position=position)
    made(pictures(), None, draw())["loss"].backward()
    assert [name for name, parameter in made.named_parameters() if parameter.grad is None] == []
    assert float(made.mask_token.grad.abs().max()) > 0


def test_parts_of_a_batch_have_the_loss_of_the_whole() -> None:
    made, images = task(), pictures()
    whole = made(images, None, draw())["loss"]
    parts = [made(images[a : a + 2], None, draw(2, a, 4))["loss"] for a in (0, 2)]
    torch.testing.assert_close((parts[0] + parts[1]) / 2, whole)
    assert not torch.equal(made(images, None, draw(step=1))["loss"], whole), "every step corrupts anew"


def test_signals_are_the_loss_without_a_gradient() -> None:
    made = task().eval()
    found = made.signals(pictures(), draw())
    torch.testing.assert_close(found["loss"], made(pictures(), None, draw())["loss"].detach())
    assert not found["loss"].requires_grad


def test_loss_falls_in_a_few_steps() -> None:
    made = task(channels=1)
    images = (
        pictures(8, 1).mean((2, 3), keepdim=True).expand(-1, -1, 32, 32) * 20
    )  # each of one grey, told by its neighbours
    optimizer = torch.optim.AdamW(made.parameters(), lr=3e-3)
    losses = []
    for step in range(30):
        loss = made(images, None, draw(8, step=step))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]  # 0.37 where measured; without training it stays near 1


def test_mask_tokens_are_not_decayed() -> None:
    found = parameter_rules(task(), 1.0)
    assert not found["mask_token"].decay
    assert found["head.weight"].decay


@pytest.mark.parametrize("target", ["colour", "down", "pixels"])
def test_reconstruction_shows_masks_grey(target) -> None:
    made, images = task(MaskedPatches(target)).eval(), pictures()
    shown = made.reconstruct(images, draw(), (0.5,) * 3, (0.5,) * 3)
    found = made.draw_corruption(images, draw())
    chosen = torch.zeros(4, 16, dtype=torch.bool).scatter(1, found.patches, True)

    def spread(flags: torch.Tensor) -> torch.Tensor:
        return unpatchify(flags.unsqueeze(-1).expand(-1, -1, 3 * 64), (4, 4), 3)

    assert all(part.dtype == torch.uint8 and part.shape == images.shape for part in vars(shown).values())
    torch.testing.assert_close(shown.original.float(), (images * 0.5 + 0.5) * 255, rtol=0, atol=0.51)
    assert (shown.masked[spread(found.masked)] == 128).all()
    assert torch.equal(shown.masked[~spread(chosen)], shown.original[~spread(chosen)])
    assert torch.equal(shown.reconstructed[~spread(chosen)], shown.original[~spread(chosen)])
    assert not torch.equal(shown.reconstructed, shown.original)


def test_predicted_colour_is_the_middle_of_its_class() -> None:
    made = MaskedPatches().build(encoder(), 1, mean=IMAGENET_STATS["mean"], std=IMAGENET_STATS["std"]).eval()
    torch.nn.init.zeros_(made.head.weight)
    with torch.no_grad():
        made.head.bias[3 * 64 + 7 * 8 + 0] = 1.0
    shown = made.reconstruct(pictures(), draw(), IMAGENET_STATS["mean"], IMAGENET_STATS["std"])
    patch = made.draw_corruption(pictures(), draw()).patches[0, 0]
    y, x = divmod(int(patch), 4)
    colour = shown.reconstructed[0, :, y * 8 : y * 8 + 8, x * 8 : x * 8 + 8].flatten(1)
    assert colour.float().std(1).tolist() == [0, 0, 0]
    assert colour[:, 0].tolist() == [round(255 * (level + 0.5) / 8) for level in (3, 7, 0)]


def test_settings_round_trip_through_json() -> None:
    spec = MaskedPatches("down", 0.15)
    assert dataclass_from_json(to_json(spec), MaskedPatches, "objective") == spec


@pytest.mark.parametrize(
    ("spec", "slots", "complaint"),
    [
        ({"target": "down"}, {"patch": 2}, "no 4×4 cells"),
        ({}, {"patch": 32}, "needs several patches"),
        ({}, {"embed": Hybrid((1,), 1)}, "set model.embed=Patches"),
        ({}, {"classes": 3}, "model.classes=none"),
        ({}, {"head": "pre-logits"}, "model.head=Linear"),
        ({}, {"pool": "map"}, "model.pool=Mean"),
        ({}, {"channels": 4}, "target=pixels"),
        ({"corrupt": 0.01}, {}, "corrupts 0 of 16 patches"),
        ({"corrupt": 0.99}, {}, "corrupts 16 of 16 patches"),
    ],
)
def test_invalid_models_are_refused_in_one_line(spec, slots, complaint) -> None:
    with pytest.raises(ValueError, match=complaint) as error:
        MaskedPatches(**spec).check(encoder(**slots).config, 8)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ({"corrupt": 0.0}, "> 0 and < 1, got 0"),
        ({"corrupt": 1.0}, "> 0 and < 1, got 1"),
        ({"target": "hue"}, "unknown target"),
    ],
)
def test_invalid_settings_are_refused(spec, complaint) -> None:
    with pytest.raises(ValueError, match=complaint):
        MaskedPatches(**spec)
