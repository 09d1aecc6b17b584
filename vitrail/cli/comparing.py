"""`vitrail inspect --compare A B PICTURES…`: two models over the same pictures, layer by layer."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from vitrail.cli.progress import cleared, counted

if TYPE_CHECKING:
    from vitrail.views.compared import Comparison

# Options that are for one model and its pictures, with what each is called on the command line.
OF_ONE = {"view": "--view", "terminal": "--terminal", "at": "--at", "layers": "--layers", "target": "--target"}


def run_comparison(options: argparse.Namespace) -> int:
    """Measures both, prints the table or with --json every number, and writes figures, arrays and a page to --out."""
    first, (second, *places) = options.model, options.images
    for name, option in OF_ONE.items():
        if getattr(options, name) is not None:
            raise ValueError(f"{option} is for one model: leave it out with --compare")
    if not places:
        raise ValueError(
            f"on which pictures? Write vitrail inspect --compare {first} {second} PICTURES: files, folders of them, or one "
            "folder with a folder for each class, for which there are probes too"
        )
    from vitrail.views.folder import Folder, earlier

    if options.out is None:
        found = compared(options, places)
    else:
        earlier(options.out)  # refused before models are loaded for it
        folder = Folder(options.out)
        try:
            from vitrail.views.comparing import write

            found = compared(options, places)
            write(found, folder)
        except BaseException:
            folder.leave()
            raise
    tell(options, found)
    for problem in found.skipped:
        print(f"vitrail inspect: skipped {problem}", file=sys.stderr)
    return 1 if found.skipped else 0


def compared(options: argparse.Namespace, places: list[str]) -> "Comparison":
    """Opens the pictures, then the models, and measures."""
    from vitrail.cli.inspect import opened
    from vitrail.views.comparing import Compared, compare
    from vitrail.views.gathered import gathered

    try:
        pictures = gathered(places, options.limit, counted())
        cleared()
        models = []
        for where in (options.model, options.images[0]):
            try:
                models.append(Compared(*opened(options, where)))
            except ValueError as error:  # of the two, which one
                raise error if where in str(error) else ValueError(f"{where}: {error}") from error
        return compare(models, pictures, counted(), counted("layers"))
    finally:
        cleared()


def tell(options: argparse.Namespace, found: "Comparison") -> None:
    """What was found, for machines or for people."""
    from vitrail.views.compared import as_dict
    from vitrail.views.comparison_table import table

    if options.json:
        written = (
            {} if options.out is None else {"directory": str(options.out), "page": str(options.out / "index.html")}
        )
        print(json.dumps(as_dict(found) | written, indent=2))
        return
    print("\n".join(table(found)))
    if options.out is not None:
        print(options.out / "index.html")
