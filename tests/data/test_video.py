"""Videos: exact frames of any container, clips, damaged and lying files, and the same pixels as for images."""

import io
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data import video_index
from vitrail.data.clip import Clip, parse_clip
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.rng import SampleRandom
from vitrail.data.transforms.augment import ColourJitter, Flip, PadCrop, RandAugment, RandomErasing
from vitrail.data.transforms.crops import RandomResizedCrop
from vitrail.data.transforms.pipeline import TrainPipeline
from vitrail.data.video import ArrayVideo, FrameFolder, VideoEndsError, open_video, read_clip
from vitrail.utils.json import dataclass_from_json, to_json

av = pytest.importorskip("av", reason="PyAV is not installed: pip install 'vitrail[video]'")

CLIPS = Path(__file__).parents[3] / "shared/data/clips"
needs_clips = pytest.mark.skipif(not CLIPS.is_dir(), reason="../shared/data/clips is absent")


BITS = 7


def numbered(count: int, size: tuple[int, int] = (48, 112)) -> np.ndarray:
    """Return frames with their number as black and white strips, uint8 [T, H, W, 3]."""
    strips = 255 * (np.arange(count)[:, None] >> np.arange(BITS) & 1).astype(np.uint8)
    row = strips.repeat(size[1] // BITS, 1)[:, None, :, None]  # [T, 1, W, 1]
    return np.broadcast_to(row, (count, *size, 3)).copy()


def encode(
    frames: np.ndarray,
    container: str = "mp4",
    codec: str = "mpeg4",
    *,
    gop: int = 12,
    b_frames: int = 0,
    pixel_format: str = "yuv420p",
    times: list[int] | None = None,
    rotation: int | None = None,
    options: dict[str, str] | None = None,
) -> bytes:
    """Return a file of these frames, at 25 per second or at the given times in 1/1000 s."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream(codec, rate=25, options={"threads": "1"} | (options or {}))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pixel_format
        stream.codec_context.gop_size, stream.codec_context.max_b_frames = gop, b_frames
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        if rotation is not None:
            stream.set_display_rotation(rotation)
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.time_base, frame.pts = Fraction(1, 1000), times[number]
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return out.getvalue()


def write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def values(frames: np.ndarray) -> list[int]:
    """Return the numbers in frames of `numbered`."""
    strips = frames.mean((1, 3)).reshape(len(frames), BITS, -1).mean(2) > 128
    return (strips @ (1 << np.arange(BITS))).tolist()


# --- exact frames ---


@needs_clips
@pytest.mark.parametrize("path", sorted(CLIPS.glob("*")) if CLIPS.is_dir() else [], ids=lambda path: path.stem[:12])
def test_frames_of_real_clips_are_those_of_decoding_everything(path: Path) -> None:
    with av.open(str(path), metadata_errors="replace") as file:
        expected = [frame.to_ndarray(format="gray") for frame in file.decode(video=0)]
    wanted = np.unique(np.linspace(0, len(expected) - 1, 7).round().astype(int))
    with open_video(str(path)) as video:
        assert len(video) == len(expected)
        assert video.rate == pytest.approx(30, rel=0.01)
        for number, frame in zip(wanted, video.iter_frames(wanted), strict=True):
            grey = np.asarray(frame.convert("L")).astype(int)
            assert np.abs(grey - expected[number]).mean() < 6  # limited against full range


@pytest.mark.parametrize(
    ("container", "codec", "b_frames"), [("mp4", "mpeg4", 0), ("mp4", "mpeg4", 2), ("avi", "mpeg4", 2)]
)
@pytest.mark.parametrize("gop", [1, 12, 100])
def test_frames_are_found_by_number(container: str, codec: str, b_frames: int, gop: int, tmp_path: Path) -> None:
    path = write(tmp_path / f"a.{container}", encode(numbered(30), container, codec, gop=gop, b_frames=b_frames))
    with open_video(path) as video:
        assert len(video) == 30
        assert values(video.read_frames(range(30))) == list(range(30))
        for wanted in ([29], [0, 29], [5, 6, 7], [17, 3, 17], [13]):
            assert values(video.read_frames(wanted)) == wanted


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("matroska", "libx264"),
        ("mpegts", "libx264"),
        ("webm", "libvpx"),
        ("webm", "libvpx-vp9"),
        ("mpeg", "mpeg2video"),
    ],
)
def test_other_containers_and_codecs(container: str, codec: str, tmp_path: Path) -> None:
    if codec not in av.codecs_available:
        pytest.skip(f"PyAV has no {codec}")
    options = {"cpu-used": "8", "deadline": "realtime"} if "vpx" in codec else {}
    data = encode(numbered(30), container, codec, gop=10, b_frames=0 if "vpx" in codec else 2, options=options)
    suffix = {"matroska": "mkv", "mpegts": "m2ts", "webm": "webm", "mpeg": "mpg"}[container]
    with open_video(write(tmp_path / f"a.{suffix}", data)) as video:
        assert len(video) == 30
        for wanted in (list(range(30)), [29], [4, 15, 26]):
            assert values(video.read_frames(wanted)) == wanted


def test_a_seek_does_not_decode_the_frames_before_the_keyframe(tmp_path: Path, monkeypatch) -> None:
    from vitrail.data.video_file import VideoFile

    seeks = []
    seek = VideoFile._seek
    monkeypatch.setattr(VideoFile, "_seek", lambda self, key, wanted: seeks.append(key) or seek(self, key, wanted))
    monkeypatch.setattr(
        VideoFile, "_open", lambda self, original=VideoFile._open: seeks.append("open") or original(self)
    )
    with open_video(write(tmp_path / "a.mp4", encode(numbered(60), gop=10, b_frames=2))) as video:
        assert values(video.read_frames([45])) == [45]
    assert seeks == ["open", "open", 4]  # index, reading, one seek, and no second start


def test_index_of_a_file_is_read_once_until_the_file_changes(tmp_path: Path, monkeypatch) -> None:
    read = []
    original = video_index.read_packets
    monkeypatch.setattr("vitrail.data.video_file.read_packets", lambda *a: read.append(1) or original(*a))
    path = write(tmp_path / "a.mp4", encode(numbered(8)))
    for _ in range(3):
        assert len(open_video(path)) == 8
    write(tmp_path / "a.mp4", encode(numbered(9)))
    assert len(open_video(path)) == 9
    assert len(read) == 2


# --- time ---


def test_positions_of_a_variable_frame_rate_are_evenly_spaced_in_time(tmp_path: Path) -> None:
    times = [40 * i for i in range(10)] + [400 + 200 * i for i in range(10)]  # five times slower at the end
    with open_video(write(tmp_path / "a.mkv", encode(numbered(20), "matroska", times=times))) as video:
        assert video.index.is_variable
        positions = np.arange(20)
        shown = np.array(times)[video.find_frames(positions)]
        even = np.linspace(times[0], times[-1], 20)
        assert np.abs(shown - even).max() <= 100  # half of the longest interval
        assert video.find_frames(positions)[[0, -1]].tolist() == [0, 19]
        assert (np.diff(video.find_frames(positions)) >= 0).all()


def test_rounded_timestamps_are_a_constant_rate(tmp_path: Path) -> None:
    times = [round(1000 * i / 30) for i in range(90)]  # 33, 34, 33 … milliseconds
    with open_video(write(tmp_path / "a.mkv", encode(numbered(90, (16, 112)), "matroska", times=times))) as video:
        assert not video.index.is_variable
        assert video.find_frames(np.arange(90)).tolist() == list(range(90))
        assert video.rate == pytest.approx(30, rel=0.01)


# --- pixels ---


@pytest.mark.parametrize(("rotation", "turn"), [(90, 1), (180, 2), (-90, 3)])
def test_display_matrix_turns_the_frames(rotation: int, turn: int, tmp_path: Path) -> None:
    pixels = numbered(4)
    pixels[:, :16, :16] = 255
    stored = encode(pixels)
    with open_video(write(tmp_path / "a.mp4", stored)) as video:
        plain = video.read_frames([0])[0]
    with open_video(write(tmp_path / "b.mp4", encode(pixels, rotation=rotation))) as video:
        turned = video.read_frames([0])[0]
    assert np.array_equal(turned, np.rot90(plain, turn))


@pytest.mark.parametrize("pixel_format", ["yuv420p", "yuv444p", "yuv420p10le", "yuv444p10le"])
def test_odd_sizes_and_ten_bits(pixel_format: str, tmp_path: Path) -> None:
    if "libx264" not in av.codecs_available:
        pytest.skip("PyAV has no libx264")
    odd = "444" in pixel_format
    height, width = (33, 51) if odd else (34, 50)
    y, x = np.mgrid[:height, :width]
    frame = np.stack((x * 4, y * 6, np.full_like(x, 128)), -1).astype(np.uint8)
    data = encode(np.stack([frame] * 3), "matroska", "libx264", pixel_format=pixel_format, options={"qp": "1"})
    with open_video(write(tmp_path / "a.mkv", data)) as video:
        got = video.read_frames([1])[0].astype(int)
    assert got.shape == (height, width, 3)
    assert np.abs(got - frame)[2:-2, 2:-2].mean() < 4


@pytest.mark.parametrize("space", ["ITU709", "ITU601"])
@pytest.mark.parametrize("spread", ["MPEG", "JPEG"])  # limited and full range
def test_colour_space_and_range_are_those_of_the_file(space: str, spread: str, tmp_path: Path) -> None:
    if "libx264" not in av.codecs_available:
        pytest.skip("PyAV has no libx264")
    kinds = av.video.reformatter
    matrix, limits = kinds.Colorspace[space], kinds.ColorRange[spread]
    tag = {"ITU709": 1, "ITU601": 5}[space]
    path = str(tmp_path / "a.mp4")
    red = np.full((48, 64, 3), (200, 60, 30), dtype=np.uint8)
    with av.open(path, "w") as file:
        stream = file.add_stream("libx264", rate=25, options={"qp": "1"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.colorspace, stream.codec_context.color_range = tag, limits.value
        frame = av.VideoFrame.from_ndarray(red, format="rgb24")
        frame = frame.reformat(format="yuv420p", dst_colorspace=matrix, dst_color_range=limits)
        frame.colorspace, frame.color_range, frame.pts = tag, limits.value, 0
        file.mux(stream.encode(frame))
        file.mux(stream.encode())
    with open_video(path) as video:
        assert np.abs(video.read_frames([0])[0].astype(int) - red).max() <= 4


def test_frame_folder_orders_frames_by_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 1, 33):
        Image.new("RGB", (8, 6), (number, 0, 0)).save(tmp_path / f"frame_{number}.png")
    (tmp_path / "notes.txt").write_text("x")
    with open_video(str(tmp_path)) as video:
        assert isinstance(video, FrameFolder)
        assert video.read_frames(range(4))[:, 0, 0, 0].tolist() == [1, 2, 10, 33]
    with pytest.raises(OSError, match="without frames"):
        open_video(write_folder(tmp_path / "empty"))


def write_folder(path: Path) -> str:
    path.mkdir()
    return str(path)


# --- clips ---


def test_a_clip_is_a_pure_function_of_the_number_of_frames() -> None:
    clip = Clip(4, 3)
    assert clip.span == 10
    starts = {int(clip.sample(30, SampleRandom(0, epoch, 5))[0]) for epoch in range(200)}
    assert starts == set(range(21))
    assert clip.sample(30, SampleRandom(1, 2, 3)).tolist() == clip.sample(30, SampleRandom(1, 2, 3)).tolist()
    assert clip.spread(0, 30).tolist() == [10, 13, 16, 19]
    several = Clip(4, 3, clips=3)
    assert [several.spread(k, 30).tolist()[0] for k in range(3)] == [0, 10, 20]
    assert clip.sample(3, SampleRandom(0, 0, 0)).tolist() == [0, 2, 2, 2]  # the last frame is repeated
    assert parse_clip("8x2") == Clip(8, 2)
    with pytest.raises(ValueError, match="frames must be 1 to"):
        Clip(0)
    with pytest.raises(ValueError, match="such as 16x4"):
        parse_clip("16")


def test_preprocessing_without_a_clip_is_stored_as_before() -> None:
    assert "clip" not in to_json(Preprocessing())
    stored = to_json(Preprocessing(clip=Clip(8, 2, crops=3)))
    assert stored["clip"] == {"type": "Clip", "frames": 8, "stride": 2, "crops": 3}
    assert dataclass_from_json(stored | {"mean": [0.5] * 3}, Preprocessing, "it") == Preprocessing(
        clip=Clip(8, 2, crops=3)
    )


def still(seed: int = 0, size: tuple[int, int] = (40, 56)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


@pytest.mark.parametrize("size", [16, 80])  # augmented in batches, and one by one
def test_a_still_video_gives_the_pixels_of_the_image_for_every_frame(size: int) -> None:
    image = still()
    video = ArrayVideo(np.stack([np.asarray(image)] * 20), "still")
    steps = (RandomResizedCrop((size, size)), Flip(), RandAugment(2, 9, rate=1.0), ColourJitter(0.4, 0.4, 0.4, 0.1))
    steps += (PadCrop(2), RandomErasing(1.0))
    images = TrainPipeline(steps, (size, size))
    clips = TrainPipeline(steps, (size, size), clip=Clip(5, 2))
    for index in range(6):
        rng = SampleRandom(3, 1, index)
        expected = images(image, rng)
        assert torch.equal(clips(video, rng), expected[:, None].expand(-1, 5, -1, -1))
    plain = Preprocessing((32, 32), (36, 36))
    clip = Preprocessing((32, 32), (36, 36), clip=Clip(5, 2))
    assert torch.equal(clip.to_pixels(video), plain.to_pixels(image)[:, None].expand(-1, 5, -1, -1))
    assert torch.equal(clip(video), plain(image)[:, None].expand(-1, 5, -1, -1))


def test_views_are_clips_and_crops() -> None:
    frames = np.zeros((30, 20, 60, 3), dtype=np.uint8)
    frames[..., 0] = np.arange(30)[:, None, None]
    frames[..., 1] = np.arange(60)
    views = Preprocessing((20, 20), (20, 20), clip=Clip(3, 2, clips=2, crops=3)).to_views(ArrayVideo(frames, "v"))
    assert views.shape == (6, 3, 3, 20, 20)
    assert views[:, 0, :, 0, 0].tolist() == [[0, 2, 4]] * 3 + [[25, 27, 29]] * 3
    assert views[:, 1, 0, 0, 0].tolist() == [0, 20, 40] * 2


def test_images_and_videos_are_not_mistaken_for_each_other() -> None:
    video = ArrayVideo(np.zeros((4, 8, 8, 3), dtype=np.uint8), "v")
    with pytest.raises(ValueError, match="takes images, got a video"):
        Preprocessing((8, 8), (8, 8)).to_pixels(video)
    with pytest.raises(ValueError, match="takes clips of 16 frames, got an image"):
        Preprocessing((8, 8), (8, 8), clip=Clip()).to_pixels(still())


# --- damaged and lying files ---


def test_a_truncated_file_is_used_as_far_as_it_goes(tmp_path: Path) -> None:
    data = encode(numbered(100), "mpegts", "mpeg2video", gop=10)
    path = write(tmp_path / "a.m2ts", data[: len(data) // 2])
    with open_video(path) as video:
        count = len(video)
        assert 30 < count < 70
        clip = Clip(4, 2)
        grey = read_clip(
            video, clip.span, lambda n: clip.spread(0, n), lambda frame: torch.tensor(np.asarray(frame.convert("L")))
        )
        assert values(grey.numpy()[..., None]) == clip.spread(0, count).tolist()


@pytest.mark.parametrize("share", [0.4, 0.6, 0.9])
def test_a_frame_whose_end_is_missing_does_not_count(share: float, tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w", options={"movflags": "faststart"}) as file:  # the index before the frames
        stream = file.add_stream("mpeg4", rate=25)
        stream.height, stream.width, stream.pix_fmt = 48, 112, "yuv420p"
        stream.codec_context.gop_size = 6
        for pixels in numbered(60):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with open_video(str(path)) as video:
        assert 2 < len(video) < 60
        assert values(video.read_frames(range(len(video)))) == list(range(len(video)))
        assert values(video.read_frames([len(video) - 1])) == [len(video) - 1]


class Ending(ArrayVideo):
    """A video of which only the first frames can be decoded."""

    readable = 12

    def iter_frames(self, numbers):
        for frame, number in zip(super().iter_frames(numbers), numbers, strict=True):
            if number >= self.readable:
                raise VideoEndsError(
                    f"{self.name}: only {self.readable} of {len(self)} frames can be decoded", self.readable
                )
            yield frame


def test_a_clip_is_chosen_before_a_damaged_end() -> None:
    video = Ending(np.arange(40, dtype=np.uint8)[:, None, None].repeat(4, 1).repeat(4, 2), "v")
    clip = Clip(4, 3)

    def read(choose) -> list[int]:
        return read_clip(video, clip.span, choose, lambda frame: torch.tensor(np.asarray(frame)))[:, 0, 0].tolist()

    assert read(lambda count: clip.spread(0, count)) == [1, 4, 7, 10]
    assert read(lambda count: clip.sample(count, SampleRandom(0, 0, 1))) == read(
        lambda count: clip.sample(count, SampleRandom(0, 0, 1))
    )
    video.readable = 9
    with pytest.raises(VideoEndsError, match="only 9 of 40 frames"):
        read(lambda count: clip.spread(0, count))
    short = ArrayVideo(np.zeros((5, 4, 4), dtype=np.uint8), "cut.mp4")
    short.stated = 300
    with pytest.raises(VideoEndsError, match="ends after 5 of 300 frames"):
        read_clip(short, clip.span, lambda count: clip.spread(0, count), torch.tensor)


def test_a_damaged_end_of_a_variable_frame_rate_ends_the_timeline_too() -> None:
    class Varying(Ending):
        def find_frames(self, positions: np.ndarray) -> np.ndarray:
            return np.minimum(
                positions * 2, len(self) - 1
            )  # the last half of the video is shown as fast as the first frame

    video = Varying(np.arange(40, dtype=np.uint8)[:, None, None].repeat(4, 1).repeat(4, 2), "v")
    clip = Clip(4, 3)
    made = read_clip(
        video, clip.span, lambda count: clip.spread(0, count), lambda frame: torch.tensor(np.asarray(frame))
    )
    assert made[:, 0, 0].max() < video.readable


def test_missing_memory_is_not_the_end_of_a_video(tmp_path: Path) -> None:
    def run_out(_) -> None:
        raise MemoryError

    path = write(tmp_path / "a.mp4", encode(numbered(8)))
    with open_video(path) as video:
        packet, decoder = SimpleNamespace(size=1), SimpleNamespace(decode=run_out)
        video._container = SimpleNamespace(demux=lambda _: iter([packet]), close=lambda: None)
        video._stream = SimpleNamespace(codec_context=decoder)
        with pytest.raises(MemoryError, match="not enough memory"):
            list(video._iter_decoded(None))


def test_kept_indices_are_bounded_with_their_entries(monkeypatch) -> None:
    kept, index = (
        video_index.KeptIndices(),
        video_index.FrameIndex(np.arange(10), np.zeros(1, np.int64), 0.1, 10, False),
    )
    monkeypatch.setattr(video_index, "KEPT_BYTES", 3 * video_index.count_bytes(index))
    for number in [*range(5), 4]:
        kept.keep((number,), index)
    assert [number for number in range(5) if kept.find((number,))] == [2, 3, 4]
    assert kept.n_bytes == 3 * video_index.count_bytes(index)


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 5000, b"not a video at all" * 50, b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"]
)
def test_files_that_are_no_videos_are_named(data: bytes, tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", data)
    with pytest.raises((OSError, ValueError), match=r"a\.mp4"):
        open_video(path)
    with pytest.raises(FileNotFoundError):
        open_video(str(tmp_path / "missing.mp4"))


def test_sound_alone_has_no_video_stream(tmp_path: Path) -> None:
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as file:
        stream = file.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), dtype=np.int16), layout="mono")
        frame.sample_rate = 8000
        file.mux(stream.encode(frame))
        file.mux(stream.encode())
    with pytest.raises(OSError, match=r"a\.mkv: has no video stream"):
        open_video(write(tmp_path / "a.mkv", out.getvalue()))


READ = """
import sys, glob, faulthandler, numpy as np
from vitrail.data.video import open_video
faulthandler.dump_traceback_later(100, exit=True)
read = refused = 0
for path in sorted(glob.glob(sys.argv[1] + "/*")):
    try:
        with open_video(path) as video:
            list(video.iter_frames(np.unique(np.linspace(0, len(video) - 1, 4).astype(int))))
        read += 1
    except (OSError, ValueError) as error:
        assert path in str(error), (path, error)
        refused += 1
print(read, refused)
"""


def mutate(data: bytes, seed: int) -> bytes:
    """Return the bytes with some of them changed, some removed, or the end cut off."""
    random = np.random.default_rng(seed)
    changed = bytearray(data)
    for _ in range(int(random.integers(1, 40))):
        changed[int(random.integers(len(changed)))] = int(random.integers(256))
    if seed % 3 == 1:
        return bytes(changed[: int(random.integers(1, len(changed)))])
    if seed % 3 == 2:
        start = int(random.integers(len(changed)))
        del changed[start : start + int(random.integers(1, 2000))]
    return bytes(changed)


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_damaged_files_are_read_or_refused_by_name(count: int, tmp_path: Path) -> None:
    kinds = {
        "mp4": ("mp4", "mpeg4"),
        "mkv": ("matroska", "mpeg4"),
        "avi": ("avi", "mpeg4"),
        "m2ts": ("mpegts", "mpeg2video"),
    }
    if "libx264" in av.codecs_available:
        kinds |= {"m4v": ("mp4", "libx264")}
    noise = np.random.default_rng(0).integers(0, 256, (20, 6, 8, 3), dtype=np.uint8).repeat(8, 1).repeat(8, 2)
    made = [(suffix, encode(noise, *kind, gop=5, b_frames=1)) for suffix, kind in kinds.items()]
    for seed in range(count):
        suffix, data = made[seed % len(made)]
        write(tmp_path / f"{seed}.{suffix}", mutate(data, seed))
    result = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    read, refused = map(int, result.stdout.split())
    assert read + refused == count
    assert read > 0
    assert refused > 0
