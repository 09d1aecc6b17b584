"""The scikit-learn classifier: images in every form, pickling, cloning, selection, and scikit-learn's own checks."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_classifiers_train, parametrize_with_checks

import vitrail
from vitrail.training.recipe import Data, Facts
from vitrail.training.recipes import build_recipe

QUICK = {"steps": 2, "batch_size": 16}
DIGITS, TARGETS = load_digits(return_X_y=True)
DIGITS, TARGETS = DIGITS[TARGETS < 3][:60], TARGETS[TARGETS < 3][:60]
NAMES = np.array(["zero", "one", "two"])[TARGETS]
UNTRAINED = {"check_classifiers_train": "four steps are too few for its accuracy: tested below with more"}


@pytest.fixture(scope="module")
def fitted():
    return vitrail.VitrailClassifier(**QUICK).fit(DIGITS, NAMES)


@pytest.mark.slow
@parametrize_with_checks(
    [vitrail.VitrailClassifier(steps=4, batch_size=16, validation_fraction=0)],
    expected_failed_checks=lambda estimator: UNTRAINED,
)
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.slow
def test_training_check_of_scikit_learn_with_enough_steps():
    classifier = vitrail.VitrailClassifier(steps=100, batch_size=32, validation_fraction=0)
    check_classifiers_train("VitrailClassifier", classifier, readonly_memmap=True, X_dtype="float32")


def test_fitted_classifier_predicts_labels_and_probabilities(fitted):
    assert fitted.classes_.tolist() == ["one", "two", "zero"]
    assert fitted.n_features_in_ == 64
    shares = fitted.predict_proba(DIGITS)
    assert shares.shape == (60, 3)
    assert np.allclose(shares.sum(1), 1)
    assert (fitted.predict(DIGITS) == fitted.classes_[shares.argmax(1)]).all()
    assert fitted.score(DIGITS, NAMES) == (fitted.predict(DIGITS) == NAMES).mean()
    assert fitted.summary_["steps"] == 2
    assert fitted.to_model().labels == ("one", "two", "zero")


def test_every_form_of_the_same_images_gives_the_same_probabilities(fitted, tmp_path):
    shares = fitted.predict_proba(DIGITS)
    arrays = DIGITS.reshape(-1, 8, 8)
    assert np.array_equal(fitted.set_params(image_shape=(8, 8)).predict_proba(DIGITS), shares)
    fitted.set_params(image_shape=None)
    low, high = fitted.pixel_range_
    images = [Image.fromarray(((a - low) * 255 / (high - low)).round().astype(np.uint8)) for a in arrays]
    paths = [tmp_path / f"{index}.png" for index in range(len(images))]
    for image, path in zip(images, paths, strict=True):
        image.save(path)
    for given in (images, paths, list(map(str, paths)), [np.asarray(image) for image in images]):
        assert np.array_equal(fitted.predict_proba(given), shares)


@pytest.mark.parametrize("shape", [(60, 12, 10), (60, 12, 10, 1), (60, 12, 10, 3), (60, 12, 10, 4)])
def test_arrays_of_every_shape_are_learnt_from(shape):
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    classifier = vitrail.VitrailClassifier(**QUICK).fit(pixels, TARGETS)
    assert classifier.predict(pixels).shape == (60,)
    assert classifier.to_model().config.channels == (1 if len(shape) == 3 or shape[3] == 1 else 3)


def test_lists_of_images_and_paths_are_learnt_from(tmp_path):
    images = [Image.new("RGB", (10 + index % 3, 12), (4 * index, 99, 200)) for index in range(60)]
    classifier = vitrail.VitrailClassifier(**QUICK).fit(images, NAMES)
    paths = [tmp_path / f"{index}.png" for index in range(60)]
    for image, path in zip(images, paths, strict=True):
        image.save(path)
    again = vitrail.VitrailClassifier(**QUICK).fit(paths, NAMES)
    assert np.allclose(classifier.predict_proba(images), again.predict_proba(paths), atol=1e-6)


def test_pickle_holds_no_modules_and_predicts_the_same_in_another_process(fitted, tmp_path):
    data = pickle.dumps(fitted)
    assert b"torch" not in data
    (tmp_path / "classifier.pkl").write_bytes(data)
    np.save(tmp_path / "x.npy", DIGITS[:5])
    script = (
        "import numpy as np, pickle; c = pickle.load(open('classifier.pkl', 'rb')); "
        "np.save('shares.npy', c.predict_proba(np.load('x.npy')))"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    assert np.allclose(np.load(tmp_path / "shares.npy"), fitted.predict_proba(DIGITS[:5]), atol=1e-6)


def test_clone_and_seed_determine_the_model():
    classifier = vitrail.VitrailClassifier(**QUICK, seed=3)
    models = [clone(classifier).fit(DIGITS, TARGETS).to_model().state_dict() for _ in range(2)]
    other = clone(classifier).set_params(seed=4).fit(DIGITS, TARGETS).to_model().state_dict()
    assert all(torch.equal(models[0][name], models[1][name]) for name in other)
    assert any(not torch.equal(models[0][name], other[name]) for name in other)


def test_pipelines_cross_validation_and_grid_search():
    pipeline = make_pipeline(FunctionTransformer(np.sqrt), vitrail.VitrailClassifier(**QUICK))
    assert np.isfinite(cross_val_score(pipeline, DIGITS, TARGETS, cv=2)).all()
    search = GridSearchCV(pipeline, {"vitrailclassifier__lr": [1e-4, 1e-3]}, cv=2, error_score="raise").fit(
        DIGITS, TARGETS
    )
    assert search.best_params_["vitrailclassifier__lr"] in (1e-4, 1e-3)
    assert search.predict(DIGITS).shape == (60,)


def test_parameters_reach_the_recipe(tmp_path):
    start = vitrail.build(patch=4, width=32, depth=1, heads=2, image_size=16, channels=1, classes=5)
    start.preprocessing = vitrail.Preprocessing((16, 16), (16, 16), mean=(0.5,), std=(0.5,))
    vitrail.save(start, tmp_path / "start.safetensors")
    tuned = vitrail.VitrailClassifier(
        init=str(tmp_path / "start.safetensors"), tune="head", augment=ImageOps.invert, **QUICK
    )
    model = tuned.fit(DIGITS, TARGETS).to_model()
    assert torch.equal(model.state_dict()["embed.projection.weight"], start.state_dict()["embed.projection.weight"])
    small = vitrail.VitrailClassifier("Ti/4", size=16, lr=1e-3, **QUICK).fit(DIGITS, TARGETS).to_model()
    assert small.config.image_size == (16, 16)
    assert small.config.size.width == 192
    facts = Facts(
        images=60, classes=3, several=False, side=(8, 8), channels=1, several_sizes=False, overrides=dict(QUICK)
    )
    recipe = build_recipe("scratch-small", facts, Data("X"))
    assert vitrail.VitrailClassifier(recipe=recipe).fit(DIGITS, TARGETS).summary_["steps"] == 2


@pytest.mark.parametrize(
    ("options", "x", "y", "message"),
    [
        ({"image_shape": (5, 5)}, DIGITS, TARGETS, "image_shape .* does not fit 64 features"),
        ({"validation_fraction": 1.0}, DIGITS, TARGETS, "validation_fraction must be >= 0 and < 1"),
        ({"model": "Q/16"}, DIGITS, TARGETS, "Q/16|'Q'"),
        ({}, DIGITS, np.zeros(60), "y has one class"),
        ({}, np.zeros((60, 4, 4, 7)), TARGETS, "1, 3 or 4 channels"),
        ({}, [np.zeros((4, 4)), np.zeros((5, 5))], [0, 1], "a list holds PIL images, paths, or arrays of uint8"),
        ({}, [Image.new("L", (4, 4))] * 3, [0, 1], "X has 3 images and y 2 labels"),
    ],
)
def test_wrong_input_is_refused(options, x, y, message):
    with pytest.raises(ValueError, match=message):
        vitrail.VitrailClassifier(**QUICK, **options).fit(x, y)


def test_unfitted_classifier_and_unreadable_files_are_refused(fitted, tmp_path):
    with pytest.raises(NotFittedError):
        vitrail.VitrailClassifier().predict(DIGITS)
    (tmp_path / "broken.png").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"1 of 1 images cannot be read, first .*broken\.png"):
        fitted.predict([tmp_path / "broken.png"])


def test_columns_of_paths_are_taken_and_one_image_is_refused(tmp_path):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed: pip install 'vitrail[dev]'")
    images = np.random.default_rng(0).integers(0, 256, (12, 8, 8), dtype=np.uint8)
    for number, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    paths, labels = [str(tmp_path / f"{number}.png") for number in range(12)], ["a", "b"] * 6
    classifier = vitrail.VitrailClassifier(steps=1, batch_size=4)
    for column in (pandas.Series(paths), np.array(paths), np.array(paths, dtype=object)):
        assert len(classifier.fit(column, labels).predict(column[:3])) == 3
    classifier.fit(images, labels)
    with pytest.raises(ValueError, match=r"X has the shape \(8, 8\): for one image give X\[None\]"):
        classifier.predict(images[0])
