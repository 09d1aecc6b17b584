"""Train one encoder on handwritten and spoken digits, then find images of a digit by a recording of it.

    python examples/one_encoder.py
    python examples/one_encoder.py --recordings ../recordings --steps 400 --batch 64 --out digits.safetensors

The same layers read patches of images and patches of spectrograms; an image and a sound of the same digit are pulled together,
others apart. The images are the handwritten digits that come with the package. The sounds are recordings named
DIGIT_SPEAKER_NUMBER.wav, such as those of https://github.com/Jakobovski/free-spoken-digit-dataset; numbers 0 to 4 are for the
test, 5 to 9 for validation. Without `--recordings`, the sounds are the tones of a telephone's keys, made here with noise.

Expect that the image nearest to a test tone shows its digit for more than 80 % of them after ten seconds on one core, and one
file from which `vitrail.load(file, take="images")` reads the model of images.
"""

import argparse
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import vitrail
from vitrail.data.log_mel import LogMel
from vitrail.data.sources import load_dataset
from vitrail.objectives.contrastive import supervised_loss

SPLITS = ("train", "validation", "test")
RATE, SIDE, MELS, FRAMES = 8000, 16, 32, 32  # Hz, pixels, rows and columns of a spectrogram
FEATURES = LogMel(RATE, MELS, frame_length=320, frame_shift=160, align="centre")
LAYERS = {
    "width": 64,
    "depth": 4,
    "heads": 4,
    "embed": "conv-pool",
    "position": "sincos2d",
    "pool": "mean",
    "channels": 1,
}
KEYS = [(941, 1336), (697, 1209), (697, 1336), (697, 1477), (770, 1209), (770, 1336), (770, 1477)]
KEYS += [(852, 1209), (852, 1336), (852, 1477)]  # Hz, the two tones of the keys 0 to 9

Samples = tuple[Tensor, Tensor]  # inputs [n, 1, H, W] and digits [n]


def load_images(preprocessing: vitrail.Preprocessing) -> dict[str, Samples]:
    """Return the handwritten digits of each split."""
    data = load_dataset("digits")
    stacked = {
        split: torch.stack([preprocessing(data[split].open(n)) for n in range(len(data[split]))]) for split in SPLITS
    }
    return {split: (stacked[split], torch.from_numpy(data[split].targets)) for split in SPLITS}


def list_recordings(folder: Path) -> dict[str, list[Path]]:
    """Return the recordings of each split by their number: 0 to 4 test, 5 to 9 validation, the others train."""
    files: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for path in sorted(folder.glob("[0-9]_*_*.wav")):
        number = int(path.stem.rpartition("_")[2])
        files["test" if number < 5 else "validation" if number < 10 else "train"].append(path)
    if not all(files.values()):
        raise SystemExit(f"{folder} has no recordings named DIGIT_SPEAKER_NUMBER.wav, such as 7_jackson_32.wav")
    return files


def dial(digit: int, rng: np.random.Generator) -> np.ndarray:
    """Return the tone of a telephone's key with noise, of a random length and loudness: float32 [n]."""
    time = np.arange(rng.integers(RATE // 5, RATE // 2)) / RATE
    tone = sum(np.sin(2 * math.pi * hertz * rng.uniform(0.98, 1.02) * time) for hertz in KEYS[digit])
    return (rng.uniform(0.1, 0.3) * tone + 0.03 * rng.standard_normal(len(time))).astype(np.float32)


def load_sounds(preprocessing: vitrail.Preprocessing, folder: Path | None) -> dict[str, Samples]:
    """Return the spectrograms of the recordings in a folder, or without one of tones, for each split."""
    if folder is not None:
        files = list_recordings(folder)
        digits = {split: [int(path.name[0]) for path in files[split]] for split in SPLITS}
        stacked = {split: torch.stack([preprocessing(path) for path in files[split]]) for split in SPLITS}
    else:
        rng = np.random.default_rng(0)
        digits = {split: [n % 10 for n in range(600 if split == "train" else 200)] for split in SPLITS}
        stacked = {split: torch.stack([preprocessing(dial(n, rng)) for n in digits[split]]) for split in SPLITS}
    return {split: (stacked[split], torch.tensor(digits[split])) for split in SPLITS}


def shift(batch: Tensor, rows: int, columns: int) -> Tensor:
    """Return images [B, C, H, W] that are shifted at random by up to so many rows and columns, the border repeated."""
    height, width = batch.shape[-2:]
    padded = F.pad(batch, (columns, columns, rows, rows), mode="replicate")
    tops, lefts = torch.randint(2 * rows + 1, (len(batch),)), torch.randint(2 * columns + 1, (len(batch),))
    places = zip(padded, tops, lefts, strict=True)
    return torch.stack([x[:, top : top + height, left : left + width] for x, top, left in places])


def hide(batch: Tensor, most: int) -> Tensor:
    """Return spectrograms with a random band of up to `most` rows and one of columns set to 0, the mean (SpecAugment)."""
    batch = batch.clone()
    for x in batch:
        for axis in (1, 2):
            length = int(torch.randint(most + 1, ()))
            x.narrow(axis, int(torch.randint(x.shape[axis] - length + 1, ())), length).zero_()
    return batch


def learning_rate(step: int, steps: int, peak: float = 2e-3) -> float:
    """Return the learning rate of a step: linear warm-up over a tenth of the steps, then cosine decay to 0."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2


def standardise(model: vitrail.Model, data: dict[str, Samples]) -> dict[str, Samples]:
    """Return the samples with the mean 0 and the deviation 1 of the training samples; both go into the preprocessing."""
    mean, std = data["train"][0].mean(), data["train"][0].std()
    assert isinstance(model.preprocessing, vitrail.Preprocessing)
    model.preprocessing = replace(model.preprocessing, mean=(mean.item(),), std=(std.item(),))
    return {split: ((inputs - mean) / std, digits) for split, (inputs, digits) in data.items()}


@torch.no_grad()
def retrieve(encoder: vitrail.SharedEncoder, sounds: Samples, images: Samples) -> tuple[Tensor, float]:
    """Return for each sound the images from the most similar on, [n, m], and how often the first one shows its digit."""
    encoder.eval()
    similar = encoder.encode("sounds", sounds[0]) @ encoder.encode("images", images[0]).T
    ranked = similar.argsort(dim=1, descending=True, stable=True)
    return ranked, (images[1][ranked[:, 0]] == sounds[1]).float().mean().item()


def train(
    encoder: vitrail.SharedEncoder, data: dict[str, dict[str, Samples]], steps: int, batch: int, rows: int = 6
) -> None:
    """Train on batches of both modalities in every step: an image and a sound of one digit are a pair.

    Up to `rows` rows and columns of a spectrogram are hidden; it is shifted too, unless `rows` is 0: a tone is one row.
    """
    decayed = [parameter for parameter in encoder.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in encoder.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        encoder.train()
        chosen = {name: torch.randint(len(data[name]["train"][1]), (batch,)) for name in encoder}
        images, image_digits = (part[chosen["images"]] for part in data["images"]["train"])
        sounds, sound_digits = (part[chosen["sounds"]] for part in data["sounds"]["train"])
        features = encoder({"images": shift(images, 1, 1), "sounds": hide(shift(sounds, min(rows, 1), 4), rows)})
        both = torch.cat((features["images"], features["sounds"]))
        loss = supervised_loss(encoder.logits, both, torch.cat((image_digits, sound_digits)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % max(1, steps // 6) == 0:
            accuracy = retrieve(encoder, data["sounds"]["validation"], data["images"]["validation"])[1]
            print(f"step {step + 1:4d}  loss {loss.item():.3f}  validation top-1 accuracy {accuracy:.3f}", flush=True)


def build_encoder() -> vitrail.SharedEncoder:
    """Return an encoder of images and sounds with their preprocessing."""
    images = vitrail.configure(patch=4, image_size=SIDE, classes=None, **LAYERS)
    sounds = vitrail.configure(patch=4, image_size=(MELS, FRAMES), classes=None, **LAYERS)
    encoder = vitrail.SharedEncoder.build({"images": images, "sounds": sounds}, features=64)
    torch.nn.init.constant_(encoder.logits.scale, math.log(10))  # less sharp at the start than CLIP: it learns sooner
    for name, size, sound in (("images", (SIDE, SIDE), None), ("sounds", (MELS, FRAMES), FEATURES)):
        encoder[name].preprocessing = vitrail.Preprocessing(size, size, mean=(0.0,), std=(1.0,), sound=sound)
    return encoder


def load_data(encoder: vitrail.SharedEncoder, recordings: Path | None) -> dict[str, dict[str, Samples]]:
    """Return the samples of both modalities by split."""
    images = load_images(encoder["images"].preprocessing)
    sounds = load_sounds(encoder["sounds"].preprocessing, recordings)
    return {"images": standardise(encoder["images"], images), "sounds": standardise(encoder["sounds"], sounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one encoder on handwritten and spoken digits.")
    parser.add_argument("--recordings", type=Path, help="folder of DIGIT_SPEAKER_NUMBER.wav (default: telephone tones)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default 60)")
    parser.add_argument("--batch", type=int, default=32, help="images, and sounds, of a step (default 32)")
    parser.add_argument("--say", type=int, default=7, help="digit of the query (default 7)")
    parser.add_argument("--out", type=Path, help="model file to write (default: in a new temporary directory)")
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="vitrail-")) / "digits.safetensors"

    torch.manual_seed(0)
    encoder = build_encoder()
    data = load_data(encoder, args.recordings)
    train(encoder, data, args.steps, args.batch, rows=6 if args.recordings else 0)

    ranked, accuracy = retrieve(encoder, data["sounds"]["test"], data["images"]["test"])
    print(f"test top-1 accuracy {accuracy:.3f}: {len(ranked)} sounds, {ranked.shape[1]} images")
    query = int((data["sounds"]["test"][1] == args.say).nonzero()[0])
    found = data["images"]["test"][1][ranked[query, :10]].tolist()
    print(f"a sound of {args.say} finds images of {' '.join(map(str, found))}")

    vitrail.save_shared(encoder, out)
    model, images = vitrail.load(out, take="images"), data["images"]["test"][0]
    with torch.no_grad():
        difference = (F.normalize(model(images), dim=-1) - encoder.encode("images", images)).abs().max().item()
    print(f"saved {out}; its model of images alone: largest difference of features {difference:.1e}")


if __name__ == "__main__":
    main()
