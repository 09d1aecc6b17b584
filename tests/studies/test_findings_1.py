"""The sentence follows from the numbers: constructed results in, finding and agreement out, for every branch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from vitrail.studies import compute, data_size, head, original_transformer, positions, resnet_optimizer, shape
from vitrail.studies.accuracies import judged_on, rate_of, series, told
from vitrail.studies.intervals import Difference
from vitrail.studies.study import Answer, Result, Study

PICTURES = 10_000
JITTER = (-0.001, 0.0, 0.001)  # of three seeds


def finals(at: Mapping[str, Any], mean: float, jitter: Sequence[float] = JITTER, **numbers: float) -> list[Result]:
    """Final runs of one place, a result for each seed."""
    return [
        Result({**at, "rate": 1e-3, "seed": seed}, "final", {"test": mean + by, "pictures": PICTURES, **numbers}, 60.0)
        for seed, by in enumerate(jitter)
    ]


def read(study: Study, results: Sequence[Result]) -> Answer:
    return study.read(results, study.scales["laptop"])


def turned(jitter: Sequence[float]) -> Sequence[float]:
    """The same spread in another order, so that it does not cancel seed by seed."""
    return (*jitter[1:], jitter[0])


# positions


def of_positions(none: float, **kinds: float) -> Answer:
    names = dict(zip(("a", "b", "c"), ("1-D, stem", "2-D, stem", "relative"), strict=True))
    results = finals({"positions": "none"}, none)
    for key, mean in kinds.items():
        results += finals({"positions": names[key]}, mean, turned(JITTER), **{"five-shot": mean - 0.1})
    return read(positions.STUDY, results)


def test_no_positions_lose_and_kinds_are_alike():
    answer = of_positions(0.80, a=0.86, b=0.8601, c=0.8599)
    assert answer.agreement == "agrees"
    assert answer.finding.startswith(
        "Without positions accuracy changes by −6.0 points (−6.4 to −5.6) against the mean of the kinds"
    )
    assert (
        "the kinds differ by less than half of that: the best (2-D, stem) and the worst (relative) are apart by"
        in answer.finding
    )


def test_no_positions_lose_and_kinds_differ_by_less():
    answer = of_positions(0.80, a=0.86, b=0.87, c=0.865)
    assert answer.agreement == "agrees"
    assert (
        "the kinds differ by less than half of that: the best (2-D, stem) and the worst (1-D, stem) are apart by +1.0"
        in answer.finding
    )


def test_kinds_whose_spread_is_not_known_are_not_called_alike():
    results = finals({"positions": "none"}, 0.80) + finals({"positions": "1-D, stem"}, 0.86, (-0.04, 0.0, 0.04))
    answer = read(positions.STUDY, results + finals({"positions": "2-D, stem"}, 0.861, (0.04, 0.0, -0.04)))
    assert "whether the kinds differ as much cannot be told" in answer.finding
    assert answer.agreement == "unclear"


def test_no_positions_lose_but_kinds_are_not_alike():
    answer = of_positions(0.80, a=0.82, b=0.87, c=0.83)
    assert answer.agreement == "disagrees"
    assert (
        "but the kinds are not alike: the best (2-D, stem) and the worst (1-D, stem) are apart by +5.0"
        in answer.finding
    )


def test_kinds_that_differ_much_and_not_clearly_agree_with_nobody():
    noisy = (-0.03, 0.0, 0.03)
    results = finals({"positions": "none"}, 0.80) + finals({"positions": "1-D, stem"}, 0.83, noisy)
    results += finals({"positions": "2-D, stem"}, 0.87, turned(noisy)) + finals(
        {"positions": "relative"}, 0.85, noisy[::-1]
    )
    answer = read(positions.STUDY, results)
    assert "and whether the kinds differ as much cannot be told: the best (2-D, stem) and the worst" in answer.finding
    assert answer.agreement == "unclear"


def test_positions_make_no_difference():
    answer = of_positions(0.86, a=0.86, b=0.8602, c=0.8598)
    assert answer.agreement == "no difference"
    assert answer.finding.startswith("No difference at this scale: positions change accuracy by")


def test_positions_do_harm():
    answer = of_positions(0.86, a=0.80, b=0.81, c=0.80)
    assert answer.agreement == "disagrees"
    assert answer.finding == "Positions do harm at this scale: −5.7 points (−6.1 to −5.2) on average over 3 kinds."


def test_the_rows_of_positions_have_gap_score_and_the_papers_number():
    rows = {row[0]: row[1:] for row in of_positions(0.80, a=0.86, b=0.8601, c=0.8599).rows}
    assert rows["none"] == ("0.001", "80.0 % (79.8–80.2)", "–", "–", "0.61382")
    rate, test, gap, shots, paper = rows["relative"]
    assert (rate, test, paper) == ("0.001", "86.0 % (85.7–86.2)", "0.64032")
    assert gap.startswith("+6.0 points (")
    assert shots.startswith("76.0 % (")


# head


def of_head(token: Mapping[float, float], mean: Mapping[float, float], tests: tuple[float, float]) -> Answer:
    results = []
    for name, tries in (("class token", token), ("mean of patches", mean)):
        for rate, value in tries.items():
            results += [
                Result({"head": name, "rate": rate, "seed": seed}, "tune", {"validation": value + by}, 60.0)
                for seed, by in enumerate(JITTER)
            ]
    results += finals({"head": "class token"}, tests[0]) + finals({"head": "mean of patches"}, tests[1], turned(JITTER))
    return read(head.STUDY, results)


def test_heads_are_alike_and_lose_at_the_others_rate():
    answer = of_head({1e-3: 0.85, 3e-3: 0.80}, {1e-3: 0.70, 3e-3: 0.85}, (0.85, 0.8501))
    assert answer.agreement == "agrees"
    assert answer.finding.startswith(
        "The heads do not differ clearly, each at its best rate (0.001 for the class token, 0.003 for the mean of patches)"
    )
    assert "the class token changes by −5.0 points" in answer.finding
    assert "the mean of patches changes by −15.0 points" in answer.finding


def test_heads_are_alike_at_one_rate():
    answer = of_head({1e-3: 0.85, 3e-3: 0.80}, {1e-3: 0.85, 3e-3: 0.80}, (0.85, 0.8501))
    assert answer.agreement == "unclear"
    assert answer.finding.endswith("but one rate is the best for both, so no need for different ones is seen.")


def test_heads_are_alike_and_do_not_mind_the_others_rate():
    noisy = [
        Result({"head": name, "rate": rate, "seed": seed}, "tune", {"validation": value}, 60.0)
        for name, grid in (
            ("class token", {1e-3: (0.80, 0.86, 0.90), 3e-3: (0.86, 0.80, 0.88)}),
            ("mean of patches", {1e-3: (0.86, 0.80, 0.88), 3e-3: (0.80, 0.86, 0.90)}),
        )
        for rate, values in grid.items()
        for seed, value in enumerate(values)
    ]
    noisy += finals({"head": "class token"}, 0.85) + finals({"head": "mean of patches"}, 0.8501, turned(JITTER))
    answer = read(head.STUDY, noisy)
    assert answer.agreement == "unclear"
    assert answer.finding.endswith(
        "but neither clearly loses at the other's rate, so no need for different ones is seen."
    )


@pytest.mark.parametrize(
    ("tests", "first", "second"),
    [((0.88, 0.85), "class token", "mean of patches"), ((0.85, 0.88), "mean of patches", "class token")],
)
def test_one_head_is_better(tests, first, second):
    answer = of_head({1e-3: 0.85, 3e-3: 0.80}, {1e-3: 0.70, 3e-3: 0.85}, tests)
    assert answer.agreement == "disagrees"
    assert answer.finding.startswith(f"The {first} is better than the {second} by +3.0 points")


def test_heads_that_surely_differ_by_a_point_or_less_are_alike():
    answer = of_head({1e-3: 0.85, 3e-3: 0.80}, {1e-3: 0.70, 3e-3: 0.85}, (0.859, 0.85))
    assert answer.agreement == "agrees"
    assert answer.finding.startswith("The heads differ by 1 point at most, each at its best rate (")
    assert "on the validation pictures that chose the rates, which makes it look surer than it is" in answer.finding
    assert any("a clear difference beyond that would be a disagreement" in note for note in answer.notes)


def test_the_whole_grid_of_rates_is_reported():
    answer = of_head({1e-3: 0.85, 3e-3: 0.80}, {1e-3: 0.70, 3e-3: 0.85}, (0.85, 0.8501))
    assert [row[0] for row in answer.rows] == ["0.001", "0.003", "best rate", "test, at its best rate"]
    assert answer.rows[0][1].startswith("85.0 % (")
    assert answer.rows[0][2].startswith("70.0 % (")
    assert answer.rows[2] == ("best rate", "0.001", "0.003")
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


def test_the_transformer_of_2017_is_worse_and_one_change_tells():
    answer = of_encoders(vit=0.88, after=0.85, old=0.84)
    assert answer.agreement == "agrees"
    assert answer.finding.startswith("The Transformer of 2017 is worse than the ViT: −4.0 points (")
    assert "these make a clear difference: norm after −3.0 points" in answer.finding
    assert any(note.startswith("One change taken back: norm after −3.0 points") for note in answer.notes)


def test_the_transformer_of_2017_is_worse_and_no_change_tells_by_itself():
    answer = of_encoders(vit=0.88, relu=0.8801, old=0.84)
    assert answer.agreement == "agrees"
    assert answer.finding.endswith("; no single change makes a clear difference.")


def test_the_transformer_of_2017_is_no_different():
    answer = of_encoders(vit=0.88, fixed=0.8799, old=0.88, after=0.8801)
    assert answer.agreement == "no difference"
    assert answer.finding.startswith("No difference at this scale between the Transformer of 2017 and the ViT: ")


def test_the_transformer_of_2017_is_better():
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
def test_one_optimiser_is_better_or_neither(adam, sgd, agreement, begun):
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
            *finals(at("heads", "8", 1.0), 0.90, jitter),  # costs nothing, so it has no place in the order
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


def test_depth_that_gains_more_than_width_is_not_all_that_the_paper_says():
    less = of_shapes(depth=0.88, width=0.81, patch=0.805)
    assert less.finding.endswith(", but patch size less than width.")
    more = of_shapes(depth=0.82, width=0.81, patch=0.88)
    assert more.finding.endswith(", but patch size more than depth.")
    assert (less.agreement, more.agreement) == ("unclear", "unclear")


def test_a_dimension_that_was_scaled_further_is_not_worse_for_it():
    # Both gain as much where they cost as much; that depth goes on with little gain does not count against it.
    answer = of_shapes(depth=0.84, width=0.828)
    assert "; depth and width do not differ clearly" in answer.finding


def test_depth_gains_less_than_width():
    answer = of_shapes(depth=0.82, width=0.84)
    assert answer.agreement == "disagrees"
    assert "width gains most, +4.0 points" in answer.finding
    assert "; depth gains less than width: −2.6 points (" in answer.finding


def test_depth_and_width_gain_alike():
    answer = of_shapes(depth=0.84, width=0.828)
    assert answer.agreement == "unclear"
    assert "; depth and width do not differ clearly: +0.0 points" in answer.finding


def test_what_clearly_loses_is_no_lack_of_difference():
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


def test_few_seeds_tell_who_gains_but_not_who_gains_more():
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


def test_what_costs_nothing_is_in_the_table_without_a_gain_for_compute():
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
def test_the_largest_models_decide_about_compute(vit, resnet, agreement, begun):
    answer = of_compute((0.50, vit), (0.54, resnet))
    assert answer.agreement == agreement
    assert answer.finding.startswith(begun)
    assert "; at the smallest, ViT minus ResNet is −4.0 points (" in answer.finding


def test_hybrids_lead_where_compute_is_scarce():
    (note,) = of_compute((0.50, 0.60), (0.5, 0.6), hybrid=(0.53, 0.60)).notes
    assert note.endswith("the hybrid leads only where compute is scarce, as in the paper.")
    (note,) = of_compute((0.50, 0.60), (0.5, 0.6), hybrid=(0.53, 0.64)).notes
    assert note.startswith("Hybrid minus ViT: +3.0 points (")
    assert not note.endswith("as in the paper.")


def test_one_size_is_no_answer_about_compute():
    results = finals({"family": "ViT", "size": 1, "compute": 1}, 0.5) + finals(
        {"family": "ResNet", "size": 1, "compute": 1}, 0.5
    )
    assert read(compute.STUDY, results).finding == (
        "Nothing can be said yet: there is no finished run of ViT and ResNet of two sizes."
    )


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
        ((0.65, 0.85), (0.55, 0.88), "agrees", "The ResNet leads with few pictures and the ViT overtakes it: "),
        ((0.65, 0.85), (0.55, 0.85), "agrees", "The ResNet leads with few pictures and the ViT catches up: "),
        ((0.65, 0.88), (0.55, 0.85), "agrees", "The ResNet leads throughout, but by less with more pictures: "),
        ((0.65, 0.95), (0.60, 0.80), "disagrees", "The ResNet leads throughout, and by more with more pictures: "),
        ((0.65, 0.85), (0.60, 0.80), "unclear", "The ResNet leads throughout, and its lead does not clearly change: "),
        (
            (0.60, 0.88),
            (0.60, 0.85),
            "disagrees",
            "The two do not differ clearly with few pictures, and the ResNet leads with more: ",
        ),
        (
            (0.60, 0.85),
            (0.60, 0.88),
            "unclear",
            "The two do not differ clearly with few pictures, and the ViT leads with more: ",
        ),
        ((0.60, 0.85), (0.60, 0.85), "no difference", "No difference at this scale: "),
        ((0.55, 0.85), (0.60, 0.85), "disagrees", "The ViT leads already where there is little data: "),
    ],
)
def test_who_leads_with_few_pictures_and_who_with_more(resnet, vit, agreement, begun):
    answer = of_sizes(resnet, vit)
    assert answer.agreement == agreement
    assert answer.finding.startswith(
        begun + "pre-trained on 10 pictures of each class and fine-tuned, ResNet minus ViT is "
    )
    assert "), on 5,000 it is " in answer.finding


def test_few_shot_scores_stand_beside_the_fine_tuned_ones():
    answer = of_sizes((0.65, 0.85), (0.55, 0.88), shots=((0.50, 0.60), (0.40, 0.66)))
    assert answer.agreement == "agrees"
    assert "; by 5 shots +10.0 points (" in answer.finding
    assert " and −6.0 points (" in answer.finding
    assert [chart.title for chart in answer.charts] == [
        "Fine-tuned with 100 labels of each class",
        "5-shot accuracy of the frozen features",
    ]
    assert [line.y for line in answer.charts[1].series if line.label == "ViT"] == [pytest.approx((0.40, 0.66))]


def test_a_lead_that_only_shrinks_has_to_shrink_by_few_shots_too():
    shrinking = (0.65, 0.88), (0.55, 0.85)
    answer = of_sizes(*shrinking, shots=((0.50, 0.60), (0.40, 0.50)))
    assert answer.agreement == "unclear"
    assert answer.finding.endswith("), where it does not clearly shrink.")
    assert of_sizes(*shrinking, shots=((0.50, 0.60), (0.40, 0.58))).agreement == "agrees"


def test_scores_that_contradict_each_other_agree_with_nobody():
    answer = of_sizes((0.65, 0.85), (0.55, 0.88), shots=((0.40, 0.60), (0.50, 0.60)))
    assert answer.agreement == "unclear"
    assert answer.finding.endswith("), which contradicts it.")


def test_scores_that_lead_to_opposite_winners_agree_with_nobody():
    # Fine-tuned the ViT leads; by few shots the ResNet does, by as much throughout.
    answer = of_sizes((0.55, 0.80), (0.65, 0.90), shots=((0.60, 0.80), (0.50, 0.70)))
    assert answer.finding.endswith("), which contradicts it.")
    assert answer.agreement == "unclear"


def test_a_lead_that_is_not_known_at_the_large_end_is_no_catching_up():
    few, many = Difference(0.02, 0.018, 0.022), Difference(0.03, -0.045, 0.105)
    assert data_size.leader(few, many) == (
        "The ResNet leads with few pictures, and who leads with more cannot be told",
        "unclear",
    )
    assert data_size.leader(Difference(0.02, 0.018, 0.022), Difference(0.001, -0.002, 0.004))[1] == "agrees"
    assert data_size.leader(Difference(0.01, -0.06, 0.08), Difference(0.03, 0.02, 0.04))[1] == "unclear"


def test_two_seeds_have_the_interval_of_the_test_pictures():
    answer = of_sizes((0.65, 0.85), (0.55, 0.88), jitter=(-0.001, 0.001))
    assert answer.agreement == "agrees"
    assert (
        "ResNet minus ViT is +10.0 points (+8.6 to +11.3), on 5,000 it is −3.0 points (−3.9 to −2.1)" in answer.finding
    )


def test_the_hybrid_is_held_against_both_at_the_ends():
    note, root = of_sizes((0.65, 0.85), (0.55, 0.88)).notes
    assert root.startswith("The hybrid of this scale is a Transformer on a ResNet's root alone")
    assert note.startswith("The hybrid: with 10 pictures of each class it has +15.0 points (")
    assert ") on the ViT and +5.0 points (" in note


def sized(many: int, family: str, **numbers: float) -> list[Result]:
    return finals({"family": family, "each class": many}, 0.5, **{"five-shot": 0.4}, **numbers)


def test_parameters_that_are_not_matched_are_told():
    results = []
    for family, parameters, macs in (("ViT", 160_000, 7.0e6), ("ResNet", 2_010_000, 6.8e6)):
        for many in (10, 5000):
            results += sized(many, family, parameters=parameters, macs=macs)
    assert read(data_size.STUDY, results).notes[0] == (
        "Compute of a picture is matched to 10 % or better, and parameters are not: ResNet 2.01 M parameters for 6.8 M "
        "multiply-adds a picture; ViT 0.16 M parameters for 7.0 M multiply-adds a picture."
    )


def test_sizes_are_in_order_whatever_order_they_were_run_in():
    results = []
    for many in (5000, 10, 150):
        for family in ("ViT", "ResNet"):
            results += sized(many, family)
    answer = read(data_size.STUDY, results)
    assert [row[0] for row in answer.rows] == ["10", "10", "150", "150", "5,000", "5,000"]
    assert answer.charts[0].series[0].x == (10, 150, 5000)


def test_both_rates_of_a_size_are_told():
    results = [
        Result({"family": "ViT", "each class": 10, "rate": rate, "seed": 0}, "base", {"validation": score}, 60.0)
        for rate, score in ((1e-3, 0.6), (3e-3, 0.7))
    ]
    for many in (10, 5000):
        for family in ("ViT", "ResNet"):
            results += sized(many, family)
    rates = {row[:2]: row[2] for row in read(data_size.STUDY, results).rows}
    assert rates["10", "ViT"] == "0.003, then 0.001"
    assert rates["10", "ResNet"] == "–, then 0.001"


def test_a_difference_that_shrank_has_the_uncertainty_of_both():
    shrunk = data_size.shrunk(Difference(0.10, 0.07, 0.13), Difference(0.02, -0.02, 0.06))
    assert (shrunk.mean, shrunk.low, shrunk.high) == pytest.approx((0.08, 0.03, 0.13))
    assert shrunk.clear
    assert not data_size.shrunk(Difference(0.10, 0.07, 0.13), Difference(0.07, 0.03, 0.11)).clear
    few = data_size.shrunk(Difference(0.015, 0.014, 0.016, 1), Difference(0.008, 0.007, 0.009))
    assert (few.seeds, few.clear) == (1, False)


# what they share


def test_accuracies_are_shares_of_the_fewest_test_pictures_that_a_final_run_saw():
    assert judged_on(finals({}, 0.5)) == PICTURES
    assert judged_on([Result({}, "tune", {"validation": 0.5, "pictures": 3}, 1.0)]) is None


def test_a_series_has_means_and_intervals_by_x():
    line = series("ViT", {8: (0.5, 0.52, 0.54)}, PICTURES)
    assert (line.label, line.x) == ("ViT", (8,))
    assert line.y[0] == pytest.approx(0.52)
    assert line.low[0] < 0.5 < 0.54 < line.high[0]


def test_what_is_not_known_is_a_dash():
    assert told(None) == told([]) == "–"
    assert rate_of(finals({"head": "class token"}, 0.5), {"head": "mean of patches"}) == "–"
