"""Findings and verdicts of seven studies from constructed results, for every branch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from vitrail.studies import compute, data_size, head, original_transformer, positions, resnet_optimizer, shape
from vitrail.studies.intervals import (
    Difference,
    Scores,
    build_series,
    count_test_images,
    estimate_reduction,
    format_accuracy,
)
from vitrail.studies.study import Answer, CellResult, Study

N_IMAGES = 10_000
JITTER = (-0.001, 0.0, 0.001)  # of three seeds


def finals(at: Mapping[str, Any], mean: float, jitter: Sequence[float] = JITTER, **numbers: float) -> list[CellResult]:
    """Return the final runs of one grid point, a result for each seed."""
    return [
        CellResult(
            {**at, "rate": 1e-3, "seed": seed}, "final", {"test": mean + by, "pictures": N_IMAGES, **numbers}, 60.0
        )
        for seed, by in enumerate(jitter)
    ]


def read(study: Study, results: Sequence[CellResult]) -> Answer:
    return study.interpret(results, study.scales["laptop"])


def turned(jitter: Sequence[float]) -> Sequence[float]:
    """Return the same spread in another order, so that it does not cancel in paired differences."""
    return (*jitter[1:], jitter[0])


# positions


def of_positions(none: float, **kinds: float) -> Answer:
    names = dict(zip(("a", "b", "c"), ("1-D, stem", "2-D, stem", "relative"), strict=True))
    results = finals({"positions": "none"}, none)
    for key, mean in kinds.items():
        results += finals({"positions": names[key]}, mean, turned(JITTER), **{"five-shot": mean - 0.1})
    return read(positions.STUDY, results)


def test_no_positions_are_worse_and_kinds_similar():
    answer = of_positions(0.80, a=0.86, b=0.8601, c=0.8599)
    assert answer.agreement == "agrees"
    assert answer.finding.startswith(
        "Without positions accuracy changes by −6.0 points (−6.4 to −5.6) against the mean of the kinds"
    )
    assert (
        "the kinds differ by less than half of that: the best (2-D, stem) and the worst (relative) are apart by"
        in answer.finding
    )


def test_no_positions_are_worse_and_kinds_differ_less():
    answer = of_positions(0.80, a=0.86, b=0.87, c=0.865)
    assert answer.agreement == "agrees"
    assert (
        "the kinds differ by less than half of that: the best (2-D, stem) and the worst (1-D, stem) are apart by +1.0"
        in answer.finding
    )


def test_kinds_with_unknown_spread_are_unclear():
    results = finals({"positions": "none"}, 0.80) + finals({"positions": "1-D, stem"}, 0.86, (-0.04, 0.0, 0.04))
    answer = read(positions.STUDY, results + finals({"positions": "2-D, stem"}, 0.861, (0.04, 0.0, -0.04)))
    assert "whether the kinds differ as much is unclear" in answer.finding
    assert answer.agreement == "unclear"


def test_no_positions_are_worse_but_kinds_differ():
    answer = of_positions(0.80, a=0.82, b=0.87, c=0.83)
    assert answer.agreement == "disagrees"
    assert "but the kinds differ: the best (2-D, stem) and the worst (1-D, stem) are apart by +5.0" in answer.finding


def test_large_unclear_spread_of_kinds_is_unclear():
    noisy = (-0.03, 0.0, 0.03)
    results = finals({"positions": "none"}, 0.80) + finals({"positions": "1-D, stem"}, 0.83, noisy)
    results += finals({"positions": "2-D, stem"}, 0.87, turned(noisy)) + finals(
        {"positions": "relative"}, 0.85, noisy[::-1]
    )
    answer = read(positions.STUDY, results)
    assert "and whether the kinds differ as much is unclear: the best (2-D, stem) and the worst" in answer.finding
    assert answer.agreement == "unclear"


def test_positions_make_no_difference():
    answer = of_positions(0.86, a=0.86, b=0.8602, c=0.8598)
    assert answer.agreement == "no difference"
    assert answer.finding.startswith("No difference at this scale: positions change accuracy by")


def test_positions_reduce_accuracy():
    answer = of_positions(0.86, a=0.80, b=0.81, c=0.80)
    assert answer.agreement == "disagrees"
    assert answer.finding == "Positions do harm at this scale: −5.7 points (−6.1 to −5.2) on average over 3 kinds."


def test_position_rows_have_gap_score_and_paper_number():
    rows = {row[0]: row[1:] for row in of_positions(0.80, a=0.86, b=0.8601, c=0.8599).rows}
    assert rows["none"] == ("0.001", "80.0 % (79.8–80.2)", "–", "–", "0.61382")
    lr, test, gap, shots, paper = rows["relative"]
    assert (lr, test, paper) == ("0.001", "86.0 % (85.7–86.2)", "0.64032")
    assert gap.startswith("+6.0 points (")
    assert shots.startswith("76.0 % (")


# head


def of_head(token: Mapping[float, float], mean: Mapping[float, float], tests: tuple[float, float]) -> Answer:
    results = []
    for name, tries in (("class token", token), ("mean of patches", mean)):
        for lr, value in tries.items():
            results += [
                CellResult({"head": name, "rate": lr, "seed": seed}, "tune", {"validation": value + by}, 60.0)
                for seed, by in enumerate(JITTER)
            ]
    results += finals({"head": "class token"}, tests[0]) + finals({"head": "mean of patches"}, tests[1], turned(JITTER))
    return read(head.STUDY, results)


def test_similar_heads_that_lose_at_the_other_lr_agree():
    answer = of_head({1e-3: 0.85, 3e-3: 0.80}, {1e-3: 0.70, 3e-3: 0.85}, (0.85, 0.8501))
    assert answer.agreement == "agrees"
    assert answer.finding.startswith(
        "The heads do not differ clearly, each at its best learning rate (0.001 for the class token, 0.003 for the "
        "mean of patches)"
    )
    assert "the class token changes by −5.0 points" in answer.finding
    assert "the mean of patches changes by −15.0 points" in answer.finding


def test_similar_heads_with_one_best_lr_are_unclear():
    answer = of_head({1e-3: 0.85, 3e-3: 0.80}, {1e-3: 0.85, 3e-3: 0.80}, (0.85, 0.8501))
    assert answer.agreement == "unclear"
    assert answer.finding.endswith(
        "but one learning rate is the best for both, so there is no evidence that they need different ones."
    )


def test_similar_heads_without_loss_at_the_other_lr_are_unclear():
    noisy = [
        CellResult({"head": name, "rate": lr, "seed": seed}, "tune", {"validation": value}, 60.0)
        for name, grid in (
            ("class token", {1e-3: (0.80, 0.86, 0.90), 3e-3: (0.86, 0.80, 0.88)}),
            ("mean of patches", {1e-3: (0.86, 0.80, 0.88), 3e-3: (0.80, 0.86, 0.90)}),
        )
        for lr, values in grid.items()
        for seed, value in enumerate(values)
    ]
    noisy += finals({"head": "class token"}, 0.85) + finals({"head": "mean of patches"}, 0.8501, turned(JITTER))
    answer = read(head.STUDY, noisy)
    assert answer.agreement == "unclear"
    assert answer.finding.endswith(
        "but neither clearly loses at the other's learning rate, so there is no evidence that they need different ones."
    )


@pytest.mark.parametrize(
    ("tests", "first", "second"),
    [((0.88, 0.85), "class token", "mean of patches"), ((0.85, 0.88), "mean of patches", "class token")],
)
def test_one_head_is_better(tests, first, second):
    answer = of_head({1e-3: 0.85, 3e-3: 0.80}, {1e-3: 0.70, 3e-3: 0.85}, tests)
    assert answer.agreement == "disagrees"
    assert answer.finding.startswith(f"The {first} is better than the {second} by +3.0 points")


def test_heads_within_one_point_are_similar():
    answer = of_head({1e-3: 0.85, 3e-3: 0.80}, {1e-3: 0.70, 3e-3: 0.85}, (0.859, 0.85))
    assert answer.agreement == "agrees"
    assert answer.finding.startswith("The heads differ by 1 point at most, each at its best learning rate (")
    assert (
        "on the validation images that chose the learning rates, which makes it look more certain than it is"
        in answer.finding
    )
    assert any("a clear difference beyond that would be a disagreement" in note for note in answer.notes)


def test_all_learning_rates_are_reported():
    answer = of_head({1e-3: 0.85, 3e-3: 0.80}, {1e-3: 0.70, 3e-3: 0.85}, (0.85, 0.8501))
    labels = ["0.001", "0.003", "best learning rate", "test, at its best learning rate"]
    assert [row[0] for row in answer.rows] == labels
    assert answer.rows[0][1].startswith("85.0 % (")
    assert answer.rows[0][2].startswith("70.0 % (")
    assert answer.rows[2] == ("best learning rate", "0.001", "0.003")
    (chart,) = answer.charts
    assert [(line.label, line.x) for line in chart.series] == [
        ("class token", (0.001, 0.003)),
        ("mean of patches", (0.001, 0.003)),
    ]


# original-transformer


def of_encoders(**means: float) -> Answer:
    names = {
        "vit": "ViT",
        "after": "ViT, norm after",
        "relu": "ViT, ReLU",
        "fixed": "ViT, sinusoid",
        "old": "Transformer of 2017",
    }
    results = []
    for place, (key, mean) in enumerate(means.items()):
        results += finals({"encoder": names[key]}, mean, turned(JITTER) if place % 2 else JITTER)
    return read(original_transformer.STUDY, results)


def test_original_transformer_worse_with_one_clear_change():
    answer = of_encoders(vit=0.88, after=0.85, old=0.84)
    assert answer.agreement == "agrees"
    assert answer.finding.startswith("The Transformer of 2017 is worse than the ViT: −4.0 points (")
    assert "these make a clear difference: norm after −3.0 points" in answer.finding
    assert any(note.startswith("One change reverted: norm after −3.0 points") for note in answer.notes)


def test_original_transformer_worse_without_clear_change():
    answer = of_encoders(vit=0.88, relu=0.8801, old=0.84)
    assert answer.agreement == "agrees"
    assert answer.finding.endswith("; no single change makes a clear difference.")


def test_original_transformer_no_difference():
    answer = of_encoders(vit=0.88, fixed=0.8799, old=0.88, after=0.8801)
    assert answer.agreement == "no difference"
    assert answer.finding.startswith("No difference at this scale between the Transformer of 2017 and the ViT: ")


def test_original_transformer_better():
    answer = of_encoders(vit=0.85, old=0.88)
    assert answer.agreement == "disagrees"
    assert answer.finding.startswith("The Transformer of 2017 is better than the ViT: +3.0 points (")
    assert answer.finding.endswith(").")  # no single change was run


# resnet-optimizer


@pytest.mark.parametrize(
    ("adam", "sgd", "agreement", "begun"),
    [
        (0.80, 0.77, "agrees", "Adam trains the ResNet better than SGD, by +3.0 points ("),
        (0.77, 0.80, "disagrees", "SGD trains the ResNet better than Adam: Adam minus SGD is −3.0 points ("),
        (0.80, 0.80, "no difference", "No difference at this scale: Adam minus SGD is "),
    ],
)
def test_optimiser_comparison(adam, sgd, agreement, begun):
    answer = read(
        resnet_optimizer.STUDY, finals({"optimizer": "Adam"}, adam) + finals({"optimizer": "SGD"}, sgd, turned(JITTER))
    )
    assert answer.agreement == agreement
    assert answer.finding.startswith(begun)


# shape


def of_shapes(depth: float, width: float, patch: float = 0.81, jitter: Sequence[float] = JITTER) -> Answer:
    """Gains over a base of 80 %: depth and patches cost twice or four times as much, width twice."""

    def at(name: str, value: str, times: float) -> dict[str, Any]:
        return {"dimension": name, "value": value, "compute": times}

    return read(
        shape.STUDY,
        [
            *finals(at("base", "", 1.0), 0.80, jitter),
            *finals(at("depth", "8 layers", 2.0), 0.80 + 0.7 * (depth - 0.80), turned(jitter)),
            *finals(at("depth", "16 layers", 4.0), depth, turned(jitter)),
            *finals(at("width", "96", 2.0), width, turned(jitter)),
            *finals(at("heads", "8", 1.0), 0.90, jitter),  # costs no compute, so it is not ranked
            *finals(at("patch size", "5 pixels", 2.0), 0.80 + 0.7 * (patch - 0.80), turned(jitter)),
            *finals(at("patch size", "4 pixels", 4.0), patch, turned(jitter)),
        ],
    )


def test_depth_gains_more_than_width():
    answer = of_shapes(depth=0.88, width=0.81, patch=0.83)
    assert answer.agreement == "agrees"
    assert answer.finding.startswith(
        "Of what was scaled, for each doubling of compute, at 2 times the base's, depth gains most, +5.6 points ("
    )
    assert "and width least, +1.0 points" in answer.finding
    assert "; depth gains more than width, by +4.6 points (" in answer.finding


def test_patch_size_outside_depth_and_width_is_unclear():
    less = of_shapes(depth=0.88, width=0.81, patch=0.805)
    assert less.finding.endswith(", but patch size less than width.")
    more = of_shapes(depth=0.82, width=0.81, patch=0.88)
    assert more.finding.endswith(", but patch size more than depth.")
    assert (less.agreement, more.agreement) == ("unclear", "unclear")


def test_dimensions_are_compared_at_equal_compute():
    # Both gain as much at equal compute; deeper models with little further gain do not count.
    answer = of_shapes(depth=0.84, width=0.828)
    assert "; depth and width do not differ clearly" in answer.finding


def test_depth_gains_less_than_width():
    answer = of_shapes(depth=0.82, width=0.84)
    assert answer.agreement == "disagrees"
    assert "width gains most, +4.0 points" in answer.finding
    assert "; depth gains less than width: −2.6 points (" in answer.finding


def test_depth_and_width_gain_equally():
    answer = of_shapes(depth=0.84, width=0.828)
    assert answer.agreement == "unclear"
    assert "; depth and width do not differ clearly: +0.0 points" in answer.finding


def test_clear_losses_disagree():
    answer = of_shapes(depth=0.77, width=0.80, patch=0.80)
    assert answer.agreement == "disagrees"
    assert answer.finding.startswith(
        "Nothing gains on the base at this scale, and scaling does harm: depth −2.1 points"
    )
    assert "width −" not in answer.finding
    answer = of_shapes(depth=0.74, width=0.79, patch=0.76)
    assert "width loses least, −1.0 points" in answer.finding
    assert "and depth most, −4.2 points" in answer.finding


def test_nothing_gains_on_the_base():
    answer = of_shapes(depth=0.80, width=0.80, patch=0.80)
    assert answer.agreement == "no difference"
    assert answer.finding.startswith("No difference at this scale: nothing gains clearly on the base;")


def test_few_seeds_do_not_rank_depth_and_width():
    answer = of_shapes(depth=0.88, width=0.81, jitter=(0.0,))
    assert answer.agreement == "unclear"
    assert answer.finding.startswith(
        "Of what was scaled, for each doubling of compute, at 2 times the base's, depth gains most, +5.6 points, and"
    )
    assert answer.finding.endswith("; too few seeds to tell depth from width, +4.6 points apart.")


def test_diminishing_returns_and_patches_are_noted():
    depth, patches = of_shapes(depth=0.88, width=0.81).notes
    assert depth.startswith("Depth: +5.6 points (")
    assert "to 8 layers, and +2.4 points" in depth
    assert patches.startswith("Patches of 4 pixels: +1.0 points (")


def test_free_dimension_has_no_gain_per_doubling():
    rows = {row[0]: row for row in of_shapes(depth=0.88, width=0.81).rows}
    assert rows["heads"][2] == "×1"
    assert rows["heads"][-1] == "–"
    assert rows["width"][-1].startswith("+1.0 points")


# compute


def of_compute(
    vit: tuple[float, float], resnet: tuple[float, float], hybrid: tuple[float, float] = (0.5, 0.6)
) -> Answer:
    results = []
    for family, means in (("ResNet", resnet), ("hybrid", hybrid), ("ViT", vit)):
        for size, mean in enumerate(means, 1):
            at = {"family": family, "size": size, "compute": size * 10**12}
            results += finals(at, mean, JITTER if family == "ViT" else turned(JITTER))
    return read(compute.STUDY, results)


@pytest.mark.parametrize(
    ("vit", "resnet", "agreement", "begun"),
    [
        (0.65, 0.60, "agrees", "For the same training compute the largest ViT beats the ResNet by +5.0 points ("),
        (0.60, 0.65, "disagrees", "For the same training compute the largest ResNet beats the ViT: −5.0 points ("),
        (
            0.60,
            0.60,
            "no difference",
            "No difference at this scale: at the same training compute, ViT minus ResNet is ",
        ),
    ],
)
def test_compute_verdict_uses_the_largest_models(vit, resnet, agreement, begun):
    answer = of_compute((0.50, vit), (0.54, resnet))
    assert answer.agreement == agreement
    assert answer.finding.startswith(begun)
    assert "; at the smallest, ViT minus ResNet is −4.0 points (" in answer.finding


def test_hybrid_note_for_small_compute():
    (note,) = of_compute((0.50, 0.60), (0.5, 0.6), hybrid=(0.53, 0.60)).notes
    assert note.endswith("the hybrid leads only where compute is scarce, as in the paper.")
    (note,) = of_compute((0.50, 0.60), (0.5, 0.6), hybrid=(0.53, 0.64)).notes
    assert note.startswith("Hybrid minus ViT: +3.0 points (")
    assert not note.endswith("as in the paper.")


def test_compute_needs_two_sizes():
    results = finals({"family": "ViT", "size": 1, "compute": 1}, 0.5) + finals(
        {"family": "ResNet", "size": 1, "compute": 1}, 0.5
    )
    assert read(compute.STUDY, results).finding == ("No finding yet: no finished run of ViT and ResNet of two sizes.")


# data-size


def of_sizes(
    resnet: tuple[float, float],
    vit: tuple[float, float],
    jitter: Sequence[float] = JITTER,
    hybrid: float = 0.7,
    shots: tuple[tuple[float, float], tuple[float, float]] | None = None,
) -> Answer:
    """Fine-tuned scores at two sizes, and 5-shot scores, which are half of them unless given: ResNet's, and ViT's."""
    results = []
    for family, means in (("ResNet", resnet), ("hybrid", (hybrid, hybrid)), ("ViT", vit)):
        few = {"ResNet": shots[0], "ViT": shots[1]}.get(family) if shots else None
        for place, (many, mean) in enumerate(zip((10, 5000), means, strict=True)):
            at = {"family": family, "each class": many}
            runs = finals(at, mean, jitter if family == "ViT" else turned(jitter))
            lower = mean / 2 if few is None else few[place]
            results += [
                replace(run, numbers={**run.numbers, "five-shot": lower + by})
                for run, by in zip(runs, jitter if family == "ViT" else turned(jitter), strict=True)
            ]
    return read(data_size.STUDY, results)


@pytest.mark.parametrize(
    ("resnet", "vit", "agreement", "begun"),
    [
        ((0.65, 0.85), (0.55, 0.88), "agrees", "The ResNet leads with few images and the ViT overtakes it: "),
        ((0.65, 0.85), (0.55, 0.85), "agrees", "The ResNet leads with few images and the ViT catches up: "),
        ((0.65, 0.88), (0.55, 0.85), "agrees", "The ResNet leads throughout, but by less with more images: "),
        ((0.65, 0.95), (0.60, 0.80), "disagrees", "The ResNet leads throughout, and by more with more images: "),
        ((0.65, 0.85), (0.60, 0.80), "unclear", "The ResNet leads throughout, and its lead does not clearly change: "),
        (
            (0.60, 0.88),
            (0.60, 0.85),
            "disagrees",
            "The two do not differ clearly with few images, and the ResNet leads with more: ",
        ),
        (
            (0.60, 0.85),
            (0.60, 0.88),
            "unclear",
            "The two do not differ clearly with few images, and the ViT leads with more: ",
        ),
        ((0.60, 0.85), (0.60, 0.85), "no difference", "No difference at this scale: "),
        ((0.55, 0.85), (0.60, 0.85), "disagrees", "The ViT leads already with few images: "),
    ],
)
def test_data_size_verdict_by_ends(resnet, vit, agreement, begun):
    answer = of_sizes(resnet, vit)
    assert answer.agreement == agreement
    assert answer.finding.startswith(begun + "pre-trained on 10 images per class and fine-tuned, ResNet minus ViT is ")
    assert "), on 5,000 it is " in answer.finding


def test_data_size_reports_few_shot_scores():
    answer = of_sizes((0.65, 0.85), (0.55, 0.88), shots=((0.50, 0.60), (0.40, 0.66)))
    assert answer.agreement == "agrees"
    assert "; by 5 shots +10.0 points (" in answer.finding
    assert " and −6.0 points (" in answer.finding
    assert [chart.title for chart in answer.charts] == [
        "Fine-tuned with 100 labels per class",
        "5-shot accuracy of the frozen features",
    ]
    assert [line.y for line in answer.charts[1].series if line.label == "ViT"] == [pytest.approx((0.40, 0.66))]


def test_shrinking_lead_must_shrink_in_few_shot_scores():
    shrinking = (0.65, 0.88), (0.55, 0.85)
    answer = of_sizes(*shrinking, shots=((0.50, 0.60), (0.40, 0.50)))
    assert answer.agreement == "unclear"
    assert answer.finding.endswith("), where it does not clearly shrink.")
    assert of_sizes(*shrinking, shots=((0.50, 0.60), (0.40, 0.58))).agreement == "agrees"


def test_contradicting_scores_are_unclear():
    answer = of_sizes((0.65, 0.85), (0.55, 0.88), shots=((0.40, 0.60), (0.50, 0.60)))
    assert answer.agreement == "unclear"
    assert answer.finding.endswith("), which contradicts it.")


def test_opposite_winners_are_unclear():
    # Fine-tuned the ViT leads; by few shots the ResNet does, by as much throughout.
    answer = of_sizes((0.55, 0.80), (0.65, 0.90), shots=((0.60, 0.80), (0.50, 0.70)))
    assert answer.finding.endswith("), which contradicts it.")
    assert answer.agreement == "unclear"


def test_unknown_lead_with_many_images_is_unclear():
    few, many = Difference(0.02, 0.018, 0.022), Difference(0.03, -0.045, 0.105)
    assert data_size.compare_ends(few, many) == (
        "The ResNet leads with few images, and which leads with more is unclear",
        "unclear",
    )
    assert data_size.compare_ends(Difference(0.02, 0.018, 0.022), Difference(0.001, -0.002, 0.004))[1] == "agrees"
    assert data_size.compare_ends(Difference(0.01, -0.06, 0.08), Difference(0.03, 0.02, 0.04))[1] == "unclear"


def test_two_seeds_use_the_interval_over_test_images():
    answer = of_sizes((0.65, 0.85), (0.55, 0.88), jitter=(-0.001, 0.001))
    assert answer.agreement == "agrees"
    assert (
        "ResNet minus ViT is +10.0 points (+8.6 to +11.3), on 5,000 it is −3.0 points (−3.9 to −2.1)" in answer.finding
    )


def test_hybrid_is_compared_with_both_at_the_ends():
    note, root = of_sizes((0.65, 0.85), (0.55, 0.88)).notes
    assert root.startswith("The hybrid of this scale is a Transformer on a ResNet's root alone")
    assert note.startswith("The hybrid: with 10 images per class it has +15.0 points (")
    assert ") on the ViT and +5.0 points (" in note


def sized(many: int, family: str, **numbers: float) -> list[CellResult]:
    return finals({"family": family, "each class": many}, 0.5, **{"five-shot": 0.4}, **numbers)


def test_unmatched_parameters_are_noted():
    results = []
    for family, parameters, macs in (("ViT", 160_000, 7.0e6), ("ResNet", 2_010_000, 6.8e6)):
        for many in (10, 5000):
            results += sized(many, family, parameters=parameters, macs=macs)
    assert read(data_size.STUDY, results).notes[0] == (
        "Compute per image is matched to within 10 %; parameters are not: ResNet 2.01 M parameters for 6.8 M "
        "multiply-adds per image; ViT 0.16 M parameters for 7.0 M multiply-adds per image."
    )


def test_sizes_are_sorted():
    results = []
    for many in (5000, 10, 150):
        for family in ("ViT", "ResNet"):
            results += sized(many, family)
    answer = read(data_size.STUDY, results)
    assert [row[0] for row in answer.rows] == ["10", "10", "150", "150", "5,000", "5,000"]
    assert answer.charts[0].series[0].x == (10, 150, 5000)


def test_both_learning_rates_of_a_size_are_reported():
    results = [
        CellResult({"family": "ViT", "each class": 10, "rate": lr, "seed": 0}, "base", {"validation": score}, 60.0)
        for lr, score in ((1e-3, 0.6), (3e-3, 0.7))
    ]
    for many in (10, 5000):
        for family in ("ViT", "ResNet"):
            results += sized(many, family)
    lrs = {row[:2]: row[2] for row in read(data_size.STUDY, results).rows}
    assert lrs["10", "ViT"] == "0.003, then 0.001"
    assert lrs["10", "ResNet"] == "–, then 0.001"


def test_reduction_combines_both_intervals():
    shrunk = estimate_reduction(Difference(0.10, 0.07, 0.13), Difference(0.02, -0.02, 0.06))
    assert (shrunk.mean, shrunk.low, shrunk.high) == pytest.approx((0.08, 0.03, 0.13))
    assert shrunk.is_clear
    assert not estimate_reduction(Difference(0.10, 0.07, 0.13), Difference(0.07, 0.03, 0.11)).is_clear
    few = estimate_reduction(Difference(0.015, 0.014, 0.016, 1), Difference(0.008, 0.007, 0.009))
    assert (few.seeds, few.is_clear) == (1, False)


# shared helpers


def test_count_test_images_uses_final_runs():
    assert count_test_images(finals({}, 0.5)) == N_IMAGES
    assert count_test_images([CellResult({}, "tune", {"validation": 0.5, "pictures": 3}, 1.0)]) is None


def test_series_has_means_and_intervals():
    line = build_series("ViT", {8: (0.5, 0.52, 0.54)}, N_IMAGES)
    assert (line.label, line.x) == ("ViT", (8,))
    assert line.y[0] == pytest.approx(0.52)
    assert line.low[0] < 0.5 < 0.54 < line.high[0]


def test_missing_values_are_a_dash():
    assert format_accuracy(None) == format_accuracy([]) == "–"
    tests = Scores(finals({"head": "class token"}, 0.5), "head")
    assert (tests.format_lr("class token"), tests.format_lr("mean of patches")) == ("0.001", "–")
    assert tests.format("mean of patches") == tests.format_change("mean of patches", "class token") == "–"


def test_scores_are_ordered_and_compared():
    results = finals({"head": "b", "size": 1}, 0.5) + finals({"head": "a", "size": 2}, 0.6, turned(JITTER))
    tests = Scores(results, "head", order=("a", "b", "c"))
    assert list(tests) == ["a", "b"]
    assert tests.find_missing(("b", "c")) == ["c"]
    assert tests.compare("b") == {"a": tests.subtract("a", "b")}
    assert tests.format_change("a", "b").startswith("+10.0 points (")
    assert tests.format_change("a", "a") == "–"
    assert list(Scores(results, "head", "size")) == [("b", 1), ("a", 2)]
    assert tests.series("test", {"b": 8.0}).x == (8.0,)
    assert (tests.n_images, Scores(results, "head", number="lines").n_images) == (N_IMAGES, None)
