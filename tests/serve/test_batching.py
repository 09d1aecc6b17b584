"""Dynamic batching."""

import asyncio
import threading
import time

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the service is not installed: pip install 'vitrail[serve]'")

from tests.serve.made import SIZE, Held, picture
from vitrail.data.preprocessing import Preprocessing
from vitrail.serve import decoding
from vitrail.serve.batching import Batcher, InferenceFailed
from vitrail.serve.body import ImagePart
from vitrail.serve.decoding import DecodingPool, ImageDecoder
from vitrail.serve.limits import MemoryTrimmer, RequestRefused

PIPELINE = Preprocessing((SIZE, SIZE), (SIZE, SIZE))


def line(*runtimes, **given):
    return Batcher(runtimes, PIPELINE, DecodingPool(ImageDecoder(10**6, MemoryTrimmer()), 2), **given)


def asked(batcher, *data):
    """Return the results of some images and the elapsed seconds."""

    async def ask():
        begin = time.monotonic()
        found = await asyncio.wait_for(
            asyncio.gather(*batcher.submit([ImagePart(None, each) for each in data]), return_exceptions=True), 20
        )
        return found, time.monotonic() - begin

    try:
        return asyncio.run(ask())
    finally:
        batcher.close()


def test_single_image_does_not_wait():
    found, seconds = asked(line(Held(), max_wait=15.0), picture())
    assert found[0].shape == (3,)
    assert seconds < 10


def test_batch_waits_for_images_being_decoded():
    runtime = Held()
    asked(line(runtime, max_wait=10.0), *(picture(n) for n in range(6)))
    assert runtime.batches == [6]


def test_batch_size_limit_and_result_order():
    runtime = Held()
    data = [picture(n) for n in range(10)]
    found, _ = asked(line(runtime, max_batch_size=4, max_wait=5.0), *data)
    assert max(runtime.batches) <= 4
    assert sum(runtime.batches) == 10
    decode = ImageDecoder(10**6, MemoryTrimmer())
    for row, each in zip(found, data, strict=True):
        wanted = decode(ImagePart(None, each), PIPELINE)[0].mean((1, 2), dtype=np.float32) / 64
        assert np.allclose(row, wanted)


def test_idle_workers_share_the_queue():
    one, other = Held(), Held()
    one.let.clear()
    other.let.clear()
    batcher = line(one, other, max_batch_size=8)
    timer = threading.Timer(1.0, lambda: (one.let.set(), other.let.set()))
    timer.start()
    asked(batcher, *(picture(n) for n in range(2)))
    timer.join()
    assert one.batches == other.batches == [1]


def test_failure_affects_only_its_batch():
    class Moody(Held):
        def __call__(self, pixels):
            if super().__call__(pixels) is not None and len(self.batches) == 1:
                raise RuntimeError("not today")
            return np.full((len(pixels), 3), np.nan if len(self.batches) == 2 else 1, np.float32)

    found, _ = asked(line(Moody(), max_batch_size=1), *(picture(n) for n in range(3)))
    assert sorted(type(each).__name__ for each in found) == ["InferenceFailed", "InferenceFailed", "ndarray"]
    assert {str(each) for each in found if isinstance(each, InferenceFailed)} == {
        "inference failed",
        "the model's output is not finite",
    }


def test_decoder_bug_refuses_the_image(monkeypatch, caplog):
    monkeypatch.setattr(decoding, "count_pixels", lambda *given: {}["a mistake"])
    batcher = line(Held())
    found, _ = asked(batcher, picture(), picture(1))
    assert all(isinstance(each, RequestRefused) and each.status == 422 for each in found)
    assert "KeyError" in caplog.text
