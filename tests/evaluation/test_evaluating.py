"""Models judged on pictures: numbers as scikit-learn's and as training wrote them, faults left out, differences tested."""

import csv
import json

import numpy as np
import pytest
import torch

import vitrail
from tests.data.making import tree
from tests.evaluation import made
from vitrail.data.sources import read
from vitrail.evaluate.intervals import wilson
from vitrail.evaluation.answering import Computing
from vitrail.evaluation.choosing import Wanted
from vitrail.evaluation.evaluating import evaluate
from vitrail.evaluation.opening import open_model
from vitrail.report.opening import interval_of

sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed: pip install 'vitrail[dev]'")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def by_hand(path, data):
    """Targets and logits of a folder, picture by picture, without anything of the command."""
    model, pictures = vitrail.load(path), read(data, fractions=(1.0, 0.0, 0.0))["train"]
    with torch.inference_mode():
        rows = [model(model.preprocessing(pictures.open(k))[None])[0] for k in range(len(pictures))]
    return pictures.targets, torch.stack(rows).numpy()


def test_numbers_are_those_of_scikit_learn(tmp_path):
    data, path = str(made.folder(tmp_path / "data")), made.model(tmp_path / "m.safetensors")
    targets, logits = by_hand(path, data)
    said, labels = logits.argmax(1), list(range(7))
    found = evaluate(path, data).as_dict()
    assert found["n"] == found["images"] == len(targets) == 63
    assert 0 < found["top1"] < 1
    assert found["top1"] == sklearn.accuracy_score(targets, said)
    assert found["top5"] == pytest.approx(sklearn.top_k_accuracy_score(targets, logits, k=5, labels=labels))
    assert found["confusion"]["matrix"] == sklearn.confusion_matrix(targets, said, labels=labels).tolist()
    recall = sklearn.recall_score(targets, said, average=None, labels=labels)
    assert [row["recall"] for row in found["per_class"]] == pytest.approx(recall.tolist())
    assert [row["class"] for row in found["per_class"]] == list(made.CLASSES)
    chances = torch.from_numpy(logits).double().softmax(1).max(1).values.numpy()
    bins, error = np.ceil(chances * 15), 0.0  # (0, 1/15], (1/15, 2/15] …
    for bin in set(bins):
        error += abs((chances - (said == targets))[bins == bin].sum()) / 63
    assert found["ece"] == found["calibration_error"] == pytest.approx(error, abs=1e-5)
    for name in ("f1", "balanced_accuracy", "loss", "calibration_error", "top5"):
        low, high = found[f"{name}_interval"]
        assert low <= found[name] <= high, name
    low, high = found["interval"]
    assert low < found["top1"] < high
    json.dumps(found, allow_nan=False)


def test_several_labels_are_measured_as_scikit_learn_does(tmp_path):
    data, path = made.several(tmp_path / "data"), made.model(tmp_path / "m.safetensors")
    found = evaluate(path, str(data))
    logits, targets = found.judged[0].evaluation.logits, found.judged[0].evaluation.targets
    told = found.as_dict()
    assert targets.shape == (40, 7)
    assert told["map"] == pytest.approx(sklearn.average_precision_score(targets, logits, average="macro"))
    each = sklearn.average_precision_score(targets, logits, average=None)
    assert [row["average_precision"] for row in told["per_class"]] == pytest.approx(each.tolist())
    assert {"top1", "top5", "n", "interval", "ece", "task"} <= set(told)
    assert told["task"] == "multi"
    right = int(targets[np.arange(40), logits.argmax(1)].sum())
    assert told["top1"] == right / 40
    assert told["top1_interval"] == list(wilson(right, 40)) != told["interval"]
    assert interval_of(told, "top1") == told["top1_interval"]
    assert interval_of(told, "map") == told["interval"]
    found.write(tmp_path / "out")
    assert "mAP" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_a_runs_own_split_gives_the_runs_own_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = ["model.size.depth=1"]
    run, summary = vitrail.train("digits", out="run", wishes={"steps": 12, "batch_size": 32}, settings=settings)
    for split in ("validation", "test"):
        found = evaluate(run, Wanted("digits", split), how=Computing(batch_size=32))
        told = found.as_dict()
        assert {name: told[name] for name in summary[split]} == summary[split]
        with np.load(run / "evaluation" / f"{split}.npz") as kept:
            assert np.array_equal(found.judged[0].evaluation.logits, kept["logits"])
    assert evaluate(run, "digits").judged[0].chosen.split == "test"
    (run / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"run that has not finished: vitrail train --resume"):
        open_model(run)


def test_a_few_of_the_models_classes_are_judged_among_all_or_among_themselves(tmp_path):
    data, path = str(made.folder(tmp_path / "data", ("cat", "fox"), each=8)), made.model(tmp_path / "m.safetensors")
    among_all, among_two = (evaluate(path, data, only_present=only).judged[0] for only in (False, True))
    logits = among_all.evaluation.logits
    truth = np.array([2] * 8 + [5] * 9)
    assert among_all.measures["top1"] == (logits.argmax(1) == truth).mean()
    assert among_two.measures["top1"] == (np.where(logits[:, 2] >= logits[:, 5], 2, 5) == truth).mean()
    assert among_two.labels == ["cat", "fox"]
    assert among_all.as_dict()["data"]["classes_present"] == 2
    assert len(among_all.as_dict()["per_class"]) == 2
    one = str(made.folder(tmp_path / "one", ("cat",), each=3))
    with pytest.raises(ValueError, match="--only-present leaves one class"):
        evaluate(path, one, only_present=True)
    assert evaluate(path, one).judged[0].measures["images"] == 3


def test_bad_files_change_no_number_but_the_count(tmp_path):
    data, path = made.folder(tmp_path / "data"), made.model(tmp_path / "m.safetensors")
    clean = evaluate(path, str(data)).as_dict()
    tree(data, {"ape/empty.png": b"", "ape/cut.png": b"\x89PNG\r\n\x1a\n", "dog/page.png": b"<html>"})
    found = evaluate(path, str(data)).as_dict()
    assert found["n"] == clean["n"]
    assert found["top1"] == clean["top1"]
    assert sorted(found["unreadable"]) == [str(data / n) for n in ("ape/cut.png", "ape/empty.png", "dog/page.png")]


def test_classes_are_matched_before_any_picture_is_looked_at(tmp_path, monkeypatch):
    data, path = made.folder(tmp_path / "data", ("ape", "yak")), made.model(tmp_path / "m.safetensors")
    monkeypatch.setattr("vitrail.evaluation.choosing.audit", lambda *_, **__: pytest.fail("pictures were looked at"))
    with pytest.raises(ValueError, match="m: the data has 1 of 2 classes that the model does not know: 'yak'"):
        evaluate(path, str(data))


def test_a_picture_that_disappears_meanwhile_is_left_out(tmp_path, monkeypatch):
    data, path = made.folder(tmp_path / "data"), made.model(tmp_path / "m.safetensors")
    from vitrail.evaluation import evaluating

    choose = evaluating.choose

    def and_then_it_is_gone(*given):
        found = choose(*given)
        (data / "ape" / "0001.png").unlink()
        return found

    monkeypatch.setattr(evaluating, "choose", and_then_it_is_gone)
    other = made.model(tmp_path / "other.safetensors", seed=1)
    found = evaluate(path, str(data), against=[other])
    told = found.as_dict()
    assert told["n"] == 62
    assert list(told["unreadable"]) == [str(data / "ape" / "0001.png")]
    assert told["comparisons"][0]["pictures"] == 62
    found.write(tmp_path / "out")
    assert len((tmp_path / "out" / "predictions.csv").read_text(encoding="utf-8").splitlines()) == 63


def test_answers_that_are_no_numbers_are_refused(tmp_path):
    data = str(made.folder(tmp_path / "data"))
    path = made.model(tmp_path / "m.safetensors")
    model = vitrail.load(path)
    for parameter in model.head.parameters():
        torch.nn.init.constant_(parameter, 3e38)  # finite, as a file's weights must be; their sum is not
    vitrail.save(model, path)
    with pytest.raises(ValueError, match=r"m gives logits that are not finite, for .*0000\.png first$"):
        evaluate(path, data)


def test_half_precision_gives_about_the_same(tmp_path):
    data, path = str(made.folder(tmp_path / "data")), made.model(tmp_path / "m.safetensors")
    whole, half = (evaluate(path, data, how=Computing(precision=p)).judged[0].answers.logits for p in ("fp32", "bf16"))
    assert not np.array_equal(whole, half)
    assert np.abs(whole - half).max() < 0.1 * np.abs(whole).max()


def test_batches_and_workers_change_nothing(tmp_path):
    data, path = str(made.folder(tmp_path / "data")), made.model(tmp_path / "m.safetensors")
    one, other = (
        evaluate(path, data, how=Computing(batch_size=size, workers=workers)).judged[0]
        for size, workers in ((64, 0), (5, 1))
    )
    assert np.allclose(one.answers.logits, other.answers.logits, atol=1e-4)
    assert one.evaluation.names == other.evaluation.names


def test_another_size_resamples_positions_and_pictures(tmp_path):
    data, path = str(made.folder(tmp_path / "data")), made.model(tmp_path / "m.safetensors")
    found = evaluate(path, data, size=(16, 16)).judged[0]
    assert found.opened.model.config.image_size == found.opened.preprocessing.size == (16, 16)
    assert found.measures["images"] == 63
    with pytest.raises(ValueError, match="not divisible"):
        evaluate(path, data, size=(9, 9))


def test_models_of_other_classes_are_compared_picture_by_picture(tmp_path):
    data = str(made.folder(tmp_path / "data"))
    ours = made.model(tmp_path / "ours.safetensors")
    more = made.model(tmp_path / "more.safetensors", ("yak", *reversed(made.CLASSES)), seed=3)
    found = evaluate(ours, data, against=[more, ours])
    first, second, third = found.judged
    right = [each.evaluation.verdicts.right for each in found.judged]
    assert found.names == ["ours", "more", "ours (2)"]
    pair = found.as_dict()["comparisons"][0]
    assert pair["first_only"] == int((right[0] & ~right[1]).sum())
    assert pair["second_only"] == int((~right[0] & right[1]).sum())
    assert pair["difference"] == pytest.approx(second.measures["top1"] - first.measures["top1"])
    assert "McNemar" in pair["verdict"]
    assert found.verdicts[1] == "ours and ours (2) get the same pictures right."
    assert third.measures == first.measures


def test_several_labels_are_compared_by_map(tmp_path):
    data = str(made.several(tmp_path / "data"))
    ours = made.model(tmp_path / "ours.safetensors")
    more = made.model(tmp_path / "more.safetensors", ("yak", *reversed(made.CLASSES)), seed=3)
    found = evaluate(ours, data, against=[more])
    pair = found.as_dict()["comparisons"][0]
    first, second = (each.measures["map"] for each in found.judged)
    assert pair["difference"] == pytest.approx(second - first)
    assert pair["interval"][0] <= pair["difference"] <= pair["interval"][1]


def test_classes_that_a_map_makes_one_are_compared_as_one(tmp_path):
    data = str(made.several(tmp_path / "data"))
    ours, more = (made.model(tmp_path / f"{seed}.safetensors", made.CLASSES[1:], seed=seed) for seed in (1, 3))
    (tmp_path / "map.json").write_text('{"ape": "bee"}', encoding="utf-8")
    found = evaluate(ours, data, against=[more], translate=tmp_path / "map.json")
    first, second = (each.measures["map"] for each in found.judged)
    assert found.as_dict()["comparisons"][0]["difference"] == pytest.approx(second - first)


def test_a_run_knows_its_data_from_another_directory_also_as_the_other_model(tmp_path, monkeypatch):
    made.folder(tmp_path / "zoo", each=12)
    other = made.model(tmp_path / "m.safetensors")
    monkeypatch.chdir(tmp_path)
    vitrail.train("zoo", out="run", wishes={"steps": 2, "batch_size": 8}, settings=["model.size.depth=1"])
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    found = evaluate(other, "../zoo", against=["../run"])
    assert (
        found.judged[0]
        .chosen.notes[-1]
        .startswith("run was trained on pictures of ../zoo, so these numbers flatter it")
    )


def test_five_classes_or_fewer_and_several_labels_have_an_interval_of_top5_too(tmp_path):
    few = made.CLASSES[:3]
    path, data = made.model(tmp_path / "m.safetensors", few), str(made.folder(tmp_path / "data", few))
    told = evaluate(path, data).as_dict()
    assert (told["top5"], told["top5_interval"]) == (1.0, list(wilson(21, 21)))
    listed = made.several(tmp_path / "several", classes=few[:2])
    several = evaluate(path, Wanted(str(listed), task="multi")).as_dict()
    right = round(40 * several["top5"])
    assert right < 40  # some pictures have no label
    assert several["top5_interval"] == list(wilson(right, 40))


def test_several_comparisons_are_each_judged_by_themselves_and_that_is_said(tmp_path):
    data = str(made.folder(tmp_path / "data"))
    paths = [made.model(tmp_path / f"{seed}.safetensors", seed=seed) for seed in range(3)]
    both = evaluate(paths[0], data, against=paths[1:])
    assert "Each of these 2 comparisons is judged at 5 % by itself" in both.caution
    both.write(tmp_path / "out")
    assert both.caution in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert both.as_dict()["caution"] == both.caution
    assert evaluate(paths[0], data, against=paths[1:2]).caution == ""


def test_every_prediction_is_a_row(tmp_path):
    data, path = str(made.folder(tmp_path / "data")), made.model(tmp_path / "m.safetensors")
    targets, logits = by_hand(path, data)
    evaluate(path, data).write(tmp_path / "out")
    with (tmp_path / "out" / "predictions.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 63
    order = np.argsort(-logits, axis=1)
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    for k, row in enumerate(rows):
        assert row["path"].startswith(data)
        assert row["label"] == made.CLASSES[targets[k]]
        assert row["predicted"] == row["top1"] == made.CLASSES[order[k, 0]]
        assert row["right"] == str(int(order[k, 0] == targets[k]))
        assert int(row["rank"]) == order[k].tolist().index(targets[k]) + 1
        assert float(row["probability"]) == pytest.approx(chances[k].max(), rel=1e-3)
        assert row["top5"] == made.CLASSES[order[k, 4]]


def test_a_model_without_classes_is_sent_to_the_probes(tmp_path):
    body = vitrail.build(patch=4, width=16, depth=1, heads=2, classes=None, image_size=8)
    vitrail.save(body, tmp_path / "body.safetensors", preprocessing=vitrail.Preprocessing((8, 8), (8, 8)))
    with pytest.raises(ValueError, match="gives features; use --probe"):
        evaluate(tmp_path / "body.safetensors", str(made.folder(tmp_path / "data")))


def test_a_model_that_does_not_say_how_pictures_are_prepared_is_refused(tmp_path):
    bare = vitrail.build(patch=4, width=16, depth=1, heads=2, classes=2, image_size=8)
    vitrail.save(bare, tmp_path / "bare.safetensors", labels=("a", "b"))
    with pytest.raises(ValueError, match="does not say how pictures are prepared"):
        open_model(tmp_path / "bare.safetensors")


def test_the_checksum_is_of_the_files_bytes(tmp_path):
    import hashlib

    path = made.model(tmp_path / "run" / "model.safetensors")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert open_model(path).checksum == open_model(path.parent).checksum == digest
    assert open_model(path).name == "run"
