"""Findings and verdicts of six studies from constructed results."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from vitrail.models.registry import build_from
from vitrail.models.vit import ViT
from vitrail.objectives.masked_patches import MaskedPatches
from vitrail.studies import (
    attention_distance,
    masked_patches,
    position_maps,
    regularisation,
    resolution,
    transfer,
    vtab,
)
from vitrail.studies.base import configure_study_vit
from vitrail.studies.study import Answer, CellResult, Study, StudySetup
from vitrail.training.recipe import Data, Facts

DIGITS = Facts(1257, 10, False, (8, 8), 1, False)
SPREAD = (-0.002, 0.0, 0.002)  # of three seeds


def final(at: Mapping[str, Any], seed: int, **numbers: Any) -> CellResult:
    return CellResult({**at, "seed": seed}, "final", {"pictures": 10_000, **numbers}, 1.0)


def finals(
    at: Mapping[str, Any], around: float, name: str = "test", spread: Sequence[float] = SPREAD
) -> list[CellResult]:
    """Return three seeds around a value."""
    return [final(at, seed, **{name: around + apart}) for seed, apart in enumerate(spread)]


def answered(study: Study, results: Sequence[CellResult], **sizes: Any) -> Answer:
    scale = study.scales["test"]
    return study.interpret(results, replace(scale, sizes={**scale.sizes, **sizes}))


def setup_of(study: Study, place: Path = Path("study"), **changes: Any) -> StudySetup:
    return StudySetup(study.scales["test"], Data("digits"), DIGITS, place, **changes)


SIX = (position_maps, resolution, masked_patches, attention_distance, transfer, regularisation)


@pytest.mark.parametrize("module", SIX, ids=lambda module: module.STUDY.name)
@pytest.mark.parametrize("scale", ["test", "laptop", "gpu", "cluster"])
def test_every_scale_plans_small_and_large_images(module: ModuleType, scale: str):
    small = replace(DIGITS, images=45_000, side=(32, 32), channels=3)
    photographs = replace(small, side=(400, 534), several_sizes=True)
    for facts in (small, photographs):
        study: Study = module.STUDY
        setup = StudySetup(study.scales[scale], Data("pictures"), facts, Path("study"))
        cells = study.plan(setup, [])
        assert cells
        assert len({cell.name for cell in cells}) == len(cells)
        assert all(cell.recipe.model.shape.patches >= 4 for cell in cells)


# --- position-maps ---


def mapped(places: Mapping[str, float], lines: float = 0.1, spread: Sequence[float] = SPREAD) -> list[CellResult]:
    """Return three seeds of each setting, with a 2×2 grid of positions."""
    return [
        final(
            {"setting": setting, "steps": 800, "rate": 1e-3, "weight decay": 0.1},
            seed,
            place=place + apart,
            lines=lines + apart,
            test=0.8,
            similarity=np.eye(4).reshape(2, 2, 2, 2).tolist(),
        )
        for setting, place in places.items()
        for seed, apart in enumerate(spread)
    ]


def test_maps_that_depend_on_training_agree_with_the_paper():
    answer = answered(
        position_maps.STUDY,
        mapped({"as usual": 0.6, "twice as long": 0.7, "no weight decay": 0.6, "half as long": 0.5}),
    )
    assert answer.finding == (
        "Closer positions are more similar (correlation of their cosine with nearness 0.60 (0.60 to 0.60)), and how much depends "
        "on the training: twice as long +0.10 (+0.10 to +0.10); half as long −0.10 (−0.10 to −0.10); no weight decay: no clear "
        "change."
    )
    assert answer.agreement == "agrees"
    assert answer.rows[1][:6] == (
        "twice as long",
        "800",
        "0.001",
        "0.1",
        "0.70 (0.70 to 0.70)",
        "+0.10 (+0.10 to +0.10)",
    )
    assert answer.notes[0].startswith("Positions of one row or column are more similar")
    maps = answer.charts[0].series[0].maps
    assert (len(maps), maps[0], maps[3]) == (4, ((1.0, 0.0), (0.0, 0.0)), ((0.0, 0.0), (0.0, 1.0)))


def test_finding_names_only_changed_settings():
    finding = answered(position_maps.STUDY, mapped({"as usual": 0.6, "twice as long": 0.7})).finding
    assert finding.endswith("depends on the training: twice as long +0.10 (+0.10 to +0.10).")


def test_one_clear_change_of_six_is_unclear():
    answer = answered(position_maps.STUDY, mapped(dict.fromkeys(position_maps.SETTINGS, 0.6) | {"twice as long": 0.7}))
    assert "and one setting of 6 changes that, which may be chance: twice as long" in answer.finding
    assert answer.agreement == "unclear"


def test_unchanged_maps_are_no_difference():
    answer = answered(position_maps.STUDY, mapped({"as usual": 0.6, "twice as long": 0.6, "half as long": 0.6}))
    assert answer.finding.endswith(
        "and none of the 2 other settings clearly changes that: no difference at this scale."
    )
    assert answer.agreement == "no difference"


def test_unclear_and_negative_correlation():
    noisy = (-0.5, 0.0, 0.5)
    answer = answered(position_maps.STUDY, mapped({"as usual": 0.1, "twice as long": 0.9}, 0.0, noisy))
    assert answer.finding == (
        "Whether closer positions are more similar is unclear at this scale: correlation of their cosine with nearness 0.10 "
        "(−1.14 to 1.34)."
    )
    assert answer.agreement == "unclear"
    assert answer.notes[0].startswith("Rows and columns do not clearly stand out")
    answer = answered(position_maps.STUDY, mapped({"as usual": -0.3}))
    assert answer.finding.startswith("Closer positions are less similar: ")
    assert answer.agreement == "disagrees"


def test_multiple_comparisons_are_noted():
    answer = answered(position_maps.STUDY, mapped(dict.fromkeys(position_maps.SETTINGS, 0.6)))
    assert answer.notes[1] == "Of 6 comparisons at least one is clear by chance alone in up to 26 % of studies."
    assert answer.charts[0].y_name == "cosine similarity"


def test_two_seeds_leave_maps_unclear():
    answer = answered(position_maps.STUDY, mapped({"as usual": 0.6, "twice as long": 0.7}, spread=(0.0, 0.0)))
    assert answer.agreement == "unclear"


def test_measure_structure_of_linear_similarity():
    y, x = (axis.reshape(-1) for axis in np.mgrid[:5, :4])
    away = np.hypot(y[:, None] - y, x[:, None] - x)
    place, lines = position_maps.measure_structure((1 - away / 10).reshape(5, 4, 5, 4))
    assert place == pytest.approx(1)
    assert lines == pytest.approx(0, abs=1e-9)
    line = (y[:, None] == y) | (x[:, None] == x)
    assert position_maps.measure_structure((1 - away / 10 + 0.3 * line).reshape(5, 4, 5, 4))[1] == pytest.approx(0.3)


# --- resolution ---


def tuned_at(same: float, grid: float, order: float, anew: float, spread: Sequence[float] = SPREAD) -> list[CellResult]:
    ways = {
        resolution.SAME_SIZE: same,
        resolution.INTERPOLATED_2D: grid,
        resolution.READING_ORDER: order,
        resolution.REINITIALISED: anew,
    }
    return [
        result for way, test in ways.items() for result in finals({"positions": way, "rate": 0.03}, test, spread=spread)
    ]


def test_better_larger_size_with_interpolation_agrees():
    answer = answered(resolution.STUDY, tuned_at(0.80, 0.85, 0.84, 0.82))
    assert answer.finding == (
        "Fine-tuning at the larger size brings +5.0 points (+5.0 to +5.0); there 2-D interpolation brings +3.0 points (+3.0 to "
        "+3.0) against reinitialised positions, and +1.0 points (+1.0 to +1.0) against reading order."
    )
    assert answer.agreement == "agrees"
    assert answer.rows[0] == ("the same size", "0.03", "80.0 % (79.5–80.5)", "+5.0 points (+5.0 to +5.0)")


@pytest.mark.parametrize(
    ("tests", "agreement"),
    [
        ((0.85, 0.80, 0.80, 0.70), "disagrees"),
        ((0.70, 0.80, 0.80, 0.85), "disagrees"),
        ((0.70, 0.80, 0.80, 0.80), "unclear"),
        ((0.80, 0.80, 0.80, 0.70), "unclear"),
    ],
)
def test_one_claim_alone_does_not_agree(tests: tuple[float, float, float, float], agreement: str):
    assert answered(resolution.STUDY, tuned_at(*tests)).agreement == agreement


def test_resolution_no_difference():
    answer = answered(resolution.STUDY, tuned_at(0.80, 0.80, 0.80, 0.80))
    assert answer.finding.endswith(
        "perhaps +0.0 points (+0.0 to +0.0) against reading order: no difference at this scale."
    )
    assert answer.finding.startswith(
        "Fine-tuning at the larger size brings perhaps +0.0 points (+0.0 to +0.0); there 2-D"
    )
    assert answer.agreement == "no difference"


def test_missing_runs_are_named():
    answer = answered(resolution.STUDY, finals({"positions": resolution.SAME_SIZE, "rate": 0.03}, 0.8))
    assert answer.finding == ("No finding yet: no finished run of larger, 2-D; larger, reading order; larger, anew.")
    assert answer.agreement == "unclear"


def test_initial_positions_keep_the_class_token():
    small = build_from(configure_study_vit(setup_of(resolution.STUDY), image_size=(4, 4)))
    assert isinstance(small, ViT)
    with torch.no_grad():
        small.position.weight.copy_(torch.arange(5.0)[None, :, None].expand(1, 5, 16))  # class token 0, patches 1 to 4
    stretched = resolution.resize_in_reading_order(small, (8, 8))
    assert stretched.shape == (1, 17, 16)
    assert stretched[0, 0].eq(0).all()
    along = stretched[0, 1:, 0]
    assert (along.diff() >= 0).all()  # monotonic across rows
    assert (along[0], along[-1]) == (1, 4)
    fresh = resolution.reinitialise_positions(small, (8, 8), 1)
    assert fresh[0, 0].eq(0).all()
    assert fresh[0, 1:].std() == pytest.approx(0.02, rel=0.2)
    assert torch.equal(fresh, resolution.reinitialise_positions(small, (8, 8), 1))
    assert not torch.equal(fresh, resolution.reinitialise_positions(small, (8, 8), 2))


def test_images_of_two_patches_are_refused():
    setup = replace(setup_of(resolution.STUDY), facts=replace(DIGITS, side=(4, 4)))
    with pytest.raises(ValueError, match="too few patches to halve"):
        resolution.plan(setup, [])


# --- masked-patches ---


def learned(
    scratch: float, colour: float, labelled: float, spread: Sequence[float] = SPREAD, **others: float
) -> list[CellResult]:
    names = {"down": masked_patches.DOWNSAMPLED, "pixels": masked_patches.PIXELS, "less": masked_patches.LESS_MASKED}
    ways = {masked_patches.SCRATCH: scratch, masked_patches.MEAN_COLOUR: colour, masked_patches.LABELLED: labelled}
    ways |= {names[name]: test for name, test in others.items()}
    return [
        result for way, test in ways.items() for result in finals({"begins": way, "rate": 1e-3}, test, spread=spread)
    ]


def test_pre_training_between_scratch_and_all_labels_agrees():
    answer = answered(masked_patches.STUDY, learned(0.40, 0.45, 0.60, down=0.45, pixels=0.44, less=0.46), labels=100)
    assert answer.finding == (
        "Pre-training on the mean colours of masked patches brings +5.0 points (+5.0 to +5.0) over scratch with 100 labels "
        "per class, and stays behind training with all labels, which has +15.0 points (+15.0 to +15.0) more."
    )
    assert answer.agreement == "agrees"
    assert answer.notes == (
        "4×4 colours, 50 %: no clear difference against colour, 50 % (+0.0 points (+0.0 to +0.0)); in the paper it works quite "
        "well too, though mean colours had the best few-shot scores.",
        "pixels, 50 %: worse against colour, 50 % (−1.0 points (−1.0 to −1.0)); in the paper it works quite well too, slightly "
        "worse.",
        "colour, 15 %: better against colour, 50 % (+1.0 points (+1.0 to +1.0)); in the paper it is slightly worse by few-shot "
        "scores.",
    )


def test_pre_training_without_gain_is_no_difference():
    answer = answered(masked_patches.STUDY, learned(0.45, 0.45, 0.60), labels=100)
    assert answer.finding.endswith("no difference at this scale.")
    assert answer.agreement == "no difference"
    assert answer.notes == ()  # no notes for targets without a run


def test_pre_training_that_loses_or_beats_all_labels_disagrees():
    costs = answered(masked_patches.STUDY, learned(0.50, 0.45, 0.60), labels=100)
    assert costs.finding == (
        "Pre-training on the mean colours of masked patches costs with 100 labels per class: −5.0 points (−5.0 to −5.0) "
        "against scratch."
    )
    ahead = answered(masked_patches.STUDY, learned(0.40, 0.45, 0.42), labels=100)
    assert "is even ahead of training with all labels" in ahead.finding
    assert costs.agreement == ahead.agreement == "disagrees"


def test_pre_training_near_all_labels_agrees():
    answer = answered(masked_patches.STUDY, learned(0.40, 0.45, 0.45), labels=100)
    assert "how far it stays behind training with all labels is not clear" in answer.finding
    assert answer.agreement == "agrees"


def test_pre_training_needs_its_baselines():
    answer = answered(masked_patches.STUDY, finals({"begins": masked_patches.MEAN_COLOUR, "rate": 1e-3}, 0.4))
    assert answer.finding == "No finding yet: no finished run of from scratch; from scratch, all labels."


def test_pre_training_never_sees_test_images():
    cells = masked_patches.plan(setup_of(masked_patches.STUDY), [])
    assert {cell.recipe.data.fractions for cell in cells} == {(0.8, 0.1, 0.1)}  # the same split with and without labels
    base = [cell for cell in cells if cell.phase == "base"]
    objectives = [cell.recipe.objective for cell in base]
    assert objectives == [
        MaskedPatches(target, share)
        for target, share in (("colour", 0.5), ("down", 0.5), ("pixels", 0.5), ("colour", 0.15))
    ]
    theirs = replace(setup_of(masked_patches.STUDY), data=Data("photos", fractions=(0.6, 0.2, 0.2)))
    assert {cell.recipe.data.fractions for cell in masked_patches.plan(theirs, [])} == {(0.6, 0.2, 0.2)}


def test_fine_tuning_waits_for_its_pre_trained_model():
    setup = setup_of(masked_patches.STUDY)
    before = {cell.at["begins"] for cell in masked_patches.plan(setup, []) if cell.phase == "final"}
    assert before == {masked_patches.SCRATCH, masked_patches.LABELLED}
    done = CellResult({"learnt": masked_patches.PIXELS, "seed": 0}, "base", {}, 1.0, "cells/pixels/run")
    after = {c.at["begins"]: c.recipe for c in masked_patches.plan(setup, [done]) if c.phase == "final"}
    assert set(after) == before | {masked_patches.PIXELS}
    assert after[masked_patches.PIXELS].init == "study/cells/pixels/run/model.safetensors"
    assert after[masked_patches.PIXELS].data.per_class == 10
    assert after[masked_patches.LABELLED].data.per_class is None


# --- attention-distance ---

APART = (-0.004, 0.0, 0.004)


def looked(
    pure: Sequence[Sequence[float]], hybrid: Sequence[Sequence[float]], seeds: Sequence[float] = APART
) -> list[CellResult]:
    """Return results with three layers of two heads."""
    return [
        final(
            {"model": model, "rate": 1e-3},
            seed,
            test=0.7,
            distance=(np.array(heads) + apart * np.array([[-1], [0], [1]])).tolist(),
        )
        for model, heads in (("ViT", pure), ("hybrid", hybrid))
        for seed, apart in enumerate(seeds)
    ]


RISING, GLOBAL, FLAT = (
    ((0.4, 0.95), (0.7, 0.9), (0.95, 1.0)),
    ((0.9, 0.95), (0.9, 1.0), (0.95, 1.0)),
    ((0.95,) * 2,) * 3,
)


def test_all_attention_claims_together_agree():
    answer = answered(attention_distance.STUDY, looked(RISING, GLOBAL))
    assert answer.finding == (
        "In the ViT attention distance grows with depth (0.30 (0.28 to 0.32) from low to high layers), of the 2 heads in its low "
        "layers 1.0 attend globally and 1.0 locally on average over seeds, and the hybrid's low layers look farther (+0.25 "
        "(+0.25 to +0.25))."
    )
    assert answer.agreement == "agrees"
    assert answer.rows[0][-2:] == ("3 of 6", "3 of 6")
    points = answer.charts[0].series[0]
    assert (points.x, points.y[:2]) == ((1, 1, 2, 2, 3, 3), (pytest.approx(0.4), pytest.approx(0.95)))


def test_heads_against_one_claim_disagree():
    falling = tuple(reversed(RISING))
    local = ((0.4, 0.45), (0.7, 0.9), (0.95, 1.0))
    spread_out = ((0.6, 0.95), (0.7, 0.9), (0.95, 1.0))
    level = ((0.4, 0.95), (0.4, 0.95), (0.42, 0.96))
    nearer = ((0.2, 0.5), (0.7, 0.9), (0.95, 1.0))
    assert "falls with depth" in answered(attention_distance.STUDY, looked(falling, GLOBAL)).finding
    assert "0.0 attend globally and 2.0 locally" in answered(attention_distance.STUDY, looked(local, GLOBAL)).finding
    assert (
        "1.0 attend globally and 0.0 locally" in answered(attention_distance.STUDY, looked(spread_out, GLOBAL)).finding
    )
    assert "0.01 (0.00 to 0.03) from low to high" in answered(attention_distance.STUDY, looked(level, GLOBAL)).finding
    assert "low layers look nearer" in answered(attention_distance.STUDY, looked(RISING, nearer)).finding
    for pure, hybrid in ((falling, GLOBAL), (local, GLOBAL), (spread_out, GLOBAL), (level, GLOBAL), (RISING, nearer)):
        assert answered(attention_distance.STUDY, looked(pure, hybrid)).agreement == "disagrees"


def test_partial_attention_claims():
    answer = answered(attention_distance.STUDY, looked(RISING, RISING))
    assert "there is no clear difference at this scale (+0.00 (+0.00 to +0.00))" in answer.finding
    assert answer.agreement == "unclear"
    answer = answered(attention_distance.STUDY, looked(FLAT, FLAT))
    assert "does not clearly change with depth" in answer.finding
    assert answer.agreement == "disagrees"
    assert answer.notes[0].startswith("It would disagree with the paper if distance grew by less than 0.05 or fell")


def test_two_seeds_leave_heads_unclear():
    assert answered(attention_distance.STUDY, looked(RISING, GLOBAL, (0.0, 0.0))).agreement == "unclear"


def test_attention_needs_both_models():
    results = [result for result in looked(RISING, GLOBAL) if result.at["model"] == "ViT"]
    answer = answered(attention_distance.STUDY, results)
    assert answer.finding == "No finding yet: no finished run of hybrid."


@pytest.mark.parametrize(("depth", "low", "high"), [(1, 1, 0), (2, 1, 1), (3, 1, 2), (4, 1, 3), (6, 2, 4), (12, 4, 8)])
def test_low_and_high_layers_are_thirds(depth: int, low: int, high: int):
    assert attention_distance.split_thirds(depth) == (slice(0, low), slice(high, depth))


def test_uniform_distance_is_the_mean_over_pairs():
    assert attention_distance.uniform_distance((1, 2), 4) == pytest.approx(2)  # half of the pairs are 4 pixels apart


def test_hybrid_with_another_stride_is_refused():
    setup = setup_of(attention_distance.STUDY)
    setup = replace(setup, scale=replace(setup.scale, sizes={**setup.scale.sizes, "stages": (1, 1)}))
    with pytest.raises(ValueError, match="8 pixels per token and the ViT 4"):
        attention_distance.plan(setup, [])


# --- transfer ---


def transferred(tasks: Mapping[str, tuple[str, float, float]]) -> list[CellResult]:
    """Return results by task: group, pre-trained and from scratch."""
    return [
        result
        for task, (group, *tests) in tasks.items()
        for begins, test in zip((transfer.PRETRAINED, transfer.SCRATCH), tests, strict=True)
        for result in finals({"task": task, "group": group, "begins": begins, "rate": 0.01}, test)
    ]


def test_transfer_agrees_and_reports_group_means():
    answer = answered(
        transfer.STUDY,
        transferred(
            {
                "cifar-100": ("natural", 0.70, 0.10),
                "dtd": ("natural", 0.60, 0.10),
                "eurosat": ("specialised", 0.90, 0.60),
                "dmlab": ("structured", 0.40, 0.30),
                "cifar-10": ("whole", 0.90, 0.90),
            }
        ),
    )
    assert answer.finding == (
        "Fine-tuned as in the paper, the model has 70.0 % (69.5–70.5) over 5 datasets (natural 65.0 % (64.5–65.5), specialised "
        "90.0 % (89.5–90.5), structured 40.0 % (39.5–40.5)); its weights bring +30.0 points (+30.0 to +30.0) over random "
        "initialisation, clearly on 4 of 5."
    )
    assert answer.agreement == "agrees"
    assert answer.rows[4][-2:] == ("99.50 ± 0.06", "99.15 ± 0.03")
    assert [row[:2] for row in answer.rows[5:]] == [
        *(("mean", group) for group in vtab.GROUPS),
        ("mean", "VTAB, 4 of 19"),
    ]
    assert answer.rows[-1][3] == "65.0 % (64.5–65.5)"
    assert answer.rows[-1][-2:] == ("", "")  # the paper's mean is of all 19
    assert answer.notes[0].startswith("The paper's table has no random initialisation")
    assert len(answer.notes) == 1 + 15
    assert (
        "svhn (natural, 10 classes) is missing: put it in DATA/svhn as published (train_32x32.mat, test_32x32.mat), or in class "
        "folders"
    ) in answer.notes
    assert not [note for note in answer.notes if "TFRecord" in note]  # dmlab is present
    assert "the published TFRecord files are not supported" in vtab.describe_missing_tasks([])[13]


def test_paper_mean_is_shown_for_all_19_tasks():
    answer = answered(transfer.STUDY, transferred({task.name: (task.group, 0.7, 0.2) for task in vtab.VTAB_TASKS}))
    assert answer.rows[-1][1:2] + answer.rows[-1][-2:] == ("VTAB, 19 of 19", "77.63 ± 0.23", "72.72 ± 0.21")
    assert len(answer.notes) == 1


def test_transfer_without_gain_or_with_loss():
    same = answered(transfer.STUDY, transferred({"digits": ("small", 0.7, 0.7)}))
    assert same.finding == (
        "Fine-tuned as in the paper, the model has 70.0 % (69.5–70.5) on one dataset; its weights make no clear difference "
        "compared with random initialisation at this scale (+0.0 points (+0.0 to +0.0))."
    )
    assert same.agreement == "no difference"
    assert same.notes[1:] == ("No VTAB task was found: --data DATA takes a folder for each.",)
    worse = answered(transfer.STUDY, transferred({"digits": ("small", 0.6, 0.7)}))
    assert "its weights cost −10.0 points" in worse.finding
    assert worse.agreement == "disagrees"


def test_transfer_with_harm_or_small_gain_disagrees():
    hurt = answered(transfer.STUDY, transferred({"dtd": ("natural", 0.9, 0.1), "svhn": ("natural", 0.6, 0.7)}))
    assert "bring +35.0 points" in hurt.finding
    assert hurt.finding.endswith("clearly on 1 of 2, and clearly cost on 1.")
    few = answered(transfer.STUDY, transferred({"dtd": ("natural", 0.9, 0.1), "svhn": ("natural", 0.7, 0.7)}))
    assert few.finding.endswith("clearly on 1 of 2.")
    little = answered(transfer.STUDY, transferred({"digits": ("small", 0.704, 0.700)}))
    assert "bring +0.4 points (+0.4 to +0.4)" in little.finding
    assert hurt.agreement == few.agreement == little.agreement == "disagrees"
    assert "or if the mean gain was clearly below 1 point" in little.notes[0]


def test_effective_number_of_test_images():
    assert transfer.effective_n_images([1_000, 1_000]) == 2_000
    assert transfer.effective_n_images([100, 10_000]) == 396  # far from 10,100
    assert transfer.effective_n_images([100, None]) is transfer.effective_n_images([]) is None


def test_dataset_needs_both_initialisations():
    only = finals({"task": "dtd", "group": "natural", "begins": transfer.PRETRAINED, "rate": 0.01}, 0.7)
    assert answered(transfer.STUDY, only).finding.startswith("No finding yet")


def test_vtab_has_its_19_tasks_in_three_groups():
    assert [sum(task.group == group for task in vtab.VTAB_TASKS) for group in vtab.GROUPS] == [7, 4, 8]
    assert set(transfer.PAPER_STEPS_AND_LRS) == {task.name for task in (*vtab.VTAB_TASKS, *vtab.WHOLE_TASKS)}
    assert {transfer.PAPER_STEPS_AND_LRS[task.name] for task in vtab.VTAB_TASKS} == {(2_500, (0.01,))}
    assert {(task.examples, task.per_class) for task in vtab.VTAB_TASKS} == {((800, 200), None)}
    assert {(task.examples, task.per_class) for task in vtab.WHOLE_TASKS} == {(None, None)}
    assert {(task.examples, task.per_class) for task in vtab.SMALL_TASKS} == {(None, 100)}


def test_folder_names_ignore_case_and_punctuation(tmp_path: Path):
    for name in ("CIFAR_100", "eurosat", "holidays"):
        (tmp_path / name).mkdir()
    (tmp_path / "svhn").write_text("no folder")
    found = {task.name: Path(where).name for task, where in vtab.locate_tasks(tmp_path).items()}
    assert found == {"cifar-100": "CIFAR_100", "eurosat": "eurosat", "cifar-100, whole": "CIFAR_100"}


def test_dataset_name_is_not_a_directory():
    assert vtab.locate_tasks("digits") == {}


def test_published_files_are_located(tmp_path: Path):
    (tmp_path / "SVHN").mkdir()
    (tmp_path / "SVHN" / "train_32x32.mat").touch()
    (tmp_path / "CLEVR_v1.0" / "scenes").mkdir(parents=True)
    (tmp_path / "CLEVR_v1.0" / "scenes" / "CLEVR_train_scenes.json").touch()
    (tmp_path / "dsprites").mkdir()  # without its file it may be either of two tasks
    (tmp_path / "kitti").mkdir()
    assert {task.name: where for task, where in vtab.locate_tasks(tmp_path).items()} == {
        "svhn": f"svhn:{tmp_path / 'SVHN'}",
        "clevr-count": f"clevr-count:{tmp_path / 'CLEVR_v1.0'}",
        "clevr-distance": f"clevr-distance:{tmp_path / 'CLEVR_v1.0'}",
        "kitti-distance": str(tmp_path / "kitti"),
    }


def test_vtab_task_uses_published_or_default_split(tmp_path: Path):
    for name in ("svhn", "dtd"):
        (tmp_path / name).mkdir()
    (tmp_path / "svhn" / "train_32x32.mat").touch()
    setup = replace(setup_of(transfer.STUDY, init="model.safetensors"), data=Data(str(tmp_path)))
    found = {task.name: data.fractions for task, data in transfer.list_tasks(setup).items()}
    assert found == {"dtd": (0.8, 0.1, 0.1), "svhn": None}


def test_directory_of_datasets_needs_a_model(tmp_path: Path):
    (tmp_path / "eurosat").mkdir()
    setup = replace(setup_of(transfer.STUDY), data=Data(str(tmp_path)))
    with pytest.raises(ValueError, match="give the model with --init FILE"):
        transfer.plan(setup, [])


def test_training_data_is_not_a_target():
    setup = setup_of(transfer.STUDY)
    laptop = replace(setup, data=Data("cifar-10"), scale=transfer.STUDY.scales["laptop"])
    assert [task.name for task in transfer.list_tasks(laptop)] == ["digits", "fashion-mnist"]
    given = transfer.list_tasks(replace(laptop, init="model.safetensors"))
    assert [task.name for task in given] == ["digits", "fashion-mnist", "cifar-10"]
    theirs = transfer.list_tasks(replace(laptop, init="model.safetensors", data=Data("here/photos")))
    assert [(task.name, task.classes, task.per_class) for task in theirs] == [("photos", 10, None)]


# --- regularisation ---

PLAIN, BOTH = regularisation.BASELINE, (regularisation.STRONG, regularisation.REGULARISED)


def grown(
    plain: Mapping[int, float], best: Mapping[int, float], spread: Sequence[float] = SPREAD, way: tuple[str, str] = BOTH
) -> list[CellResult]:
    """Return plain training and one other method by images per class, with equal validation and test accuracy."""
    return [
        final(
            {"augmentation": kind[0], "regularisation": kind[1], "per class": count},
            seed,
            test=value + apart,
            validation=value + apart,
        )
        for kind, curve in ((PLAIN, plain), (way, best))
        for count, value in curve.items()
        for seed, apart in enumerate(spread)
    ]


CURVE = {100: 0.40, 200: 0.50, 400: 0.60, 1600: 0.70}


def test_data_equivalent_from_the_plain_curve():
    answer = answered(regularisation.STUDY, grown(CURVE, {100: 0.50, 200: 0.65}))
    assert answer.finding == (
        "Augmentation and regularisation stand in for data: with 100 images per class the best of them, strong "
        "augmentation with regularisation, is worth 2.0 times (1.9 to 2.1) the images, with 200 4.0 times (3.7 to 4.3), short "
        "of the order of magnitude that the authors found."
    )
    assert answer.agreement == "disagrees"
    assert answer.rows[1][:4] == (
        "strong",
        "dropout, depth, decay",
        "50.0 % (49.5–50.5), 2.0 times (1.9 to 2.1)",
        "65.0 % (64.5–65.5), 4.0 times (3.7 to 4.3)",
    )
    assert answer.rows[1][4] == "–"


def test_factor_of_ten_agrees():
    answer = answered(regularisation.STUDY, grown(CURVE, {100: 0.69}))
    assert answer.finding.endswith("is worth 13.9 times (13.0 to 14.9) the images.")
    beyond = answered(regularisation.STUDY, grown(CURVE, {100: 0.75}))
    assert beyond.finding.endswith("is worth more than 16.0 times the images.")
    assert answer.agreement == beyond.agreement == "agrees"


def test_regularisation_without_gain_or_with_loss():
    answer = answered(regularisation.STUDY, grown(CURVE, {100: 0.40}))
    assert answer.finding == (
        "With 100 images per class augmentation and regularisation make no clear difference to plain training at this "
        "scale: strong augmentation with regularisation is worth 1.0 times (less than 1.0 to 1.0) the images."
    )
    assert answer.agreement == "no difference"
    answer = answered(regularisation.STUDY, grown(CURVE, {100: 0.30, 200: 0.45}))
    assert answer.finding == (
        "Augmentation and regularisation are no substitute for data here: with 100 images per class even the best of them, "
        "strong augmentation with regularisation, is clearly worse than plain training (−10.0 points (−10.0 to −10.0)), with 200 "
        "0.7 times (0.7 to 0.7)."
    )
    assert answer.agreement == "disagrees"


def test_best_method_is_selected_on_validation():
    light = (regularisation.LIGHT, regularisation.NONE)
    results = grown(CURVE, {100: 0.50})
    for result in grown({}, {100: 0.65}, way=light):  # better on test images, worse on validation
        results.append(replace(result, numbers={**result.numbers, "validation": 0.2}))
    assert (
        "the best of them, strong augmentation with regularisation, is worth 2.0 times"
        in answered(regularisation.STUDY, results).finding
    )


def test_regularisation_needs_another_method():
    assert answered(regularisation.STUDY, grown(CURVE, {})).finding.startswith("No finding yet")


def test_equivalent_images_skip_a_dip():
    curve = [(100, 0.4), (200, 0.35), (400, 0.6)]
    assert regularisation.equivalent_images(curve, 0.5) == pytest.approx(200)  # half way from 100 to 400
    assert regularisation.equivalent_images(curve, 0.39) == 0
    assert regularisation.equivalent_images(curve, 0.4) == 100
    assert regularisation.equivalent_images(curve, 0.6) == pytest.approx(400)
    assert regularisation.equivalent_images(curve, 0.61) == float("inf")


def test_regularisation_grid():
    setup = replace(setup_of(regularisation.STUDY), scale=regularisation.STUDY.scales["laptop"])
    cells = regularisation.plan(replace(setup, facts=replace(DIGITS, images=45_000, side=(32, 32), channels=3)), [])
    counts = {(str(c.at["augmentation"]), str(c.at["regularisation"])): [] for c in cells}
    for each in cells:
        if each.at["seed"] == 0:
            counts[str(each.at["augmentation"]), str(each.at["regularisation"])].append(each.recipe.data.per_class)
    assert len(counts) == 6
    assert counts.pop(PLAIN) == [200, 400, 800, 1600, 3200]
    assert all(each == [200, 400, 800] for each in counts.values())
    few = regularisation.plan(replace(setup, facts=replace(DIGITS, images=800)), [])
    assert max(c.recipe.data.per_class or 0 for c in few) == 80  # limited by the data
