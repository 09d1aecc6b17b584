"""Recipes: what they hold, against the papers; how they are listed, changed and written down."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import vitrail
from vitrail.data.transforms.augment import Flip, RandomResizedCrop, Rotate, ScaleJitter
from vitrail.models.vit_config import RESAMPLINGS
from vitrail.objectives.classification import Classification
from vitrail.objectives.token_labelling import TokenLabelling
from vitrail.training.optim import SGD, AdamW, Muon
from vitrail.training.recipe import Data, Facts, Recipe, Teacher, read_recipe, with_settings, write_recipe
from vitrail.training.recipes import METHODS, NAMES, build_recipe, describe_recipe
from vitrail.training.runs.models import load_initial_model
from vitrail.training.schedule import Constant, Cosine
from vitrail.utils.json import to_json


def facts(images: int = 1_281_167, classes: int = 1000, side: int = 400, **more: object) -> Facts:
    given = {"teacher": Teacher("model.safetensors"), **more}  # for recipes that ask about it
    return Facts(images, classes, False, (side, side), 3, True, **given)  # pyright: ignore[reportArgumentType]


def checkpoint(**more: object) -> Facts:
    return facts(init=vitrail.configure("B/16"), init_preprocessing=vitrail.Preprocessing(), **more)


def recipe(name: str, given: Facts | None = None) -> Recipe:
    tuned = name in ("finetune", "self-training", "paper-finetune")
    if name == "swin-finetune" and given is None:
        given = swin_checkpoint("Swin-T")
    return build_recipe(name, given or (checkpoint() if tuned else facts()), Data("somewhere"))


def swin_checkpoint(name: str, **more: object) -> Facts:
    return facts(init=vitrail.configure(name, classes=21_841), init_preprocessing=vitrail.Preprocessing(), **more)


@pytest.mark.parametrize("name", [*NAMES, *METHODS])
def test_every_recipe_round_trips_through_json(name: str, tmp_path: Path) -> None:
    found = recipe(name)
    write_recipe(found, tmp_path / "recipe.json")
    assert read_recipe(tmp_path / "recipe.json") == found
    assert found.name == name


def test_recipes_of_older_versions_load(tmp_path: Path) -> None:
    found = recipe("finetune")
    written = to_json(found)
    for name in ("teacher", "views", "collapse"):
        del written[name]
    del written["optimizer"]["decay_end"]
    (tmp_path / "recipe.json").write_text(json.dumps(written))
    assert read_recipe(tmp_path / "recipe.json") == found
    del written["batch_size"]
    (tmp_path / "recipe.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match="lacks batch_size"):
        read_recipe(tmp_path / "recipe.json")


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_documents_expected_results_and_a_command(name: str) -> None:
    line, text = describe_recipe(name)
    assert "Expected" in text
    assert "vitrail train" in text
    assert len(line) < 120


def test_paper_imagenet_is_the_last_row_of_table_3() -> None:
    found = recipe("paper-imagenet")
    assert isinstance(found.optimizer, AdamW)
    assert (found.optimizer.lr, found.optimizer.weight_decay, found.optimizer.clip) == (3e-3, 0.3, 1.0)
    assert found.optimizer.betas == (0.9, 0.999)
    assert found.schedule == Cosine(warmup=10_000)
    assert (found.batch_size, found.epochs, found.model.image_size) == (4096, 300, (224, 224))
    assert found.model.dropout == 0.1


@pytest.mark.parametrize(("images", "steps"), [(1_281_167, 20_000), (50_000, 10_000), (2_040, 500)])
def test_paper_finetune_is_table_4(images: int, steps: int) -> None:
    found = recipe("paper-finetune", checkpoint(images=images))
    assert isinstance(found.optimizer, SGD)
    assert (found.optimizer.momentum, found.optimizer.weight_decay, found.optimizer.clip) == (0.9, 0.0, 1.0)
    assert (found.batch_size, found.steps, found.model.image_size) == (512, steps, (384, 384))
    rates = (0.003, 0.01, 0.03, 0.06) if steps == 20_000 else (0.001, 0.003, 0.01, 0.03)
    assert found.optimizer.lr in rates


@pytest.mark.parametrize(("name", "drop"), [("Swin-T", 0.2), ("Swin-S", 0.3), ("Swin-B", 0.5), ("SwinV2-T", 0.2)])
def test_swin_is_section_4_1(name: str, drop: float) -> None:
    found = recipe("swin", facts(overrides={"model": name}))
    assert isinstance(found.optimizer, AdamW)
    assert (found.optimizer.lr, found.optimizer.weight_decay, found.optimizer.clip) == (1e-3, 0.05, 5.0)
    assert found.schedule == Cosine(warmup=20 * (1_281_167 // 1024), end=0.01)
    assert (found.batch_size, found.epochs, found.ema) == (1024, 300, None)
    assert found.model.stochastic_depth == drop
    assert found.model.image_size == ((256, 256) if "V2" in name else (224, 224))
    assert isinstance(found.objective, Classification)
    assert (found.objective.mixup, found.objective.cutmix, found.objective.smoothing) == (0.8, 1.0, 0.1)


@pytest.mark.parametrize(("name", "drop"), [("Swin-T", 0.1), ("Swin-B", 0.2), ("Swin-L", 0.2)])
def test_swin_finetune_is_appendix_a2(name: str, drop: float) -> None:
    found = recipe("swin-finetune", swin_checkpoint(name, overrides={"size": (384, 384)}))
    assert isinstance(found.optimizer, AdamW)
    assert (found.optimizer.lr, found.optimizer.weight_decay) == (1e-5, 1e-8)
    assert found.schedule == Constant()
    assert (found.batch_size, found.epochs, found.model.image_size) == (1024, 30, (384, 384))
    assert found.model.stochastic_depth == drop


@pytest.mark.parametrize(("name", "drop"), [("MViTv2-T", 0.1), ("MViTv2-S", 0.1), ("MViTv2-B", 0.3), ("MViTv2-L", 0.5)])
def test_mvit_is_the_published_code(name: str, drop: float) -> None:
    found = recipe("mvit", facts(overrides={"model": name, "batch_size": 512}))
    assert isinstance(found.optimizer, AdamW)
    assert (found.optimizer.lr, found.optimizer.weight_decay, found.optimizer.clip) == (5e-4, 0.05, 1.0)
    assert found.schedule == Cosine(warmup=70 * (1_281_167 // 512), end=0.004)
    assert (found.epochs, found.ema, found.model.image_size) == (300, None, (224, 224))
    assert found.model.stochastic_depth == drop
    with pytest.raises(ValueError, match=r"model='Swin-T'\) does not support Swin Transformers: use an MViT"):
        recipe("mvit", facts(overrides={"model": "Swin-T"}))


def test_recipes_of_swin_refuse_other_families_by_name() -> None:
    with pytest.raises(ValueError, match=r"recipe \(model='S/16'\) does not support Vision Transformers: use a Swin"):
        recipe("swin", facts(overrides={"model": "S/16"}))
    with pytest.raises(
        ValueError, match="the recipe swin-finetune does not support Vision Transformers: use recipe='f"
    ):
        recipe("swin-finetune", checkpoint())
    with pytest.raises(ValueError, match=r"recipe \(model='Swin-T'\) does not support Swin Transformers"):
        recipe("deit", facts(overrides={"model": "Swin-T"}))


def fine_tune(**overrides: object) -> tuple[AdamW, Classification, Facts]:
    """Return the optimiser and the objective of a fine-tune of 800 images with these overrides, and its facts."""
    given = checkpoint(images=800, classes=10, overrides=overrides)
    found = recipe("finetune", given)
    assert isinstance(found.optimizer, AdamW)
    assert isinstance(found.objective, Classification)
    return found.optimizer, found.objective, given


@pytest.mark.parametrize(
    ("length", "head_scale", "smoothing", "layer_decay"),
    [
        ({}, 1.0, 0.1, 0.65),  # 20 epochs of 25 steps
        ({"steps": 5_000}, 1.0, 0.1, 0.65),
        ({"steps": 250}, 2.0, 0.05, 0.725),
        ({"epochs": 10.0}, 2.0, 0.05, 0.725),
        ({"steps": 125}, 4.0, 0.025, 0.762),
        ({"steps": 125, "batch_size": 128}, 2.0, 0.05, 0.725),  # the learning rate is twice as high
        ({"steps": 50}, 10.0, 0.01, 0.785),
        ({"steps": 1}, 16.0, 0.0, 0.8),
        ({"epochs": 0.001}, 16.0, 0.0, 0.8),  # rounded to no steps; a run has at least one
    ],
)
def test_short_fine_tunes_move_head_and_low_layers_further(
    length: dict[str, object], head_scale: float, smoothing: float, layer_decay: float
) -> None:
    optimizer, objective, given = fine_tune(**length)
    assert (optimizer.head_scale, objective.smoothing) == (head_scale, smoothing)
    assert optimizer.layer_decay == pytest.approx(layer_decay, abs=2e-3)
    line = next(line for line in given.chosen if line.startswith("head scale"))
    assert ("a new head needs more" in line) == (head_scale > 1)


def test_fine_tunes_change_smoothly_with_the_number_of_steps() -> None:
    scales = [fine_tune(steps=steps)[0].head_scale for steps in range(1, 700, 3)]
    assert scales == sorted(scales, reverse=True)
    assert scales[-1] == 1.0
    products = [scale * steps for scale, steps in zip(scales, range(1, 700, 3), strict=True) if 32 <= steps <= 500]
    assert products == pytest.approx([500] * len(products), rel=0.01)


@pytest.mark.parametrize(("tune", "head_scale"), [("full", 10.0), ("last-2", 10.0), ("lora", 3.33), ("head", 3.33)])
def test_a_higher_learning_rate_of_all_parameters_counts_for_the_head(tune: str, head_scale: float) -> None:
    assert fine_tune(steps=50, tune=tune)[0].head_scale == head_scale
    assert fine_tune(tune=tune)[0].head_scale == 1.0


def test_overrides_come_first_and_reasons_are_given() -> None:
    given = facts(images=900, classes=3, overrides={"batch_size": 16, "epochs": 2.0})
    found = recipe("scratch-small", given)
    assert (found.batch_size, found.epochs) == (16, 2.0)
    assert "batch size 16: as given" in given.chosen
    assert any(line.startswith("width") and "900 training images" in line for line in given.chosen)


@pytest.mark.parametrize("name", [*NAMES, *METHODS])
def test_a_named_resnet_is_trained_or_refused(name: str) -> None:
    overrides = {"model": "R50x1", "size": (32, 32)}
    if name in ("finetune", "self-training", "paper-finetune", "swin-finetune"):
        return  # their model is the checkpoint's
    if name in ("scratch-small", "distil", "regress"):
        assert recipe(name, facts(overrides=overrides)).model == vitrail.configure(
            "R50x1", root="small", classes=1000, image_size=32
        )
        return
    if name == "sound":
        found = recipe(name, facts(overrides=overrides)).model
        assert (found.family, found.channels) == ("bit", 1)
        return
    if name == "segment":
        found = recipe(name, facts(classes=3, overrides=overrides)).model
        assert (found.output_kind, found.as_backbone().family) == ("masks", "bit")
        return
    with pytest.raises(ValueError, match=r"does not support BiT ResNets: use a(n MViT| (Vision|Swin) Transformer)"):
        recipe(name, facts(overrides=overrides | {"model": "R50x1"}))


@pytest.mark.parametrize("side", [8, 28, 32, 50, 64, 300])
@pytest.mark.parametrize("images", [10, 1_000, 60_000])
def test_default_recipe_fits_any_small_data(side: int, images: int) -> None:
    given = Facts(images, 10, False, (side, side), 1 if side < 30 else 3, side > 64)
    found = recipe("scratch-small", given)
    assert found.model.image_size == found.preprocessing.size
    assert found.total_steps(max(1, images // found.batch_size)) > 0


def test_settings_change_any_field() -> None:
    start = recipe("deit")
    found = with_settings(
        start,
        ["optimizer.lr=3e-4", "augment.0.scale=[0.3, 1]", "ema=EMA", "ema.decay=0.99", "model.stochastic_depth=0.2"],
    )
    assert found.optimizer == replace(start.optimizer, lr=3e-4)
    assert isinstance(found.augment[0], RandomResizedCrop)
    assert found.augment[0].scale == (0.3, 1.0)
    assert found.ema is not None
    assert found.ema.decay == 0.99
    assert found.model.stochastic_depth == 0.2  # pyright: ignore[reportAttributeAccessIssue]


def test_settings_choose_the_augmentation_of_segmentation(tmp_path: Path) -> None:
    start = recipe("deit")
    settings = ["augment.0=ScaleJitter", "augment.0.factor=[0.5, 1.5]", "augment.1=Rotate", "augment.1.degrees=[-5, 5]"]
    found = with_settings(start, settings)
    size = found.preprocessing.size
    assert found.augment[0] == ScaleJitter(size, (0.5, 1.5), "bicubic")
    assert found.augment[1] == Rotate((-5.0, 5.0), 0.5)
    write_recipe(found, tmp_path / "recipe.json")
    assert read_recipe(tmp_path / "recipe.json") == found


def test_length_is_epochs_or_steps_in_any_order_of_settings() -> None:
    for settings in (["steps=100"], ["steps=100", "epochs=none"], ["epochs=none", "steps=100"]):
        found = with_settings(recipe("deit"), settings)
        assert (found.steps, found.epochs) == (100, None)


def test_settings_are_applied_in_order() -> None:
    assert with_settings(recipe("deit"), ["ema=none", "ema=EMA"]).ema is not None
    assert with_settings(recipe("deit"), ["ema=EMA", "ema=none"]).ema is None
    assert with_settings(recipe("deit"), ["data.balance=weights", "data.balance=none"]).data.balance == "none"


@pytest.mark.parametrize("order", [1, -1])
def test_settings_that_belong_together_are_accepted_in_any_order(order: int) -> None:
    found = with_settings(recipe("deit"), ["model.size.width=16", "model.size.heads=2"][::order])
    assert (found.model.size.width, found.model.size.heads) == (16, 2)  # pyright: ignore[reportAttributeAccessIssue]
    tokens = ["objective=TokenLabelling", "objective.mixup=0", "objective.cutmix=0", "optimizer.lr=0.1"]
    assert isinstance(with_settings(recipe("deit"), tokens).objective, TokenLabelling)
    with pytest.raises(ValueError, match=r"^settings=\['model\.size\.width=16'\]: ") as caught:
        with_settings(recipe("deit"), ["model.size.width=16", "optimizer.lr=0.1"])
    assert "heads" in str(caught.value)


def test_another_class_keeps_shared_fields() -> None:
    found = with_settings(recipe("deit"), ["optimizer=muon"])
    assert isinstance(found.optimizer, Muon)
    assert found.optimizer.weight_decay == 0.05
    assert with_settings(found, ["augment.1=Flip"]).augment[1] == Flip()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("optimizer.lrr=1", "did you mean 'lr'"),
        ("optimiser.lr=1", "did you mean 'optimizer'"),
        ("optimizer.lr", "NAME=VALUE"),
        ("optimizer.lr=quick", "is not float"),
        ("augment.7.rate=1", "from 0 to"),
        ("ema.decay=0.9", "has no fields"),
        ("batch_size=0", "must be > 0"),
        ("tune=tail", "unknown tuning mode"),
        ("optimizer={}", "optimizer"),
        ("teacher=Teacher", "Teacher needs where"),
    ],
)
def test_invalid_settings_are_named(setting: str, said: str) -> None:
    with pytest.raises(ValueError, match="settings=") as caught:
        with_settings(recipe("deit"), [setting])
    assert said in str(caught.value)


def test_recipe_with_a_field_too_many_is_refused(tmp_path: Path) -> None:
    data = to_json(recipe("deit")) | {"magic": 1}
    (tmp_path / "recipe.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="magic"):
        read_recipe(tmp_path / "recipe.json")


def test_recipes_are_listed_without_pytorch() -> None:
    code = "import sys; from vitrail.cli import main; main(['recipes']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in NAMES:
        assert name in done.stdout
    assert done.stdout.count("Expected") == len((*NAMES, *METHODS))


def test_recipe_of_an_earlier_version_keeps_its_rule_of_resampling(tmp_path: Path) -> None:
    """It has no rule and stands for timm's; its checkpoint, read by this version, has another."""
    small = {"patch": 8, "width": 16, "depth": 1, "heads": 1, "image_size": 16, "classes": None}
    vitrail.save(vitrail.build(**small, resampling="transformers"), tmp_path / "init.safetensors")
    new = recipe("mae", facts(init=vitrail.load(tmp_path / "init.safetensors").config))
    assert new.model.resampling == RESAMPLINGS["transformers"]
    old = replace(new, init=str(tmp_path / "init.safetensors"), model=new.model.with_resampling("timm"))
    model = load_initial_model(SimpleNamespace(recipe=old))  # pyright: ignore[reportArgumentType]
    assert model.config == old.model
    assert model.training


@pytest.mark.parametrize("name", ["finetune", "self-training", "paper-finetune", "swin-finetune"])
def test_a_grey_checkpoint_without_preprocessing_gets_that_of_one_channel(name: str) -> None:
    init = vitrail.configure("Swin-T" if name == "swin-finetune" else "S/16", channels=1)
    assert build_recipe(name, facts(init=init), Data("somewhere")).preprocessing.channels == 1
