"""Image operations with given parameters, uint8 to uint8, [..., C, H, W].

The arithmetic is Pillow's, which timm and torchvision use: results are truncated, not rounded. A fourth channel (alpha)
keeps its values under colour operations and moves with the others. Factors are numbers, or tensors [B, 1, 1, 1].
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor

from vitrail.data.dataset import IGNORED
from vitrail.data.preprocessing import FILTERS, ImageSize

Factor = float | Tensor
BYTE_VALUES = torch.arange(256, dtype=torch.uint8)
# Source of an output pixel: x' = a x + b y + c, y' = d x + e y + f.
AffineMatrix = tuple[float, float, float, float, float, float]
HEXAGON_STARTS = torch.tensor((5.0, 3.0, 1.0)).view(3, 1, 1)  # of the channels in Smith's hexagon of hues
STRIP_PIXELS = 2**14  # processed at once where an operation has many intermediate results, to stay in the CPU caches
ROUNDING_MARGIN = 2e-4  # tolerance for float32 results just below an integer, before truncation


def luma(pixels: Tensor) -> Tensor:
    """Return the luma of ITU-R 601-2, uint8 [..., 1, H, W]."""
    if pixels.shape[-3] == 1:
        return pixels
    return to_bytes(float_luma(pixels[..., :3, :, :].float()))


def float_luma(values: Tensor) -> Tensor:
    """Return the luma of float32 values, whole numbers [..., 1, H, W].

    All sums are multiples of 2^-16 below 2^8, so they are exact in any order.
    """
    if values.shape[-3] == 1:
        return values
    red, green, blue = values.split(1, dim=-3)
    total = (red * (19_595 / 2**16)).add_(green, alpha=38_470 / 2**16).add_(blue, alpha=7_471 / 2**16)
    return total.add_(0.5).floor_()


def to_bytes(values: Tensor) -> Tensor:
    """Truncate float32 values from 0 to 255 to uint8; by way of int16, which is three times as fast."""
    return values.to(torch.int16).to(torch.uint8)


def blend(base: Tensor | float, values: Tensor, factor: Factor) -> Tensor:
    """Interpolate float32 values in place from the base (factor 0) to themselves (factor 1), and extrapolate beyond."""
    return values.sub_(base).mul_(factor).add_(base).clamp_(0, 255).floor_()


def restore_alpha(pixels: Tensor, changed: Tensor) -> Tensor:
    """Append the alpha channel of the original pixels to the changed colours."""
    if pixels.shape[-3] == changed.shape[-3]:
        return changed
    return torch.cat((changed, pixels[..., changed.shape[-3] :, :, :]), dim=-3)


def drop_alpha(pixels: Tensor) -> Tensor:
    """Return the colour channels."""
    return pixels[..., :3, :, :] if pixels.shape[-3] > 3 else pixels


def change_colours(pixels: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply an operation on float32 values, which may change them in place, to the colour channels."""
    return restore_alpha(pixels, to_bytes(operation(drop_alpha(pixels).float())))


def adjust_brightness(pixels: Tensor, factor: Factor) -> Tensor:
    return change_colours(pixels, lambda values: scale_brightness(values, factor))


def adjust_contrast(pixels: Tensor, factor: Factor) -> Tensor:
    """Blend with the mean luma."""
    return change_colours(pixels, lambda values: scale_contrast(values, factor))


def adjust_saturation(pixels: Tensor, factor: Factor) -> Tensor:
    """Blend with the grey image."""
    return change_colours(pixels, lambda values: scale_saturation(values, factor))


# The same on float32 values, whole numbers from 0 to 255 of one or three channels: changed in place, and returned.


def scale_brightness(values: Tensor, factor: Factor) -> Tensor:
    return values.mul_(factor).clamp_(0, 255).floor_()


def scale_contrast(values: Tensor, factor: Factor) -> Tensor:
    count = values.shape[-1] * values.shape[-2]
    exact = torch.float32 if 255 * count < 2**24 else torch.float64  # of a sum of whole numbers, in any order
    if values.ndim == 3:
        return blend(math.floor(float_luma(values).sum(dtype=exact).item() / count + 0.5), values, factor)
    total = float_luma(values).sum(dim=(-3, -2, -1), keepdim=True, dtype=exact).double()
    return blend((total / count + 0.5).floor().float(), values, factor)


def scale_saturation(values: Tensor, factor: Factor) -> Tensor:
    return values if values.shape[-3] == 1 else blend(float_luma(values), values, factor)


def rotate_hue(values: Tensor, shift: Factor) -> Tensor:
    if values.shape[-3] == 3:
        rows = max(1, STRIP_PIXELS // max(1, values[..., 0, 0, :].numel()))
        for strip in values.split(rows, dim=-2):
            rotate_hue_of_strip(strip, shift)
    return values


def rotate_hue_of_strip(values: Tensor, shift: Factor) -> None:
    red, green, blue = values.div_(255).split(1, dim=-3)
    top = torch.maximum(torch.maximum(red, green), blue)
    spread = top - torch.minimum(torch.minimum(red, green), blue)
    # Sectors as 0 or 1 in float32: products with them are exact, and forty times faster than torch.where.
    of_red, of_green = (torch.eq(top, channel, out=torch.empty_like(top)) for channel in (red, green))
    of_green.sub_(of_red).clamp_(min=0)
    of_blue = 1 - of_red - of_green
    angle = (green - blue).mul_(of_red).addcmul_(blue - red, of_green).addcmul_(red - green, of_blue)
    angle.div_(spread.clamp(min=1e-12)).add_(of_green, alpha=2).add_(of_blue, alpha=4).add_(6 * shift)
    position = angle + HEXAGON_STARTS
    position.sub_((position / 6).floor_(), alpha=6)  # modulo 6, several times faster than remainder
    torch.minimum(position, 4 - position, out=position)
    torch.sub(top, position.clamp_(0, 1).mul_(spread), out=values)
    values.mul_(255).add_(0.5).floor_()


def convert_to_grey(pixels: Tensor) -> Tensor:
    """Replace colours by luma, keeping the number of channels."""
    if pixels.shape[-3] == 1:
        return pixels
    return restore_alpha(pixels, luma(pixels).expand_as(drop_alpha(pixels)).contiguous())


def adjust_sharpness(pixels: Tensor, factor: Factor) -> Tensor:
    """Blend with a smoothed image; the border pixels are unchanged."""
    if min(pixels.shape[-2:]) < 3:
        return pixels
    inner = drop_alpha(pixels)
    rows = inner[..., :-2, :].to(torch.int16) + inner[..., 1:-1, :] + inner[..., 2:, :]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * inner[..., 1:-1, 1:-1].to(torch.int16)
    smooth = total.float().div_(13).add_(0.5).floor_()
    out = inner.clone()
    out[..., 1:-1, 1:-1] = to_bytes(blend(smooth, inner[..., 1:-1, 1:-1].float(), factor))
    return restore_alpha(pixels, out)


def invert(pixels: Tensor) -> Tensor:
    return restore_alpha(pixels, 255 - drop_alpha(pixels))


def solarise(pixels: Tensor, threshold: int) -> Tensor:
    """Invert values at or above the threshold."""
    return apply_table(pixels, torch.where(BYTE_VALUES.int() >= threshold, 255 - BYTE_VALUES, BYTE_VALUES))


def solarise_add(pixels: Tensor, add: int, threshold: int = 128) -> Tensor:
    """Add to values below the threshold."""
    brighter = (BYTE_VALUES.int() + add).clamp(max=255).to(torch.uint8)
    return apply_table(pixels, torch.where(threshold > BYTE_VALUES, brighter, BYTE_VALUES))


def posterise(pixels: Tensor, bits: int) -> Tensor:
    """Keep only the upper bits."""
    if bits >= 8:
        return pixels
    return restore_alpha(pixels, drop_alpha(pixels) & (0xFF & ~(2 ** (8 - bits) - 1)))


def autocontrast(pixels: Tensor) -> Tensor:
    """Stretch every channel to the full range."""

    def stretch(plane: Tensor) -> np.ndarray:
        low, high = int(plane.min()), int(plane.max())
        scale = 255.0 / (high - low) if high > low else 1.0
        return np.arange(256) * scale + (-low * scale if high > low else 0.0)

    return apply_channel_tables(pixels, stretch)


def equalise(pixels: Tensor) -> Tensor:
    """Equalise the histogram of every channel."""

    def flatten_histogram(plane: Tensor) -> np.ndarray:
        counts = np.array(plane_to_image(plane).histogram())
        used = counts[counts > 0]
        step = int(used.sum() - used[-1]) // 255 if len(used) > 1 else 0
        below = np.concatenate(([0], counts.cumsum()[:-1]))
        return (step // 2 + below) // step if step else np.arange(256)

    return apply_channel_tables(pixels, flatten_histogram)


def apply_channel_tables(pixels: Tensor, make_table: Callable[[Tensor], np.ndarray]) -> Tensor:
    """Look up every colour value in the table [256] made for its channel of its image."""
    inner, out = drop_alpha(pixels), bytearray()
    for plane in inner.flatten(0, -3):
        table = make_table(plane).clip(0, 255).astype(np.uint8)
        out += plane.contiguous().numpy().tobytes().translate(table.tobytes())
    return restore_alpha(pixels, torch.frombuffer(out, dtype=torch.uint8).view(inner.shape))


def apply_table(pixels: Tensor, table: Tensor) -> Tensor:
    """Look up every colour value in one table [256]."""
    inner = drop_alpha(pixels)
    out = bytearray(inner.contiguous().numpy().data).translate(table.numpy().tobytes())
    return restore_alpha(pixels, torch.frombuffer(out, dtype=torch.uint8).view(inner.shape))


def blur_image(pixels: Tensor, radius: float) -> Tensor:
    """Apply Pillow's Gaussian blur to one image [C, H, W]."""
    blur = ImageFilter.GaussianBlur(radius)
    planes = [np.asarray(plane_to_image(plane).filter(blur)) for plane in drop_alpha(pixels)]
    return restore_alpha(pixels, torch.from_numpy(np.stack(planes)))


def blur_batch(pixels: Tensor, deviations: Tensor) -> Tensor:
    """Blur every image [B, C, H, W] with its own standard deviation [B], float64; edges are replicated.

    The blur is two matrix products, over rows and columns. Weights are multiples of 1/256, so all sums are integers below
    2^24, exact in float32 in any order: an image gets the same bytes alone and in a batch.
    """
    inner = drop_alpha(pixels)
    height, width = inner.shape[-2:]
    columns = build_blur_matrices(width, deviations)
    rows = columns if width == height else build_blur_matrices(height, deviations)
    total = rows @ inner.float() @ columns.transpose(-1, -2)  # scaled by 65,536
    return restore_alpha(pixels, to_bytes(total.add_(2**15).div_(2**16)))


def build_blur_matrices(side: int, deviations: Tensor) -> Tensor:
    """Return the weight, in 1/256, of each pixel of a line for each output pixel, [B, 1, side, side]."""
    edges = torch.arange(1 - side, side + 1, dtype=torch.float64) - 0.5  # pixel edges relative to a pixel
    spread = (deviations.square() - 1 / 12).clamp(min=1e-6).sqrt()  # a pixel itself has variance 1/12
    below = (256 * torch.special.ndtr(edges / spread[:, None])).round_().float()  # [B, 2·side]
    offsets = torch.arange(side + 1) - torch.arange(side)[:, None] + side - 1
    below = below[:, offsets]  # [B, side, side + 1]
    below[:, :, 0], below[:, :, -1] = 0, 256  # replicated edges
    return below.diff(dim=2)[:, None]


def plane_to_image(plane: Tensor) -> Image.Image:
    """Wrap a plane [H, W] as a grey image without copying."""
    plane = plane.contiguous()
    size = (plane.shape[1], plane.shape[0])
    return Image.frombuffer("L", size, plane.numpy(), "raw", "L", 0, 1)  # pyright: ignore[reportArgumentType]


def identity_matrices(count: int) -> np.ndarray:
    """Return identity matrices, [n, 3, 3]."""
    return np.tile(np.eye(3), (count, 1, 1))


def apply_affine(pixels: Tensor, matrix: AffineMatrix, interpolation: str, fill: int) -> Tensor:
    """Sample uint8 [..., C, H, W] at the positions of the matrix; outside is the fill value."""
    a, b, c, d, e, f = matrix
    if interpolation != "nearest" and a == e == 1:
        planes = pixels.flatten(0, -3)
        if d == f == 0:
            return shift_rows(planes, b, c, interpolation, fill).view(pixels.shape)
        if b == c == 0:
            columns = shift_rows(planes.transpose(1, 2).contiguous(), d, f, interpolation, fill)
            return columns.transpose(1, 2).contiguous().view(pixels.shape)
    if pixels.ndim == 4:
        return torch.stack([apply_affine(image, matrix, interpolation, fill) for image in pixels])
    array = pixels.permute(1, 2, 0).contiguous().numpy()
    image = Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
    fill_colour = fill if pixels.shape[0] == 1 else (fill,) * pixels.shape[0]
    size, affine = (pixels.shape[2], pixels.shape[1]), Image.Transform.AFFINE
    moved = np.array(image.transform(size, affine, matrix, FILTERS[interpolation], fillcolor=fill_colour))
    return torch.from_numpy(moved if moved.ndim == 3 else moved[..., None]).permute(2, 0, 1).contiguous()


def move_mask(mask: Tensor, matrix: AffineMatrix) -> Tensor:
    """Sample a mask, uint8 [H, W], at the nearest pixels of the positions of the matrix; outside is IGNORED."""
    return apply_affine(mask[None], matrix, "nearest", IGNORED)[0]


def relative_matrix(matrix: AffineMatrix, size: ImageSize) -> np.ndarray:
    """Convert a matrix for positions in pixels of an image of this size to fractions of its sides, [3, 3]."""
    (a, b, c, d, e, f), (height, width) = matrix, size
    return np.array(((a, b * height / width, c / width), (d * width / height, e, f / height), (0, 0, 1)))


def shift_rows(pixels: Tensor, slope: float, shift: float, interpolation: str, fill: int) -> Tensor:
    """Shift each row y of [C, H, W] by slope · y + shift."""
    channels, height, width = pixels.shape
    offsets = slope * (np.arange(height) + 0.5) + shift  # [H]
    whole = np.floor(offsets).astype(np.int64)
    fraction = torch.from_numpy(offsets - whole).float()[:, None]  # [H, 1]
    canvas = np.empty((channels, height, width + 3), dtype=np.uint8)  # one neighbour before each row, two after
    source = pixels.numpy()
    for top, bottom, begin in find_runs(whole):
        first = begin - 1
        left, right = min(max(0, -first), width + 3), max(min(width + 3, width - first), 0)
        rows = source[:, top:bottom]
        if left < right:
            canvas[:, top:bottom, left:right] = rows[..., left + first : right + first]
        canvas[:, top:bottom, :left] = rows[..., :1]
        canvas[:, top:bottom, max(left, right) :] = rows[..., -1:]
    near = torch.from_numpy(canvas).float()
    if interpolation == "bilinear":
        out = near[..., 1 : width + 1] * (1 - fraction)
        out.addcmul_(near[..., 2 : width + 2], fraction)
    else:  # Keys' cubic convolution with a = -1
        square, cube = fraction * fraction, fraction * fraction * fraction
        out = near[..., :width] * (2 * square - fraction - cube)
        out.addcmul_(near[..., 1 : width + 1], 1 - 2 * square + cube)
        out.addcmul_(near[..., 2 : width + 2], fraction + square - cube)
        out.addcmul_(near[..., 3 : width + 3], cube - square)
    out = to_bytes(out.add_(ROUNDING_MARGIN).clamp_(0, 255))
    for top, bottom, nearest in find_runs(np.floor(offsets + 0.5).astype(np.int64)):  # pixels whose centre is outside
        if nearest:
            outside = slice(0, -nearest) if nearest < 0 else slice(max(0, width - nearest), width)
            out[:, top:bottom, outside] = fill
    return out


def find_runs(values: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield the start, end and value of every run of equal values."""
    starts = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    yield from zip(starts[:-1], starts[1:], values[starts[:-1]].tolist(), strict=True)


def rotation_matrix(degrees: float, height: int, width: int) -> AffineMatrix:
    """Return the matrix of a counter-clockwise rotation around the centre."""
    angle = -math.radians(degrees % 360.0)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = width / 2, height / 2
    return (cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y)
