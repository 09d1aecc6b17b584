"""How pictures come together before a model."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the service is not installed: pip install 'vitrail[serve]'")

from tests.serve.made import SIZE, Held, picture
from vitrail.data.preprocessing import Preprocessing
from vitrail.serve import decoding
from vitrail.serve.batching import Batcher, Failed
from vitrail.serve.decoding import Decoder
from vitrail.serve.limits import Refused
from vitrail.serve.memory import Memory
from vitrail.serve.multipart import Part

PIPELINE = Preprocessing((SIZE, SIZE), (SIZE, SIZE))


def line(*runtimes, **given):
    return Batcher(runtimes, PIPELINE, Decoder(10**6, Memory()), ThreadPoolExecutor(2), **given)


def asked(batcher, *data):
    """The answers to some pictures, and how long they took."""

    async def ask():
        begin = time.monotonic()
        found = await asyncio.wait_for(
            asyncio.gather(*batcher.ask([Part(None, each) for each in data]), return_exceptions=True), 20
        )
        return found, time.monotonic() - begin

    try:
        return asyncio.run(ask())
    finally:
        batcher.close()


def test_a_picture_that_is_alone_waits_for_nobody():
    found, seconds = asked(line(Held(), wait=15.0), picture())
    assert found[0].shape == (3,)
    assert seconds < 10


def test_pictures_that_are_being_decoded_are_waited_for():
    runtime = Held()
    asked(line(runtime, wait=10.0), *(picture(n) for n in range(6)))
    assert runtime.batches == [6]


def test_no_batch_is_larger_than_allowed_and_every_answer_finds_its_picture():
    runtime = Held()
    data = [picture(n) for n in range(10)]
    found, _ = asked(line(runtime, largest=4, wait=5.0), *data)
    assert max(runtime.batches) <= 4
    assert sum(runtime.batches) == 10
    decode = Decoder(10**6, Memory())
    for row, each in zip(found, data, strict=True):
        wanted = decode(Part(None, each), PIPELINE).mean((1, 2), dtype=np.float32) / 64
        assert np.allclose(row, wanted)


def test_free_workers_share_what_waits():
    one, other = Held(), Held()
    one.let.clear()
    other.let.clear()
    batcher = line(one, other, largest=8)
    timer = threading.Timer(1.0, lambda: (one.let.set(), other.let.set()))
    timer.start()
    asked(batcher, *(picture(n) for n in range(2)))
    timer.join()
    assert one.batches == other.batches == [1]


def test_a_model_that_fails_fails_its_own_batch_alone():
    class Moody(Held):
        def __call__(self, pixels):
            if super().__call__(pixels) is not None and len(self.batches) == 1:
                raise RuntimeError("not today")
            return np.full((len(pixels), 3), np.nan if len(self.batches) == 2 else 1, np.float32)

    found, _ = asked(line(Moody(), largest=1), *(picture(n) for n in range(3)))
    assert sorted(type(each).__name__ for each in found) == ["Failed", "Failed", "ndarray"]
    assert {str(each) for each in found if isinstance(each, Failed)} == {
        "the model could not answer",
        "the model's answer is not finite",
    }


def test_a_readers_own_mistake_refuses_the_picture_and_the_thread_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(decoding, "check", lambda *given: {}["a mistake"])
    batcher = line(Held())
    found, _ = asked(batcher, picture(), picture(1))
    assert all(isinstance(each, Refused) and each.status == 422 for each in found)
    assert "KeyError" in caplog.text
