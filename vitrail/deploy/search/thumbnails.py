"""Small images of what was indexed or embedded: of an image, of the middle of a video, of the spectrogram of a sound."""

from typing import Any

from PIL import Image, ImageOps

from vitrail.data.preprocessing import convert_image
from vitrail.data.sound import Sound, draw_spectrogram
from vitrail.data.video import Video

BACKGROUND = (255, 255, 255)  # behind transparent pixels


def draw_still(item: Any) -> Image.Image:
    """Return an opened image as it is, the frame in the middle of a video, or the spectrogram of a sound."""
    if isinstance(item, Sound):
        return draw_spectrogram(item)
    if isinstance(item, Video):
        (frame,) = (frame.copy() for frame in item.iter_frames([len(item) // 2]))
        return frame
    return item


def shrink_image(image: Image.Image, size: int) -> Image.Image:
    """Return an upright RGB image whose longer side is at most `size`; transparent pixels become white."""
    image.draft(None, (size, size))
    upright = ImageOps.exif_transpose(image)
    if upright.mode == "RGB" and "transparency" not in upright.info:
        flat = upright.copy() if upright is image else upright
    else:
        upright = convert_image(upright, 4)
        flat = Image.alpha_composite(Image.new("RGBA", upright.size, (*BACKGROUND, 255)), upright).convert("RGB")
    flat.thumbnail((size, size), Image.Resampling.LANCZOS)
    return flat
