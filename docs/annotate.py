"""Writes docs/annotated-vit.md from its template: source pulled from the files, examples run, so that it cannot drift.

    python docs/annotate.py           write the page
    python docs/annotate.py --check   fail if it is not what would be written

In the template, a line `:source FILE NAME` is replaced by that function, method or class as it stands in the file, and a
block from `:example` to `:end` by its lines, each expression with its value beside it.
"""

import argparse
import ast
import sys
import textwrap
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
TEMPLATE, PAGE = DOCS / "annotated-vit.template.md", DOCS / "annotated-vit.md"


def source(path: str, name: str) -> str:
    """A function, method or class by its qualified name, with a link to its file."""
    text = (DOCS.parent / path).read_text()
    node: Any = ast.parse(text)
    for part in name.split("."):
        found = [child for child in node.body if getattr(child, "name", None) == part]
        if not found:
            raise SystemExit(f"annotate: {path} has no {name}")
        node = found[0]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = text.splitlines()[first - 1 : node.end_lineno]
    return f"[`{path}`](../{path}) · `{name}`\n\n```python\n{textwrap.dedent(chr(10).join(lines))}\n```"


def example(lines: list[str], names: dict[str, Any]) -> str:
    """The lines, run one after the other in one place; what has a value shows it."""
    shown = []
    for statement in ast.parse("\n".join(lines)).body:
        text = "\n".join(lines[statement.lineno - 1 : statement.end_lineno])
        if isinstance(statement, ast.Expr):
            value = eval(compile(ast.Expression(statement.value), "example", "eval"), names)
            shown.append(f"{text}  # {list(value) if type(value).__name__ == 'Size' else value}")
        else:
            exec(compile(ast.Module([statement], []), "example", "exec"), names)
            shown.append(text)
    return "```python\n" + "\n".join(shown) + "\n```"


def page() -> str:
    """The template with its sources and examples filled in."""
    out = [f"<!-- Written by docs/annotate.py from {TEMPLATE.name}: edit that, then run `make docs`. -->", ""]
    names: dict[str, Any] = {}
    block: list[str] | None = None
    for line in TEMPLATE.read_text().splitlines():
        if line.startswith(":source "):
            out.append(source(*line.split()[1:]))
        elif line == ":example":
            block = []
        elif line == ":end" and block is not None:
            out.append(example(block, names))
            block = None
        elif block is not None:
            block.append(line)
        else:
            out.append(line)
    return "\n".join(out) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    text = page()
    if parser.parse_args().check:
        if not PAGE.exists() or PAGE.read_text() != text:
            print(f"{PAGE.name} is not what the source says: run `make docs`", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
