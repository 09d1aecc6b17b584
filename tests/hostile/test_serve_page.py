"""The page in a real browser, with names that a hostile model file or a hostile file name would bring."""

import io
from dataclasses import dataclass

import pytest
import torch
from PIL import Image

pytest.importorskip("fastapi", reason="the service is not installed: pip install 'vitrail[serve]'")

import vitrail
from tests.serve.made import picture, serving
from tests.serve.test_page import file, give, send, trouble, until, visiting
from vitrail.data.preprocessing import Preprocessing

RUN = "window.hacked=1"
NAMES = (
    f"<img src=x onerror={RUN}>",
    f"<script>{RUN}</script>",
    f"</title><svg onload={RUN}>",
    f"\"'><iframe srcdoc='<script>parent.{RUN}</script>'>",
    f"javascript:{RUN}",
    "${" + RUN + "} {{constructor.constructor('" + RUN + "')()}}",
    "__proto__",
    "constructor",
    "\u202egpj.exe",
    "a\u0300" * 90,
    "x" * 5000,
    "𓂀" * 60,
)
PAYLOAD = "img[src=x], script:not([src]), svg[onload], iframe, a[href^='javascript:'], object, embed, [onerror]"


@dataclass(frozen=True)
class Running:
    address: str


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """Serve a model whose classes have hostile names, under a hostile name."""
    path = tmp_path_factory.mktemp("models") / "hostile.safetensors"
    torch.manual_seed(0)
    model = vitrail.build(width=24, depth=2, heads=3, patch=8, image_size=32, classes=len(NAMES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    vitrail.save(model, path, labels=NAMES, preprocessing=Preprocessing((32, 32), (32, 32)))
    with serving(f"<script>window.hacked<s>={path}", f"__proto__={path}") as client:
        yield Running(f"http://127.0.0.1:{client.port}")


def check_harmless(opened) -> None:
    """Check that no name became an element, ran, or made the page wider than its window."""
    assert opened.evaluate("window.hacked === undefined && ({}).hacked === undefined")
    assert opened.evaluate(f"document.querySelectorAll({PAYLOAD!r}).length") == 0
    assert opened.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_hostile_class_names_are_text(browser, running):
    with visiting(browser, running.address) as opened:
        assert opened.title().startswith("<script>")
        shown: set[str] = set()
        for seed in range(4):
            give(opened, file(f"{seed}.png", picture(seed), "image/png"))
            check_harmless(opened)
            shown |= {text[:40] for text in opened.locator(".scores .label").all_text_contents()}
        assert len(shown & {name[:40] for name in NAMES}) >= 5
        opened.keyboard.press("Tab")
        check_harmless(opened)


@pytest.mark.parametrize("name", [name.replace("/", "∕")[:200] for name in NAMES], ids=range(len(NAMES)))
def test_hostile_file_names_are_text(browser, running, name):
    with visiting(browser, running.address) as opened:
        give(opened, file(name, picture(), "image/png"))
        check_harmless(opened)
        assert opened.locator(".verdict span").first.text_content().startswith(name[:20])


def test_hostile_files_are_errors_in_words(browser, running):
    """Files that are not images, under hostile names: the message quotes them as text."""
    broken = io.BytesIO()
    Image.new("RGB", (32, 32)).save(broken, "PNG")
    for data in (f"<svg xmlns='http://www.w3.org/2000/svg' onload='{RUN}'/>".encode(), b"\0", broken.getvalue()[:50]):
        with visiting(browser, running.address, quiet=False) as opened:
            opened.locator("#files").set_input_files([file(NAMES[0].replace("/", "∕"), data, "image/svg+xml")])
            assert trouble(opened)
            check_harmless(opened)


def test_hostile_text_is_not_pasted_as_markup(browser, running):
    with visiting(browser, running.address, quiet=False) as opened:
        for kind in ("paste", "drop"):
            send(opened, kind, text=f"<img src=x onerror={RUN}>")
            send(opened, kind, text=f"javascript:{RUN}")
        opened.wait_for_timeout(300)
        check_harmless(opened)


def test_page_cannot_be_framed_or_read_by_another_site(browser, running):
    """Another site (here: the same service under another loopback name) can neither frame nor read nor post."""
    other = running.address.replace("127.0.0.1", "localhost")
    context = browser.new_context()
    opened = context.new_page()
    opened.goto(f"{other}/healthz")
    found = opened.evaluate(
        """async (address) => {
          const attempt = async (path, options) => {
            try { return (await fetch(address + path, options)).status; } catch { return "refused"; }
          };
          const frame = document.createElement("iframe");
          frame.src = address + "/";
          document.body.append(frame);
          await new Promise((resolve) => { frame.onload = resolve; setTimeout(resolve, 3000); });
          let inside; try { inside = frame.contentDocument?.body?.innerText ?? ""; } catch { inside = ""; }
          return [await attempt("/models"), await attempt("/predict", {method: "POST", body: "x"}), inside];
        }""",
        running.address,
    )
    assert found == ["refused", "refused", ""]
    context.close()


def test_ready_page_still_works(browser, running):
    with visiting(browser, running.address) as opened:
        give(opened, file("fine.png", picture(5), "image/png"))
        until(opened, "document.querySelectorAll('.scores li').length > 0")
