"""Hooks of `mkdocs build`: pages from outside docs/, links that work here and on GitHub, formulas, images by theme.

GitHub renders the same Markdown files, so they say nothing that only the site understands. What differs is done here.
"""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mathml import convert_formulas
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebooks import convert_notebook
from pages import write_api_pages, write_command_pages, write_source_page

ROOT = Path(__file__).parents[2]
# Files of the repository outside docs/ that are pages of the site.
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "examples/README.md": "examples.md",
}
NOTEBOOKS = "examples/notebooks"
FENCED = re.compile(r"(^(`{3,}|~{3,})[^\n]*\n.*?^\2`*[ ]*$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
PICTURE = re.compile(r'<picture><source [^>]*srcset="([^"]+)"><img alt="([^"]*)" src="([^"]+)"></picture>')

_homes: dict[str, str] = {}  # path in the repository to path in the site


def map_prose(text: str, change: Callable[[str], str]) -> str:
    """Return a Markdown text with everything outside its fenced blocks changed."""
    parts = FENCED.split(text)
    # Each fenced block gives two groups: the block and its fence.
    return "".join(change(part) if k % 3 == 0 else part for k, part in enumerate(parts) if k % 3 != 2)


def resolve_link(link: str, home: str) -> str | None:
    """Return the path in the repository that a link of the page at `home` points to, or None for an address or anchor."""
    path = link.partition("#")[0]
    if not path or ":" in path:
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(home), path))


def list_links(text: str) -> list[str]:
    """Return the targets of the links of a Markdown text."""
    found: list[str] = []
    map_prose(text, lambda part: found.extend(link[2] for link in LINK.finditer(part)) or part)
    return found


def rewrite_links(text: str, home: str, uri: str) -> str:
    """Return the text of the page at `home` in the repository with links between pages of the site, from `uri`."""

    def rewrite(found: re.Match) -> str:
        target = resolve_link(found[2], home)
        if target not in _homes:
            return found[0]  # an address, or a broken link, which `--strict` reports
        anchor = "".join(found[2].partition("#")[1:])
        return found[1] + posixpath.relpath(_homes[target], posixpath.dirname(uri) or ".") + anchor + found[3]

    return map_prose(text, lambda part: LINK.sub(rewrite, part))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    _homes.clear()
    _homes.update({f"docs/{file.src_uri}": file.src_uri for file in files})
    _homes.update(OUTSIDE)

    def add(uri: str, content: str | bytes) -> None:
        files.append(File.generated(config, uri, content=content))

    for home, uri in OUTSIDE.items():
        head = "---\nhide: [navigation]\n---\n\n" if uri == "index.md" else ""
        add(uri, head + (ROOT / home).read_text(encoding="utf-8"))
    for path in sorted((ROOT / NOTEBOOKS).glob("*.ipynb")):
        page, images = convert_notebook(path)
        home, uri = f"{NOTEBOOKS}/{path.name}", f"notebooks/{path.stem}.md"
        _homes[home] = uri
        add(uri, page)
        add(f"notebooks/{path.name}", path.read_bytes())
        for name, content in images.items():
            add(f"notebooks/{name}", content)
    for uri, page in (write_command_pages() | write_api_pages(ROOT)).items():
        add(uri, page)
    add("site/window.svg", draw_window())

    # Source files and folders that pages link to.
    linked = set()
    for home in [home for home in _homes if home.endswith(".md")]:
        text = (ROOT / home).read_text(encoding="utf-8")
        linked |= {target for link in list_links(text) if (target := resolve_link(link, home))}
    linked = {path for path in linked if path not in _homes and (ROOT / path).exists() and ".." not in path}
    for folder in [path for path in linked if (ROOT / path).is_dir()]:
        linked |= {f"{folder}/{file.name}" for file in (ROOT / folder).glob("*.py")}
    for path in sorted(linked):
        _homes[path] = f"source/{path}.md"
        add(_homes[path], write_source_page(ROOT, path))
    return files


def draw_window() -> str:
    """Return the stained-glass window of the site, as our report pages have one, as an SVG file of its own."""
    from vitrail.reports.document import read_resource, render_window

    css = read_resource("vitrail.reports", "page.css")
    colours = dict(re.findall(r"--(g\d): (#\w+);", css.partition("@media")[0]))
    style = "".join(f".{name}{{fill:{colour}}}" for name, colour in colours.items())
    style += "polygon{stroke:#1a1921;stroke-width:4;stroke-linejoin:round}"
    svg = str(render_window("vitrail")).replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    return svg.replace(">", f"><style>{style}</style>", 1)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change what GitHub and the site understand differently."""
    uri = page.file.src_uri
    page.meta.setdefault("search", {}).setdefault("boost", 0.5 if uri.startswith("api/") else 1)  # guides first
    home = next((home for home, there in _homes.items() if there == uri), None)
    if home is not None and not home.endswith(".py") and not uri.startswith("source/"):
        markdown = rewrite_links(markdown, home, uri)

    def change(part: str) -> str:
        # GitHub asks the system for the theme; here a button changes it.
        part = PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", part)
        return part.replace("<details>", '<details markdown="1">')  # Markdown in HTML is an option here

    return map_prose(markdown, change)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn formulas into MathML."""
    return convert_formulas(html)
