"""Evaluation: metrics equal to scikit-learn's and to training's, unreadable images, paired comparisons."""

import csv
import importlib
import json

import numpy as np
import pytest
import torch

import vitrail
from tests.data.making import tree
from tests.evaluation import made
from vitrail.data.sources import load_dataset
from vitrail.deploy.runtimes.open import open_checkpoint
from vitrail.evaluation.evaluate import evaluate
from vitrail.metrics.intervals import wilson_interval
from vitrail.reports.summary import get_interval

sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed: pip install 'vitrail[dev]'")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def by_hand(path, data):
    """Return targets and logits of a folder, computed image by image."""
    model, images = vitrail.load(path), load_dataset(data, fractions=(1.0, 0.0, 0.0))["train"]
    with torch.inference_mode():
        rows = [model(model.preprocessing(images.open(k))[None])[0] for k in range(len(images))]
    return images.targets, torch.stack(rows).numpy()


def test_metrics_equal_scikit_learn(tmp_path):
    data, path = str(made.folder(tmp_path / "data")), made.model(tmp_path / "m.safetensors")
    targets, logits = by_hand(path, data)
    output, labels = logits.argmax(1), list(range(7))
    found = evaluate(path, data).as_dict()
    assert found["n"] == found["images"] == len(targets) == 63
    assert 0 < found["top1"] < 1
    assert found["top1"] == sklearn.accuracy_score(targets, output)
    assert found["top5"] == pytest.approx(sklearn.top_k_accuracy_score(targets, logits, k=5, labels=labels))
    assert found["confusion"]["matrix"] == sklearn.confusion_matrix(targets, output, labels=labels).tolist()
    recall = sklearn.recall_score(targets, output, average=None, labels=labels)
    assert [row["recall"] for row in found["per_class"]] == pytest.approx(recall.tolist())
    assert [row["class"] for row in found["per_class"]] == list(made.CLASSES)
    probabilities = torch.from_numpy(logits).double().softmax(1).max(1).values.numpy()
    bins, error = np.ceil(probabilities * 15), 0.0  # (0, 1/15], (1/15, 2/15] …
    for bin in set(bins):
        error += abs((probabilities - (output == targets))[bins == bin].sum()) / 63
    assert found["ece"] == found["calibration_error"] == pytest.approx(error, abs=1e-5)
    for name in ("f1", "balanced_accuracy", "loss", "calibration_error", "top5"):
        low, high = found[f"{name}_interval"]
        assert low <= found[name] <= high, name
    low, high = found["interval"]
    assert low < found["top1"] < high
    json.dumps(found, allow_nan=False)


def test_multilabel_metrics_equal_scikit_learn(tmp_path):
    data, path = made.several(tmp_path / "data"), made.model(tmp_path / "m.safetensors")
    found = evaluate(path, str(data))
    logits, targets = found.evaluations[0].evaluation.logits, found.evaluations[0].evaluation.targets
    report = found.as_dict()
    assert targets.shape == (40, 7)
    assert report["map"] == pytest.approx(sklearn.average_precision_score(targets, logits, average="macro"))
    each = sklearn.average_precision_score(targets, logits, average=None)
    assert [row["average_precision"] for row in report["per_class"]] == pytest.approx(each.tolist())
    assert {"top1", "top5", "n", "interval", "ece", "task"} <= set(report)
    assert report["task"] == "multi"
    right = int(targets[np.arange(40), logits.argmax(1)].sum())
    assert report["top1"] == right / 40
    assert report["top1_interval"] == list(wilson_interval(right, 40)) != report["interval"]
    assert get_interval(report, "top1") == report["top1_interval"]
    assert get_interval(report, "map") == report["interval"]
    found.write(tmp_path / "out")
    assert "mAP" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_evaluation_reproduces_the_metrics_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = ["model.size.depth=1"]
    run, summary = vitrail.train("digits", out="run", steps=12, batch_size=32, settings=settings)
    for split in ("validation", "test"):
        found = evaluate(run, "digits", split=split, batch_size=32)
        report = found.as_dict()
        assert {name: report[name] for name in summary[split]} == summary[split]
        with np.load(run / "evaluation" / f"{split}.npz") as kept:
            assert np.array_equal(found.evaluations[0].evaluation.logits, kept["logits"])
    assert evaluate(run, "digits").evaluations[0].selection.split == "test"
    (run / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"is an unfinished run: continue it with vitrail.resume"):
        open_checkpoint(run)


def test_only_present_restricts_the_outputs(tmp_path):
    data, path = str(made.folder(tmp_path / "data", ("cat", "fox"), each=8)), made.model(tmp_path / "m.safetensors")
    among_all, among_two = (evaluate(path, data, only_present=only).evaluations[0] for only in (False, True))
    logits = among_all.evaluation.logits
    truth = np.array([2] * 8 + [5] * 9)
    assert among_all.measures["top1"] == (logits.argmax(1) == truth).mean()
    assert among_two.measures["top1"] == (np.where(logits[:, 2] >= logits[:, 5], 2, 5) == truth).mean()
    assert among_two.labels == ["cat", "fox"]
    assert among_all.as_dict()["data"]["classes_present"] == 2
    assert len(among_all.as_dict()["per_class"]) == 2
    one = str(made.folder(tmp_path / "one", ("cat",), each=3))
    with pytest.raises(ValueError, match="only_present= leaves a single class"):
        evaluate(path, one, only_present=True)
    assert evaluate(path, one).evaluations[0].measures["images"] == 3


def test_unreadable_files_do_not_change_metrics(tmp_path):
    data, path = made.folder(tmp_path / "data"), made.model(tmp_path / "m.safetensors")
    clean = evaluate(path, str(data)).as_dict()
    tree(data, {"ape/empty.png": b"", "ape/cut.png": b"\x89PNG\r\n\x1a\n", "dog/page.png": b"<html>"})
    found = evaluate(path, str(data)).as_dict()
    assert found["n"] == clean["n"]
    assert found["top1"] == clean["top1"]
    assert sorted(found["unreadable"]) == [str(data / n) for n in ("ape/cut.png", "ape/empty.png", "dog/page.png")]


def test_classes_are_matched_before_images_are_read(tmp_path, monkeypatch):
    data, path = made.folder(tmp_path / "data", ("ape", "yak")), made.model(tmp_path / "m.safetensors")
    monkeypatch.setattr("vitrail.evaluation.selection.audit_dataset", lambda *_, **__: pytest.fail("images were read"))
    with pytest.raises(ValueError, match="m: 1 of 2 classes are unknown to the model: 'yak'"):
        evaluate(path, str(data))


def test_image_deleted_during_evaluation_is_skipped(tmp_path, monkeypatch):
    data, path = made.folder(tmp_path / "data"), made.model(tmp_path / "m.safetensors")
    module = importlib.import_module("vitrail.evaluation.evaluate")
    select_images = module.select_images

    def select_and_delete(*arguments):
        selection = select_images(*arguments)
        (data / "ape" / "0001.png").unlink()
        return selection

    monkeypatch.setattr(module, "select_images", select_and_delete)
    other = made.model(tmp_path / "other.safetensors", seed=1)
    found = evaluate(path, str(data), against=[other])
    report = found.as_dict()
    assert report["n"] == 62
    assert list(report["unreadable"]) == [str(data / "ape" / "0001.png")]
    assert report["comparisons"][0]["pictures"] == 62
    found.write(tmp_path / "out")
    assert len((tmp_path / "out" / "predictions.csv").read_text(encoding="utf-8").splitlines()) == 63


def test_logits_that_are_not_finite_are_an_error(tmp_path):
    data = str(made.folder(tmp_path / "data"))
    path = made.model(tmp_path / "m.safetensors")
    model = vitrail.load(path)
    for parameter in model.head.parameters():
        torch.nn.init.constant_(parameter, 3e38)  # finite, as a file's weights must be; their sum is not
    vitrail.save(model, path)
    with pytest.raises(ValueError, match=r"m gives logits that are not finite, for .*0000\.png first$"):
        evaluate(path, data)


def test_half_precision_is_close_to_fp32(tmp_path):
    data, path = str(made.folder(tmp_path / "data")), made.model(tmp_path / "m.safetensors")
    whole, half = (evaluate(path, data, precision=p).evaluations[0].outputs.logits for p in ("fp32", "bf16"))
    assert not np.array_equal(whole, half)
    assert np.abs(whole - half).max() < 0.1 * np.abs(whole).max()


def test_batch_size_and_workers_do_not_change_logits(tmp_path):
    data, path = str(made.folder(tmp_path / "data")), made.model(tmp_path / "m.safetensors")
    one, other = (
        evaluate(path, data, batch_size=size, workers=workers).evaluations[0] for size, workers in ((64, 0), (5, 1))
    )
    assert np.allclose(one.outputs.logits, other.outputs.logits, atol=1e-4)
    assert one.evaluation.names == other.evaluation.names


def test_another_size_resizes_model_and_images(tmp_path):
    data, path = str(made.folder(tmp_path / "data")), made.model(tmp_path / "m.safetensors")
    found = evaluate(path, data, size=(16, 16)).evaluations[0]
    assert found.deployed.model.config.image_size == found.deployed.contract.preprocessing.size == (16, 16)
    assert found.measures["images"] == 63
    with pytest.raises(ValueError, match="not divisible"):
        evaluate(path, data, size=(9, 9))


def test_models_with_other_classes_are_compared_by_image(tmp_path):
    data = str(made.folder(tmp_path / "data"))
    ours = made.model(tmp_path / "ours.safetensors")
    more = made.model(tmp_path / "more.safetensors", ("yak", *reversed(made.CLASSES)), seed=3)
    found = evaluate(ours, data, against=[more, ours])
    first, second, third = found.evaluations
    right = [each.evaluation.predictions.correct for each in found.evaluations]
    assert found.names == ["ours", "more", "ours (2)"]
    pair = found.as_dict()["comparisons"][0]
    assert pair["first_only"] == int((right[0] & ~right[1]).sum())
    assert pair["second_only"] == int((~right[0] & right[1]).sum())
    assert pair["difference"] == pytest.approx(second.measures["top1"] - first.measures["top1"])
    assert "McNemar" in pair["verdict"]
    assert found.verdicts[1] == "ours and ours (2) are correct on the same samples."
    assert third.measures == first.measures


def test_multilabel_models_are_compared_by_map(tmp_path):
    data = str(made.several(tmp_path / "data"))
    ours = made.model(tmp_path / "ours.safetensors")
    more = made.model(tmp_path / "more.safetensors", ("yak", *reversed(made.CLASSES)), seed=3)
    found = evaluate(ours, data, against=[more])
    pair = found.as_dict()["comparisons"][0]
    first, second = (each.measures["map"] for each in found.evaluations)
    assert pair["difference"] == pytest.approx(second - first)
    assert pair["interval"][0] <= pair["difference"] <= pair["interval"][1]


def test_classes_mapped_to_one_output_are_compared_as_one(tmp_path):
    data = str(made.several(tmp_path / "data"))
    ours, more = (made.model(tmp_path / f"{seed}.safetensors", made.CLASSES[1:], seed=seed) for seed in (1, 3))
    (tmp_path / "map.json").write_text('{"ape": "bee"}', encoding="utf-8")
    found = evaluate(ours, data, against=[more], class_map=tmp_path / "map.json")
    first, second = (each.measures["map"] for each in found.evaluations)
    assert found.as_dict()["comparisons"][0]["difference"] == pytest.approx(second - first)


def test_training_data_is_recognised_from_another_directory(tmp_path, monkeypatch):
    made.folder(tmp_path / "zoo", each=12)
    other = made.model(tmp_path / "m.safetensors")
    monkeypatch.chdir(tmp_path)
    vitrail.train("zoo", out="run", steps=2, batch_size=8, settings=["model.size.depth=1"])
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    found = evaluate(other, "../zoo", against=["../run"])
    assert (
        found.evaluations[0]
        .selection.notes[-1]
        .startswith("run was trained on ../zoo, so its metrics are too optimistic")
    )


def test_top5_has_an_interval_for_few_classes_and_multilabel(tmp_path):
    few = made.CLASSES[:3]
    path, data = made.model(tmp_path / "m.safetensors", few), str(made.folder(tmp_path / "data", few))
    report = evaluate(path, data).as_dict()
    assert (report["top5"], report["top5_interval"]) == (1.0, list(wilson_interval(21, 21)))
    listed = made.several(tmp_path / "several", classes=few[:2])
    several = evaluate(path, listed, task="multi").as_dict()
    right = round(40 * several["top5"])
    assert right < 40  # some pictures have no label
    assert several["top5_interval"] == list(wilson_interval(right, 40))


def test_multiple_comparisons_have_a_caution(tmp_path):
    data = str(made.folder(tmp_path / "data"))
    paths = [made.model(tmp_path / f"{seed}.safetensors", seed=seed) for seed in range(3)]
    both = evaluate(paths[0], data, against=paths[1:])
    assert "Each of these 2 comparisons is tested at 5 %, without correction" in both.caution
    both.write(tmp_path / "out")
    assert both.caution in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert both.as_dict()["caution"] == both.caution
    assert evaluate(paths[0], data, against=paths[1:2]).caution == ""


def test_predictions_csv_has_a_row_per_image(tmp_path):
    data, path = str(made.folder(tmp_path / "data")), made.model(tmp_path / "m.safetensors")
    targets, logits = by_hand(path, data)
    evaluate(path, data).write(tmp_path / "out")
    with (tmp_path / "out" / "predictions.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 63
    order = np.argsort(-logits, axis=1)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    for k, row in enumerate(rows):
        assert row["path"].startswith(data)
        assert row["label"] == made.CLASSES[targets[k]]
        assert row["predicted"] == row["top1"] == made.CLASSES[order[k, 0]]
        assert row["right"] == str(int(order[k, 0] == targets[k]))
        assert int(row["rank"]) == order[k].tolist().index(targets[k]) + 1
        assert float(row["probability"]) == pytest.approx(probabilities[k].max(), rel=1e-3)
        assert row["top5"] == made.CLASSES[order[k, 4]]


def test_model_without_classifier_error_suggests_probes(tmp_path):
    body = vitrail.build(patch=4, width=16, depth=1, heads=2, classes=None, image_size=8)
    vitrail.save(body, tmp_path / "body.safetensors", preprocessing=vitrail.Preprocessing((8, 8), (8, 8)))
    with pytest.raises(ValueError, match=r"has no classifier: use vitrail.evaluation.probes.probe"):
        evaluate(tmp_path / "body.safetensors", str(made.folder(tmp_path / "data")))


def test_model_without_preprocessing_is_an_error(tmp_path):
    bare = vitrail.build(patch=4, width=16, depth=1, heads=2, classes=2, image_size=8)
    vitrail.save(bare, tmp_path / "bare.safetensors", labels=("a", "b"))
    with pytest.raises(ValueError, match="has no preprocessing"):
        open_checkpoint(tmp_path / "bare.safetensors")


def test_checksum_is_of_the_file(tmp_path):
    import hashlib

    path = made.model(tmp_path / "run" / "model.safetensors")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    opened = open_checkpoint(path)
    assert opened.contract.checksum == open_checkpoint(path.parent).contract.checksum == digest
    assert opened.name == "run"
