"""Spoken digits find handwritten digits: one encoder for both, beside two encoders of the same size.

    python benchmarks/one_encoder.py
    python benchmarks/one_encoder.py --seeds 0 --steps 400 --figure docs/one-encoder.png

The models, the data and the training are those of `examples/one_encoder.py`. Recordings are 1,200 of the Free Spoken Digit
Dataset, of six speakers: numbers 0 to 4 are the test, 5 to 9 the validation. Settings were chosen on the validation parts. Each
test recording is compared with all test images; top-1 accuracy counts those whose nearest image shows their digit. Intervals
are Wilson's over the recordings, whose speakers are those of the training recordings.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import measure
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from vitrail.data.sound import draw_spectrogram, open_sound
from vitrail.metrics.intervals import wilson_interval

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import one_encoder  # noqa: E402  # pyright: ignore[reportMissingImports]

RECORDINGS = ROOT.parent / "shared" / "data" / "spoken-digits"
INK, QUIET, RIGHT, WRONG, PAPER = "#1c1b22", "#5c5867", "#0f7f68", "#b01e52", "#fbfaf7"
SPEAKERS = ("jackson", "theo", "nicolas", "yweweler", "george")  # of the queries in the figure
QUERIES, SHOWN, CELL = (7, 3, 0, 5), 10, 56  # digits, images of each, pixels


class SeparateEncoders(nn.Module):
    """An encoder for each modality, with the same scale of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: one_encoder.build_encoder() for name in one_encoder.build_encoder()})
        for name, part in self.parts.items():
            for other in [other for other in part if other != name]:
                del part.models[other]
        self.logits = next(iter(self.parts.values())).logits

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __getitem__(self, name: str) -> nn.Module:
        return self.parts[name].models[name]

    def encode(self, name: str, batch: Tensor) -> Tensor:
        return self.parts[name].encode(name, batch)

    def forward(self, batches: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.encode(name, batch) for name, batch in batches.items()}


def draw_figure(path: Path, ranked: Tensor, data: dict[str, Any], files: list[Path]) -> None:
    """Draw the spectrograms of recordings, and beside each the images nearest to it."""
    images, digits = data["images"]["test"]
    names = ("LiberationSans-Regular.ttf", "DejaVuSans.ttf")
    font = next(ImageFont.truetype(name, 30) for name in names if has_font(name))
    left, gap, high = 240, 12, 2 * CELL
    wide = left + 60 + SHOWN * (2 * CELL + gap) + 40
    sheet = Image.new("RGB", (wide, 90 + len(QUERIES) * (high + 70) + 10), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((40, 28), "said", INK, font)
    draw.text((left + 60, 28), "the nearest handwritten digits, from the most similar on", INK, font)
    for row, (digit, speaker) in enumerate(zip(QUERIES, SPEAKERS, strict=False)):
        query = next(n for n, file in enumerate(files) if file.name.startswith(f"{digit}_{speaker}_"))
        top = 90 + row * (high + 70)
        with open_sound(str(files[query])) as sound:
            spectrogram = draw_spectrogram(sound).resize((left - 40, high), Image.Resampling.BICUBIC)
        sheet.paste(spectrogram.convert("RGB"), (40, top))
        draw.text((40, top + high + 6), f"“{digit}”, {speaker}", QUIET, font)
        for place, index in enumerate(ranked[query, :SHOWN].tolist()):
            at = left + 60 + place * (2 * CELL + gap)
            pixels = images[index, 0]
            grey = ((pixels - pixels.min()) / (pixels.max() - pixels.min()) * 255).to(torch.uint8).numpy()
            sheet.paste(Image.fromarray(grey).resize((high, high), Image.Resampling.NEAREST), (at, top))
            found = int(digits[index])
            draw.text(
                (at + high / 2, top + high + 6), str(found), RIGHT if found == digit else WRONG, font, anchor="ma"
            )
    sheet.save(path)


def has_font(name: str) -> bool:
    try:
        ImageFont.truetype(name, 10)
    except OSError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=Path, default=RECORDINGS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--figure", type=Path, help="figure of queries and the images nearest to them")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        for kind in ("shared", "separate"):
            torch.manual_seed(seed)
            encoder = one_encoder.build_encoder() if kind == "shared" else SeparateEncoders()
            data = one_encoder.load_data(encoder, options.recordings)
            parameters = sum(p.numel() for p in encoder.parameters())
            begin = time.process_time()
            one_encoder.train(encoder, data, options.steps, options.batch)
            seconds = time.process_time() - begin
            ranked, accuracy = one_encoder.retrieve(encoder, data["sounds"]["test"], data["images"]["test"])
            interval = wilson_interval(accuracy * len(ranked), len(ranked))
            row = {"seed": seed, "encoder": kind, "parameters": parameters, "steps": options.steps, "seconds": seconds}
            rows.append(
                row | {"sounds": len(ranked), "images": ranked.shape[1], "top1": accuracy, "interval": interval}
            )
            low, high = interval
            result = f"{100 * accuracy:.1f} % ({100 * low:.1f}–{100 * high:.1f}) of {len(ranked)} recordings"
            print(f"seed {seed}, {kind} ({parameters:,} parameters, {seconds:.0f} s of a core): {result}", flush=True)
            measure.save("one_encoder", rows)
            if options.figure is not None and kind == "shared" and seed == options.seeds[0]:
                draw_figure(options.figure, ranked, data, one_encoder.list_recordings(options.recordings)["test"])


if __name__ == "__main__":
    main()
