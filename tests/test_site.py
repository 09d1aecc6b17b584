"""The documentation as a site: it builds without a warning, asks no other server for anything, and its search works."""

import functools
import http.server
import importlib
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[1]
HOOKS = ROOT / "docs" / "site"
LOADED = {"script": "src", "img": "src", "source": "srcset", "iframe": "src", "link": "href", "video": "src"}
VISITED = ("index", "commands/train", "api/index", "annotated-vit", "paper/positions", "notebooks/vit-from-scratch")
MARKED = ("table", "tr", "pre", "li", "ol", "ul", "h1", "h2", "h3", "details")


@pytest.fixture
def hooks(monkeypatch):
    """Import a module of docs/site by its name."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'vitrail[site]'")
    monkeypatch.syspath_prepend(str(HOOKS))
    names = ("hooks", "mathml", "notebooks", "pages")
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


# --- the parts ---


def test_formulas_become_mathml(hooks):
    to_mathml = hooks("mathml").to_mathml
    made = to_mathml(r"\mathbf{z}'_\ell = \text{MSA}(\mathbf{z}_{\ell-1}) \in \mathbb{R}^{N\times D}", block=True)
    assert made.startswith('<math display="block">')
    plain = re.sub("<annotation.*?</annotation>|<[^>]+>", "", made)
    assert plain == "𝐳ʹℓ=MSA(𝐳ℓ−1)∈ℝN×D"
    rows = to_mathml(r"\begin{aligned} a &= \frac{b}{\sqrt{d}} & (1)\\ c &= 2.5 \end{aligned}")
    assert rows.count("<mtr>") == 2
    assert "<mfrac><mrow><mi>b</mi></mrow><mrow><msqrt>" in rows


@pytest.mark.parametrize("formula", [r"\unheard{x}", r"\frac{1}", r"\begin{matrix} 1 \end{matrix}", "a & b", "x}"])
def test_a_formula_beyond_the_subset_fails(hooks, formula):
    with pytest.raises(ValueError, match="formula"):
        hooks("mathml").to_mathml(formula)


def test_links_are_rewritten_for_the_site_and_code_is_not(hooks):
    module = hooks("hooks")
    homes = {
        "docs/training.md": "training.md",
        "README.md": "index.md",
        "vitrail/nn/embed.py": "source/vitrail/nn/embed.py.md",
    }
    module._homes.update(homes)
    text = "[a](docs/training.md#recipes) [b](vitrail/nn/embed.py)\n```\n[c](docs/training.md)\n```\n[d](https://e.org)"
    expected = "[a](training.md#recipes) [b](source/vitrail/nn/embed.py.md)\n```\n[c](docs/training.md)\n```\n[d](https://e.org)"
    assert module.rewrite_links(text, "README.md", "index.md") == expected
    assert module.rewrite_links("[a](../training.md)", "docs/paper/head.md", "paper/head.md") == "[a](../training.md)"
    assert module.rewrite_links("[a](../README.md)", "docs/data.md", "data.md") == "[a](index.md)"


def test_every_command_has_a_page_that_says_what_its_help_says(hooks):
    from vitrail.cli import COMMANDS

    written = hooks("pages").write_command_pages()
    assert set(written) == {"commands/index.md"} | {f"commands/{name}.md" for name in COMMANDS}
    assert "`--epochs N` { #vitrail-train-epochs }\n:   epochs of training" in written["commands/train.md"]
    assert "vitrail train digits" in written["commands/train.md"]
    assert "## vitrail search find\n" in written["commands/search.md"]
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"commands/{name}.md" not in navigation] == []


def test_a_notebook_becomes_a_page_with_its_outputs(hooks, tmp_path):
    import json

    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "Words."]},
        {
            "cell_type": "code",
            "source": "print(1)",
            "outputs": [
                {"output_type": "stream", "name": "stdout", "text": "\x1b[1m1\x1b[0m\n"},
                {"output_type": "display_data", "data": {"image/png": "aGk=", "text/plain": "<Figure>"}},
            ],
        },
    ]
    path = tmp_path / "small.ipynb"
    path.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    page, images = hooks("notebooks").convert_notebook(path)
    assert images == {"small-1.png": b"hi"}
    assert page.startswith("# Title\n\n[Download this notebook](small.ipynb)")
    assert "```python\nprint(1)\n```\n\n``` { .text .output }\n1\n```\n\n![Figure](small-1.png)" in page
    cells[1]["outputs"] = [{"output_type": "error", "ename": "KeyError"}]
    path.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    with pytest.raises(ValueError, match="small was saved with an error, KeyError"):
        hooks("notebooks").convert_notebook(path)


@pytest.mark.parametrize("link", ["nowhere.md", "other.md#nowhere", "/other.md"])
def test_a_broken_link_fails_the_build(tmp_path, link):
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install 'vitrail[site]'")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n\n[a link]({link})\n", encoding="utf-8")
    (tmp_path / "docs" / "other.md").write_text("# Another\n", encoding="utf-8")
    settings = re.findall(
        r"^(?:strict|validation):.*\n(?: .*\n)*", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE
    )
    (tmp_path / "mkdocs.yml").write_text("site_name: small\n" + "".join(settings), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert f"'{link}'" in done.stderr


# --- the whole ---


class Elements(HTMLParser):
    """The addresses that a browser loads for a page, and how often some elements occur."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.counts = dict.fromkeys(MARKED, 0)
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag in self.counts:
            self.counts[tag] += 1
        address = given.get(LOADED.get(tag, ""))
        if address and not (tag == "link" and given.get("rel") in ("prev", "next", "canonical")):
            self.loaded.append(address)


def find_outside_references(site: Path) -> list[str]:
    """Return the references to other servers that a browser would load, in pages and style sheets."""
    found = []
    for page in site.rglob("*.html"):
        found += [f"{page}: {url}" for url in Elements(page.read_text(encoding="utf-8")).loaded if is_outside(url)]
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        urls = re.findall(r"url\(\s*[\"']?([^\"')]+)", text) + re.findall(r"@import\s+[\"']([^\"']+)", text)
        found += [f"{sheet}: {url}" for url in urls if is_outside(url)]
    return found


def test_references_to_other_servers_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        "<script src='https://cdn.org/a.js'></script><a href='https://fine.org'>a link</a><img src='b.png'>"
        "<link rel='preconnect' href='//fonts.org'>",
        encoding="utf-8",
    )
    (tmp_path / "a.css").write_text("@import 'http://x.org/b.css'; a {background: url(c.svg)}", encoding="utf-8")
    found = [reference.split(": ")[1] for reference in find_outside_references(tmp_path)]
    assert found == ["https://cdn.org/a.js", "//fonts.org", "http://x.org/b.css"]


def is_outside(url: str) -> bool:
    return url.startswith(("http:", "https:", "//"))


def find_differences_to_github(site: Path) -> list[str]:
    """Return the pages whose lists, tables, listings and headings are not those that GitHub's Markdown gives."""
    markdown = pytest.importorskip("markdown_it").MarkdownIt("gfm-like", {"linkify": False})
    found = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        if page.name.endswith(".template.md"):
            continue
        path = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix().replace("README.html", "index.html")
        article = re.search("<article.*</article>", (site / path).read_text(encoding="utf-8"), re.DOTALL)
        here = Elements(article[0]).counts if article else None
        there = Elements(markdown.render(page.read_text(encoding="utf-8"))).counts
        if here != there:
            found.append(f"{page.name}: {here} here, {there} on GitHub")
    return found


@contextmanager
def serve(folder: Path):
    """Serve a folder on this machine and yield its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def visit(browser, address: str, width: int, scheme: str = "light"):
    """Open a page of its own, in which requests to other servers fail, and yield it with what went wrong."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    trouble: list[str] = []
    allowed = urlsplit(address).netloc

    def route(each):
        url = urlsplit(each.request.url)
        if (url.netloc == allowed and url.scheme in ("http", "file")) or url.scheme in ("data", "blob"):
            each.continue_()
        else:
            trouble.append(f"request to {each.request.url}")
            each.abort()

    context.route("**/*", route)
    page = context.new_page()
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("console", lambda message: trouble.append(message.text) if message.type == "error" else None)
    yield page, trouble
    context.close()


def search(page, words: str) -> str:
    """Search for some words and return the text of the results."""
    page.locator(".md-search__input").click()
    page.locator(".md-search__input").press_sequentially(words)
    page.locator(".md-search-result__item mark").first.wait_for(timeout=60_000)
    return page.inner_text(".md-search-result")


@pytest.mark.slow
def test_the_site_builds_strictly_and_works_without_a_network(browser, tmp_path):
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install 'vitrail[site]'")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: pip install 'vitrail[site]'")
    site = tmp_path / "site"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert find_outside_references(site) == []
    assert find_differences_to_github(site) == []

    with serve(site) as address, visit(browser, address, 1280) as (page, trouble):
        for name in VISITED:
            page.goto(f"{address}/{name}.html")
            assert page.locator("article h1").inner_text() != ""
        assert "rollout" in search(page, "attention rollout").lower()
        # The button changes the theme, and with it the figures of the studies.
        page.goto(f"{address}/paper/positions.html")
        light, dark = (page.locator(f"img[src$='#only-{scheme}']").first for scheme in ("light", "dark"))
        assert (light.is_visible(), dark.is_visible()) == (True, False)
        page.locator("[for=__palette_1]").click()
        page.locator("[for=__palette_2]").click()
        assert page.locator("body").get_attribute("data-md-color-scheme") == "slate"
        assert (light.is_visible(), dark.is_visible()) == (False, True)
        assert dark.evaluate("image => image.complete && image.naturalWidth > 100")
        assert trouble == []

    with visit(browser, site.as_uri(), 390, "dark") as (page, trouble):  # from the disk, on a phone
        for name in VISITED:
            page.goto(f"{site.as_uri()}/{name}.html")
            assert page.locator("body").get_attribute("data-md-color-scheme") == "slate"
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        page.set_viewport_size({"width": 1280, "height": 900})
        assert "--quarantine" in search(page, "quarantine")
        assert trouble == []
