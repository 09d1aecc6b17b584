"""Responses of the service equal the model's outputs."""

import base64
import io
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("fastapi", reason="the service is not installed: pip install 'vitrail[serve]'")

import vitrail
from tests.serve.made import FORM, LABELS, form, held, picture, serving, tiny
from vitrail.analysis.trace import trace_image
from vitrail.deploy.export.export import export
from vitrail.deploy.runtimes.open import open_deployed_model
from vitrail.serve.limits import RequestLimits
from vitrail.serve.models import ModelOpener, parse_model_sources
from vitrail.serve.server import ServerOptions

SHARED = Path(__file__).parents[3] / "shared"
WEIGHTS, SAMPLES = SHARED / "weights" / "deit_tiny_patch16_224.safetensors", SHARED / "data" / "imagenet-samples"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("served") / "tiny.safetensors")


@pytest.fixture(scope="module")
def client(path):
    with serving(f"tiny={path}") as running:
        yield running


def logits(path, data):
    model = vitrail.load(path)
    with torch.inference_mode():
        return model(model.preprocessing(Image.open(io.BytesIO(data)))[None])[0]


def test_predict_returns_the_model_probabilities(client, path):
    data = picture(1)
    odds = logits(path, data).softmax(0)
    said = client.predicted(data)
    assert [answer["label"] for answer in said] == [LABELS[k] for k in odds.argsort(descending=True)]
    assert [answer["score"] for answer in said] == pytest.approx(sorted(odds.tolist(), reverse=True), abs=1e-5)


def test_form_keeps_order_and_marks_invalid_parts(client, path):
    files = [(f"{n}.png", picture(n)) for n in range(5)]
    files.insert(2, ("notes.txt", b"these are words"))
    status, said, _ = client.post("/predict?top=1", form(*files), FORM)
    assert status == 200
    assert [each["name"] for each in said["predictions"]] == [name for name, _ in files]
    for each, (name, data) in zip(said["predictions"], files, strict=True):
        if name == "notes.txt":
            assert "not an image" in each["error"]
            assert "answers" not in each
        else:
            assert each["answers"][0]["label"] == LABELS[int(logits(path, data).argmax())]


def test_format_is_detected_from_the_bytes(client, path):
    for kind in ("JPEG", "WEBP", "BMP", "GIF", "TIFF"):
        data = picture(3, kind=kind)
        status, said, _ = client.post("/predict", data, "image/png")
        assert status == 200
        assert said["predictions"][0]["answers"][0]["label"] == LABELS[int(logits(path, data).argmax())]


@pytest.mark.skipif(
    not WEIGHTS.exists() or not SAMPLES.exists(),
    reason="the DeiT-Ti weights and ImageNet samples are not beside this checkout (../shared)",
)
def test_deit_predictions_equal_pytorch():
    files = [(path.name, path.read_bytes()) for path in sorted(SAMPLES.glob("*.JPEG"))[::25]]
    with serving(f"deit={WEIGHTS}", how=ServerOptions(workers=2, drain_seconds=0.0)) as client:
        status, said, _ = client.post("/predict?top=1000", form(*files), FORM)
    assert status == 200
    for each, (_, data) in zip(said["predictions"], files, strict=True):
        odds = logits(WEIGHTS, data).softmax(0)
        assert each["answers"][0]["label"] == str(int(odds.argmax()))  # these weights have no class names
        assert max(abs(answer["score"] - float(odds[int(answer["label"])])) for answer in each["answers"]) < 1e-4


def test_embed_returns_headless_features(client, path):
    data = picture(2)
    model = vitrail.load(path, classes=None)
    with torch.inference_mode():
        wanted = model(model.preprocessing(Image.open(io.BytesIO(data)))[None])[0]
    status, said, _ = client.post("/embed", data)
    assert status == 200
    assert said["features"][0]["values"] == pytest.approx(wanted.tolist(), abs=1e-5)


def seen(path, data, **given):
    model = vitrail.load(path)
    return trace_image(model, model.preprocessing(Image.open(io.BytesIO(data)))[None], **given)


def test_attention_equals_trace_image(client, path):
    data = picture(4)
    status, said, _ = client.post("/attention", data)
    assert status == 200
    wanted = seen(path, data)
    codes = np.frombuffer(base64.b64decode(said["attention"]), np.uint8).reshape(wanted.attention.shape)
    found = codes / 255 * np.array(said["attention_scale"])[..., None, None]
    assert np.abs(found - wanted.attention).max() < 0.003
    between = np.frombuffer(base64.b64decode(said["between"]), np.uint8).reshape(wanted.between.shape)
    scale = np.frombuffer(base64.b64decode(said["between_scale"]), "<f4").reshape(wanted.between.shape[:-1])
    assert np.abs(between / 255 * scale[..., None] - wanted.between.astype(np.float32)).max() < 0.003
    rollout = np.frombuffer(base64.b64decode(said["rollout"]), np.uint8).reshape(wanted.rollout.shape)
    assert np.abs(rollout / 255 * said["rollout_scale"] - wanted.rollout).max() < 0.003
    assert said["target"] == said["answers"][0]["label"] == LABELS[int(wanted.logits.argmax())]
    shown = Image.open(io.BytesIO(base64.b64decode(said["image"].partition(",")[2])))
    assert np.array_equal(
        np.asarray(shown), vitrail.load(path).preprocessing.to_pixels(Image.open(io.BytesIO(data))).permute(1, 2, 0)
    )


def test_single_attention_map(client, path):
    data = picture(5)
    status, said, _ = client.post("/attention?layer=2&head=1&patch=3,0", data)
    assert status == 200
    assert np.allclose(said["map"], seen(path, data, at=(3, 0)).attention_at[1, 1], atol=1e-5)
    status, said, _ = client.post("/attention?layer=1", data)
    assert status == 200
    assert np.allclose(said["map"], seen(path, data).attention[0].mean(0), atol=1e-5)
    status, said, _ = client.post("/attention?head=0", data)
    assert status == 200
    assert np.allclose(said["map"], seen(path, data).attention[1, 0], atol=1e-5)


def test_attention_is_independent_of_parallel_predictions(client, path):
    """Attention uses hooks on layers, which must not be the layers that compute predictions."""
    data, stop = picture(7), threading.Event()
    wanted = seen(path, data).rollout
    runtime, pixels = client.service.models.get(None).deployed.runtime, np.zeros((1, 3, 32, 32), np.uint8)

    def predict():
        while not stop.is_set():
            runtime(pixels)

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(predict) for _ in range(2)]
        found = [client.post("/attention", data) for _ in range(20)]
        stop.set()
        for each in running:
            each.result()
    for status, said, _ in found:
        assert status == 200
        rollout = np.frombuffer(base64.b64decode(said["rollout"]), np.uint8).reshape(wanted.shape)
        assert np.abs(rollout / 255 * said["rollout_scale"] - wanted).max() < 0.003


@pytest.mark.parametrize(
    ("asked", "code", "why"),
    [
        ("layer=3", 404, "1 to 2"),
        ("layer=1&head=2", 404, "0 to 1"),
        ("patch=4,0", 404, "0 to 3"),
        ("layer=0", 422, "layer"),
        ("layer=1&patch=../../etc/passwd", 422, "patch"),
    ],
)
def test_unknown_maps_are_refused(client, asked, code, why):
    status, said, _ = client.post(f"/attention?{asked}", picture())
    assert status == code
    assert why in said["error"]


def test_models_by_name_and_default(tmp_path):
    one, other = tiny(tmp_path / "a.safetensors", 1), tiny(tmp_path / "b.safetensors", 2)
    data = picture()
    with serving(f"one={one}", f"other={other}") as client:
        status, said, _ = client.ask("GET", "/models")
        assert status == 200
        assert [(model["name"], model["default"]) for model in said["models"]] == [("one", True), ("other", False)]
        said = {name: client.post(f"/predict?model={name}&top=3", data)[1] for name in ("one", "other")}
        for name, file in (("one", one), ("other", other)):
            assert said[name]["model"] == name
            odds = logits(file, data).softmax(0)
            assert said[name]["predictions"][0]["answers"][0]["score"] == pytest.approx(float(odds.max()), abs=1e-5)
        assert client.post("/predict", data)[1]["model"] == "one"
        status, said, _ = client.post("/predict?model=/etc/passwd", data)
        assert status == 404
        assert "one, other" in said["error"]


def test_model_without_classifier(tmp_path):
    with serving(f"body={tiny(tmp_path / 'body.safetensors', classes=None)}") as client:
        assert len(client.post("/embed", picture())[1]["features"][0]["values"]) == 32
        status, said, _ = client.post("/predict", picture())
        assert status == 409
        assert "/embed" in said["error"]
        assert client.post("/attention", picture())[1]["answers"] == []


@pytest.mark.slow
def test_exported_file_predicts_without_attention(tmp_path, path):
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed: pip install 'vitrail[onnx]'")
    pytest.importorskip("onnxscript", reason="ONNX cannot be written here: pip install 'vitrail[onnx]'")
    file, model = tmp_path / "tiny.onnx", open_deployed_model(path, runtime="torch", device="cpu")
    assert model.model is not None
    export(model.model, model.contract, file, target="onnx", uint8=True)
    data = picture(6)
    with serving(f"onnx={file}", opening=ModelOpener(1)) as client:
        odds = logits(path, data).softmax(0)
        assert client.predicted(data)[0]["score"] == pytest.approx(float(odds.max()), abs=1e-5)
        assert client.ask("GET", "/models")[1]["models"][0]["attention"] is False
        status, said, _ = client.post("/attention", data)
        assert status == 409
        assert "exported" in said["error"]


def test_reload_under_load(tmp_path):
    file = tiny(tmp_path / "model.safetensors", 1)
    newer = tiny(tmp_path / "newer.safetensors", 2)
    data, token = picture(), "a-long-secret"
    allowed = {"Authorization": f"Bearer {token}"}
    with serving(f"m={file}", tokens=(token,)) as client:

        def score():
            status, said, _ = client.post("/predict?top=1", data, **allowed)
            assert status == 200, said
            return said["predictions"][0]["answers"][0]["score"]

        old = score()
        stop, found = threading.Event(), []

        def ask():
            while not stop.is_set():
                found.append(score())

        with ThreadPoolExecutor(3) as pool:
            asking = [pool.submit(ask) for _ in range(3)]
            shutil.copy(newer, file)
            status, said, _ = client.ask("POST", "/reload", **allowed)
            assert (status, said) == (200, {"reloaded": ["m"]})
            new = score()
            file.write_bytes(b"not a model any more")
            status, said, _ = client.ask("POST", "/reload", **allowed)
            assert status == 409
            assert "keeping the old version" in said["error"]
            stop.set()
            for each in asking:
                each.result()
        assert new == pytest.approx(float(logits(newer, data).softmax(0).max()), abs=1e-5)
        assert new != pytest.approx(old, abs=1e-4)
        assert score() == pytest.approx(new)
        assert {round(value, 4) for value in found} <= {round(old, 4), round(new, 4)}


def test_clients_share_a_batch():
    runtime, opening = held()
    with serving("m=held", opening=opening) as client, ThreadPoolExecutor(9) as pool:
        client.predicted(picture())
        runtime.batches.clear()
        runtime.let.clear()
        first = pool.submit(client.predicted, picture(0))
        while not runtime.entered.acquire(timeout=5) or not runtime.batches:
            pass
        others = [pool.submit(client.predicted, picture(n)) for n in range(1, 9)]
        while len(client.service.models.get(None).batchers["logits"].queue) < 8:
            pass
        runtime.let.set()
        answers = [each.result() for each in (first, *others)]
    assert runtime.batches == [1, 8]
    assert len({tuple(answer["score"] for answer in each) for each in answers}) == 9


def test_parse_model_sources():
    assert [
        (each.name, each.where)
        for each in parse_model_sources(["a=x/model.onnx", "runs/photos-1", "w/deit.safetensors", "hf://o/n"])
    ] == [("a", "x/model.onnx"), ("photos-1", "runs/photos-1"), ("deit", "w/deit.safetensors"), ("n", "hf://o/n")]
    assert parse_model_sources(["runs/a/model.safetensors"])[0].name == "a"
    with pytest.raises(ValueError, match="two models are named 'a'"):
        parse_model_sources(["a=x", "y/a.onnx"])
    with pytest.raises(ValueError, match="NAME=MODEL"):
        parse_model_sources(["a="])


def test_invalid_limits_are_refused():
    with pytest.raises(ValueError, match="--queue"):
        RequestLimits(images=10, queue=5)
    with pytest.raises(ValueError, match="> 0 and finite"):
        replace(RequestLimits(), body=0)
    with pytest.raises(ValueError, match="must be > 0"):
        ServerOptions(limits=RequestLimits(seconds=0.0))
