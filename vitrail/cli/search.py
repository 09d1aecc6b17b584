"""Index a folder of images once, then find the nearest neighbours of an image or a text.

`vitrail search index MODEL FOLDER --out DIR` computes the feature vector of every image below FOLDER and stores them in DIR,
with the name and the checksum of the model. `vitrail search find DIR IMAGE` compares the features of IMAGE, the input of the
model's head, with every vector by cosine similarity, exactly. An image of the index does not find itself.

--update computes the vectors of new and changed images and drops those of deleted ones. Unreadable images are listed and left
out. --index faiss also builds a graph for approximate search in very large folders; its recall is measured and reported.
--text finds the images that a text describes, if the index was made with a model that has a text tower, such as CLIP.
With a model of clips, the videos and folders of frames below FOLDER are indexed, and queries are videos.

examples:
  vitrail search index deit_tiny.safetensors photos --out photos.index
  vitrail search find photos.index cat.jpg
  vitrail search find photos.index cat.jpg dog.jpg --top 24 --out sheet.html
  vitrail search index deit_tiny.safetensors photos --out photos.index --update
  vitrail search index dino.pth photos --out photos.index --index faiss
  vitrail search index clip.safetensors photos --out clip.index
  vitrail search find clip.index --text "red shoes" --text "a dog on a beach"
  vitrail search find photos.index cat.jpg --json | jq -r '.answers[0].neighbours[].path'
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.cli.options import CommandParser, check_at_least, inference_options, parse_assumptions, print_result
from vitrail.cli.predict import print_note
from vitrail.cli.text.progress import clear_progress, count_progress
from vitrail.utils.text import format_table

if TYPE_CHECKING:
    from vitrail.deploy.search.index import SearchIndex
    from vitrail.deploy.search.search import SearchResult

MAX_NAMED_FILES = 5  # unreadable images listed in the terminal


def add_arguments(parser: CommandParser) -> None:
    """Add the subcommands index and find."""
    parts = parser.add_subparsers(dest="part", metavar="index|find", required=True)
    about = "Compute the feature vector of every image below FOLDER."
    index = parts.add_parser("index", help="embed a folder", description=about)
    index.add_shared("model MODEL")
    index.add_argument("folder", type=Path, metavar="FOLDER", help="folder of images (recursive)")
    index.add_option("--out DIR", "new directory; with --update an existing index", Path, required=True)
    index.add_option("--update", "add new, recompute changed and drop deleted images")
    graph = "faiss also builds a graph for large folders [exact]"
    index.add_option("--index", graph, choices=("exact", "faiss"), default="exact")
    index.add_shared("--json")
    index.add_compute_options(precision="fp32")

    about = "Find the images that are nearest to IMAGE, or to a text."
    find = parts.add_parser("find", help="find the nearest images", description=about)
    find.add_argument("index", type=Path, metavar="DIR", help="directory of vitrail search index")
    find.add_argument("images", type=Path, nargs="*", metavar="IMAGE", help="query image")
    words = "query text, for the index of a model with a text tower (repeatable)"
    find.add_option("--text TEXT", words, action="append", default=[])
    files = "directory, tokenizer.json, or bpe_simple_vocab_16e6.txt.gz [that of the model]"
    find.add_option("--tokenizer PATH", f"tokeniser: {files}")
    find.add_option("--top K", "neighbours per query [10]", int, default=10)
    find.add_option("--out FILE.html", "contact sheet: one self-contained page", Path)
    find.add_option("--exact", "compare with every image, even if there is a graph")
    find.add_shared("--json")
    find.add_option("--model MODEL", "new location of the model, or an export of it")
    find.add_shared("--runtime", "--device auto|cpu|cuda|mps")
    find.add_checkpoint_options()


def run(options: argparse.Namespace) -> int:
    """Build or query an index."""
    return build_index_from_options(options) if options.part == "index" else search_from_options(options)


def build_index_from_options(options: argparse.Namespace) -> int:
    """Build or update the index and print a summary."""
    from vitrail.deploy.search.neighbours import import_faiss
    from vitrail.deploy.search.search import build_index

    if options.index == "faiss":
        import_faiss()  # raises before any computation if it is not installed
    result = build_index(
        options.model,
        options.folder,
        options.out,
        options=inference_options(options),
        update=options.update,
        graph=options.index == "faiss",
        progress=count_progress(),
        report=print_note,
    )
    index, lines = result.index, list(result.notes)
    if not options.json:
        clear_progress()
        unreadable = list(index.unreadable.items())
        for path, reason in unreadable[:MAX_NAMED_FILES]:
            print(f"left out: {path}: {reason}", file=sys.stderr)
        if more := len(unreadable[MAX_NAMED_FILES:]):
            print(f"and {more:,} more, listed in {options.out / 'index.json'}", file=sys.stderr)
    if options.update:
        counts = f"{result.added:,} new, {result.changed:,} changed, {result.removed:,} deleted"
        lines.append(f"{counts}, {result.kept:,} unchanged")
    lines.append(f"{len(index.images):,} {index.media}s by {index.model.name}, {index.vectors.shape[1]} values each")
    if index.recall is not None:
        lines.append(f"faiss: {index.recall.describe()}")
    return print_result(options, result.as_dict(), [*lines, options.out])


def search_from_options(options: argparse.Namespace) -> int:
    """Find the neighbours of the queries and print them as tables or JSON."""
    from vitrail.deploy.search.index import read_index

    if not options.images and not options.text:
        raise ValueError("no query: give an image, or --text WORDS")
    if options.tokenizer is not None and not options.text:
        raise ValueError("--tokenizer needs --text: leave it out")
    check_at_least(1, options.top, "--top")
    if options.out is not None and options.out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--out {options.out}: the name of a contact sheet must end in .html")
    index = read_index(options.index)
    results = [*find_by_text(index, options), *find_by_image(index, options)]
    exact = options.exact or index.recall is None
    method = "exactly" if exact else "with a faiss graph"
    record, lines = results_as_dict(index, results, exact), format_results(index, results, method)
    if options.out is not None:
        from vitrail.deploy.search.contact_sheet import write_sheet

        write_sheet(index, results, method, options.out)
        record, lines = record | {"sheet": str(options.out)}, [*lines, str(options.out)]
    return print_result(options, record, lines)


def find_by_image(index: "SearchIndex", options: argparse.Namespace) -> "list[SearchResult]":
    """Return the neighbours of the query images."""
    from vitrail.deploy.search.search import find_neighbours, open_query_model

    if not options.images:
        return []
    deployed = open_query_model(
        index,
        options.model,
        runtime=options.runtime,
        device=options.device,
        assume=parse_assumptions(options),
        take=options.take,
        n_images=len(options.images),
    )
    return find_neighbours(index, deployed, options.images, options.top, options.exact)


def find_by_text(index: "SearchIndex", options: argparse.Namespace) -> "list[SearchResult]":
    """Return the images nearest to the query texts."""
    from vitrail.deploy.search.texts import find_texts, open_text_model

    if not options.text:
        return []
    reading = {"tokenizer": options.tokenizer, "assume": parse_assumptions(options), "take": options.take}
    towers = open_text_model(index, options.model, **reading)
    return find_texts(index, towers, options.text, options.top, options.exact, print_note)


def results_as_dict(index: "SearchIndex", results: "list[SearchResult]", exact: bool) -> dict[str, Any]:
    """Return the results as values for JSON."""
    from vitrail.data.sources.files import printable_path

    return {
        "index": str(index.directory),
        "model": index.model.name,
        "images": len(index.images),
        "exact": exact,
        "answers": [
            {
                "query": printable_path(str(result.query)),
                "neighbours": [
                    {"rank": rank, "cosine": round(neighbour.cosine, 6), "path": printable_path(str(neighbour.path))}
                    for rank, neighbour in enumerate(result.neighbours, 1)
                ],
            }
            for result in results
        ],
    }


def format_results(index: "SearchIndex", results: "list[SearchResult]", method: str) -> list[str]:
    """Return the results as one table per query."""
    from vitrail.data.sources.files import printable_path

    lines = []
    for result in results:
        query = printable_path(str(result.query))
        lines.append(f"nearest to {query} of {len(index.images):,} {index.media}s in {index.folder}, {method}")
        rows = [(str(rank), f"{n.cosine:.3f}", n.relative_path) for rank, n in enumerate(result.neighbours, 1)]
        lines += [f"  {line}" for line in format_table([("rank", "cosine", index.media), *rows], right=(0, 1))]
    return lines
