"""What a model looks at, and what it has learnt: figures, arrays and a page to explore.

MODEL is any checkpoint of a Vision Transformer or a hybrid that vitrail reads (`vitrail describe FILE` says whether). Each
IMAGE, or each picture in a folder, is looked at as the model's own preprocessing prepares it.

DIR/index.html is one page that needs no network: hover a patch, or move it with the arrow keys, and every head's attention
from it is drawn. Beside it are distance.png, positions.png, filters.png and model.npz; for each picture a folder has a figure
for each view and arrays.npz. Pictures that cannot be read are named and left out; the exit code is then 1, and 2 if none was
left.

With --compare the first two are models, and what follows are pictures: both go over the same ones, and their layers are held
against each other as Park et al. 2023 do ("What Do Self-Supervised Vision Transformers Learn?"): how far attention reaches,
how unlike heads and queries are, which frequencies the tokens keep and, for one folder of class folders or another data set with
labels, what a linear probe reads from each layer. A table is printed; DIR gets a page, figures and all numbers.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli import reading
from vitrail.cli.describe import size
from vitrail.cli.progress import cleared, counted, progress

if TYPE_CHECKING:
    from vitrail.data.preprocessing import Preprocessing
    from vitrail.models.vit import ViT
    from vitrail.views.inspecting import Looker

# The same names as in vitrail.views, kept here too so that --help need not import PyTorch; a test compares them.
VIEWS = ("attention", "rollout", "distance", "positions", "filters", "tokens", "heads", "patches")
IN_TERMINAL = ("attention", "rollout", "relevance", *VIEWS[2:])
LIMIT, FILTERS = 12, 28


def pixel(text: str) -> tuple[int, int]:
    """ "120,80": to the right, and down."""
    x, comma, y = text.partition(",")
    if not comma or not x.strip().isdecimal() or not y.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a pixel: write x,y, like 120,80")
    return int(x), int(y)


def numbers(text: str) -> list[int]:
    """ "1,6,10-12": layers from 1."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise argparse.ArgumentTypeError(f"{text!r} is no list of layers: write 1,6,12 or 1-4,12")
        found += range(int(first), int(last if dash else first) + 1)
    return sorted(set(found))


def positive(text: str) -> int:
    """A number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to look at, how, and where it goes."""
    parser.epilog = (
        "examples:\n"
        "  vitrail inspect deit_tiny.safetensors cat.jpg --out cat\n"
        "  vitrail inspect runs/photos/model.safetensors photos/validation --limit 20 --out looked\n"
        "  vitrail inspect deit_tiny.safetensors cat.jpg --at 120,80 --target 281 --out cat\n"
        "  vitrail inspect deit_tiny.safetensors cat.jpg --size 384 --view attention --layers 1,6,12 --out large\n"
        "  vitrail inspect hf://facebook/dinov2-base cat.jpg --terminal tokens\n"
        "  vitrail inspect --compare runs/mae runs/dino photos --out mae-and-dino\n"
        "  vitrail inspect --compare mae.safetensors dino.safetensors cat.jpg dog.jpg --json\n"
    )
    parser.add_argument("model", metavar="MODEL", help="a file, a directory, hf://owner/name")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="pictures, or folders of them")
    parser.add_argument(
        "--compare", action="store_true", help="two models, layer by layer: --compare MODEL MODEL IMAGE…"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="a new or empty directory, or one of an earlier inspection"
    )
    parser.add_argument(
        "--view",
        action="append",
        choices=VIEWS,
        metavar="NAME",
        help=f"again and again: {', '.join(VIEWS)} (default all); rollout has relevance beside it",
    )
    parser.add_argument(
        "--terminal",
        nargs="?",
        const="rollout",
        choices=IN_TERMINAL,
        metavar="NAME",
        help="draw a view here (default rollout); the same names, and relevance. --out is then not needed",
    )
    parser.add_argument(
        "--at",
        type=pixel,
        metavar="X,Y",
        help="a pixel of the picture as the model sees it: attention and likeness of its patch",
    )
    parser.add_argument("--layers", type=numbers, metavar="N,…", help="draw these in figures (1,6,10-12), not all")
    parser.add_argument("--target", metavar="CLASS", help="explain this class, by name or index, not the predicted one")
    parser.add_argument(
        "--size", type=size, metavar="N|HxW", help="look at another resolution: positions are resampled"
    )
    parser.add_argument(
        "--limit",
        type=positive,
        metavar="N",
        help=f"pictures that are drawn, spread evenly over those given (default {LIMIT}); distances take 128, or N if more. "
        "With --compare: measured are N (default 128), probes take N of each split (default 1,024)",
    )
    parser.add_argument(
        "--filters",
        type=positive,
        default=FILTERS,
        metavar="N",
        help=f"principal filters that are drawn (default {FILTERS}, as in the paper)",
    )
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda|mps", help="auto unless given")
    parser.add_argument("--json", action="store_true", help="what was written and predicted, for machines")
    reading.add_arguments(parser.add_argument_group("how the checkpoint is read"))


def run(options: argparse.Namespace) -> int:
    """Looks, draws and writes; says where. With --compare, measures two models instead."""
    if options.compare:
        from vitrail.cli.comparing import run_comparison

        return run_comparison(options)
    options.limit = options.limit or LIMIT
    if options.out is None and options.terminal is None:
        raise ValueError("where to? Give --out DIR, or --terminal to draw here")
    if options.json and options.terminal is not None:
        raise ValueError("--json and --terminal would both write to standard output: leave one of them out")
    if options.json and options.out is None:
        raise ValueError("--json tells what was written: give --out DIR too")
    from vitrail.views.folder import earlier
    from vitrail.views.pictures import listed

    files = listed(options.images)
    if options.out is not None:
        earlier(options.out)  # refused before a model is loaded for it
    looker = made(options)
    skipped: list[str] = []
    if options.terminal is not None:
        skipped = in_terminal(looker, files, options)
    if options.out is not None:
        skipped += written(looker, files, options)
    for problem in dict.fromkeys(skipped):  # each once, also where both were asked for
        print(f"vitrail inspect: skipped {problem}", file=sys.stderr)
    return 1 if skipped else 0


def made(options: argparse.Namespace) -> "Looker":
    """The model, on its device and at its size, with what is asked of it."""
    from vitrail.views.inspecting import Looker
    from vitrail.views.naming import target_of

    vit, preprocessing, name = opened(options, options.model)
    return Looker(
        vit,
        preprocessing,
        name,
        tuple(options.view or VIEWS),
        options.layers,
        options.at,
        None if options.target is None else target_of(vit, options.target),
        options.filters,
    )


def opened(options: argparse.Namespace, where: str) -> "tuple[ViT, Preprocessing, str]":
    """A model on its device and at the size that is asked for, its pipeline, and what to call it."""
    from vitrail.analysis.inside import vit_in
    from vitrail.checkpoints.loading import load
    from vitrail.engine.distributed import pick_device
    from vitrail.evaluation.opening import pipeline_of, weights_of

    device = pick_device(options.device)
    try:
        model = load(
            where if where.startswith("hf://") else weights_of(where),
            assume=reading.assumed(options),
            take=options.take,
            image_size=options.size,
            progress=progress("reading"),
            device=device,
        )
    finally:
        cleared()
    vit = vit_in(model)
    name = where if where.startswith("hf://") else Path(where).name
    if name == "model.safetensors":
        name = Path(where).resolve().parent.name
    return vit, pipeline_of(where, vit), name.removesuffix(".safetensors")


def written(looker: "Looker", files: list[Path], options: argparse.Namespace) -> list[str]:
    """Writes the directory; gives what was skipped."""
    from vitrail.views.inspecting import inspect

    try:
        result = inspect(looker, files, options.out, options.limit, counted(), counted("layers"))
    finally:
        cleared()
    if options.json:
        told = {"page": str(options.out / "index.html"), "directory": str(options.out), "pictures": result.pictures}
        print(json.dumps(told | {"skipped": result.skipped, "files": result.files}, indent=2))
        return result.skipped
    for each in result.pictures:
        sure = "".join(f"  {p['name']} {100 * p['probability']:.0f} %" for p in each["predicted"][:1])
        patch = (
            f"  patch in row {each['patch']['row'] + 1}, column {each['patch']['column'] + 1}"
            if "patch" in each
            else ""
        )
        print(f"{options.out / each['folder']}{sure}{patch}")
    if result.pictures and len(files) > options.limit:
        print(f"{options.limit} of {len(files):,} pictures are drawn: --limit {len(files)} draws all")
    print(options.out / "index.html")
    return result.skipped


def in_terminal(looker: "Looker", files: list[Path], options: argparse.Namespace) -> list[str]:
    """Draws one view here, of each picture or of the model; gives what was skipped."""
    from vitrail.report.markup import plain
    from vitrail.views import in_terminal as lines
    from vitrail.views.drawn import OF_MODELS, OF_PICTURES
    from vitrail.views.inspecting import measured
    from vitrail.views.pictures import Unusable, evenly, none_read
    from vitrail.views.terminal import columns, depth_of

    view, wide, depth = options.terminal, columns(), depth_of(sys.stdout)
    skipped: list[str] = []
    if view in OF_MODELS:
        far = partial(looker.distances, measured(files, options.limit), skipped.append, counted())
        try:
            found = {"distance": far, "positions": looker.positions, "filters": looker.filters}[view]()
        finally:
            cleared()
        print("\n".join(lines.of_model(found, wide, depth)))
        return skipped
    chosen = evenly(files, options.limit)
    needs = OF_PICTURES.get(view, ("relevance",))
    for path in chosen:
        try:
            shown = looker.shown(path, asked=needs)
        except Unusable as problem:
            skipped.append(str(problem))
            continue
        if view == "relevance" and shown.seen.relevance is None:
            raise ValueError("this model ends in features and has no classes to explain: use --terminal rollout")
        print("\n".join(lines.of_picture(shown, view, wide, depth, looker.layers)))
        print(plain(f"{shown.name}{f': {shown.verdict}' if shown.verdict else ''}"))
    if len(skipped) == len(chosen):
        raise none_read(skipped)
    return skipped
