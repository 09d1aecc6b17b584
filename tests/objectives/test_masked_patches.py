"""Masked patch prediction: what is corrupted, what is asked, and of which patches."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.objectives.made import draw, encoder, pictures
from vitrail.data.preprocessing import IMAGENET
from vitrail.engine.rules import rules
from vitrail.models.hybrid import Hybrid
from vitrail.models.written import dataclass_from_json, to_json
from vitrail.nn.embed import choose
from vitrail.objectives.masked_patches import MaskedPatches, MaskedPatchPredictor
from vitrail.objectives.reconstruction import assembled, reconstruct


def task(spec: MaskedPatches = MaskedPatches(), **slots: object) -> MaskedPatchPredictor:  # noqa: B008 (a value)
    return spec.build(encoder(**slots), 10)


def test_colours_are_three_bits_a_channel_of_the_picture_before_it_was_normalised() -> None:
    wanted = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.99, 0.13, 0.5], [0.12, 0.126, 0.874]])  # [N, C]
    image = assembled(wanted.unsqueeze(0).repeat_interleave(64, 2), (2, 2), 3)  # [1, 3, 16, 16]
    mean, std = (torch.tensor(IMAGENET[name]).view(-1, 1, 1) for name in ("mean", "std"))
    made = MaskedPatches().build(encoder(image_size=16), 1, mean=IMAGENET["mean"], std=IMAGENET["std"])
    assert made.wanted((image - mean) / std).flatten().tolist() == [0, 511, 7 * 64 + 1 * 8 + 4, 0 * 64 + 1 * 8 + 6]


def test_down_asks_for_the_colours_of_sixteen_cells() -> None:
    cells = torch.arange(16).view(4, 4) // 2  # each grey level twice, cell by cell
    grey = (cells.repeat_interleave(2, 0).repeat_interleave(2, 1) + 0.5) / 8  # one patch of 8×8
    image = (grey.tile(2, 2).expand(1, 3, 16, 16) - 0.5) / 0.5
    made = task(MaskedPatches("down"), image_size=16)
    assert made.head.out_features == 16 * 512
    expected = (cells * (64 + 8 + 1)).flatten()
    assert torch.equal(made.wanted(image), expected.expand(1, 4, 16))


def test_down_works_where_four_cells_do_not_divide_a_patch() -> None:
    made = task(MaskedPatches("down"), patch=6, image_size=24)
    image = assembled(torch.rand(2, 16, 3, 1).expand(-1, -1, -1, 36).flatten(2), (4, 4), 3)  # one colour a patch
    number = made.wanted(image)
    assert torch.equal(number, number[:, :, :1].expand(-1, -1, 16))


def test_grey_pictures_have_eight_colours() -> None:
    made = task(channels=1)
    assert made.head.out_features == 8
    assert made.wanted(torch.linspace(-1, 1, 32 * 32).view(1, 1, 32, 32)).unique().tolist() == list(range(8))


def test_half_of_the_patches_of_every_picture_are_corrupted_in_the_papers_proportions() -> None:
    made = task(patch=2)  # 256 patches
    images = pictures(64)
    found = made.corruption(images, draw(64))
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
    assert made.corruption(pictures(), draw()).patches.shape == (4, 38)


def test_loss_is_cross_entropy_over_corrupted_patches_alone() -> None:
    made, images = task().eval(), pictures()
    found = made.corruption(images, draw())
    answers = made.answers(images, found)  # [B, n, 512]
    numbers = choose(made.wanted(images), found.patches)[..., 0]
    expected = -answers.log_softmax(-1).gather(-1, numbers.unsqueeze(-1)).mean()
    torch.testing.assert_close(made(images, None, draw())["loss"], expected)
    assert answers.shape == (4, 8, 512)


def test_pixel_loss_is_the_mean_squared_error_of_corrupted_patches() -> None:
    made, images = task(MaskedPatches("pixels")).eval(), pictures()
    found = made.corruption(images, draw())
    patches = F.unfold(images, 8, stride=8).transpose(1, 2)  # [B, N, C·P²], by another way than ours
    expected = (made.answers(images, found) - choose(patches, found.patches)).square().mean()
    torch.testing.assert_close(made(images, None, draw())["loss"], expected)


def test_what_a_masked_patch_shows_does_not_reach_the_model() -> None:
    made, images = task().eval(), pictures()
    found = made.corruption(images, draw())
    used = torch.zeros_like(found.masked).scatter(
        1, torch.where(found.masked, found.source[:, :1] * 0, found.source), True
    )
    hidden = found.masked & ~used  # neither seen in its own place nor in another's
    hidden[:, 0] = False
    assert hidden.any()
    noise = assembled(hidden.unsqueeze(-1).expand(-1, -1, 3 * 64).float(), (4, 4), 3) * torch.randn_like(images)
    torch.testing.assert_close(made.answers(images + noise, found), made.answers(images, found))
    seen = (~hidden).unsqueeze(-1).expand(-1, -1, 3 * 64).float()
    other = images + assembled(seen, (4, 4), 3) * torch.randn_like(images)
    assert not torch.allclose(made.answers(other, found), made.answers(images, found))


def test_an_untrained_head_knows_nothing() -> None:
    loss = task().eval().signals(pictures(), draw())["loss"]
    assert float(loss) == pytest.approx(math.log(512), abs=0.2)


@pytest.mark.parametrize("target", ["colour", "down", "pixels"])
@pytest.mark.parametrize("embed", ["patches", "conv-stem"])
@pytest.mark.parametrize("position", ["learned1d", "relative", "rotary2d"])
def test_every_parameter_learns(target, embed, position) -> None:
    made = task(MaskedPatches(target), embed=embed, position=position)
    made(pictures(), None, draw())["loss"].backward()
    assert [name for name, parameter in made.named_parameters() if parameter.grad is None] == []
    assert float(made.mask_token.grad.abs().max()) > 0


def test_parts_of_a_batch_lose_as_the_whole_does() -> None:
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


def test_a_few_steps_teach_colours() -> None:
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
    assert losses[-1] < 0.5 * losses[0]


def test_mask_tokens_are_not_decayed() -> None:
    found = rules(task(), 1.0)
    assert not found["mask_token"].decay
    assert found["head.weight"].decay


@pytest.mark.parametrize("target", ["colour", "down", "pixels"])
def test_pictures_show_grey_for_masks_and_change_nothing_that_was_not_corrupted(target) -> None:
    made, images = task(MaskedPatches(target)).eval(), pictures()
    shown = reconstruct(made, images, draw(), (0.5,) * 3, (0.5,) * 3)
    found = made.corruption(images, draw())
    chosen = torch.zeros(4, 16, dtype=torch.bool).scatter(1, found.patches, True)

    def spread(flags: torch.Tensor) -> torch.Tensor:
        return assembled(flags.unsqueeze(-1).expand(-1, -1, 3 * 64), (4, 4), 3)

    assert all(part.dtype == torch.uint8 and part.shape == images.shape for part in vars(shown).values())
    torch.testing.assert_close(shown.original.float(), (images * 0.5 + 0.5) * 255, rtol=0, atol=0.51)
    assert (shown.masked[spread(found.masked)] == 128).all()
    assert torch.equal(shown.masked[~spread(chosen)], shown.original[~spread(chosen)])
    assert torch.equal(shown.reconstructed[~spread(chosen)], shown.original[~spread(chosen)])
    assert not torch.equal(shown.reconstructed, shown.original)


def test_a_told_colour_is_painted_in_the_middle_of_its_class() -> None:
    made = MaskedPatches().build(encoder(), 1, mean=IMAGENET["mean"], std=IMAGENET["std"]).eval()
    torch.nn.init.zeros_(made.head.weight)
    with torch.no_grad():
        made.head.bias[3 * 64 + 7 * 8 + 0] = 1.0
    shown = reconstruct(made, pictures(), draw(), IMAGENET["mean"], IMAGENET["std"])
    patch = made.corruption(pictures(), draw()).patches[0, 0]
    y, x = divmod(int(patch), 4)
    colour = shown.reconstructed[0, :, y * 8 : y * 8 + 8, x * 8 : x * 8 + 8].flatten(1)
    assert colour.float().std(1).tolist() == [0, 0, 0]
    assert colour[:, 0].tolist() == [round(255 * (level + 0.5) / 8) for level in (3, 7, 0)]


def test_specs_are_written_and_read() -> None:
    spec = MaskedPatches("down", 0.15)
    assert dataclass_from_json(to_json(spec), MaskedPatches, "objective") == spec


@pytest.mark.parametrize(
    ("spec", "slots", "complaint"),
    [
        ({"target": "down"}, {"patch": 2}, "no 4×4 cells"),
        ({}, {"patch": 32}, "are one patch"),
        ({}, {"embed": Hybrid((1,), 1)}, "set model.embed=Patches"),
        ({}, {"classes": 3}, "model.classes=none"),
        ({}, {"head": "pre-logits"}, "model.head=Linear"),
        ({}, {"pool": "map"}, "model.pool=Mean"),
        ({}, {"channels": 4}, "target=pixels"),
        ({"corrupt": 0.01}, {}, "corrupt 0.01 of 16 patches is 0"),
        ({"corrupt": 0.99}, {}, "corrupt 0.99 of 16 patches is 16"),
    ],
)
def test_what_cannot_work_is_refused_in_a_line(spec, slots, complaint) -> None:
    with pytest.raises(ValueError, match=complaint) as error:
        MaskedPatches(**spec).check(encoder(**slots).config, 8)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [({"corrupt": 0.0}, "corrupt is 0"), ({"corrupt": 1.0}, "corrupt is 1"), ({"target": "hue"}, "unknown target")],
)
def test_settings_that_make_no_sense_are_refused(spec, complaint) -> None:
    with pytest.raises(ValueError, match=complaint):
        MaskedPatches(**spec)
