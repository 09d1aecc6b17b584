"""A recipe: everything that decides what a training run computes, as one value. And how it is changed and written down."""

import json
import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from vitrail.data.augment import AugmentSlot
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.views import Views
from vitrail.engine.ema import EMA
from vitrail.engine.optim import OptimizerSlot
from vitrail.engine.schedule import ScheduleSlot
from vitrail.models.bit import BiTConfig
from vitrail.models.build import Config
from vitrail.models.sizes import closest
from vitrail.models.tuning import check_tune
from vitrail.models.vit import ViTConfig
from vitrail.models.written import dataclass_from_json, read_value, to_json
from vitrail.objectives.classification import Classification
from vitrail.objectives.dino import DINO
from vitrail.objectives.distillation import Distillation
from vitrail.objectives.feature_distillation import FeatureDistillation
from vitrail.objectives.mae import MAE
from vitrail.objectives.masked_patches import MaskedPatches
from vitrail.objectives.token_labelling import TokenLabelling

TaughtSlot = Distillation | FeatureDistillation | TokenLabelling  # what asks a teacher
LabelSlot = Classification | TaughtSlot
PictureSlot = MaskedPatches | MAE | DINO  # what is learnt from pictures alone
ObjectiveSlot = LabelSlot | PictureSlot
METHODS: dict[type[Any], str] = {MaskedPatches: "mpp", MAE: "mae", DINO: "dino"}
FEATURES = "features"  # a teacher's, learnt from pictures alone


@dataclass(frozen=True)
class Data:
    """Where pictures come from, and how their labels are treated."""

    where: str
    fractions: tuple[float, float, float] | None = None  # train, validation, test, where the data has no splits
    task: Literal["auto", "single", "multi", "none"] = "auto"  # "none" needs no labels
    balance: Literal["none", "weights", "sampling"] = "none"  # for classes with few pictures
    allow_class_mismatch: bool = False
    quarantine: str | None = None  # a file that names pictures to leave out
    per_class: int | None = None  # at most so many pictures of each class to learn from
    drawn: int = 0  # which ones: another number draws others
    test: bool = True  # whether test pictures are looked at: not while something is still being chosen
    classes: tuple[int, int] | None = None  # the first that is taken, and every so-manieth from there on; else all
    examples: tuple[int, int] | None = None  # so many of all to learn from and to validate on, as VTAB draws them

    def __post_init__(self) -> None:
        if self.classes is not None and not 0 <= self.classes[0] < self.classes[1]:
            raise ValueError(
                f"classes {self.classes}: give the first and the step, (0, 2) or (1, 2) for every other one"
            )
        if self.examples is not None and min(self.examples) < 1:
            raise ValueError(f"examples {self.examples}: use 1 or more to learn from, and to validate on")
        if self.per_class is not None and self.per_class < 1:
            raise ValueError(f"{self.per_class} pictures of each class to learn from: use 1 or more")
        if self.drawn < 0:
            raise ValueError(f"draw {self.drawn}: use 0 or more")


@dataclass(frozen=True)
class Teacher:
    """A trained model that a run learns from."""

    where: str  # a file, a directory, hf://owner/name
    cached: bool = False  # asked once about each picture as it is, not about every sample that the student sees
    same_classes: bool = False  # its classes are the data's in their order, though it has no names for them


@dataclass(frozen=True)
class Recipe:
    """A training run as a value. Two runs of one recipe on one kind of machine give the same weights, bit for bit."""

    name: str
    data: Data
    model: ViTConfig | BiTConfig
    preprocessing: Preprocessing  # of evaluation, and of everything after training
    augment: tuple[AugmentSlot, ...]
    objective: ObjectiveSlot
    optimizer: OptimizerSlot
    schedule: ScheduleSlot
    batch_size: int  # over all processes
    epochs: float | None = None  # this or `steps`
    steps: int | None = None
    init: str | None = None  # a checkpoint to begin with
    teacher: Teacher | None = None
    tune: str = "full"
    ema: EMA | None = None
    views: Views | None = None  # several crops of each picture, for DINO; `augment` is of the first
    collapse: Literal["stop", "warn"] = "stop"  # what to do when learning without labels goes nowhere
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    accumulate: int = 1
    validate_every: float = 1.0  # epochs
    patience: int | None = None  # validations without improvement before training stops
    keep: Literal["last", "best"] = "last"  # which weights become the model
    skip_nonfinite: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("a recipe has either epochs or steps: set one, and the other to none")
        for name in ("batch_size", "epochs", "steps", "accumulate", "patience"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}: it is above 0")
        if not 0 < self.validate_every < math.inf:
            raise ValueError(f"validate_every is {self.validate_every}: it is above 0")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed {self.seed}: give 0 to {2**31 - 1}")
        if self.preprocessing.size != self.model.image_size:
            raise ValueError(
                f"the model takes {self.model.image_size} and the preprocessing gives {self.preprocessing.size}: "
                "use --size, which changes both"
            )
        check_tune(self.tune)

    def check(self) -> None:
        """Refuses parts that do not fit together. Not when a value is made: settings change one after the other."""
        takes, gives = self.model.channels, self.preprocessing.channels
        if takes != gives:
            raise ValueError(
                f"the model takes {takes} channels and the preprocessing gives {gives}: set model.channels={gives}"
            )

    def length(self, steps_per_epoch: int) -> int:
        """Steps from the first to the last."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, round(self.epochs * steps_per_epoch))


@dataclass(frozen=True)
class Machine:
    """What a run is computed on: it changes how long it takes, not what it is."""

    device: str = "auto"
    workers: int | None = None  # processes that prepare pictures; None to choose
    parallel: Literal["ddp", "fsdp"] = "ddp"
    compile: bool = False
    save_seconds: float = 300.0
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        if self.keep_checkpoints < 1:
            raise ValueError(f"{self.keep_checkpoints} checkpoints to keep: keep 1 at least")
        if self.workers is not None and self.workers < 0:
            raise ValueError(f"{self.workers} workers: use 0 or more")
        if not self.save_seconds >= 0:
            raise ValueError(f"a checkpoint every {self.save_seconds} seconds: use 0 or more")


@dataclass
class Facts:
    """What a recipe may adapt to, and the reasons that it gives for what it chose."""

    images: int  # to train on
    classes: int
    several: bool
    side: tuple[int, int]  # of the pictures, height and width: the median
    channels: int
    several_sizes: bool  # whether pictures differ in size, as photographs do
    init: Config | None = None  # what the checkpoint to begin with is
    init_preprocessing: Preprocessing | None = None
    teacher: Teacher | None = None
    wishes: dict[str, Any] = field(default_factory=dict)  # what the user asked for: batch_size, epochs, model, size…
    chosen: list[str] = field(default_factory=list)
    heard: set[str] = field(default_factory=set)  # the wishes that the recipe asked about

    @property
    def loss(self) -> Literal["softmax", "sigmoid"]:
        """A sigmoid for each class where a picture may have several labels."""
        return "sigmoid" if self.several else "softmax"

    def steps(self, epochs: float, batch: int) -> int:
        """Steps in so many epochs."""
        return round(epochs * max(1, self.images // batch))

    def lasting(self, *, steps: int | None = None, epochs: float | None = None, why: str) -> dict[str, Any]:
        """`epochs` or `steps` of a recipe: what the user asked for, or else what it says."""
        for name in ("epochs", "steps"):
            if self.wishes.get(name) is not None:
                return {name: self.choose(name, None, "")}
        return {"steps": self.choose("steps", steps, why)} if steps else {"epochs": self.choose("epochs", epochs, why)}

    def choose(self, name: str, value: Any, why: str) -> Any:
        """The user's wish, or the recipe's value with its reason."""
        wish = self.wishes.get(name)
        self.heard.add(name)
        if wish is not None:
            self.chosen.append(f"{name.replace('_', ' ')} {shown(wish)}: as asked")
            return wish
        self.chosen.append(f"{name.replace('_', ' ')} {shown(value)}: {why}")
        return value


def method_of(recipe: Recipe) -> str | None:
    """How a recipe learns without labels; None for one that learns labels."""
    if isinstance(recipe.objective, FeatureDistillation) and recipe.model.classes is None:
        return FEATURES
    return METHODS.get(type(recipe.objective))


def shown(value: Any) -> str:
    """A value in a line for people."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "×".join(map(str, value)) if isinstance(value, tuple) else str(value)


def write_recipe(recipe: Recipe, path: Path) -> None:
    """A recipe as JSON."""
    path.write_text(json.dumps(to_json(recipe), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_recipe(path: Path) -> Recipe:
    """The recipe of a run, or one that was edited by hand; whatever does not fit is an error that says where."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no recipe ({error})") from None
    try:
        return dataclass_from_json(data, Recipe, "recipe")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def with_settings(recipe: Recipe, settings: list[str]) -> Recipe:
    """A recipe changed in places: `optimizer.lr=3e-4`, `augment.0.scale=[0.3,1]`, `ema=none`, `optimizer=Muon`."""
    # A length is taken away last: `epochs=none` makes sense once there are steps.
    for setting in sorted(settings, key=lambda setting: setting.lower() in ("epochs=none", "steps=none")):
        path, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting}: write it as NAME=VALUE, optimizer.lr=3e-4 for example")
        try:
            recipe = changed(recipe, Recipe, path.strip().split("."), text.strip(), path.strip())
        except (TypeError, ValueError) as error:
            raise ValueError(f"--set {setting}: {error}") from None
    return recipe


def changed(value: Any, kind: Any, path: list[str], text: str, whole: str) -> Any:
    """`value` with what lies at the end of the path replaced."""
    if not path:
        return parsed(value, kind, text, whole)
    name = path[0]
    if isinstance(value, tuple):
        if not name.isdecimal() or int(name) >= len(value):
            raise ValueError(f"{whole} has the places 0 to {len(value) - 1}, not {name!r}")
        inner = get_args(kind)[0]
        place = int(name)
        return (*value[:place], changed(value[place], inner, path[1:], text, whole), *value[place + 1 :])
    if not is_dataclass(value):
        raise ValueError(f"{whole}: there is nothing inside {shown(value)}; set it to a kind first")
    known = [f.name for f in fields(value)]
    if name not in known:
        raise ValueError(f"no {name!r} in {type(value).__name__}: {closest(name, known)}")
    inner = get_type_hints(type(value))[name]
    if isinstance(value, Recipe) and name in ("epochs", "steps") and text.lower() != "none":
        length = {"epochs": None, "steps": None, name: parsed(None, inner, text, whole)}
        return replace(value, **length)
    return replace(value, **{name: changed(getattr(value, name), inner, path[1:], text, whole)})  # type: ignore[type-var]


def parsed(old: Any, kind: Any, text: str, where: str) -> Any:
    """A value as it is typed on a command line: JSON, a bare word, none, or the name of a kind with its own defaults."""
    if text.lower() in ("none", "null") and text not in get_args(kind):  # "none" is one of the words for data.balance
        return read_value(None, kind, where)
    alternatives: tuple[Any, ...] = (kind, *get_args(kind))
    kinds: dict[str, Any] = {each.__name__.lower(): each for each in alternatives if is_dataclass(each)}  # type: ignore[union-attr]
    if kinds and not text.startswith("{"):
        if text.lower() not in kinds:
            raise ValueError(f"no kind {text!r}: {closest(text, [each.__name__ for each in kinds.values()])}")
        made: Any = kinds[text.lower()]
        shared = {f.name for f in fields(made)} & ({f.name for f in fields(old)} if is_dataclass(old) else set())
        return made(**{name: getattr(old, name) for name in shared if name != "betas"})
    try:
        data = json.loads(text)
    except ValueError:
        data = text
    return read_value(data, kind, where)
