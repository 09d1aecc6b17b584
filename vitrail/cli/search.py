"""Embed a folder once, then find the pictures nearest to a picture.

`vitrail search index MODEL FOLDER --out DIR` makes a vector of every picture below FOLDER and keeps them in DIR, with the name
and the checksum of the model. `vitrail search find DIR PICTURE` looks PICTURE up: what comes to the model's head is compared by
cosine with every picture of the index, exactly. A picture that is in the index is not found by itself.

When pictures come, go or change, `--update` computes what is new. Pictures that cannot be read are listed and left out.
With --index faiss a graph is built as well, which compares few of very many pictures; how many of the true neighbours it finds is
measured and said.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from vitrail.cli import computing, reading
from vitrail.cli.progress import cleared, counted

MOST_NAMED = 5  # unreadable pictures in the terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two commands in one: make, and ask."""
    parser.epilog = (
        "examples:\n"
        "  vitrail search index deit_tiny.safetensors photos --out photos.index\n"
        "  vitrail search find photos.index cat.jpg\n"
        "  vitrail search find photos.index cat.jpg dog.jpg --top 24 --out sheet.html\n"
        "  vitrail search index deit_tiny.safetensors photos --out photos.index --update\n"
        "  vitrail search index dino.pth photos --out photos.index --index faiss\n"
        "  vitrail search find photos.index cat.jpg --json | jq -r '.answers[0].neighbours[].path'\n"
    )
    parts = parser.add_subparsers(dest="part", metavar="index|find", required=True)
    index = parts.add_parser(
        "index", help="embed a folder", description="Every picture below FOLDER, as MODEL sees it."
    )
    index.add_argument("model", metavar="MODEL", help="a file, a directory, a run, hf://owner/name, .onnx, .xml, .pt2")
    index.add_argument("folder", type=Path, metavar="FOLDER", help="pictures, in it and in all folders below it")
    index.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="a new directory; with --update, the index"
    )
    index.add_argument("--update", action="store_true", help="compute what is new or changed, drop what is gone")
    index.add_argument(
        "--index", choices=("exact", "faiss"), default="exact", help="faiss: a graph as well, for very many pictures"
    )
    index.add_argument("--json", action="store_true", help="what was done, for machines")
    computing.add_arguments(index)

    find = parts.add_parser(
        "find", help="the nearest pictures to a picture", description="The pictures nearest to PICTURE."
    )
    find.add_argument("index", type=Path, metavar="DIR", help="what vitrail search index wrote")
    find.add_argument("pictures", type=Path, nargs="+", metavar="PICTURE", help="to look for, one or several")
    find.add_argument("--top", type=int, default=10, metavar="K", help="neighbours of each (10)")
    find.add_argument("--out", type=Path, metavar="FILE.html", help="a contact sheet: one page that needs nothing else")
    find.add_argument("--exact", action="store_true", help="compare every picture, also where there is a graph")
    find.add_argument("--json", action="store_true", help="the answers for machines")
    find.add_argument("--model", metavar="MODEL", help="where the model is now, or an export of it")
    computing.add_runtime(find)
    reading.add_arguments(find.add_argument_group("of MODEL's file"))


def run(options: argparse.Namespace) -> int:
    """Makes an index, or asks one."""
    try:
        return made(options) if options.part == "index" else asked(options)
    finally:
        cleared()


def made(options: argparse.Namespace) -> int:
    """Embeds the folder and says what came of it."""
    from vitrail.cli.writing import noted
    from vitrail.deploy.nearest import faiss_module
    from vitrail.deploy.searching import make_index

    if options.index == "faiss":
        faiss_module()  # refused before anything is computed
    found = make_index(
        options.model,
        options.folder,
        options.out,
        how=computing.chosen(options),
        update=options.update,
        graph=options.index == "faiss",
        progress=counted(),
        tell=noted,
    )
    cleared()
    if options.json:
        print(json.dumps(found.as_dict(), indent=2, ensure_ascii=False))
        return 0
    index = found.index
    for note in found.notes:
        print(note)
    named = list(index.unreadable.items())
    for path, reason in named[:MOST_NAMED]:
        print(f"left out: {path}: {reason}", file=sys.stderr)
    if len(named) > MOST_NAMED:
        print(f"and {len(named) - MOST_NAMED:,} more, all in {options.out / 'index.json'}", file=sys.stderr)
    if options.update:
        print(f"{found.added:,} new, {found.changed:,} changed, {found.removed:,} gone, {found.kept:,} as before")
    print(f"{len(index.pictures):,} pictures by {index.model.name}, {index.vectors.shape[1]} values each")
    if index.recall is not None:
        print(f"faiss: {index.recall.in_words()}")
    print(options.out)
    return 0


def asked(options: argparse.Namespace) -> int:
    """Looks pictures up, as a table, as JSON, as a sheet."""
    from vitrail.deploy.search_index import read_index
    from vitrail.deploy.searching import find, opened_for

    if options.top < 1:
        raise ValueError(f"--top {options.top}: at least 1 neighbour")
    if options.out is not None and options.out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--out {options.out}: a contact sheet is a page, so its name ends in .html")
    index = read_index(options.index)
    deployed = opened_for(
        index,
        options.model,
        runtime=options.runtime,
        device=options.device,
        assume={name: str(value) for name, value in reading.assumed(options).items()},
        take=options.take,
        pictures=len(options.pictures),
    )
    answers = find(index, deployed, options.pictures, options.top, options.exact)
    exact = options.exact or index.recall is None
    how = "exactly" if exact else "through faiss's graph"
    if options.out is not None:
        from vitrail.deploy.sheet import write_sheet

        write_sheet(index, answers, how, options.out)
    if options.json:
        print(json.dumps(as_dict(index, answers, exact, options.out), indent=2, ensure_ascii=False))
        return 0
    for line in told(index, answers, how):
        print(line)
    if options.out is not None:
        print(options.out)
    return 0


def as_dict(index: Any, answers: list[Any], exact: bool, out: Path | None) -> dict[str, Any]:
    """The answers in JSON's own kinds of value."""
    from vitrail.data.sources.files import printable

    return {
        "index": str(index.directory),
        "model": index.model.name,
        "pictures": len(index.pictures),
        "exact": exact,
        "answers": [
            {
                "query": printable(str(answer.query)),
                "neighbours": [
                    {"rank": rank, "cosine": round(each.cosine, 6), "path": printable(str(each.path))}
                    for rank, each in enumerate(answer.neighbours, 1)
                ],
            }
            for answer in answers
        ],
        **({} if out is None else {"sheet": str(out)}),
    }


def told(index: Any, answers: list[Any], how: str) -> list[str]:
    """The answers as tables."""
    from vitrail.data.sources.files import printable

    lines = []
    for answer in answers:
        query = printable(str(answer.query))
        lines.append(f"nearest to {query} of {len(index.pictures):,} pictures in {index.folder}, {how}")
        lines.append("  rank  cosine  picture")
        lines += [f"  {rank:>4}  {each.cosine:6.3f}  {each.shown}" for rank, each in enumerate(answer.neighbours, 1)]
    return lines
