"""Recipes: everything that determines the result of a training run as one value, how it is changed and stored."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sources.numbers import parse_targets
from vitrail.data.tokenizer import Tokenizer
from vitrail.data.transforms.augment import AugmentSlot
from vitrail.data.transforms.pipeline import Views
from vitrail.models.base import ModelConfig
from vitrail.models.lora import check_tune
from vitrail.models.sizes import closest
from vitrail.objectives.registry import ObjectiveSlot
from vitrail.training.optim import OptimizerSlot
from vitrail.training.schedule import EMA, ScheduleSlot
from vitrail.utils.json import check_fields, dataclass_from_json, parse_json, to_json, value_from_json


@dataclass(frozen=True)
class Data:
    """A dataset and the treatment of its labels."""

    where: str
    fractions: tuple[float, float, float] | None = None  # train, validation, test, where the data has no splits
    task: Literal["auto", "single", "multi", "none", "captions"] = "auto"  # "none" needs no labels
    balance: Literal["none", "weights", "sampling"] = "none"  # for classes with few images
    allow_class_mismatch: bool = False
    quarantine: str | None = None  # a file that lists images to leave out
    per_class: int | None = None  # at most this many training images of each class
    drawn: int = 0  # seed of that draw
    test: bool = True  # whether the test split is used: not while something is still being tuned
    classes: tuple[int, int] | None = None  # first class and step, to use a part of the classes
    examples: tuple[int, int] | None = None  # training and validation images in all, as VTAB draws them
    label_from: str | None = None  # regular expression that finds the class in a file name
    names: str | None = None  # file of readable class names, or "imagenet"
    ignore: tuple[int, ...] | None = None  # stored values of masks that neither train nor count, besides the data's own
    targets: tuple[str, ...] | None = None  # columns of numbers to learn, in place of labels
    unlabelled: str | None = None  # more training images, whose labels a teacher predicted
    pseudo_labels: str | None = None  # file with these labels

    def __post_init__(self) -> None:
        if (self.unlabelled is None) != (self.pseudo_labels is None):
            raise ValueError("unlabelled images need pseudo_labels, and these need unlabelled images: give both")
        if self.classes is not None and not 0 <= self.classes[0] < self.classes[1]:
            raise ValueError(f"classes must be (first, step), such as (0, 2) or (1, 2), got {self.classes}")
        if self.examples is not None and min(self.examples) < 1:
            raise ValueError(f"examples must be >= 1 for training and validation, got {self.examples}")
        for_classes = (
            "task",
            "balance",
            "allow_class_mismatch",
            "per_class",
            "classes",
            "label_from",
            "names",
            "ignore",
        )
        parse_targets(self.targets, {name: getattr(self, name) for name in for_classes})
        check_fields(self, ">= 1", "per_class")
        check_fields(self, ">= 0", "drawn")
        if self.ignore is not None and (not self.ignore or min(self.ignore) < 0):
            raise ValueError(f"ignore must be values >= 0 of masks, such as (255,), got {self.ignore}")


@dataclass(frozen=True)
class Teacher:
    """Settings of the trained model that a run learns from."""

    where: str  # a file, a directory, hf://owner/name
    cached: bool = False  # outputs computed once for each whole image, not for every sample of the student
    same_classes: bool = False  # its classes are the data's in their order, though it has no names for them


@dataclass(frozen=True)
class Recipe:
    """A training run as a value. Two runs of one recipe on the same machine give the same weights, bit for bit."""

    name: str
    data: Data
    model: ModelConfig
    preprocessing: Preprocessing  # of evaluation, and of the trained model
    augment: tuple[AugmentSlot, ...]
    objective: ObjectiveSlot
    optimizer: OptimizerSlot
    schedule: ScheduleSlot
    batch_size: int  # over all processes
    epochs: float | None = None  # this or `steps`
    steps: int | None = None
    init: str | None = None  # the initial checkpoint
    init_image: str | None = None  # the checkpoint of the image tower alone
    tokenizer: str | None = None  # file or directory; None: that of `init`, or learnt from the captions
    teacher: Teacher | None = None
    tune: str = "full"
    ema: EMA | None = None
    views: Views | None = None  # several crops of each image, for DINO; `augment` is for the first
    collapse: Literal["stop", "warn"] = "stop"  # reaction to the alarm of pretraining
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    accumulate: int = 1
    validate_every: float = 1.0  # epochs
    validation_images: int | None = None  # held-out images of a validation of pretraining; None for at most 1,000
    patience: int | None = None  # validations without improvement before training stops
    keep: Literal["last", "best"] = "last"  # the weights that become the model
    calibrate: Literal["temperature", "none"] = "temperature"  # scale the logits at the end, if it helps on validation
    skip_nonfinite: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("a recipe has either epochs or steps: set one, and the other to none")
        check_fields(
            self,
            "> 0",
            "batch_size",
            "epochs",
            "steps",
            "accumulate",
            "patience",
            "validate_every",
            "validation_images",
        )
        if self.init is not None and self.init_image is not None:
            raise ValueError("init= has both towers, init_image= the image tower: give one of them")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be from 0 to {2**31 - 1}, got {self.seed}")
        check_tune(self.tune)
        model, pipeline = self.model, self.preprocessing
        if pipeline.size != model.image_size:
            sizes = f"the model takes {model.image_size} and the preprocessing gives {pipeline.size}"
            raise ValueError(f"{sizes}: use size=, which changes both")
        if pipeline.channels != model.channels:
            channels = f"the model takes {model.channels} channels and the preprocessing gives {pipeline.channels}"
            raise ValueError(f"{channels}: set model.channels={pipeline.channels}")
        clip = pipeline.clip
        pipeline.check_frames(model.frames, "use clip=, which changes both")
        if clip is not None and clip.views > 1:
            raise ValueError(f"a run has one view of each video, got {clip.views}: give clips= and crops= to evaluate")

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the number of steps of the run."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, round(self.epochs * steps_per_epoch))


@dataclass(frozen=True)
class Machine:
    """Settings that change the speed of a run and not its result."""

    device: str = "auto"
    workers: int | None = None  # loading processes; None to choose
    parallel: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    shard_size: int | None = None  # processes that share one copy of the model, with hsdp; None for those of a host
    lost_after: float = 60.0  # seconds without a sign of another process
    compile: bool = False
    save_seconds: float = 300.0
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        check_fields(self, ">= 1", "keep_checkpoints", "shard_size", "lost_after")
        check_fields(self, ">= 0", "workers")
        if not self.save_seconds >= 0:
            raise ValueError(f"save_seconds must be >= 0, got {self.save_seconds}")

    def group(self) -> dict[str, Any]:
        """Return the arguments of `join_process_group`."""
        return {name: getattr(self, name) for name in ("device", "parallel", "shard_size", "lost_after")}


@dataclass
class Facts:
    """Properties of the data that a named recipe adapts to, the user's overrides, and the choices made."""

    images: int  # training images
    classes: int
    several: bool  # several labels per image
    side: tuple[int, int]  # median height and width of the images
    channels: int
    several_sizes: bool  # whether images differ in size, as photographs do
    init: ModelConfig | None = None  # of the initial checkpoint
    init_preprocessing: Preprocessing | None = None
    teacher: Teacher | None = None
    overrides: dict[str, Any] = field(default_factory=dict)  # the user's values: batch_size, epochs, model, size…
    chosen: list[str] = field(default_factory=list)  # a line for each choice, with its reason
    used: set[str] = field(default_factory=set)  # the overrides that the recipe asked for
    target_mean: tuple[float, ...] = ()  # of the training images, if targets are numbers
    target_std: tuple[float, ...] = ()
    frames: int | None = None  # median number of frames of a video; None for images
    rate: float | None = None  # median frames per second of the videos; None if unknown
    seconds: float | None = None  # that 95 % of the sounds do not exceed; None for images and videos
    sample_rate: int | None = None  # median samples per second of the sounds, Hz
    tokenizer: Tokenizer | None = None  # of captions
    init_image: ModelConfig | None = None  # of the checkpoint of the image tower

    @property
    def training_size(self) -> str:
        """Return the number of training images, videos or sounds in words."""
        media = "videos" if self.frames is not None else "sounds" if self.seconds is not None else "images"
        return f"{self.images:,} training {media}"

    @property
    def loss(self) -> Literal["softmax", "sigmoid"]:
        """The loss of labels: a sigmoid for each class where images have several labels."""
        return "sigmoid" if self.several else "softmax"

    def steps(self, epochs: float, batch: int) -> int:
        """Return the number of steps in so many epochs."""
        return round(epochs * max(1, self.images // batch))

    def total_steps(self, length: Mapping[str, Any], batch: int) -> int:
        """Return the number of steps of a run with this length, as `choose_length` returns it."""
        return length.get("steps") or self.steps(length["epochs"], batch)

    def choose_length(self, *, steps: int | None = None, epochs: float | None = None, why: str) -> dict[str, Any]:
        """Return `epochs` or `steps` of a recipe: the user's override, or the given value."""
        for name in ("epochs", "steps"):
            if self.overrides.get(name) is not None:
                return {name: self.choose(name, None, "")}
        return {"steps": self.choose("steps", steps, why)} if steps else {"epochs": self.choose("epochs", epochs, why)}

    def choose(self, name: str, value: Any, why: str) -> Any:
        """Return the user's override, or the recipe's value, and record the choice."""
        self.used.add(name)
        if self.overrides.get(name) is not None:
            value, why = self.overrides[name], "as given"
        self.chosen.append(f"{name.replace('_', ' ')} {format_value(value)}: {why}")
        return value


def method_of(recipe: Recipe) -> str | None:
    """Return the pretraining method of a recipe; None for one that learns labels."""
    return recipe.objective.method_for(recipe.model.classes)


def format_value(value: Any) -> str:
    """Return a setting as text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "×".join(map(str, value)) if isinstance(value, tuple) else str(value)


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write a recipe as JSON."""
    path.write_text(json.dumps(to_json(recipe), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_recipe(path: Path) -> Recipe:
    """Read a recipe; raise ValueError with the field that is wrong."""
    try:
        data = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a recipe ({error})") from None
    try:
        return dataclass_from_json(data, Recipe, "recipe")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def with_settings(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """Return a recipe with changes like `optimizer.lr=3e-4`, `augment.0.scale=[0.3,1]`, `ema=none`, `optimizer=Muon`.

    All changes are made before the new values are checked, so that several of them may belong together.
    """
    for setting in settings:
        path, equals, text = (part.strip() for part in setting.partition("="))
        if not equals:
            raise ValueError(f"settings={[setting]}: write it as 'NAME=VALUE', 'optimizer.lr=3e-4' for example")
        try:
            recipe = replace_at(recipe, Recipe, path.split("."), text, path)
        except (TypeError, ValueError) as error:
            raise ValueError(f"settings={[setting]}: {error}") from None
    return check_values(recipe, settings)


def replace_at(value: Any, kind: Any, path: list[str], text: str, whole: str) -> Any:
    """Return `value` with the field at the end of the path replaced, unchecked."""
    if not path:
        return parse_setting(value, kind, text, whole)
    name = path[0]
    if isinstance(value, tuple):
        if not name.isdecimal() or int(name) >= len(value):
            raise ValueError(f"index of {whole} must be from 0 to {len(value) - 1}, got {name!r}")
        index = int(name)
        part = replace_at(value[index], get_args(kind)[0], path[1:], text, whole)
        return (*value[:index], part, *value[index + 1 :])
    if not is_dataclass(value):
        raise ValueError(f"{whole}: {format_value(value)} has no fields; set it to a class first")
    values = {f.name: getattr(value, f.name) for f in fields(value)}
    if name not in values:
        raise ValueError(f"no {name!r} in {type(value).__name__}: {closest(name, list(values))}")
    if isinstance(value, Recipe) and name in ("epochs", "steps") and text.lower() != "none":
        values |= {"epochs": None, "steps": None}  # a run has one of them
    inner = get_type_hints(type(value))[name]
    return assemble(type(value), values | {name: replace_at(values[name], inner, path[1:], text, whole)})


def parse_setting(old: Any, kind: Any, text: str, where: str) -> Any:
    """Return a value typed on the command line: JSON, a bare word, none, or the name of a class with its defaults."""
    if text.lower() in ("none", "null") and text not in get_args(kind):  # "none" is a value of data.balance
        return value_from_json(None, kind, where)
    alternatives: tuple[Any, ...] = (kind, *get_args(kind))
    classes: dict[str, Any] = {option.__name__.lower(): option for option in alternatives if is_dataclass(option)}  # type: ignore[union-attr]
    if classes and not text.startswith("{"):
        if text.lower() not in classes:
            known = [option.__name__ for option in classes.values()]
            raise ValueError(f"unknown class {text!r}: {closest(text, known)}")
        chosen = classes[text.lower()]
        kept = {f.name: getattr(old, f.name) for f in fields(old)} if is_dataclass(old) else {}
        before, after = (get_type_hints(kind) if is_dataclass(kind) else {} for kind in (type(old), chosen))
        same = {name: part for name, part in kept.items() if after.get(name) == before[name] and name != "betas"}
        return assemble(chosen, same)
    try:
        data = json.loads(text)
    except ValueError:
        data = text
    return value_from_json(data, kind, where)


def assemble(kind: Any, values: Mapping[str, Any]) -> Any:
    """Return a dataclass of this kind with these values, defaults for its other fields, and none of its checks."""
    made = object.__new__(kind)
    for f in fields(kind):
        if f.name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f'{kind.__name__} needs {f.name}: write {{"type": "{kind.__name__}", "{f.name}": …}}')
        default = f.default if f.default_factory is MISSING else f.default_factory()
        object.__setattr__(made, f.name, values.get(f.name, default))
    return made


def check_values(value: Any, settings: Sequence[str], path: str = "") -> Any:
    """Return a value with each of its dataclasses built anew, which checks them; raise ValueError with the settings at fault."""
    if isinstance(value, tuple):
        return tuple(check_values(part, settings, f"{path}.{index}") for index, part in enumerate(value))
    if not is_dataclass(value):
        return value
    parts = {f.name: check_values(getattr(value, f.name), settings, f"{path}.{f.name}") for f in fields(value)}
    try:
        return type(value)(**parts)  # type: ignore[operator]
    except (TypeError, ValueError) as error:
        at_fault = [setting for setting in settings if f".{setting}".startswith(path)]
        raise ValueError(f"settings={at_fault}: {error}") from None
