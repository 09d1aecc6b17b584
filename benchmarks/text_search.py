"""Time of a text search over 100,000 vectors after start-up, with a text tower of the size of CLIP B/32's.

    python benchmarks/text_search.py
    python benchmarks/text_search.py --images 1000000

The weights and the vectors are random: neither changes the time. The index is read from disk as `vitrail search find` does it,
memory-mapped; a query is tokenised, encoded and compared with every vector. OMP_NUM_THREADS sets the threads.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import measure
import numpy as np
import torch

import vitrail
from vitrail.checkpoints.load import compute_checksum
from vitrail.data.tokenizer import make_open_clip_tokenizer
from vitrail.deploy.search import index as files
from vitrail.deploy.search.index import IndexedImage, IndexedModel, SearchIndex, VectorWriter, read_index, write_header
from vitrail.deploy.search.texts import find_texts, open_text_model
from vitrail.models.registry import configure_two_towers
from vitrail.models.sizes import Size
from vitrail.models.text import TextConfig
from vitrail.nn.head import Projection

FEATURES, BLOCK = 512, 10_000
WORDS = ("red", "shoes", "dog", "beach", "a", "photo", "of", "the", "old", "house", "two", "people", "walking", "snow")


def save_model(path: Path) -> None:
    """Save two towers with random weights: CLIP B/32's text tower, and a small image tower, which is not used."""
    tokenizer = make_open_clip_tokenizer([], 77)
    text = TextConfig(Size(depth=12, width=512, mlp=2048, heads=8), FEATURES)
    image = {"patch": 32, "width": 64, "depth": 1, "heads": 1, "image_size": 32, "head": Projection(FEATURES)}
    model = vitrail.build_from(configure_two_towers(text=text, **image))
    model.tokenizer = tokenizer
    vitrail.save(model, path, preprocessing=vitrail.Preprocessing((32, 32), (32, 32)))


def write_index(folder: Path, model: Path, count: int) -> None:
    """Write an index of this many random vectors."""
    rng = np.random.default_rng(0)
    path = files.new_path(folder, "vectors", "npy")
    with path.open("wb") as file:
        writer = VectorWriter(file)
        for start in range(0, count, BLOCK):
            rows = rng.standard_normal((min(BLOCK, count - start), FEATURES), dtype=np.float32)
            writer.add(rows / np.linalg.norm(rows, axis=1, keepdims=True))
        writer.finish()
    images = tuple(IndexedImage(f"{number:07}.jpg", 1, 1) for number in range(count))
    parts = {"vectors": files.checksum_file(path), "pictures": files.write_images(folder, images)}
    about = IndexedModel(str(model), "random", compute_checksum(model))
    vectors = np.load(path, mmap_mode="r")
    write_header(
        SearchIndex(folder, folder, about, vitrail.Preprocessing((32, 32), (32, 32)), images, vectors, files=parts)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=100)
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as root:
        model, folder = Path(root) / "towers.safetensors", Path(root) / "index"
        folder.mkdir()
        save_model(model)
        write_index(folder, model, options.images)
        begin = time.perf_counter()
        index = read_index(folder)
        towers = open_text_model(index)
        find_texts(index, towers, ["a warm-up"])
        startup = time.perf_counter() - begin
        rng, seconds, processor = np.random.default_rng(1), [], []
        for _ in range(options.queries):
            text = " ".join(rng.choice(WORDS, rng.integers(2, 7)))
            begin, used = time.perf_counter(), time.process_time()
            find_texts(index, towers, [text])
            seconds.append(time.perf_counter() - begin)
            processor.append(time.process_time() - used)
    row = {
        "images": options.images,
        "features": FEATURES,
        "threads": torch.get_num_threads(),
        "startup_seconds": startup,
        "median_ms": 1000 * statistics.median(seconds),
        "p95_ms": 1000 * float(np.quantile(seconds, 0.95)),
        "median_processor_ms": 1000 * statistics.median(processor),
    }
    measure.save("text_search", [row])
    print(
        f"{options.images:,} vectors of {FEATURES} values, {row['threads']} threads: start-up {startup:.2f} s",
        flush=True,
    )
    print(f"a search by text: median {row['median_ms']:.1f} ms, 95 % of them within {row['p95_ms']:.1f} ms")
    print(f"of these, time of the processor: {row['median_processor_ms']:.1f} ms; the rest is other programs' time")


if __name__ == "__main__":
    main()
