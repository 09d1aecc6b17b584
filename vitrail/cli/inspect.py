"""Write attention maps, rollout, attention distances and other figures of a model, with a page to explore them.

MODEL is any checkpoint of a Vision Transformer, a hybrid, a Swin Transformer or an MViT that vitrail reads (check with `vitrail
describe FILE`). Each IMAGE, or each image in a folder, goes through the preprocessing of the model. Models with windows or
pooled tokens have no rollout and no relevance: attention is drawn inside its windows, or on the grid of the pooled keys.

DIR/index.html is one page that needs no network: it draws the attention of every head from the patch under the pointer, or the
one selected with the arrow keys. Beside it are distance.png, positions.png, filters.png and model.npz; each image has a folder
with a figure for each view and arrays.npz. Unreadable images are listed and skipped; the exit code is then 1, and 2 if none
is left.

For a model of clips, give video files or folders of frames. The figure is a strip of frames with the attention of the class
token, or the mean of all patches, at each time step. Other views are for models of images.

For a model of sounds, give sound files. Maps are drawn over the spectrogram that the model takes, with axes in Hz and seconds,
and --at is a time and a frequency: --at 0.25,1200.

With --compare the first two arguments are models, the rest are images. Both models see the same images, and their layers are
compared as in Park et al. 2023 ("What Do Self-Supervised Vision Transformers Learn?"): attention distance, diversity of heads
and queries, frequencies of the tokens and, for a folder of class folders or another labelled dataset, a linear probe of each
layer. A table is printed; DIR gets a page, figures and all numbers.

examples:
  vitrail inspect deit_tiny.safetensors cat.jpg --out cat
  vitrail inspect runs/photos/model.safetensors photos/validation --limit 20 --out figures
  vitrail inspect deit_tiny.safetensors cat.jpg --at 120,80 --target 281 --out cat
  vitrail inspect deit_tiny.safetensors cat.jpg --size 384 --view attention --layers 1,6,12 --out large
  vitrail inspect hf://facebook/dinov2-base cat.jpg --terminal tokens
  vitrail inspect runs/actions walk.mp4 --out walk
  vitrail inspect runs/digits seven.wav --at 0.25,1200 --out seven
  vitrail inspect --compare runs/mae runs/dino photos --out mae-and-dino
  vitrail inspect --compare mae.safetensors dino.safetensors cat.jpg dog.jpg --json
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.options import CommandParser, parse_assumptions, parse_positive, print_result, refuse_options
from vitrail.cli.text.progress import byte_progress, clear_progress, count_progress

if TYPE_CHECKING:
    from vitrail.analysis.comparison import ModelComparison
    from vitrail.analysis.inspect import ModelInspector
    from vitrail.data.preprocessing import Preprocessing
    from vitrail.models.base import Model

# The names of vitrail.analysis.figures, repeated so that --help does not import PyTorch; a test compares them.
VIEWS = ("attention", "rollout", "distance", "positions", "filters", "tokens", "heads", "patches")
TERMINAL_VIEWS = ("attention", "rollout", "relevance", *VIEWS[2:])
SINGLE_MODEL_OPTIONS = ("view", "terminal", "at", "layers", "target")
DEFAULT_IMAGES, DEFAULT_FILTERS = 12, 28


def parse_place(text: str) -> tuple[float, float]:
    """Return "120,80" or "0.25,1200" as two numbers >= 0."""
    try:
        x, y = map(float, text.split(","))
    except ValueError:
        x = y = -1.0
    if not (0 <= x < 1e9 and 0 <= y < 1e9):
        raise argparse.ArgumentTypeError(f"{text!r} is not a pixel: write x,y, like 120,80 (of a sound seconds,Hz)")
    return x, y


def parse_layers(text: str) -> list[int]:
    """Return "1,6,10-12" as sorted layer numbers, counted from 1."""
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers: write 1,6,12 or 1-4,12")
        layers += range(int(first), int(last if dash else first) + 1)
    return sorted(set(layers))


def add_arguments(parser: CommandParser) -> None:
    """Add the options of `vitrail inspect`."""
    parser.add_checkpoint()
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="images or sounds, or folders of them")
    parser.add_option("--compare", "compare two models: --compare MODEL MODEL IMAGE…")
    parser.add_option("--out DIR", "output directory: new, empty, or of an earlier inspection", Path)
    views = f"view to draw (repeatable): {', '.join(VIEWS)} [all]; rollout includes relevance"
    parser.add_option("--view NAME", views, action="append", choices=VIEWS)
    terminal = (
        "view to draw in the terminal: one of --view, or relevance [rollout; attention for windows]; --out is optional"
    )
    parser.add_option("--terminal NAME", terminal, nargs="?", const="default", choices=(*TERMINAL_VIEWS, "default"))
    at = "pixel of the preprocessed image, or seconds,Hz of a sound: attention and similarity of its patch"
    parser.add_option("--at X,Y", at, parse_place)
    parser.add_option("--layers N,…", "layers to draw, for example 1,6,10-12 [all]", parse_layers)
    parser.add_option("--target CLASS", "class to explain, by name or index [the predicted class]")
    parser.add_shared("--size N|HxW")
    limit = f"images to draw, evenly spaced [{DEFAULT_IMAGES}]; distances use 128, or N if larger"
    compared = "With --compare: images to measure [128], and images per split for the probes [1,024]"
    parser.add_option("--limit N", f"{limit}. {compared}", parse_positive)
    filters = f"principal filters to draw [{DEFAULT_FILTERS}, as in the paper]"
    parser.add_option("--filters N", filters, parse_positive, default=DEFAULT_FILTERS)
    parser.add_shared("--names FILE", "--device auto|cpu|cuda|mps", "--json")
    parser.add_checkpoint_options()


def run(options: argparse.Namespace) -> int:
    """Inspect one model, or compare two with --compare."""
    if options.compare:
        return run_comparison(options)
    options.limit = options.limit or DEFAULT_IMAGES
    if options.out is None and options.terminal is None:
        raise ValueError("no output: give --out DIR, or --terminal")
    if options.json and options.terminal is not None:
        raise ValueError("--json and --terminal both write to standard output: leave one of them out")
    if options.json and options.out is None:
        raise ValueError("--json lists the written files: give --out DIR too")
    from vitrail.analysis.inputs import list_images
    from vitrail.analysis.output import list_previous_files
    from vitrail.deploy.runtimes.open import read_media

    media = read_media(options.model, parse_assumptions(options), options.take)
    if media == "video":
        return run_clips(options)
    files = list_images(options.images, media)
    if options.out is not None:
        list_previous_files(options.out)  # raises before a model is loaded
    inspector = build_inspector(options)
    skipped: list[str] = []
    if options.terminal is not None:
        skipped = draw_in_terminal(inspector, files, options)
    if options.out is not None:
        skipped += write_inspection(inspector, files, options)
    return print_skipped(list(dict.fromkeys(skipped)))


def run_clips(options: argparse.Namespace) -> int:
    """Inspect a model of clips: attention over time."""
    from vitrail.analysis.inspect_clips import ClipInspector, describe_prediction, inspect_videos
    from vitrail.analysis.output import list_previous_files
    from vitrail.deploy.predict.inputs import collect_inputs
    from vitrail.deploy.runtimes.open import is_multilabel
    from vitrail.models.base import Unsupported

    given = [flag for flag in ("terminal", "at", "target") if getattr(options, flag) is not None]
    given += ["view"] if set(options.view or ()) - {"attention"} else []
    if given:
        flag = f"--view {options.view[0]}" if given[0] == "view" else f"--{given[0]}"
        raise Unsupported(f"{flag} does not support models of clips: use --view attention with --out DIR")
    list_previous_files(options.out)  # raises before a model is loaded
    inputs = collect_inputs(options.images, count_progress("listing"), lambda: "video")
    if inputs.media != "video":
        raise ValueError(f"{options.model} takes videos, and {inputs.name(0)} is an image: give videos")
    model, preprocessing, name = load_inspected_model(options, options.model)
    inspector = ClipInspector(model, preprocessing, name, options.layers, is_multilabel(model, None))
    result = inspect_videos(inspector, inputs, options.out, options.limit, count_progress())
    clear_progress()
    lines = [f"{options.out / each['folder']}  {describe_prediction(each['predicted'])}" for each in result.videos]
    if len(inputs) > options.limit:
        lines.append(f"{options.limit} of {len(inputs):,} videos are drawn: --limit {len(inputs)} draws all")
    page = str(options.out / "index.html")
    record = {"page": page, "directory": str(options.out), "videos": result.videos, "skipped": result.skipped}
    print_result(options, record | {"files": result.files}, [*lines, page])
    return print_skipped(result.skipped)


def print_skipped(skipped: list[str]) -> int:
    """Print the skipped images and return the exit code."""
    for problem in skipped:
        print(f"vitrail inspect: skipped {problem}", file=sys.stderr)
    return 1 if skipped else 0


def run_comparison(options: argparse.Namespace) -> int:
    """Compare two models, print the table or JSON, and write page, figures and arrays to --out."""
    first, (second, *paths) = options.model, options.images
    refuse_options(options, SINGLE_MODEL_OPTIONS, "applies to one model: leave it out with --compare")
    if not paths:
        command = f"vitrail inspect --compare {first} {second} IMAGES"
        raise ValueError(f"no images: write {command} (files, folders or a dataset)")
    from vitrail.analysis.compare_models import write_comparison
    from vitrail.analysis.comparison import comparison_to_dict
    from vitrail.analysis.output import OutputFolder
    from vitrail.analysis.page.comparison import format_model_comparison

    folder = OutputFolder(options.out) if options.out else None  # raises before models are loaded
    try:
        comparison = compare_from_options(options, paths)
        if folder:
            write_comparison(comparison, folder)
    except BaseException:
        if folder:
            folder.discard_if_empty()
        raise
    record, lines = comparison_to_dict(comparison), format_model_comparison(comparison)
    if folder:
        page = str(options.out / "index.html")
        record, lines = record | {"directory": str(options.out), "page": page}, [*lines, page]
    print_result(options, record, lines)
    return print_skipped(comparison.skipped)


def compare_from_options(options: argparse.Namespace, paths: list[str]) -> "ModelComparison":
    """Load the images, then the models, and compare them."""
    from vitrail.analysis.compare_models import compare_models, gather_images
    from vitrail.analysis.inputs import InspectedModel
    from vitrail.deploy.runtimes.open import read_media
    from vitrail.models.base import Unsupported

    for path in (options.model, options.images[0]):
        if read_media(path, parse_assumptions(options), options.take) == "sound":
            raise Unsupported(f"--compare does not support models of sounds, and {path} is one")
    images = gather_images(paths, options.limit, count_progress())
    clear_progress()
    models = []
    for path in (options.model, options.images[0]):
        try:
            model, preprocessing, name = load_inspected_model(options, path)
            models.append(InspectedModel(model.require_tokens("--compare"), preprocessing, name))
        except ValueError as error:  # name the model that failed
            raise error if path in str(error) else ValueError(f"{path}: {error}") from error
    return compare_models(models, images, count_progress(), count_progress("layers"))


def build_inspector(options: argparse.Namespace) -> "ModelInspector":
    """Return the inspector of the model that the options describe."""
    from vitrail.analysis.inputs import resolve_target
    from vitrail.analysis.inspect_stages import choose_inspector

    model, preprocessing, name = load_inspected_model(options, options.model)
    inspector, views = choose_inspector(model, options.view, [options.terminal] if options.terminal else [])
    return inspector(
        model,
        preprocessing,
        name,
        views,
        options.layers,
        options.at,
        None if options.target is None else resolve_target(model, options.target),
        options.filters,
    )


def load_inspected_model(options: argparse.Namespace, path: str) -> "tuple[Model, Preprocessing, str]":
    """Load a model on its device and at --size; return it with its preprocessing and its name."""
    from vitrail.analysis.record import require_attention
    from vitrail.checkpoints.known_models import expand_name
    from vitrail.checkpoints.load import find_weights, load, require_preprocessing
    from vitrail.data.class_names import name_outputs
    from vitrail.tasks.numbers import is_regression
    from vitrail.training.distributed import pick_device

    device = pick_device(options.device)
    model = load(
        path if expand_name(path).startswith("hf://") else find_weights(path),
        assume=parse_assumptions(options),
        take=options.take,
        image_size=options.size,
        progress=byte_progress("reading"),
        device=device,
    )
    clear_progress()
    if model.config.output_kind == "masks":
        model = model.replace_head(None)  # views are of the backbone
    require_attention(model)
    if options.names is not None and is_regression(model):
        raise ValueError(f"{path} predicts numbers, which have names: leave out --names")
    if options.names is not None:
        model.labels = name_outputs(options.names, model.config.classes)
    name = path if path.startswith("hf://") else Path(path).name
    if name == "model.safetensors":
        name = Path(path).resolve().parent.name
    return model, require_preprocessing(path, model), name.removesuffix(".safetensors")


def write_inspection(inspector: "ModelInspector", files: list[Path], options: argparse.Namespace) -> list[str]:
    """Write the output directory and return the skipped images."""
    from vitrail.analysis.inspect import inspect_images

    result = inspect_images(inspector, files, options.out, options.limit, count_progress(), count_progress("layers"))
    lines = []
    for image in result.images:
        prediction = "".join(f"  {p['name']} {100 * p['probability']:.0f} %" for p in image["predicted"][:1])
        patch = image.get("patch")
        position = f"  patch in row {patch['row'] + 1}, column {patch['column'] + 1}" if patch else ""
        position = f"  patch at {patch['where']}" if patch and "where" in patch else position
        position = f"  pixel {pixel[0]},{pixel[1]}" if (pixel := image.get("pixel")) else position
        lines.append(f"{options.out / image['folder']}{prediction}{position}")
    if result.images and len(files) > options.limit:
        media = inspector.preprocessing.media
        lines.append(f"{options.limit} of {len(files):,} {media}s are drawn: --limit {len(files)} draws all")
    page = str(options.out / "index.html")
    record = {"page": page, "directory": str(options.out), "images": result.images}
    print_result(options, record | {"skipped": result.skipped, "files": sorted(result.folder.written)}, [*lines, page])
    return result.skipped


def draw_in_terminal(inspector: "ModelInspector", files: list[Path], options: argparse.Namespace) -> list[str]:
    """Draw one view of each image or of the model in the terminal and return the skipped images."""
    from vitrail.analysis.figures import terminal
    from vitrail.analysis.inputs import UnusableImageError, make_no_images_error, sample_evenly
    from vitrail.analysis.inspect import MODEL_VIEWS, select_distance_files
    from vitrail.reports.html import clean_text

    view, skipped = options.terminal, list[str]()
    view = inspector.DEFAULT_TERMINAL_VIEW if view == "default" else view
    width, depth = terminal.get_terminal_width(), terminal.detect_colour_depth(sys.stdout)
    if view in MODEL_VIEWS:
        result = inspector.view_model(view, select_distance_files(files, options.limit), skipped, count_progress())
        clear_progress()
        print("\n".join(terminal.render_model_view(result, width, depth)))
        return skipped
    selected = sample_evenly(files, options.limit)
    for path in selected:
        try:
            image_view = inspector.view_image(path, views=[view])
        except UnusableImageError as problem:
            skipped.append(str(problem))
            continue
        if view == "relevance" and image_view.trace.relevance is None:
            raise ValueError("the model has no classes to explain: use --terminal rollout")
        print("\n".join(terminal.render_image_view(image_view, view, width, depth, inspector.layers)))
        print(clean_text(": ".join(filter(None, (image_view.name, image_view.prediction_text)))))
    if len(skipped) == len(selected):
        raise make_no_images_error(skipped, inspector.preprocessing.media)
    return skipped
