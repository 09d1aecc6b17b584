"""Pages of the site that are made from the source: commands from their parser, the API, files that other pages link to."""

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path

# The page that explains a command with its real output.
GUIDES = {
    "check": ("Bring your data", "data.md"),
    "convert": ("Bring your weights", "weights.md"),
    "describe": ("Bring your weights", "weights.md"),
    "doctor": ("When something does not work", "doctor.md"),
    "embed": ("Predict many images", "predict.md"),
    "join": ("Train and predict on many hosts", "many-hosts.md"),
    "label": ("Find, propose and correct labels", "labels.md"),
    "evaluate": ("Evaluate a model", "evaluate.md"),
    "export": ("Export to other runtimes", "export.md"),
    "inspect": ("Gallery of model inspections", "gallery.md"),
    "models": ("Bring your weights", "weights.md"),
    "paper": ("Studies", "studies.md"),
    "predict": ("Predict many images", "predict.md"),
    "pretrain": ("Pretraining without labels", "pretraining.md"),
    "push": ("Bring your weights", "weights.md"),
    "recipes": ("Training", "training.md"),
    "report": ("Report pages", "report.md"),
    "search": ("Search similar images", "search.md"),
    "serve": ("Serve a model over HTTP", "serve.md"),
    "train": ("Training", "training.md"),
    "transfer": ("Probes and transfer", "transfer.md"),
}
WIDTH = "84"  # columns of usage lines


# --- commands ---


def format_prose(text: str) -> str:
    """Return plain help text as Markdown: options and literals as code, nothing else marked up."""
    parts = re.split(r"(`[^`]*`)", text.strip())
    for k in range(0, len(parts), 2):
        plain = re.sub(r"([\\*_<>\[\]#|])", r"\\\1", parts[k])
        parts[k] = re.sub(r"(?<![\w-])(--?[a-z][\w-]*)", r"`\1`", plain)
    return "".join(parts)


def iterate_options(parser: argparse.ArgumentParser, anchor: str, level: int) -> Iterator[str]:
    """Yield the groups of a parser's options as headings and definition lists."""
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
        shown = [action for action in shown if not isinstance(action, argparse._SubParsersAction)]
        if not shown or (shown[0].dest == "help" and len(shown) == 1):
            continue
        yield f"\n{'#' * level} {(group.title or 'options').capitalize()}\n"
        for action in shown:
            names = formatter._format_action_invocation(action)
            name = (action.option_strings or [action.dest])[-1].lstrip("-")
            meaning = format_prose(formatter._expand_help(action)) if action.help else "–"
            yield f"`{names}` {{ #{anchor}-{name} }}\n:   {meaning}\n"


def iterate_parser(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    """Yield the description, usage, options and examples of a command, then those of its subcommands."""
    anchor = parser.prog.replace(" ", "-")
    yield f"{'#' * level} {parser.prog}\n"
    description, _, _ = (parser.description or "").partition("examples:\n")
    yield format_prose(description) + "\n"
    yield f"```text\n{parser.format_usage().removeprefix('usage: ').rstrip()}\n```\n"
    if parser.epilog and parser.epilog.startswith("examples:\n"):
        lines = [line.removeprefix("  ") for line in parser.epilog.removeprefix("examples:\n").rstrip().splitlines()]
        yield f"{'#' * (level + 1)} Examples\n\n```text\n" + "\n".join(lines) + "\n```\n"
    yield from iterate_options(parser, anchor, level + 1)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from iterate_parser(sub, level + 1)


def write_command_pages() -> dict[str, str]:
    """Return the pages of all commands by their path in the site: `commands/train.md`, …"""
    from vitrail.cli import COMMANDS, build_parser

    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = WIDTH  # argparse wraps to the terminal
    try:
        parser = build_parser()
        subparsers = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        pages = {}
        for name in COMMANDS:
            title, guide = GUIDES[name]
            text = "\n".join(iterate_parser(subparsers.choices[name], 1))
            pages[f"commands/{name}.md"] = f"{text}\n\nGuide with real output: [{title}](../{guide}).\n"
        rows = [f"| [`vitrail {name}`]({name}.md) | {format_prose(summary)} |" for name, summary in COMMANDS.items()]
        pages["commands/index.md"] = (
            "# Commands\n\nThese pages are made from the parser of the command line when the site is built: they say what "
            "`vitrail COMMAND --help` says.\n\n| command | purpose |\n|---|---|\n" + "\n".join(rows) + "\n\n"
            f"```text\n$ vitrail --help\n{parser.format_help().rstrip()}\n```\n"
        )
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return pages


# --- API ---

PACKAGES = {
    "models": "Models",
    "nn": "Layers",
    "data": "Data",
    "training": "Training",
    "objectives": "Objectives",
    "checkpoints": "Checkpoints",
    "inference": "Inference",
    "deploy": "Prediction and export",
    "evaluation": "Evaluation",
    "labelling": "Labelling",
    "analysis": "Analysis",
    "metrics": "Metrics",
    "studies": "Studies",
}


def list_modules(root: Path, package: str) -> list[str]:
    """Return the dotted names of the modules of a package that have public names, in reading order."""
    home = root / "vitrail" / package
    files = sorted(home.rglob("*.py")) if home.is_dir() else [home.with_suffix(".py")]
    names = []
    for file in files:
        public = re.search(r"^(?:def|class) [A-Za-z]", file.read_text(encoding="utf-8"), re.MULTILINE)
        if public and not file.stem.startswith("_"):
            names.append(".".join(file.relative_to(root).with_suffix("").parts))
    return names


def write_api_pages(root: Path) -> dict[str, str]:
    """Return the pages of the API by their path: the public names, and every package."""
    import vitrail

    public = [name for name in vitrail.__all__ if not name.startswith("_")]
    blocks = "\n".join(f"::: vitrail.{name}\n    options:\n      show_source: true\n" for name in public)
    packages = "\n".join(f"| [`vitrail.{name}`]({name}.md) | {title} |" for name, title in PACKAGES.items())
    guide = "The names in `vitrail`, from their docstrings. The [Python guide](../reference.md) shows them at work."
    table = f"| package | |\n|---|---|\n{packages}"
    pages = {"api/index.md": f"# Public interface\n\n{guide} Every package:\n\n{table}\n\n{blocks}"}
    for name, title in PACKAGES.items():
        modules = "\n".join(f"::: {module}\n" for module in list_modules(root, name))
        pages[f"api/{name}.md"] = f"# {title}\n\n{modules}"
    return pages


# --- source ---

LANGUAGES = {".py": "python", ".js": "javascript", ".css": "css", ".toml": "toml", ".json": "json"}


def write_source_page(root: Path, path: str) -> str:
    """Return a page with a file of the repository as it stands, or with the files of a folder."""
    target = root / path
    head = f"---\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n"
    if target.is_dir():
        rows = [f"- [`{file.name}`]({target.name}/{file.name}.md)" for file in sorted(target.glob("*.py"))]
        return head + "\n".join(rows) + "\n"
    text = target.read_text(encoding="utf-8").rstrip()
    fence = "`" * max(4, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f'{head}{fence}{LANGUAGES.get(target.suffix, "text")} linenums="1"\n{text}\n{fence}\n'
