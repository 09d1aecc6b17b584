"""Masks move with their images: exactly by whole pixels, within half a pixel where the image is interpolated."""

import io
import json
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from vitrail.data.dataset import IGNORED
from vitrail.data.decode import Box, DecodedImage, crop_and_resize, start_decoding
from vitrail.data.preprocessing import Preprocessing, resize_mask
from vitrail.data.rng import BatchRandom, SampleRandom
from vitrail.data.transforms import randaugment
from vitrail.data.transforms.augment import (
    AugmentSlot,
    Blur,
    ColourJitter,
    Flip,
    Grey,
    PadCrop,
    RandAugment,
    RandomErasing,
    Rotate,
    Solarise,
    ThreeAugment,
    Warp,
)
from vitrail.data.transforms.crops import Fit, PaddedCrop, RandomResizedCrop, ScaleJitter, SimpleCrop
from vitrail.data.transforms.pipeline import TrainPipeline, Views, match_masks
from vitrail.data.transforms.user import BoundTransform, describe_transform
from vitrail.utils.json import dataclass_from_json, to_json

SIZE = (32, 32)  # of images below 64 pixels, no centre lies between two pixels: Pillow rounds those to either
MOVING = ("rotate", "shear-x", "shear-y", "translate-x", "translate-y")
CROPS = (
    RandomResizedCrop(SIZE, (0.1, 1.0), interpolation="nearest"),
    SimpleCrop(SIZE, 4, "nearest"),
    ScaleJitter(SIZE, (0.3, 2.5), "nearest", fill=0),
    Fit(SIZE, "nearest"),
)
MOVES = (
    Flip(),
    PadCrop(5),
    RandAugment(2, 9, rate=1.0, interpolation="nearest", fill=0),
    Rotate((-180, 180), interpolation="nearest", fill=0),
)
PHOTOMETRIC = (ColourJitter(), Grey(1.0), Solarise(1.0), Blur(1.0, (1.0, 2.0)), ThreeAugment())


def paint(mask: np.ndarray, channels: int = 3) -> np.ndarray:
    """Return an image whose colour is 40 times the class plus 40, [H, W, C]."""
    return np.repeat((40 + 40 * mask)[..., None], channels, 2).astype(np.uint8)


def random_mask(height: int, width: int, seed: int, cell: int = 1) -> np.ndarray:
    """Return a mask of cells with random classes from 0 to 4."""
    cells = np.random.default_rng(seed).integers(0, 5, (-(-height // cell), -(-width // cell)), dtype=np.uint8)
    return cells.repeat(cell, 0).repeat(cell, 1)[:height, :width].copy()


def find_inner(masks: torch.Tensor, margin: int = 1) -> torch.Tensor:
    """Return where all pixels around have the same class; beyond the edge is another."""
    padded = torch.nn.functional.pad(masks.float(), [margin] * 4, value=-1)
    windows = padded.unfold(0, 2 * margin + 1, 1).unfold(1, 2 * margin + 1, 1).flatten(2)
    return (windows == windows[..., :1]).all(-1)


def split(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert row.dtype == torch.uint8
    return row[:-1], row[-1]


@settings(max_examples=120, deadline=None)
@given(
    crop=st.sampled_from(CROPS),
    steps=st.lists(st.sampled_from(MOVES), max_size=3),
    height=st.integers(1, 63),
    width=st.integers(1, 63),
    orientation=st.integers(1, 8),
    index=st.integers(0, 10_000),
)
def test_painted_images_agree_with_their_masks_after_any_chain(crop, steps, height, width, orientation, index):
    mask = random_mask(height, width, index, cell=5)
    padded = isinstance(crop, PaddedCrop)
    if padded:  # resizes to other sizes: borders of classes may be a pixel off, and stay so under whole shifts
        steps = [step for step in steps if isinstance(step, Flip | PadCrop)]
    pipeline = TrainPipeline((crop, *steps), SIZE, masks=True)
    source = DecodedImage(torch.from_numpy(paint(mask)), orientation, mask=mask)
    with mock.patch.object(randaugment, "OPERATIONS", MOVING):
        pixels, moved = split(pipeline.apply(source, SampleRandom(1, 2, index)))
    shown, inner = moved != IGNORED, find_inner(moved) if padded else torch.ones_like(moved, dtype=torch.bool)
    assert (pixels[:, shown & inner] == 40 + 40 * moved[shown & inner]).all()
    if not isinstance(crop, SimpleCrop):  # its padding is a reflection
        assert (pixels[:, ~shown & inner] == 0).all()


@settings(max_examples=60, deadline=None)
@given(
    start=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    box=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    size=st.tuples(st.integers(1, 90), st.integers(1, 90)),
)
def test_resized_masks_have_the_pixel_at_each_centre(start, box, size):
    mask = np.arange(70 * 70, dtype=np.uint64).reshape(70, 70)
    found = resize_mask(mask, size, (*start, *box))
    rows, columns = (
        np.floor(begin + (np.arange(count) + 0.5) * length / count + 1e-9).astype(int)
        for begin, length, count in zip(start, box, size, strict=True)
    )
    np.testing.assert_array_equal(found, mask[rows][:, columns])


@pytest.mark.parametrize(
    "step", [None, Warp(), RandAugment(2, 9, rate=1.0, fill=0), Rotate((-40, 40), fill=0)], ids=repr
)
@pytest.mark.parametrize("crop", [RandomResizedCrop((64, 64), (0.3, 1.0)), ScaleJitter((64, 64)), SimpleCrop((64, 64))])
def test_interpolated_images_agree_away_from_borders(crop, step):
    """Classes are cells of 25 pixels, so at most 2 pixels around their borders may be blends."""
    pipeline = TrainPipeline((crop, *([step] if step else [])), (64, 64), masks=True)
    checked = 0
    for index in range(20):
        mask = random_mask(150, 200, index, 25)
        source = DecodedImage(torch.from_numpy(paint(mask)), mask=mask)
        with mock.patch.object(randaugment, "OPERATIONS", MOVING):
            pixels, moved = split(pipeline.apply(source, SampleRandom(0, 0, index)))
        inner = find_inner(moved, 2) & (moved != IGNORED)
        assert (((pixels[0][inner].float() - 40) / 40).round() == moved[inner]).all()
        checked += int(inner.sum())
    assert checked > 20 * 64 * 64 * 0.1


@pytest.mark.parametrize("size", [(160, 160), (100, 300)])
@pytest.mark.parametrize("box", [Box(0, 0, 1200, 1600), Box(301, 417, 777, 901), Box(11, 3, 333, 1555)])
@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("axis", [0, 1])
def test_masks_of_reduced_jpegs_are_aligned_within_half_a_pixel(box, size, orientation, axis):
    """Compare where an edge is: in the image by its mean, in the mask by the number of pixels."""
    start, length = (box.top, box.left)[axis], (box.height, box.width)[axis]
    for share in (0.2, 0.43, 0.59, 0.8):
        mask = (np.mgrid[0:1200, 0:1600][axis] >= start + share * length).astype(np.uint8)
        image, data, exif = Image.fromarray(paint(mask)), io.BytesIO(), Image.Exif()
        exif[0x0112] = orientation
        stored = image if orientation == 1 else image.transpose(Image.Transpose.ROTATE_90)
        stored.save(data, "JPEG", quality=98, exif=exif)
        with Image.open(data) as opened:
            pixels, moved = split(crop_and_resize(start_decoding(opened, 3, True, mask), box, size, "bicubic"))
        edges = (pixels[0].float().mean() / 40 - 1) * size[axis], moved.float().mean() * size[axis]
        assert abs(edges[0] - edges[1]) < 0.52
        assert moved.unique().tolist() == [0, 1]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("turn", [False, True])
def test_masks_follow_the_exif_orientation(orientation, turn):
    stored = paint(random_mask(30, 40, 0))
    data, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(stored).save(data, "PNG", exif=exif)
    with Image.open(data) as image:
        upright = (np.asarray(ImageOps.exif_transpose(image))[..., 0] - 40) // 40
    for crop in (RandomResizedCrop((16, 20), interpolation="nearest"), Fit((16, 20), "nearest")):
        with Image.open(data) as image:
            row = TrainPipeline((crop,), (16, 20), turn=turn, masks=True)(image, SampleRandom(0, 0, 3), upright)
        assert (row[0] == 40 + 40 * row[-1]).all()
    wrong = np.zeros((7, 9), dtype=np.uint8)
    with (
        Image.open(data) as image,
        pytest.raises(ValueError, match=r"^its mask has 9×7 pixels, the image .*same size$"),
    ):
        start_decoding(image, 3, turn, wrong)


@pytest.mark.parametrize("step", PHOTOMETRIC, ids=repr)
def test_photometric_steps_leave_masks_alone(step):
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (*SIZE, 3), dtype=np.uint8))
    mask = random_mask(*SIZE, 0)
    pipeline = TrainPipeline((step,), SIZE, masks=True)
    pixels, moved = split(pipeline.apply(DecodedImage(image, mask=mask), SampleRandom(0, 0, 0)))
    assert torch.equal(moved, torch.from_numpy(mask))
    assert (pixels != image.permute(2, 0, 1)).any()


def test_photometric_operations_of_randaugment_leave_masks_alone():
    with mock.patch.object(randaugment, "OPERATIONS", ("invert",)):
        mask = torch.from_numpy(random_mask(*SIZE, 0))
        assert torch.equal(RandAugment(rate=1.0).move_mask(mask, SampleRandom(0, 0, 0)), mask)


def test_a_flip_is_exact():
    mask = random_mask(*SIZE, 0)
    source = DecodedImage(torch.from_numpy(paint(mask)), mask=mask)
    row = TrainPipeline((Flip(1.0),), SIZE, masks=True).apply(source, SampleRandom(0, 0, 0))
    np.testing.assert_array_equal(row[-1].numpy(), mask[:, ::-1])


def test_padding_is_ignored():
    mask = np.zeros((20, 20), dtype=np.uint8)
    source = DecodedImage(torch.full((20, 20, 3), 9, dtype=torch.uint8), mask=mask)
    for step in (PadCrop(4), PadCrop(4, "reflect"), SimpleCrop((20, 20), 4), ScaleJitter((20, 20), (0.2, 0.9), fill=7)):
        pipeline = TrainPipeline((step,), (20, 20), masks=True)
        rows = torch.stack([pipeline.apply(source, SampleRandom(0, 0, index)) for index in range(50)])
        assert set(rows[:, -1].unique().tolist()) == {0, IGNORED}
        if isinstance(step, ScaleJitter):
            assert torch.equal(rows[:, 0] == 7, rows[:, -1] == IGNORED)


@pytest.mark.parametrize("step", [*MOVES, *PHOTOMETRIC[:-1], Warp()], ids=repr)
def test_a_batch_of_masks_equals_single_masks(step):
    masks = np.stack([random_mask(*SIZE, index) for index in range(12)])
    rows = torch.stack([torch.from_numpy(np.concatenate((paint(m).transpose(2, 0, 1), m[None]))) for m in masks])
    pipeline = TrainPipeline((step,), SIZE, masks=True)
    assert pipeline.augments_batches
    indices = np.arange(100, 112)
    whole = pipeline.augment_batch(rows, BatchRandom(5, 1, indices))
    single = [
        pipeline.augment_image(row, SampleRandom(5, 1, int(index))) for row, index in zip(rows, indices, strict=True)
    ]
    assert torch.equal(whole, torch.stack(single))


@pytest.mark.parametrize("size", [(40, 60), (60, 40), (20, 25), (48, 48)])
@pytest.mark.parametrize(
    "preprocessing",
    [
        Preprocessing((32, 32), (32, 32), "squash", "nearest"),
        Preprocessing((32, 24), (40, 40), "cover", "nearest"),
        Preprocessing((32, 33), (31, 31), "cover", "nearest", centre="down"),
        Preprocessing((50, 50), (30, 30), "squash", "nearest"),
    ],
    ids=Preprocessing.describe,
)
def test_evaluation_masks_match_their_images(size, preprocessing):
    mask = random_mask(size[0], size[1], 0, cell=5)
    pixels, moved = preprocessing.to_pixels(Image.fromarray(paint(mask))), preprocessing.to_mask(mask)
    assert moved.shape == pixels.shape[1:]
    shown, inner = moved != IGNORED, find_inner(moved)
    assert (shown & inner).any()
    assert (pixels[0][shown & inner] == 40 + 40 * moved[shown & inner]).all()
    assert torch.equal(shown, pixels[0] > 0)


def test_a_pipeline_takes_masks_or_none():
    image = DecodedImage(torch.zeros((*SIZE, 3), dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"^the pipeline is built with masks=True: give a mask$"):
        TrainPipeline((), SIZE, masks=True).apply(image, SampleRandom(0, 0, 0))
    masked = DecodedImage(image.pixels, mask=np.zeros(SIZE, dtype=np.uint8))
    with pytest.raises(ValueError, match=r"^the pipeline is built with masks=False: give no mask$"):
        TrainPipeline((), SIZE).apply(masked, SampleRandom(0, 0, 0))


def test_scale_jitter_spans_its_factors():
    crop = ScaleJitter((32, 32), (0.5, 2.0))
    corners = [crop.sample_corner(60, 90, SampleRandom(0, 0, index)) for index in range(500)]
    heights = [tall for _, _, tall, _ in corners]
    assert 16 <= min(heights) < 19
    assert 61 < max(heights) <= 64
    assert all(min(0, tall - 32) <= top <= max(0, tall - 32) for top, _, tall, _ in corners)
    assert all(min(0, wide - 32) <= left <= max(0, wide - 32) for _, left, _, wide in corners)
    image = DecodedImage(torch.full((60, 90, 3), 200, dtype=torch.uint8))
    assert crop.apply(image, SampleRandom(0, 0, 0)).shape == (3, 32, 32)


def test_rotation_angles_are_within_their_range():
    rotate = Rotate((10, 20), rate=0.5)
    matrices = rotate.affine_matrices((32, 32), BatchRandom(0, 0, np.arange(400)))
    angles = np.degrees(np.arccos(matrices[:, 0, 0].clip(-1, 1)))
    turned = angles > 1e-6
    assert 0.4 < turned.mean() < 0.6
    assert 10 <= angles[turned].min() < 11
    assert 19 < angles[turned].max() <= 20


def test_steps_without_a_meaning_for_masks_are_refused():
    function = BoundTransform(describe_transform(ImageOps.invert), ImageOps.invert)
    for step, name in (
        (RandomErasing(), "RandomErasing"),
        (function, "the function PIL.ImageOps.invert"),
        (function.slot, "the function PIL.ImageOps.invert"),
    ):
        message = f"^{name} cannot augment images with masks: remove it from the augmentation$"
        with pytest.raises(ValueError, match=message):
            TrainPipeline((Flip(), step), SIZE, masks=True)
    with pytest.raises(
        ValueError, match=r"^several crops of each image \(views\) are not supported for images with masks$"
    ):
        match_masks(Views().build_pipeline((RandomResizedCrop(),), (224, 224)), True)


@pytest.mark.parametrize("slot", [ScaleJitter((64, 64), (0.25, 1.5)), Rotate((-5, 30), 0.3, "bicubic", 0)])
def test_new_slots_round_trip_through_json(slot):
    assert dataclass_from_json(json.loads(json.dumps(to_json(slot))), AugmentSlot, "augment") == slot  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ScaleJitter((0, 4)),
        lambda: ScaleJitter(factor=(2.0, 1.0)),
        lambda: ScaleJitter(factor=(0.0, 1.0)),
        lambda: ScaleJitter(fill=256),
        lambda: Rotate((10, -10)),
        lambda: Rotate((-400, 10)),
        lambda: Rotate(rate=2),
        lambda: Rotate(interpolation="box"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_invalid_arguments_raise_one_line(wrong):
    with pytest.raises(ValueError, match=r"^[^\n]{1,120}$"):
        wrong()
