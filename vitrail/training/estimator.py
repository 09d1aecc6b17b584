"""`vitrail.VitrailClassifier`: a scikit-learn classifier of images that trains with a recipe.

Needs scikit-learn. Parameters are stored as given; `fit` trains in a temporary directory and keeps the model as the bytes of
`model.safetensors`, so that a fitted classifier can be pickled without pickling modules.
"""

# ruff: noqa: N803, N806 (scikit-learn names the samples X)

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
from PIL import Image

from vitrail.checkpoints.load import MODEL_FILE, load, require_preprocessing
from vitrail.data.audit import Audit
from vitrail.data.dataset import Dataset, Images, Store
from vitrail.data.labels import LabelMap
from vitrail.data.sources.arrays import ArrayStore, PixelStore
from vitrail.data.sources.files import FileStore
from vitrail.data.transforms.user import list_functions
from vitrail.inference import TorchRuntime, probabilities, run_batches
from vitrail.models.base import Model
from vitrail.training.distributed import join_process_group, pick_device
from vitrail.training.recipe import Data, Machine, Recipe
from vitrail.training.recipe_choice import Augment, RecipeChoice, with_precision
from vitrail.training.runs.prepare import Prepared
from vitrail.training.runs.run import Run
from vitrail.training.runs.setup import RunSetup

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ImportError:
    raise ImportError("vitrail.VitrailClassifier needs scikit-learn: pip install scikit-learn") from None

COLOUR_CHANNELS = (1, 3, 4)


@dataclass(frozen=True, eq=False)
class ListStore(PixelStore):
    """A store of images of different sizes in memory."""

    arrays: Sequence[np.ndarray]  # uint8 [H, W] or [H, W, C]
    origins: tuple[tuple[int, str], ...] = ((0, "X"),)

    def __len__(self) -> int:
        return len(self.arrays)

    def image_pixels(self, item: int) -> np.ndarray:
        return self.arrays[item]


class VitrailClassifier(ClassifierMixin, BaseEstimator):
    """A classifier of images for scikit-learn: a Vision Transformer, trained or fine-tuned with a recipe.

    X is an array [n, H, W] or [n, H, W, C], a list of PIL images, arrays or paths, or a table [n, features] of flattened
    images: `image_shape` is the shape of each, (H, W) or (H, W, C); without it, rows are filled up with zeros to a square.
    Pixels are bytes; other numbers are scaled from the least and greatest value of the training X to 0 and 255.

    `model` is an architecture ("S/16") or None for the recipe's choice; `init` a checkpoint to fine-tune, a path or a name of
    `vitrail models`. `recipe` is a name or a Recipe; `epochs` or `steps`, `lr`, `batch_size`, `size` and `tune` override it.
    `validation_fraction` of the training images is held out to validate; with 0, the training images are used for that.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        init: str | None = None,
        recipe: str | Recipe | None = None,
        epochs: float | None = None,
        steps: int | None = None,
        lr: float | None = None,
        batch_size: int | None = None,
        size: int | None = None,
        tune: str | None = None,
        augment: Augment | None = None,
        image_shape: tuple[int, ...] | None = None,
        validation_fraction: float = 0.1,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        self.model = model
        self.init = init
        self.recipe = recipe
        self.epochs = epochs
        self.steps = steps
        self.lr = lr
        self.batch_size = batch_size
        self.size = size
        self.tune = tune
        self.augment = augment
        self.image_shape = image_shape
        self.validation_fraction = validation_fraction
        self.seed = seed
        self.device = device

    def fit(self, X: Any, y: Any) -> Self:
        """Train on images X with labels y."""
        X, y = self._check_training_data(list_paths(X), y)
        self.classes_, targets = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("y has one class: a classifier needs two or more")
        if isinstance(X, np.ndarray):
            self.pixel_range_, self.dimensions_ = (float(X.min()), float(X.max())), X.ndim
        names = tuple(map(str, self.classes_.tolist()))
        images = Images(self._read_images(X), np.arange(len(y)), targets.astype(np.int64), names)
        with tempfile.TemporaryDirectory(prefix="vitrail-") as folder:
            self.summary_ = train_images(images, Path(folder) / "run", self._choose_recipe(), self._options())
            self.model_bytes_ = (Path(folder) / "run" / MODEL_FILE).read_bytes()
        self._model = self._load_model()
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return the most likely class of each image."""
        likely = self.predict_proba(X).argmax(1)
        return self.classes_[likely]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, [n, classes], in the order of `classes_`."""
        check_is_fitted(self, "model_bytes_")
        X = list_paths(X)
        if not is_image_list(X):
            if isinstance(X, np.ndarray) and 1 < X.ndim == getattr(self, "dimensions_", X.ndim) - 1:
                raise ValueError(f"X has the shape {X.shape}: for one image give X[None], [1, H, W]")
            X = validate_data(self, cast(Any, X), reset=False, allow_nd=True, dtype="numeric")
        store, model = self._read_images(X), self.to_model()
        images = Images(store, np.arange(len(store)), np.zeros(len(store), np.int64), ("0",))
        runtime = TorchRuntime(model, require_preprocessing("the classifier", model), device=pick_device(self.device))
        unreadable: dict[str, str] = {}
        logits = [batch.outputs for batch in run_batches(runtime, images, runtime.preprocessing, unreadable)]
        if unreadable:
            name, error = next(iter(unreadable.items()))
            raise ValueError(f"{len(unreadable)} of {len(store)} images cannot be read, first {name}: {error}")
        return probabilities(np.concatenate(logits).astype(np.float64), multilabel=False)

    def to_model(self) -> Model:
        """Return the trained model, on the classifier's device."""
        check_is_fitted(self, "model_bytes_")
        if self._model is None:  # after unpickling
            self._model = self._load_model()
        return self._model

    def _load_model(self) -> Model:
        with tempfile.TemporaryDirectory(prefix="vitrail-") as folder:
            path = Path(folder) / MODEL_FILE
            path.write_bytes(self.model_bytes_)
            return load(path, mmap=False).to(pick_device(self.device))

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(cast(Any, super().__getstate__()))
        return {**state, "_model": None} if "_model" in state else state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = tags.input_tags.three_d_array = True
        return tags

    def _options(self) -> dict[str, Any]:
        """Return the arguments of `train_images` beside the data and the recipe."""
        given = {"validation": self.validation_fraction, "augment": self.augment, "seed": self.seed}
        return {**given, "machine": Machine(device=self.device)}

    def _choose_recipe(self) -> RecipeChoice:
        """Return the recipe and its overrides."""
        given = self.recipe if isinstance(self.recipe, Recipe) else None
        named = self.recipe if isinstance(self.recipe, str) else "finetune" if self.init else "scratch-small"
        names = ("model", "epochs", "steps", "lr", "batch_size", "tune", *(() if given else ("seed",)))
        overrides = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.size is not None:
            overrides["size"] = (self.size, self.size)
        data = Data("X", task="single")
        return RecipeChoice(named, given, data, None, self.init, None, None, overrides, (), self.augment)

    def _check_training_data(self, X: Any, y: Any) -> tuple[Any, np.ndarray]:
        """Return X, as an array or a list of images, and y, checked as scikit-learn does."""
        if y is None:
            raise ValueError("VitrailClassifier requires y to be passed, but the target y is None")
        if not is_image_list(X):
            X, y = cast(Any, validate_data(self, X, y, allow_nd=True, ensure_min_samples=2, dtype="numeric"))
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        if len(y) != len(X):
            raise ValueError(f"X has {len(X)} images and y {len(y)} labels: give one label for each image")
        return X, y

    def _read_images(self, X: Any) -> Store:
        """Return the images of checked input."""
        if not isinstance(X, np.ndarray):
            return read_image_list(X)
        if X.ndim == 2:
            X = to_images(X, self.image_shape)
        if X.ndim not in (3, 4) or (X.ndim == 4 and X.shape[3] not in COLOUR_CHANNELS):
            raise ValueError(f"X has the shape {X.shape}: use [n, H, W] or [n, H, W, C] with 1, 3 or 4 channels")
        if X.ndim == 4 and X.shape[3] == 1:
            X = X[..., 0]
        if X.dtype != np.uint8:
            low, high = self.pixel_range_
            scaled = (X.astype(np.float64) - low) * (255 / (high - low) if high > low else 0)
            X = scaled.round().clip(0, 255).astype(np.uint8)
        return ArrayStore(np.ascontiguousarray(X), ((0, "X"),))


def train_images(images: Images, out: Path, choice: RecipeChoice, options: dict[str, Any]) -> dict[str, Any]:
    """Train on all of these images in the directory `out`; return the summary of the run."""
    share, machine = options["validation"], options["machine"]
    if not 0 <= share < 1:
        raise ValueError(f"validation_fraction must be >= 0 and < 1, got {share}")
    held = hold_out(images.targets, share, options["seed"])
    train, validation = (images.select(~held), images.select(held, "validation")) if held.any() else (images, images)
    dataset = Dataset("X", "arrays", {"train": train, "validation": replace(validation, split="validation")})
    with join_process_group(**machine.group()) as team:
        labels = LabelMap(images.classes)
        prepared = Prepared(dataset, labels, dataset.splits, Audit(dataset, ()), [])  # every image is used as it is
        facts = prepared.measure_facts()
        recipe = choice.build(facts)
        recipe = with_precision(recipe, facts, choice.measure_precision(recipe, len(train), team))
        functions = list_functions(options["augment"])
        setup = RunSetup(recipe, prepared, out, machine, team, facts.chosen, functions=functions)
        setup.check_functions()
        return Run(setup).start()


def hold_out(targets: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Return a mask of this share of the images of each class, rounded down, so that every class is trained on."""
    held = np.zeros(len(targets), dtype=bool)
    order = np.random.default_rng(seed).permutation(len(targets))
    for label in np.unique(targets):
        mine = order[targets[order] == label]
        held[mine[: int(share * len(mine))]] = True
    return held


def list_paths(X: Any) -> Any:
    """Return a column of paths or images, such as a pandas Series, as a list; other values as they are."""
    is_column = getattr(X, "ndim", None) == 1 and hasattr(X, "tolist")
    return X.tolist() if is_column and not np.issubdtype(np.asarray(X).dtype, np.number) else X


def is_image_list(X: Any) -> bool:
    """Return whether X is a list of PIL images, paths or arrays of pixels."""
    if isinstance(X, np.ndarray) and not (X.ndim == 1 and X.dtype.kind in "OU" and len(X)):
        return False
    if not isinstance(X, list | tuple | np.ndarray) or not len(X):
        return False
    return all(isinstance(x, Image.Image | str | os.PathLike) or getattr(x, "ndim", 0) in (2, 3) for x in X)


def read_image_list(X: Sequence[Any]) -> Store:
    """Return a list of paths, or of PIL images and arrays of bytes, as a store."""
    if all(isinstance(x, str | os.PathLike) for x in X):
        if missing := [os.fspath(x) for x in X if not os.path.isfile(x)]:
            raise FileNotFoundError(f"{len(missing)} of {len(X)} files of X do not exist, first {missing[0]}")
        return FileStore.from_paths(map(os.fspath, X))
    arrays = []
    for index, x in enumerate(X):
        array = np.asarray(x.convert("RGB") if isinstance(x, Image.Image) and x.mode not in ("L", "RGB") else x)
        if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)):
            kind = f"{array.dtype} {list(array.shape)}"
            raise ValueError(
                f"X[{index}] is {kind}: a list holds PIL images, paths, or arrays of uint8 [H, W] or [H, W, 3]"
            )
        arrays.append(array)
    return ListStore(arrays)


def to_images(X: np.ndarray, shape: tuple[int, ...] | None) -> np.ndarray:
    """Return rows [n, features] as images [n, H, W] or [n, H, W, C]; without a shape as squares, zeros at the end."""
    features = X.shape[1]
    if shape is not None:
        if len(shape) not in (2, 3) or math.prod(shape) != features:
            raise ValueError(f"image_shape {shape} does not fit {features} features: give (H, W) or (H, W, C)")
        return X.reshape(len(X), *shape)
    side = math.isqrt(features - 1) + 1 if features else 0
    return np.pad(X, ((0, 0), (0, side * side - features))).reshape(len(X), side, side)
