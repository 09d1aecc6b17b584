"""What is done to pixels, by parameters that somebody else has chosen: uint8 in, uint8 out, [..., C, H, W].

The arithmetic is Pillow's, which timm and torchvision use: blends and tables are cut off, not rounded. A fourth channel, the
opacity, keeps its values and moves with the rest. Factors are numbers, or tensors [B, 1, 1, 1] for the pictures of a batch.
"""

import numpy as np
import torch
from PIL import Image
from torch import Tensor

Factor = float | Tensor
VALUES = torch.arange(256, dtype=torch.uint8)


def luma(pixels: Tensor) -> Tensor:
    """Brightness as ITU-R 601-2 weighs the colours, uint8 [..., 1, H, W]."""
    if pixels.shape[-3] == 1:
        return pixels
    red, green, blue = (pixels[..., i : i + 1, :, :].to(torch.int32) for i in range(3))
    return (red.mul_(19_595).add_(green.mul_(38_470)).add_(blue.mul_(7_471)).add_(0x8000) >> 16).to(torch.uint8)


def blend(base: Tensor | float, pixels: Tensor, factor: Factor) -> Tensor:
    """The base at factor 0, the pixels at 1, and on from there beyond."""
    base = base.float() if isinstance(base, Tensor) else base
    return pixels.float().sub_(base).mul_(factor).add_(base).clamp_(0, 255).to(torch.uint8)


def coloured(pixels: Tensor, changed: Tensor) -> Tensor:
    """What was changed of the colours, with the opacity that the pixels had."""
    if pixels.shape[-3] == changed.shape[-3]:
        return changed
    return torch.cat((changed, pixels[..., changed.shape[-3] :, :, :]), dim=-3)


def colours(pixels: Tensor) -> Tensor:
    """Without opacity."""
    return pixels[..., :3, :, :] if pixels.shape[-3] > 3 else pixels


def brightness(pixels: Tensor, factor: Factor) -> Tensor:
    if isinstance(factor, Tensor):
        return coloured(pixels, _brighter(colours(pixels), factor))
    return by_table(pixels, _brighter(VALUES, factor))


def _brighter(values: Tensor, factor: Factor) -> Tensor:
    return values.float().mul_(factor).clamp_(0, 255).to(torch.uint8)


def contrast(pixels: Tensor, factor: Factor) -> Tensor:
    """Away from, or towards, the mean brightness."""
    total = luma(pixels).sum(dim=(-3, -2, -1), keepdim=True, dtype=torch.int64)
    mean = (total.double() / (pixels.shape[-1] * pixels.shape[-2]) + 0.5).floor().float()
    if isinstance(factor, Tensor) or pixels.ndim == 4:
        return coloured(pixels, blend(mean, colours(pixels), factor))
    return by_table(pixels, blend(mean.flatten(), VALUES, factor))


def saturation(pixels: Tensor, factor: Factor) -> Tensor:
    """Away from, or towards, grey."""
    if pixels.shape[-3] == 1:
        return pixels
    return coloured(pixels, blend(luma(pixels), colours(pixels), factor))


def grey(pixels: Tensor) -> Tensor:
    """Without colour, in as many channels."""
    if pixels.shape[-3] == 1:
        return pixels
    return coloured(pixels, luma(pixels).expand_as(colours(pixels)).contiguous())


def hue(pixels: Tensor, shift: Factor) -> Tensor:
    """Colours turned around the wheel by so much of a full turn."""
    if pixels.shape[-3] == 1:
        return pixels
    rgb = colours(pixels).float() / 255
    top, low = rgb.amax(-3, keepdim=True), rgb.amin(-3, keepdim=True)
    spread = top - low
    red, green, blue = rgb.split(1, dim=-3)
    whole = spread.clamp(min=1e-12)
    angle = torch.where(
        top == red,
        (green - blue) / whole,
        torch.where(top == green, 2 + (blue - red) / whole, 4 + (red - green) / whole),
    )
    angle = angle + 6 * shift
    wanted = []
    for start in (5, 3, 1):  # red, green and blue, by Smith's hexagon
        place = (start + angle).remainder(6)
        wanted.append(top - spread * torch.minimum(place, 4 - place).clamp(0, 1))
    return coloured(pixels, (torch.cat(wanted, dim=-3) * 255 + 0.5).clamp_(0, 255).to(torch.uint8))


def sharpness(pixels: Tensor, factor: Factor) -> Tensor:
    """Away from, or towards, a smoothed picture; the outermost pixels are left alone."""
    if min(pixels.shape[-2:]) < 3:
        return pixels
    inner = colours(pixels)
    rows = inner[..., :-2, :].to(torch.int16) + inner[..., 1:-1, :] + inner[..., 2:, :]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * inner[..., 1:-1, 1:-1].to(torch.int16)
    smooth = total.float().div_(13).add_(0.5).floor_()
    out = inner.clone()
    out[..., 1:-1, 1:-1] = blend(smooth, inner[..., 1:-1, 1:-1], factor)
    return coloured(pixels, out)


def invert(pixels: Tensor) -> Tensor:
    return coloured(pixels, 255 - colours(pixels))


def solarise(pixels: Tensor, threshold: int) -> Tensor:
    """What is at least so bright is inverted."""
    return by_table(pixels, torch.where(VALUES.int() >= threshold, 255 - VALUES, VALUES))


def solarise_add(pixels: Tensor, add: int, threshold: int = 128) -> Tensor:
    """What is darker than the threshold is made brighter."""
    brighter = (VALUES.int() + add).clamp(max=255).to(torch.uint8)
    return by_table(pixels, torch.where(threshold > VALUES, brighter, VALUES))


def posterise(pixels: Tensor, bits: int) -> Tensor:
    """Only so many of the upper bits are kept."""
    if bits >= 8:
        return pixels
    return coloured(pixels, colours(pixels) & (0xFF & ~(2 ** (8 - bits) - 1)))


def autocontrast(pixels: Tensor) -> Tensor:
    """Every colour stretched to the whole range."""
    if pixels.ndim == 4:
        return torch.stack([autocontrast(each) for each in pixels])
    inner = colours(pixels)
    flat = inner.flatten(1)
    values = np.arange(256)
    tables = []
    for low, high in zip(flat.amin(1).tolist(), flat.amax(1).tolist(), strict=True):
        scale = 255.0 / (high - low) if high > low else 1.0
        table = values * scale + (-low * scale if high > low else 0.0)
        tables.append(table.clip(0, 255).astype(np.uint8))
    return coloured(pixels, looked_up(inner, tables))


def equalise(pixels: Tensor) -> Tensor:
    """Every colour's values spread so that each is about as frequent."""
    if pixels.ndim == 4:
        return torch.stack([equalise(each) for each in pixels])
    inner = colours(pixels)
    tables = []
    for plane in inner:
        counts = np.array(as_image(plane).histogram())
        found = counts[counts > 0]
        step = int(found.sum() - found[-1]) // 255 if len(found) > 1 else 0
        below = np.concatenate(([0], counts.cumsum()[:-1]))
        table = (step // 2 + below) // step if step else np.arange(256)
        tables.append(table.clip(0, 255).astype(np.uint8))
    return coloured(pixels, looked_up(inner, tables))


def looked_up(pixels: Tensor, tables: list[np.ndarray]) -> Tensor:
    """Every value replaced by what the table of its channel says, one picture [C, H, W]."""
    out = bytearray()
    for plane, table in zip(pixels, tables, strict=True):
        out += plane.contiguous().numpy().tobytes().translate(table.tobytes())
    return torch.frombuffer(out, dtype=torch.uint8).view(pixels.shape)


def by_table(pixels: Tensor, table: Tensor) -> Tensor:
    """Every value of every colour replaced by what the table [256] says: what could be computed is looked up."""
    inner = colours(pixels)
    out = bytearray(inner.contiguous().numpy().data).translate(table.numpy().tobytes())
    return coloured(pixels, torch.frombuffer(out, dtype=torch.uint8).view(inner.shape))


def blur(pixels: Tensor, radius: float) -> Tensor:
    """Pillow's Gaussian blur, one picture [C, H, W]."""
    from PIL import ImageFilter

    blurred = ImageFilter.GaussianBlur(radius)
    planes = [np.asarray(as_image(plane).filter(blurred)) for plane in colours(pixels)]
    return coloured(pixels, torch.from_numpy(np.stack(planes)))


def smooth(pixels: Tensor, deviations: Tensor) -> Tensor:
    """A Gaussian blur of every picture [B, C, H, W] by its own deviation [B], float64; edges are repeated.

    A row of pixels times a matrix, and a column too. The weights are whole 256ths: so all sums are whole numbers below 2^24,
    which are exact in float32 in whatever order they are taken, and one picture gets the same bytes as many.
    """
    inner = colours(pixels)
    height, width = inner.shape[-2:]
    columns = smoothing(width, deviations)
    rows = columns if width == height else smoothing(height, deviations)
    total = rows @ inner.float() @ columns.transpose(-1, -2)  # 65,536 times what is wanted
    return coloured(pixels, total.add_(2**15).div_(2**16).to(torch.uint8))


def smoothing(side: int, deviations: Tensor) -> Tensor:
    """How many 256ths of each pixel of a line go into each, [B, 1, side, side]."""
    edges = torch.arange(1 - side, side + 1, dtype=torch.float64) - 0.5  # between pixels, as seen from one of them
    spread = (deviations.square() - 1 / 12).clamp(min=1e-6).sqrt()  # a pixel is wide itself, and spreads by that much
    below = (256 * torch.special.ndtr(edges / spread[:, None])).round_().float()  # [B, 2·side]
    places = torch.arange(side + 1) - torch.arange(side)[:, None] + side - 1
    below = below[:, places]  # [B, side, side + 1]
    below[:, :, 0], below[:, :, -1] = 0, 256  # what lies outside is as the edge
    return below.diff(dim=2)[:, None]


def as_image(plane: Tensor) -> Image.Image:
    """A plane [H, W] as a grey picture of the same memory."""
    plane = plane.contiguous()
    size = (plane.shape[1], plane.shape[0])
    return Image.frombuffer("L", size, plane.numpy(), "raw", "L", 0, 1)  # pyright: ignore[reportArgumentType]
