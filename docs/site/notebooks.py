"""Notebooks to Markdown, with the outputs that they were saved with."""

import base64
import json
import re
from pathlib import Path

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def join_text(value: str | list[str]) -> str:
    """Return the text of a notebook field, which is stored as one text or as lines."""
    return value if isinstance(value, str) else "".join(value)


def fence(text: str, head: str) -> str:
    """Return a text in a fence that is longer than any in it."""
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{ticks}{head}\n{text.rstrip()}\n{ticks}"


def convert_output(output: dict, name: str, images: dict[str, bytes]) -> str:
    """Return an output as Markdown; an image is added to `images` and linked."""
    if output["output_type"] == "error":
        raise ValueError(f"notebook {name} was saved with an error, {output['ename']}: run `make notebooks`")
    data = output.get("data", {})
    if "image/png" in data:
        file = f"{name}-{len(images) + 1}.png"
        images[file] = base64.b64decode(join_text(data["image/png"]))
        alt = join_text(data.get("text/plain", "output")).strip("<>")
        return f"![{alt}]({file}){{ .output }}"
    text = ANSI.sub("", join_text(output.get("text", data.get("text/plain", ""))))
    return fence(text, " { .text .output }") if text.strip() else ""


def convert_notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return the page of a notebook and its images by file name."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    parts: list[str] = []
    images: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = join_text(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif source.strip():
            parts.append(fence(source, "python"))
            parts += [convert_output(output, path.stem, images) for output in cell["outputs"]]
    title, _, rest = parts[0].partition("\n")
    note = f"[Download this notebook]({path.name}){{ .md-button download }}"
    return "\n\n".join(filter(None, [title, note, rest.strip(), *parts[1:]])) + "\n", images
