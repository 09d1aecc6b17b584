"""Seven studies from plan to answer: positions, shape, head, original-transformer, resnet-optimizer, compute, data-size."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from vitrail.checkpoints.load import load
from vitrail.models.bit import BiTConfig
from vitrail.models.hybrid import Hybrid
from vitrail.models.vit_config import ViTConfig
from vitrail.nn.block import PostNorm
from vitrail.nn.embed import Patches
from vitrail.nn.mlp import GELU, ReLU
from vitrail.nn.pool import ClassToken, Mean
from vitrail.nn.position import Learned1D, Learned2D, NoPosition, Relative1D, Sinusoid1D
from vitrail.studies import data_size, load_study
from vitrail.studies.base import (
    HYBRID,
    RESNET,
    VIT,
    build_recipe,
    choose_image_size,
    configure_study_vit,
    count_macs,
    count_training_macs,
    match_cost,
    measure_five_shot,
    measure_five_shot_of,
)
from vitrail.studies.runner import Runner
from vitrail.studies.study import Answer, Cell, CellResult, StudyScale, StudySetup
from vitrail.studies.sweep import Sweep, SweepState, begin_sweep
from vitrail.training.optim import SGD, AdamW
from vitrail.training.recipe import Data, Facts

OURS = ("positions", "shape", "head", "original-transformer", "resnet-optimizer", "compute", "data-size")
FACTS = {
    "digits": Facts(1293, 10, False, (8, 8), 1, False),
    "fashion-mnist": Facts(53_988, 10, False, (28, 28), 1, False),
    "cifar-10": Facts(45_000, 10, False, (32, 32), 3, False),
    "imagenet-21k": Facts(14_000_000, 21_000, False, (375, 500), 3, True),
}
PHOTOGRAPHS = Facts(800, 10, False, (534, 400), 3, True)


def set_up(name: str, scale: str, place: Path = Path("study")) -> StudySetup:
    chosen = load_study(name).scales[scale]
    return StudySetup(chosen, Data(chosen.data), FACTS[chosen.data], place)


def planned(name: str, setup: StudySetup, score: Callable[[Cell], float] = lambda cell: 0.5) -> list[Cell]:
    """Return all cells of a study, planned with constructed results."""
    cells: list[Cell] = []
    results: list[CellResult] = []
    while True:
        cells = load_study(name).plan(setup, results)
        if len(cells) == len(results):
            return cells
        results = [CellResult(cell.at, cell.phase, {"validation": score(cell), "test": 0.5}, 1.0) for cell in cells]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Sweep, SweepState, Answer]]:
    """Return a study run to its end on digits; cached."""
    known: dict[str, tuple[Sweep, SweepState, Answer]] = {}

    def run(name: str) -> tuple[Sweep, SweepState, Answer]:
        if name not in known:
            sweep = begin_sweep(tmp_path_factory.mktemp(name) / "study", load_study(name), "test")
            state = Runner(sweep).run()
            known[name] = sweep, state, load_study(name).interpret(list(state.results.values()), sweep.setup.scale)
        return known[name]

    return run


@pytest.mark.parametrize("name", OURS)
def test_a_study_runs_from_plan_to_answer(name, ran):
    _, state, answer = ran(name)
    assert not state.failed
    assert not state.missing
    finals = [result for result in state.results.values() if result.phase == "final"]
    held = {"data-size": 140}.get(name, 270)  # of half of the classes
    assert all(result.numbers["pictures"] == held for result in finals)
    assert answer.finding.endswith(".")
    assert answer.finding.count(". ") == 0, "one sentence"
    assert "Nothing can be said" not in answer.finding
    assert answer.agreement in ("agrees", "disagrees", "no difference", "unclear")
    assert {len(row) for row in answer.rows} == {len(answer.columns)}
    assert answer.charts[0].series
    for chart in answer.charts:
        for line in chart.series:
            assert len(line.x) == len(line.y) == len(line.low) == len(line.high) > 0


@pytest.mark.parametrize("name", OURS)
def test_incomplete_study_has_no_finding(name, ran):
    sweep, state, _ = ran(name)
    for results in ([], list(state.results.values())[:1]):
        answer = load_study(name).interpret(results, sweep.setup.scale)
        assert answer.finding.startswith("No finding yet: no finished run of ")
        assert (answer.agreement, answer.columns) == ("unclear", ("missing",))


@pytest.mark.parametrize("name", ["positions", "data-size"])
def test_five_shot_scores_are_measured_where_the_paper_has_them(name, ran):
    _, state, answer = ran(name)
    finals = [result for result in state.results.values() if result.phase == "final"]
    assert all(0 < result.numbers["five-shot"] < 1 for result in finals)
    assert len(answer.charts) == 2


def test_tuning_run_has_no_five_shot_score(tmp_path):
    tries = [cell for cell in planned("positions", set_up("positions", "laptop")) if cell.phase == "tune"]
    assert measure_five_shot(tries[0], tmp_path / "nothing") == {}  # the run is not opened


def test_position_table_has_the_paper_numbers(ran):
    _, _, answer = ran("positions")
    column = answer.columns.index("paper: 5-shot")
    told = {row[0]: row[column] for row in answer.rows}
    assert told == {"none": "0.61382", "1-D, stem": "0.64206", "2-D, shared": "0.64022", "relative": "0.64032"}


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("positions", 8 * (3 + 3)),
        ("head", 2 * 5 * 3 + 2 * 3),
        ("original-transformer", 5 * (4 + 3)),
        ("shape", 13 * (2 + 3)),
        ("resnet-optimizer", 2 * (3 + 3)),
        ("compute", 9 * (2 + 3)),
        ("data-size", 18 * (2 + 2) + 18 * (2 + 3)),
    ],
)
def test_laptop_scale_has_the_estimated_cells(name, cells):
    assert len(planned(name, set_up(name, "laptop"))) == cells


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("scale", ["gpu", "cluster"])
def test_larger_scales_can_be_planned(name, scale):
    cells = planned(name, set_up(name, scale))
    assert {cell.phase for cell in cells} >= {"final"}
    assert len({cell.name for cell in cells}) == len(cells)
    assert all(cell.recipe.precision == "bf16" for cell in cells)


@pytest.mark.parametrize("name", OURS)
def test_every_family_has_equal_tuning(name):
    cells = planned(name, set_up(name, "laptop"))
    places = [tuple(value for key, value in cell.at.items() if key not in ("rate", "seed")) for cell in cells]
    tries = Counter(place for place, cell in zip(places, cells, strict=True) if cell.phase == "tune")
    finals = Counter(place for place, cell in zip(places, cells, strict=True) if cell.phase == "final")
    assert len(set(tries.values())) == len(set(finals.values())) == 1
    assert tries.keys() == finals.keys()


@pytest.mark.parametrize("name", OURS)
def test_final_runs_use_the_best_lr(name):
    setup = set_up(name, "laptop")
    lrs = {*setup.scale.lrs, *setup.scale.sizes.get("sgd_rates", ())}
    assert len(lrs) > 1
    cells = planned(name, setup, lambda cell: float(cell.at["rate"]))  # the highest is the best
    finals = {cell.recipe.optimizer.lr for cell in cells if cell.phase == "final"}
    assert finals == {setup.scale.lrs[-1], *setup.scale.sizes.get("sgd_rates", ())[-1:]}


@pytest.mark.parametrize("name", OURS)
def test_studies_plan_large_images(name):
    setup = replace(set_up(name, "laptop"), facts=PHOTOGRAPHS)
    for cell in planned(name, setup):
        model = cell.recipe.model
        assert model.channels == 3
        assert max(model.image_size) <= 168  # 128, or the next multiple of a patch


def models(name: str, key: str, scale: str = "laptop") -> dict[str, ViTConfig | BiTConfig]:
    return {str(cell.at[key]): cell.recipe.model for cell in planned(name, set_up(name, scale))}


def test_positions_differ_in_positions_alone():
    found = models("positions", "positions")
    kinds = {name: model.position for name, model in found.items() if isinstance(model, ViTConfig)}
    assert kinds == {
        "none": NoPosition(),
        "1-D, stem": Learned1D("stem"),
        "1-D, every layer": Learned1D("every"),
        "1-D, shared": Learned1D("shared"),
        "2-D, stem": Learned2D("stem"),
        "2-D, every layer": Learned2D("every"),
        "2-D, shared": Learned2D("shared"),
        "relative": Relative1D("every"),
    }
    assert len({replace(model, position=NoPosition()) for model in found.values()}) == 1


def test_the_two_heads_differ_in_pooling_and_its_token():
    found = models("head", "head")
    token, mean = found["class token"], found["mean of patches"]
    assert (token.pool, token.prefix.outputs) == (ClassToken(), 1)
    assert (mean.pool, mean.prefix.outputs) == (Mean(), 0)
    assert replace(mean, pool=token.pool, prefix=token.prefix) == token


def test_encoders_differ_in_one_change():
    found = models("original-transformer", "encoder")
    original, ours = found["Transformer of 2017"], found["ViT"]
    assert (original.block, original.position) == (PostNorm(mlp=ReLU()), Sinusoid1D())
    assert (ours.block.mlp, ours.block.final_norm, ours.position) == (GELU(), True, Learned1D())
    assert found["ViT, norm after"] == replace(ours, block=PostNorm(mlp=GELU()))
    assert found["ViT, ReLU"] == replace(ours, block=replace(ours.block, mlp=ReLU()))
    assert found["ViT, sinusoid"] == replace(ours, position=Sinusoid1D())


def test_shapes_have_counted_compute():
    cells = planned("shape", set_up("shape", "laptop"))
    base = next(cell.recipe.model for cell in cells if cell.at["dimension"] == "base")
    for cell in cells:
        assert cell.at["compute"] == pytest.approx(count_macs(cell.recipe.model) / count_macs(base), abs=1e-3)
    heads = {cell.at["compute"] for cell in cells if cell.at["dimension"] == "heads"}
    assert heads == {1.0}


def test_a_wider_model_keeps_its_mlp_and_everything_scales_all():
    cells = planned("shape", set_up("shape", "laptop"))
    sizes = {(cell.at["dimension"], cell.at["value"]): cell.recipe.model.size for cell in cells}
    wide = sizes["width", "128 wide"]
    assert (wide.width, wide.mlp, wide.depth) == (128, 256, 4)
    whole = sizes["everything", "6 layers of 96"]
    assert (whole.depth, whole.width, whole.mlp, whole.heads) == (6, 96, 384, 6)


def test_resnet_uses_adam_and_sgd():
    cells = planned("resnet-optimizer", set_up("resnet-optimizer", "laptop"))
    kinds = {(cell.at["optimizer"], type(cell.recipe.optimizer), type(cell.recipe.model)) for cell in cells}
    assert kinds == {("Adam", AdamW, BiTConfig), ("SGD", SGD, BiTConfig)}
    assert len({cell.recipe.model for cell in cells}) == 1
    assert all(cell.recipe.optimizer.lr == cell.at["rate"] for cell in cells)


@pytest.mark.parametrize("scale", ["test", "laptop", "gpu", "cluster"])
def test_models_of_matched_compute_are_within_ten_percent(scale):
    for name in ("data-size", "compute"):
        setup = set_up(name, scale)
        for each in setup.scale.sizes.get("models", (setup.scale.sizes,)):
            found = match_cost(setup, each["bit"], each["hybrid"])
            costs = {family: count_macs(model) for family, model in found.items()}
            assert all(abs(cost / costs[RESNET] - 1) < 0.1 for cost in costs.values()), (name, costs)
            assert len({model.image_size for model in found.values()}) == 1


@pytest.mark.parametrize("scale", ["laptop", "gpu"])
def test_too_costly_hybrid_is_left_out(scale):
    setup = replace(set_up("compute", scale), facts=PHOTOGRAPHS)
    for each in setup.scale.sizes["models"]:
        found = match_cost(setup, each["bit"], each["hybrid"])
        assert {RESNET, VIT} <= found.keys()
        assert all(abs(count_macs(model) / count_macs(found[RESNET]) - 1) < 0.1 for model in found.values())
    families = Counter(str(cell.at["family"]) for cell in load_study("compute").plan(setup, []))
    assert families[HYBRID] < families[VIT] == families[RESNET]


def test_models_of_matched_compute_are_of_three_families():
    setup = set_up("data-size", "laptop")
    found = match_cost(setup, setup.scale.sizes["bit"], setup.scale.sizes["hybrid"])
    assert isinstance(found[RESNET], BiTConfig)
    assert isinstance(found[HYBRID], ViTConfig)
    assert isinstance(found[HYBRID].embed, Hybrid)
    assert isinstance(found[VIT], ViTConfig)
    assert isinstance(found[VIT].embed, Patches)


def test_training_compute_is_three_forward_passes():
    setup = set_up("compute", "laptop")
    for cell in planned("compute", setup):
        assert cell.recipe.steps is not None
        seen = cell.recipe.steps * cell.recipe.batch_size
        assert (
            cell.at["compute"]
            == 3 * count_macs(cell.recipe.model) * seen
            == count_training_macs(cell.recipe.model, seen)
        )


def test_models_are_pre_trained_on_every_other_class_and_transferred_to_the_rest():
    cells = planned("data-size", set_up("data-size", "laptop"))
    base, others = ([cell for cell in cells if (cell.phase == "base") is first] for first in (True, False))
    assert {cell.recipe.data.classes for cell in base} == {(1, 2)}
    assert {cell.recipe.data.classes for cell in others} == {(0, 2)}
    assert {cell.recipe.model.classes for cell in cells} == {5}
    assert sorted({cell.recipe.data.per_class for cell in base}) == [10, 40, 150, 500, 1600, 5000]
    assert {cell.recipe.data.per_class for cell in others} == {100}
    assert all(cell.recipe.data.per_class == cell.at["each class"] for cell in base)
    assert all(cell.recipe.data.drawn == cell.at["seed"] for cell in cells)
    assert ({cell.recipe.steps for cell in base}, {cell.recipe.steps for cell in others}) == ({400}, {200})
    assert all(isinstance(cell.recipe.optimizer, SGD) and cell.recipe.init for cell in others)


def test_eleven_classes_are_divided_into_five_and_six():
    setup = set_up("data-size", "laptop")
    learned, asked = data_size.split_classes(replace(setup, facts=replace(setup.facts, classes=11)))
    assert (learned.facts.classes, asked.facts.classes) == (5, 6)
    with pytest.raises(ValueError, match=r"fashion-mnist has 3 classes.*use data with 4 or more"):
        data_size.plan(replace(setup, facts=replace(setup.facts, classes=3)), [])


def test_first_seed_tunes_pre_training():
    setup = set_up("data-size", "laptop")
    first = data_size.plan(setup, [])
    assert {(cell.phase, cell.at["seed"]) for cell in first} == {("base", 0)}
    scores = {1e-3: 0.6, 3e-3: 0.7}
    tried = [
        CellResult(
            cell.at, cell.phase, {"validation": scores[float(str(cell.at["rate"]))]}, 1.0, f"cells/{cell.name}/run"
        )
        for cell in first
    ]
    after = [cell for cell in data_size.plan(setup, tried) if cell.at["seed"] != 0]
    assert {(cell.phase, cell.at["seed"], cell.at["rate"]) for cell in after} == {("base", 1, 3e-3), ("base", 2, 3e-3)}
    one = replace(setup, scale=replace(setup.scale, seeds=1))
    tuning = next(cell for cell in data_size.plan(one, tried) if cell.phase == "tune")
    begun = next(each for each in tried if each.at == {"family": "ResNet", "each class": 10, "rate": 3e-3, "seed": 0})
    assert tuning.at["family"] == "ResNet"
    assert tuning.recipe.init == f"study/{begun.run}/model.safetensors"


def test_every_scale_fits_its_data():
    for scale, left in (("laptop", 1.0), ("gpu", 1.0), ("cluster", 0.8)):  # ImageNet-21k has no splits of its own
        setup = set_up("data-size", scale)
        setup = replace(setup, facts=replace(setup.facts, images=round(left * setup.facts.images)))
        assert len(data_size.subset_sizes(setup)) == 6


def test_missing_sizes_are_left_out():
    setup = replace(set_up("data-size", "laptop"), facts=PHOTOGRAPHS)  # 80 of each class
    assert sorted({cell.at["each class"] for cell in planned("data-size", setup)}) == [10, 40]
    few = replace(setup, data=Data("photos"), facts=replace(PHOTOGRAPHS, images=100))
    with pytest.raises(ValueError, match=r"photos has about 10 training images per class.*use data with 40 or more"):
        planned("data-size", few)


def test_pre_training_and_transfer_use_disjoint_classes(ran):
    sweep, state, _ = ran("data-size")
    seen: dict[str, set[str]] = {}
    for result in state.results.values():
        about = json.loads((sweep.directory / result.run / "run.json").read_text())["data"]
        many = int(str(result.at["each class"])) if result.phase == "base" else 8
        assert about["splits"]["train"]["images"] == 5 * many
        assert ("test" in about["splits"]) is (result.phase == "final")
        seen.setdefault(result.phase, set()).update(load(sweep.directory / result.run / "model.safetensors").labels)
    assert seen == {"base": set("13579"), "final": set("02468")}
    cell = next(cell for cell in state.cells.values() if cell.phase == "final")
    shots = measure_five_shot_of(str(cell.recipe.init), cell)["five-shot"]
    assert (
        shots == next(r for r in state.results.values() if (r.phase, r.at) == ("final", cell.at)).numbers["five-shot"]
    )


def set_up_for(facts: Facts, **sizes) -> StudySetup:
    return StudySetup(StudyScale("any", 1, "one core", steps=50, sizes=sizes), Data("any"), facts, Path("study"))


def test_small_and_large_images_have_equal_tokens():
    small = configure_study_vit(set_up_for(FACTS["cifar-10"], width=32, depth=2, heads=2, patch=4))
    photograph = configure_study_vit(set_up_for(PHOTOGRAPHS, width=32, depth=2, heads=2, patch=4))
    assert (small.image_size, small.embed) == ((32, 32), Patches(4))
    assert (photograph.image_size, photograph.embed) == ((128, 128), Patches(16))
    assert small.shape.patches == photograph.shape.patches == 64


def test_scale_sets_the_image_size():
    setup = set_up_for(PHOTOGRAPHS, width=32, depth=2, heads=2, patch=16, image=224)
    assert (configure_study_vit(setup).image_size, configure_study_vit(setup).shape.patches) == ((224, 224), 196)


def test_image_size_is_a_multiple_of_the_patch():
    assert choose_image_size(set_up_for(FACTS["fashion-mnist"]), 8) == (32, 32)


def test_base_recipe_follows_the_paper():
    setup = set_up_for(FACTS["cifar-10"], width=32, depth=2, heads=2, patch=4, weight_decay=0.03)
    made = build_recipe(setup, configure_study_vit(setup), 2e-3, 7)
    assert isinstance(made.optimizer, AdamW)
    assert (made.optimizer.lr, made.optimizer.weight_decay, made.optimizer.clip) == (2e-3, 0.03, 1.0)
    assert (made.schedule.warmup, made.steps, made.seed, made.data) == (5, 50, 7, Data("any"))
    longer = build_recipe(setup, configure_study_vit(setup), 2e-3, 7, steps=200)
    assert (longer.schedule.warmup, longer.steps) == (20, 200)
