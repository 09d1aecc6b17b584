"""Six studies from plan to report at the scale `test`."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.checkpoints.load import load, save
from vitrail.models.registry import build
from vitrail.models.vit import ViT
from vitrail.studies import (
    attention_distance,
    load_study,
    masked_patches,
    position_maps,
    regularisation,
    resolution,
    transfer,
)
from vitrail.studies.report import write_report
from vitrail.studies.runner import Runner
from vitrail.studies.study import Answer, CellResult, Study
from vitrail.studies.sweep import Sweep, begin_sweep
from vitrail.training.recipe import Data, read_recipe


def ran(sweep: Sweep) -> tuple[list[CellResult], Answer]:
    """Run every cell, write the report, and return results and answer."""
    state = Runner(sweep).run()
    assert not state.failed, [failed.line for failed in state.failed.values()]
    results = list(state.results.values())
    answer = write_report(sweep.study, sweep.setup, results, [], sweep.directory)
    assert answer is not None
    assert answer.finding in json.loads((sweep.directory / "study.json").read_text())["answer"]["finding"]
    assert answer.limits.split()[0] in (sweep.directory / "report.html").read_text()
    assert all(len(row) == len(answer.columns) for row in answer.rows)
    assert not answer.finding.startswith("No finding yet")
    return results, answer


def begun(study: Study, place: Path) -> Sweep:
    assert load_study(study.name) is study
    return begin_sweep(place / "study", study, "test")


def test_position_maps_from_plan_to_answer(tmp_path: Path):
    results, answer = ran(begun(position_maps.STUDY, tmp_path))
    assert [result.at["setting"] for result in results] == ["as usual"] * 2 + ["twice as long"] * 2
    assert [result.numbers["steps"] for result in results] == [6, 6, 12, 12]
    similarity = np.array(results[0].numbers["similarity"])
    assert similarity.shape == (4, 4, 4, 4)
    assert np.allclose(similarity.reshape(16, 16).diagonal(), 1)
    assert all(-1 <= result.numbers["place"] <= 1 for result in results)
    assert [len(series.maps) for series in answer.charts[0].series] == [16, 16]


def test_fine_tuning_starts_from_the_named_positions(tmp_path: Path):
    sweep = begun(resolution.STUDY, tmp_path)
    results, answer = ran(sweep)
    assert [result.phase for result in results] == ["base", *["final"] * 4]
    assert ["test" in result.numbers for result in results] == [
        False,
        *[True] * 4,
    ]  # only final runs
    assert [row[0] for row in answer.rows] == list(resolution.INIT_FILES)
    base = sweep.directory / results[0].run
    small = load(base / "model.safetensors")
    assert isinstance(small, ViT)
    assert small.config.image_size == (4, 4)
    begins = {}
    for result in results[1:]:
        recipe = read_recipe(sweep.directory / result.run / "recipe.json")
        assert recipe.init is not None
        assert Path(recipe.init).parent == base
        model = load(recipe.init, image_size=recipe.model.image_size)
        begins[result.at["positions"]] = model
        assert model.labels == small.labels
        differ = [n for n, t in model.state_dict().items() if not t.equal(small.state_dict()[n])]
        assert differ == ([] if result.at["positions"] == resolution.SAME_SIZE else ["position.weight"])
    assert [begins[way].config.image_size for way in resolution.INIT_FILES] == [(4, 4), (8, 8), (8, 8), (8, 8)]
    tables = [
        begins[way].state_dict()["position.weight"]
        for way in (resolution.INTERPOLATED_2D, resolution.READING_ORDER, resolution.REINITIALISED)
    ]
    assert not any(a.equal(b) for a, b in ((tables[0], tables[1]), (tables[0], tables[2]), (tables[1], tables[2])))


def test_masked_patches_from_plan_to_answer(tmp_path: Path):
    sweep = begun(masked_patches.STUDY, tmp_path)
    results, answer = ran(sweep)
    assert [row[0] for row in answer.rows] == list(masked_patches.METHODS)
    bases = [result for result in results if result.phase == "base"]
    assert [result.at["learnt"] for result in bases] == list(masked_patches.OBJECTIVES)
    n_images = {}
    for result in results:
        splits = json.loads((sweep.directory / result.run / "run.json").read_text())["data"]["splits"]
        n_images[result.phase, result.at.get("begins")] = splits["train"]["images"]
    assert n_images["final", masked_patches.MEAN_COLOUR] == n_images["final", masked_patches.SCRATCH] == 100
    assert n_images["base", None] == n_images["final", masked_patches.LABELLED] > 1_400
    starts = {
        result.at["begins"]: read_recipe(sweep.directory / result.run / "recipe.json").init
        for result in results
        if result.phase == "final"
    }
    assert starts[masked_patches.SCRATCH] is starts[masked_patches.LABELLED] is None
    assert len({init for init in starts.values() if init}) == 4


def test_attention_distance_from_plan_to_answer(tmp_path: Path):
    results, answer = ran(begun(attention_distance.STUDY, tmp_path))
    assert [result.at["model"] for result in results] == ["ViT", "ViT", "hybrid", "hybrid"]
    for result in results:
        distance = np.array(result.numbers["distance"])
        assert distance.shape == (3, 2)
        assert ((distance > 0) & (distance < 2)).all()
        assert result.numbers["looked at"] == 128
    assert [row[0] for row in answer.rows] == ["ViT", "hybrid"]
    assert [len(series.x) for series in answer.charts[0].series] == [6, 6]


def test_transfer_trains_and_transfers_a_model(tmp_path: Path):
    sweep = begun(transfer.STUDY, tmp_path)
    results, answer = ran(sweep)
    assert [(r.phase, r.at.get("begins")) for r in results] == [
        ("base", None),
        *[("final", transfer.PRETRAINED)] * 2,
        *[("final", transfer.SCRATCH)] * 2,
    ]
    assert [row[0] for row in answer.rows] == ["digits"]
    recipe = read_recipe(sweep.directory / results[1].run / "recipe.json")
    assert recipe.init == str(sweep.directory / results[0].run / "model.safetensors")
    assert (recipe.data.per_class, recipe.optimizer.weight_decay, recipe.optimizer.clip) == (100, 0.0, 1.0)


def test_given_model_is_transferred_to_present_folders(tmp_path: Path):
    random = np.random.default_rng(0)
    for task, classes in (("Patch_Camelyon", 2), ("kitti-distance", 4)):
        for split, count in (("train", 4), ("validation", 2), ("test", 2)):
            for label in range(classes):
                folder = tmp_path / "DATA" / task / split / f"class-{label}"
                folder.mkdir(parents=True)
                for number in range(count):
                    pixels = random.integers(0, 255, (16, 16, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / f"{number}.png")
    model = build(patch=8, width=16, depth=1, heads=2, image_size=16, classes=7)
    save(model, tmp_path / "model.safetensors")
    data, init = Data(str(tmp_path / "DATA")), str(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="give the model with --init FILE"):
        begin_sweep(tmp_path / "study", transfer.STUDY, "test", data)
    with pytest.raises(OSError, match=r"no\.safetensors"):
        begin_sweep(tmp_path / "study", transfer.STUDY, "test", data, init=str(tmp_path / "no.safetensors"))
    assert not (tmp_path / "study").exists()
    sweep = begin_sweep(tmp_path / "study", transfer.STUDY, "test", data, seeds=1, init=init)
    with pytest.raises(ValueError, match="a different --init"):
        begin_sweep(tmp_path / "study", transfer.STUDY, "test", data, seeds=1)
    results, answer = ran(sweep)
    assert [(r.at["task"], r.at["group"], r.at["begins"]) for r in results] == [
        ("patch-camelyon", "specialised", transfer.PRETRAINED),
        ("patch-camelyon", "specialised", transfer.SCRATCH),
        ("kitti-distance", "structured", transfer.PRETRAINED),
        ("kitti-distance", "structured", transfer.SCRATCH),
    ]
    assert [result.numbers["pictures"] for result in results] == [4, 4, 8, 8]
    assert answer.rows[-1][1] == "VTAB, 2 of 19"
    assert (
        "eurosat (specialised, 10 classes) is missing: put it in DATA/eurosat as published (AnnualCrop), or in class folders"
        in answer.notes
    )
    assert len(answer.notes) == 1 + 17
    command = json.loads((tmp_path / "study" / "study.json").read_text())["command"]
    assert command[command.index("--init") + 1] == init


def test_init_is_refused_by_other_studies(tmp_path: Path):
    with pytest.raises(ValueError, match="regularisation does not support --init"):
        begin_sweep(tmp_path / "study", regularisation.STUDY, "test", init="model.safetensors")


def test_regularisation_from_plan_to_answer(tmp_path: Path):
    sweep = begun(regularisation.STUDY, tmp_path)
    results, answer = ran(sweep)
    assert [result.at["per class"] for result in results] == [10] * 4 + [40]
    recipes = [read_recipe(sweep.directory / result.run / "recipe.json") for result in results]
    assert [recipe.model.dropout for recipe in recipes] == [0.0, 0.1, 0.0, 0.1, 0.0]
    assert [recipe.optimizer.weight_decay for recipe in recipes] == [0.0, 0.1, 0.0, 0.1, 0.0]
    assert [recipe.objective.mixup for recipe in recipes] == [0.0, 0.0, 0.5, 0.5, 0.0]
    assert [len(recipe.augment) for recipe in recipes] == [1, 1, 3, 3, 1]
    assert answer.columns == ("augmentation", "regularisation", "10 a class", "40 a class")
