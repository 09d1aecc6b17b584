"""The page of vitrail serve in a real browser with a real service."""

import io
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.data.spoilt import encoded, photograph
from tests.e2e.test_report import CONTRAST
from tests.serve.made import serving
from vitrail.analysis import trace_image
from vitrail.data.preprocessing import Preprocessing
from vitrail.reports.colours import HEAT_CMAP, colour_table

LABELS = ("window", "door", "roof", "wall", "</script><b>stairs</b>")
LAYERS, HEADS, SIDE = 4, 3, 8  # of the tiny model: a grid of 8×8 patches
GREY = 100
GROUND = 0.4 * GREY + 0.6 * (18 + 0.72 * GREY)  # background of maps at 60 % over a grey image
WORDS = b"404: there was no such picture"


@dataclass(frozen=True)
class Running:
    """A running service with its model."""

    address: str
    model: vitrail.models.vit.ViT
    preprocessing: Preprocessing

    def seen(self, data: bytes):
        """Return the trace of an image file."""
        with Image.open(io.BytesIO(data)) as image:
            return trace_image(self.model, self.preprocessing(image)[None])


def tiny(path, seed=0, **given):
    torch.manual_seed(seed)
    options = {"width": 24, "depth": LAYERS, "heads": HEADS, "patch": 8, "image_size": 64, "classes": 5} | given
    model, size = vitrail.build(**options), (options["image_size"],) * 2
    preprocessing = Preprocessing(size, size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    vitrail.save(model, path, labels=LABELS if options["classes"] else None, preprocessing=preprocessing)
    return model.eval(), preprocessing


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return models: with classes, with many small patches, without classifier, and without attention."""
    folder = tmp_path_factory.mktemp("models")
    model, preprocessing = tiny(folder / "tiny.safetensors")
    tiny(folder / "fine.safetensors", 2, image_size=160, depth=2)
    tiny(folder / "features.safetensors", 1, classes=None)
    vitrail.save(
        vitrail.build("R26x0.25", classes=5, image_size=32),
        folder / "resnet.safetensors",
        labels=LABELS,
        preprocessing=Preprocessing((32, 32), (32, 32)),
    )
    return folder, model, preprocessing


@pytest.fixture(scope="module")
def running(files):
    folder, model, preprocessing = files
    names = [f"{name}={folder}/{name}.safetensors" for name in ("tiny", "fine", "features", "resnet")]
    with serving(*names) as client:
        yield Running(f"http://127.0.0.1:{client.port}", model, preprocessing)


@contextmanager
def visiting(browser, address, width=1280, *, before=None, quiet=True, ready=True, **given):
    """Open the page with all other requests blocked; `quiet` fails on any console message."""
    context = browser.new_context(viewport={"width": width, "height": 900}, **given)
    strange, complaints = [], []

    def only_here(route):
        if route.request.url.startswith((f"{address}/", "data:", "blob:")):
            return route.fallback()
        strange.append(route.request.url)
        return route.abort()

    context.route("**/*", only_here)
    context.set_default_timeout(60_000)
    if before:
        context.add_init_script(before)
    opened = context.new_page()
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto(f"{address}/")
    if ready:
        until(opened, "document.documentElement.dataset.ready === 'yes'")
    yield opened
    assert strange == []
    if quiet:
        assert complaints == []
    context.close()


def until(opened, true, seconds=60):
    """Poll a condition from outside the page: its policy forbids eval, which Playwright's own waiting uses."""
    for _ in range(seconds * 40):
        if found := opened.evaluate(true):
            return found
        opened.wait_for_timeout(25)
    raise AssertionError(f"never became true: {true}")


def shown(opened, count=1):
    """Wait until this many images have predictions and maps."""
    until(
        opened,
        f"document.querySelectorAll('.map:not([hidden])').length === {count} && !document.querySelector('.busy')",
    )


def file(name="photo.jpg", data=None, kind="image/jpeg"):
    return {"name": name, "mimeType": kind, "buffer": encoded(photograph(1)) if data is None else data}


def give(opened, *given, count=1):
    """Choose files, as with the button."""
    opened.locator("#files").set_input_files(list(given) or [file()])
    shown(opened, count)


def grey(size=(64, 64)):
    return encoded(Image.new("RGB", size, (GREY,) * 3), "PNG")


def on_stage(opened, pane=0, side=SIDE):
    """Return the colour in the middle of every patch, [h·w, 3]."""
    return np.array(
        opened.evaluate(
            """([pane, n]) => {
              const copy = document.createElement("canvas"), context = copy.getContext("2d", {willReadFrequently: true});
              copy.width = copy.height = 10 * n;
              context.imageSmoothingEnabled = false;
              context.drawImage(document.querySelectorAll(".map")[pane], 0, 0, 10 * n, 10 * n);
              const { data } = context.getImageData(0, 0, 10 * n, 10 * n), found = [];
              for (let y = 5; y < 10 * n; y += 10) for (let x = 5; x < 10 * n; x += 10) {
                const at = 4 * (10 * n * y + x);
                found.push([...data.slice(at, at + 3)]);
              }
              return found;
            }""",
            [pane, side],
        )
    )


def expected(values):
    """Return the expected colours of a map [h, w] over grey."""
    codes = np.round(values.astype(np.float64) / values.max() * 255)
    part = 0.6 * (0.12 + 0.76 * (codes / 255) ** 0.8)[..., None]
    return ((1 - part) * GROUND + part * colour_table(HEAT_CMAP)[codes.astype(int)]).reshape(-1, 3)


def same(found, values):
    np.testing.assert_allclose(found, expected(values), atol=5)  # the page interpolates every eighth colour


def between(seen, layer, head, row, column):
    maps = seen.between[layer - 1, :, row * SIDE + column].astype(np.float32).reshape(HEADS, SIDE, SIDE)
    return maps.mean(0) if head == 0 else maps[head - 1]


def point(opened, row, column, pane=0, side=SIDE):
    box = opened.locator(".map").nth(pane).bounding_box()
    opened.mouse.move(box["x"] + (column + 0.5) * box["width"] / side, box["y"] + (row + 0.5) * box["height"] / side)
    until(opened, f"document.getElementById('workspace').dataset.patch === '{row},{column}'")


def data_of(opened):
    return opened.evaluate("({...document.getElementById('workspace').dataset})")


def trouble(opened):
    """Return the lines of the error box."""
    box = opened.locator(".trouble:visible").first
    box.wait_for()
    return [line for line in box.inner_text().splitlines() if line]


# Input and predictions.


def test_page_shows_predictions_as_bars(browser, running):
    data = encoded(photograph(1))
    with Image.open(io.BytesIO(data)) as image, torch.inference_mode():
        odds = running.model(running.preprocessing(image)[None])[0].softmax(0).numpy()
    order = np.argsort(-odds)
    with visiting(browser, running.address) as opened:
        assert opened.title() == "tiny · vitrail"
        assert opened.locator("h1").inner_text() == "Predictions of tiny"
        assert "4 layers of 3 heads" in opened.locator("#facts").inner_text()
        give(opened, file("<i>mine</i>.jpg", data))
        rows = opened.locator(".scores").first.locator("li")
        assert rows.locator(".label").all_inner_texts() == [LABELS[k] for k in order]  # escaped text
        shares = [float(share.strip("<> %")) for share in rows.locator(".share").all_inner_texts()]
        np.testing.assert_allclose(shares, 100 * odds[order], atol=0.11)
        bars = rows.locator(".bar").evaluate_all(
            "bars => bars.map(bar => parseFloat(bar.style.getPropertyValue('--score')))"
        )
        np.testing.assert_allclose(bars, 100 * odds[order], atol=1e-3)
        assert opened.locator(".verdict b").first.inner_text() == LABELS[order[0]]
        assert opened.locator(".verdict span").first.inner_text().startswith("<i>mine</i>.jpg · ")
        said = opened.locator("#status")
        assert said.get_attribute("aria-live") == "polite"
        assert said.inner_text().startswith(f"<i>mine</i>.jpg: {LABELS[order[0]]}, ")


EVENT = """([kind, files, text]) => {
  const data = new DataTransfer();
  for (const [name, type, bytes] of files) data.items.add(new File([Uint8Array.from(bytes)], name, {type}));
  if (text) data.setData("text/plain", text);
  const event = kind === "paste" ? new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true})
    : new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true});
  (document.querySelector(".target-of-test") ?? document.body).dispatchEvent(event);
}"""


def send(opened, kind, *given, text=""):
    opened.evaluate(EVENT, [kind, [[each["name"], each["mimeType"], list(each["buffer"])] for each in given], text])


def test_paste_and_drop(browser, running):
    small = encoded(photograph(1, (40, 30)), "PNG")
    with visiting(browser, running.address) as opened:
        asked = []
        opened.on("request", lambda request: asked.append(request.url))
        notice = opened.locator("#notice")
        for kind, given, text, words in (
            ("paste", [], "hello", "There is no image to paste"),
            ("drop", [], "https://example.org/cat.jpg", "Only files can be dropped here"),
            ("drop", [file("notes.txt", WORDS, "text/plain")], "", "notes.txt is not an image."),
            ("drop", [file("zero.png", b"", "image/png")], "", "zero.png is empty."),
        ):
            send(opened, kind, *given, text=text)
            assert words in notice.inner_text()
        assert asked == []
        send(opened, "dragover")
        assert opened.locator(".curtain").is_visible()
        send(opened, "drop", file("dropped.png", small, "image/png"))
        assert not opened.locator(".curtain").is_visible()
        shown(opened)
        assert not notice.is_visible()
        assert "dropped.png" in opened.locator(".verdict").first.inner_text()
        send(opened, "paste", file("image.png", small, "image/png"))
        until(opened, "document.querySelector('.verdict').innerText.includes('pasted image')")
        shown(opened)
        send(opened, "drop", file("one.png", small, "image/png"), file("two.png", small, "image/png"))
        shown(opened, 2)
        assert [text.split(" · ")[0] for text in opened.locator(".verdict span").all_inner_texts()] == [
            "one.png",
            "two.png",
        ]


def test_camera_on_desktop_and_phone(browser, running):
    with visiting(browser, running.address) as opened:
        opened.locator("#photograph").click()
        until(opened, "document.getElementById('video').videoWidth > 0")
        opened.locator("#shutter").click()
        shown(opened)
        assert "photo.jpg" in opened.locator(".verdict").first.inner_text()
        assert opened.evaluate("document.getElementById('video').srcObject") is None  # the camera is released
    with visiting(browser, running.address, 390, has_touch=True, is_mobile=True) as opened:
        with opened.expect_file_chooser() as chooser:
            opened.locator("#photograph").tap()
        assert chooser.value.element.get_attribute("capture") == "environment"
        chooser.value.set_files([file("from the phone.jpg")])
        shown(opened)
        assert "from the phone.jpg" in opened.locator(".verdict").first.inner_text()


# Attention maps.


def test_maps_equal_the_analysis(browser, running):
    seen = running.seen(grey())
    with visiting(browser, running.address) as opened:
        give(opened, file("grey.png", grey(), "image/png"))
        same(on_stage(opened), seen.attention[-1].mean(0))
        opened.locator("#layer").fill("2")
        opened.locator("#head").fill("3")
        same(on_stage(opened), seen.attention[1, 2])
        for row, column in ((0, 0), (3, 5), (7, 7)):
            point(opened, row, column)
            same(on_stage(opened), between(seen, 2, 3, row, column))
        most = np.unravel_index(between(seen, 2, 3, 7, 7).argmax(), (SIDE, SIDE))
        assert f"maximum at row {most[0] + 1}, column {most[1] + 1}" in opened.locator("#caption-a").inner_text()
        opened.mouse.move(2, 2)
        until(opened, "document.getElementById('workspace').dataset.patch === ''")
        same(on_stage(opened), seen.attention[1, 2])
        opened.locator("#heads button").nth(0).click()
        same(on_stage(opened), seen.attention[1].mean(0))
        opened.locator("#every summary").click()
        until(opened, f"document.getElementById('all').width === {LAYERS * (SIDE + 1) - 1}")
        box = opened.locator("#all").bounding_box()
        opened.mouse.click(box["x"] + box["width"] - 3, box["y"] + 3)  # the last layer's first head
        same(on_stage(opened), seen.attention[3, 0])
        opened.locator("#tab-rollout").click()
        same(on_stage(opened), seen.rollout)
        opened.locator("#tab-relevance").click()
        same(on_stage(opened), seen.relevance)
        assert f"support {LABELS[seen.target]}" in opened.locator("#reading").inner_text()
        with opened.expect_download() as saved:
            opened.locator(".save").first.click()
        assert saved.value.suggested_filename == "grey, relevance.png"
        with Image.open(saved.value.path()) as image:
            wide, high = image.size
            assert high > wide  # the map with text under it
            side = wide // SIDE
            found = np.asarray(image.convert("RGB"))[side // 2 : wide : side, side // 2 :: side].reshape(-1, 3)
        same(found, seen.relevance)
        assert opened.locator("#strength").input_value() == "60"
        opened.locator("#strength").fill("0")
        assert np.abs(on_stage(opened) - GREY).max() <= 2  # the image without a map


def test_keyboard_navigation(browser, running):
    seen = running.seen(grey())
    choosers = []
    with visiting(browser, running.address) as opened:
        opened.on("filechooser", lambda chooser: choosers.append(chooser))
        opened.keyboard.press("Tab")
        assert opened.evaluate("document.activeElement.className") == "skip"
        for _ in range(4):  # the model, the colours, and then
            opened.keyboard.press("Tab")
            if opened.evaluate("document.activeElement.id") == "choose":
                break
        opened.keyboard.press("Enter")
        while not choosers:
            opened.wait_for_timeout(25)
        choosers[0].set_files([file("grey.png", grey(), "image/png")])
        shown(opened)
        opened.locator(".map").first.focus()
        assert opened.locator(".frame").first.evaluate("frame => getComputedStyle(frame).outlineStyle") == "solid"
        opened.keyboard.press("ArrowDown")  # the middle first
        row, column = SIDE // 2, SIDE // 2
        for key, down, across in (("ArrowUp", -1, 0), *[("ArrowLeft", 0, -1)] * 5, ("ArrowRight", 0, 1)):
            opened.keyboard.press(key)
            row, column = min(7, max(0, row + down)), min(7, max(0, column + across))
        assert data_of(opened)["patch"] == f"{row},{column}" == "3,1"
        same(on_stage(opened), between(seen, 4, 0, 3, 1))
        assert (
            opened.locator("#status")
            .inner_text()
            .startswith("The patch in row 4, column 2, layer 4, mean of the heads")
        )
        opened.keyboard.press("Escape")
        assert data_of(opened)["patch"] == ""
        opened.locator("#layer").focus()
        opened.keyboard.press("ArrowLeft")
        assert data_of(opened)["layer"] == "3"
        assert opened.locator("#layer").get_attribute("aria-valuetext") == "3 of 4"
        opened.locator("#tab-attention").focus()
        opened.keyboard.press("ArrowRight")
        assert data_of(opened)["view"] == "rollout"
        assert opened.locator("#tab-rollout").get_attribute("aria-selected") == "true"
        same(on_stage(opened), seen.rollout)
        opened.keyboard.press("ArrowLeft")
        opened.locator("#patch").focus()
        opened.keyboard.press("Enter")
        assert opened.evaluate("document.activeElement.className").startswith("map")
        assert data_of(opened)["patch"] == "4,4"


def test_compare_two_images(browser, running):
    dark = encoded(Image.new("RGB", (64, 64), (GREY, GREY, GREY + 1)), "PNG")
    with visiting(browser, running.address) as opened:
        give(opened, file("a.png", grey(), "image/png"))
        opened.locator("#compare").click()
        assert opened.locator("#compare").get_attribute("aria-pressed") == "true"
        assert opened.locator(".vacant").nth(1).is_visible()
        give(opened, file("b.png", dark, "image/png"), count=2)
        point(opened, 2, 6, pane=1)
        for pane, data in enumerate((grey(), dark)):
            same(on_stage(opened, pane), between(running.seen(data), 4, 0, 2, 6))
        names = opened.locator(".verdict span")
        for pane, name in ((0, "new a.png"), (1, "new b.png")):
            with opened.expect_file_chooser() as chooser:
                opened.locator(".replace").nth(pane).click()
            chooser.value.set_files([file(name)])
            until(opened, f"document.querySelectorAll('.verdict span')[{pane}].innerText.startsWith('{name}')")
            shown(opened, 2)
        assert [text.split(" · ")[0] for text in names.all_inner_texts()] == ["new a.png", "new b.png"]
        opened.locator("#compare").click()
        assert opened.locator(".map:visible").count() == 1
        assert names.first.inner_text().startswith("new a.png")


def test_coarse_grid_for_many_patches(browser, running, files):
    data, model = grey((160, 160)), vitrail.load(files[0] / "fine.safetensors")
    with Image.open(io.BytesIO(data)) as image:
        seen = trace_image(model, model.preprocessing(image)[None])
    assert seen.between_grid == (10, 10)
    with visiting(browser, running.address) as opened:
        opened.locator("#model").select_option("fine")
        give(opened, file("grey.png", data, "image/png"))
        assert "10×10 cells of 2×2 patches" in opened.locator("#coarse").inner_text()
        same(on_stage(opened, side=20), seen.attention[-1].mean(0))
        point(opened, 5, 19, side=20)
        cells = seen.between[-1, :, 2 * 10 + 9].astype(np.float32).mean(0).reshape(10, 10)
        same(on_stage(opened, side=20), np.kron(cells, np.ones((2, 2))))


def test_switch_model(browser, running):
    with visiting(browser, running.address) as opened:
        assert opened.locator("#model option").all_inner_texts() == ["tiny", "fine", "features", "resnet"]
        give(opened)
        glass = opened.locator("#window").inner_html()
        opened.locator("#model").select_option("resnet")
        until(opened, "!document.querySelector('.busy')")
        assert opened.title() == "resnet · vitrail"
        assert opened.locator("#window").inner_html() != glass
        assert opened.locator(".scores").first.locator(".share").count() == 5
        assert opened.locator(".preview").first.is_visible()
        assert not opened.locator("#controls").is_visible()
        assert "No attention maps" in opened.locator(".aside").first.inner_text()
        opened.locator("#model").select_option("features")
        shown(opened)
        assert opened.locator(".scores").first.locator("li").count() == 0
        assert "has no classifier" in opened.locator(".aside").first.inner_text()
        assert not opened.locator("#tab-relevance").is_visible()


# Errors.


def test_invalid_image_then_valid_image(browser, running):
    with visiting(browser, running.address, quiet=False) as opened:
        opened.locator("#files").set_input_files([file("words.png", WORDS, "image/png")])
        plain, detail = trouble(opened)
        assert plain == "This file is not a valid image."
        assert "not an image" in detail
        assert opened.locator(".trouble").first.get_attribute("role") == "alert"
        assert opened.locator("#shelf button").count() == 0  # nothing is stored
        give(opened)
        assert not opened.locator(".trouble:visible").count()


def test_large_image_is_downsized(browser, files):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 1700, 3), dtype=np.uint8))
    with (
        serving(f"tiny={files[0]}/tiny.safetensors", body=700_000) as client,
        visiting(browser, f"http://127.0.0.1:{client.port}", quiet=False) as opened,
    ):
        opened.locator("#files").set_input_files(
            [file("large.png", encoded(noise, "PNG", compress_level=0), "image/png")]
        )
        assert "too large" in " ".join(trouble(opened))
        opened.locator(".trouble button").first.click()
        shown(opened)
        assert opened.locator(".verdict span").first.inner_text().startswith("large.png, smaller")


def test_busy_server_is_retried(browser, running):
    busy = {"status": 503, "headers": {"Retry-After": "1"}, "json": {"error": "busy: the queue is full"}}
    left = [2]

    def sometimes(route):
        left[0] -= 1
        return route.fulfill(**busy) if left[0] >= 0 else route.fallback()

    with visiting(browser, running.address, quiet=False) as opened:
        opened.route("**/predict?*", sometimes)
        opened.locator("#files").set_input_files([file()])
        assert trouble(opened) == ["The server is busy. Trying again in 1 s, attempt 2 of 5."]
        shown(opened)
        assert left == [-1]
        assert not opened.locator(".trouble:visible").count()
        left[0] = 100
        opened.evaluate("setTimeout = ((late) => (act, ms, ...rest) => late(act, ms / 50, ...rest))(setTimeout)")
        opened.locator("#files").set_input_files([file("other.jpg")])
        until(opened, "document.querySelector('.trouble button')")
        assert trouble(opened) == ["The server is too busy.", "busy: the queue is full", "Try again"]
        assert left == [95]
        left[0] = 0
        opened.get_by_role("button", name="Try again").click()
        shown(opened)


def test_token_dialog(browser, files):
    with (
        serving(f"tiny={files[0]}/tiny.safetensors", tokens=("open sesame".replace(" ", "-"),)) as client,
        visiting(browser, f"http://127.0.0.1:{client.port}", quiet=False, ready=False) as opened,
    ):
        gate = opened.locator("#gate")
        gate.wait_for()
        opened.keyboard.type("not-the-token")
        opened.keyboard.press("Enter")
        until(opened, "document.getElementById('gate-words').innerText.includes('rejected this token')")
        opened.keyboard.type("open-sesame")
        opened.keyboard.press("Enter")
        until(opened, "document.documentElement.dataset.ready === 'yes'")
        give(opened)
        assert opened.evaluate("sessionStorage.getItem('vitrail-token')") == "open-sesame"
        assert opened.evaluate("Object.values(localStorage).join()") == ""
        opened.reload()
        until(opened, "document.documentElement.dataset.ready === 'yes'")
        assert not gate.is_visible()
        other = opened.context.browser.new_context().new_page()
        other.goto(opened.url)
        other.locator("#gate").wait_for()
        other.keyboard.press("Escape")
        until(other, "document.getElementById('notice').innerText.includes('The server requires a token.')")
        other.context.close()


def test_unreachable_server_and_recovery(browser, running):
    with visiting(browser, running.address, quiet=False) as opened:
        give(opened)
        opened.context.route("**/*", lambda route: route.abort("connectionrefused"))
        opened.locator("#files").set_input_files([file("next.jpg")])
        assert trouble(opened)[0] == "The server does not respond."
        opened.context.unroute_all()
        opened.get_by_role("button", name="Try again").click()
        shown(opened)
        opened.route("**/predict?*", lambda route: route.abort("connectionreset"))
        opened.locator("#files").set_input_files([file("broken off.jpg")])
        until(opened, "document.querySelector('.trouble b').innerText.startsWith('The server closed the connection')")
        opened.unroute_all()
        opened.route("**/predict?*", lambda route: route.fulfill(status=502, body="<html>Bad gateway</html>"))
        opened.locator("#files").set_input_files([file("proxy.jpg")])
        until(opened, "document.querySelector('.trouble b').innerText === 'The request failed.'")


# Recent images.


def test_recent_images_are_shared_by_tabs(browser, running):
    with visiting(browser, running.address) as opened:
        give(opened, file("first.jpg"))
        give(opened, file("second.jpg", encoded(photograph(2))))
        recent = opened.locator("#shelf button")
        until(opened, "document.querySelectorAll('#shelf button').length === 2")
        assert recent.nth(0).get_attribute("aria-label").startswith("second.jpg: ")
        assert recent.nth(0).get_attribute("aria-current") == "true"
        second = opened.context.new_page()
        second.goto(opened.url)
        until(second, "document.querySelectorAll('#shelf button').length === 2")
        assert second.locator("#shelf img").first.evaluate("image => image.naturalWidth") == 128
        second.locator("#shelf button").nth(1).click()
        shown(second)
        assert "first.jpg" in second.locator(".verdict").first.inner_text()
        assert "second.jpg" in opened.locator(".verdict").first.inner_text()  # tabs are independent
        give(second, file("third.jpg", encoded(photograph(3))))
        until(opened, "document.querySelectorAll('#shelf button').length === 3")
        kept = "(sizes) => room(sizes.map((size) => ({blob: {size}})))"
        assert [opened.evaluate(kept, [n] * 40) for n in (1000, 2**23, 2**30)] == [24, 8, 1]  # 64 MB in total
        opened.locator("#clear").click()
        for each in (opened, second):
            until(each, "document.getElementById('recent').hidden")
        opened.reload()
        until(opened, "document.documentElement.dataset.ready === 'yes'")
        assert not opened.locator("#recent").is_visible()


def test_recent_images_of_an_earlier_version_stay(browser, running):
    old = """() => new Promise((resolve) => {
      const opening = indexedDB.open("vitrail", 1);
      opening.onupgradeneeded = () => opening.result.createObjectStore("pictures", { keyPath: "id" });
      opening.onsuccess = () => {
        const store = opening.result.transaction("pictures", "readwrite").objectStore("pictures");
        const item = { id: "old", name: "old.jpg", blob: new Blob(["x"]), at: 1, answers: [], thumb: null };
        store.put(item).onsuccess = () => { opening.result.close(); resolve(true); };
      };
    })"""
    with visiting(browser, running.address, ready=False) as opened:
        opened.goto(f"{running.address}/healthz")  # the same origin without the page
        opened.evaluate("() => new Promise((r) => { indexedDB.deleteDatabase('vitrail').onsuccess = () => r(true); })")
        assert opened.evaluate(old)
        opened.goto(f"{running.address}/")
        until(opened, "document.querySelectorAll('#shelf button').length === 1")
        assert opened.locator("#shelf button").get_attribute("aria-label") == "old.jpg"


def test_page_works_without_storage(browser, running):
    forbidden = """for (const name of ["indexedDB", "localStorage", "sessionStorage"])
      Object.defineProperty(window, name, {get() { throw new DOMException("forbidden", "SecurityError"); }});"""
    with visiting(browser, running.address, before=forbidden) as opened:
        give(opened, file("first.jpg"))
        give(opened, file("second.jpg"))
        assert opened.locator("#shelf button").count() == 2
        opened.locator("#theme").click()
        opened.locator("#shelf button").nth(1).click()
        until(opened, "document.querySelector('.verdict').innerText.includes('first.jpg')")
        opened.locator("#clear").click()
        assert not opened.locator("#recent").is_visible()


# Appearance.


def test_theme_follows_the_system(browser, running):
    ground = "getComputedStyle(document.body).backgroundColor"
    with visiting(browser, running.address, color_scheme="light") as opened:
        light = opened.evaluate(ground)
        opened.emulate_media(color_scheme="dark")
        dark = opened.evaluate(ground)
        assert light != dark
        until(opened, "document.getElementById('theme').getAttribute('aria-pressed') === 'true'")
        opened.locator("#theme").click()
        assert opened.evaluate(ground) == light
        opened.reload()
        assert opened.evaluate(ground) == light
        opened.locator("#theme").click()
        assert opened.evaluate(ground) == dark
        opened.emulate_media(color_scheme="light")
        assert opened.evaluate(ground) == light  # the system's theme again


NAMELESS = """() => {
  const asked = "button, input, select, summary, canvas, img, [tabindex], [role]";
  const apart = "main, [role=status], [role=alert], img[alt='']";
  const named = (node) => {
    const ids = (node.getAttribute("aria-labelledby") ?? "").split(" ");
    const labelled = ids.map((id) => document.getElementById(id)?.innerText ?? "").join("");
    const label = [...(node.labels ?? [])].map((each) => each.innerText).join("");
    return node.getAttribute("aria-label") || labelled || label || node.innerText?.trim();
  };
  const seen = (node) => node.checkVisibility({visibilityProperty: true}) && !node.closest("[aria-hidden=true]");
  const met = (node) => seen(node) && !node.matches(apart);
  const without = [...document.querySelectorAll(asked)].filter((node) => met(node) && !named(node));
  return without.map((node) => node.outerHTML.slice(0, 80));
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_layout_contrast_and_labels(browser, running, scheme):
    with visiting(browser, running.address, color_scheme=scheme, reduced_motion="reduce", quiet=False) as opened:

        def fits():
            for width in (320, 390, 820, 1440):
                opened.set_viewport_size({"width": width, "height": 800})
                assert opened.evaluate("document.documentElement.scrollWidth") <= width
                assert opened.evaluate(CONTRAST) == []
            assert opened.evaluate(NAMELESS) == []

        fits()
        give(opened, file(f"a name that is very long indeed {'and longer ' * 9}.jpg"))
        fits()
        opened.locator("#tab-relevance").click()
        opened.locator("#compare").click()
        fits()
        give(opened, file("b.jpg"), count=2)
        fits()
        opened.locator("#files").set_input_files([file("words.png", WORDS, "image/png")])
        trouble(opened)
        fits()
        assert opened.locator("h1").count() == 1
        assert opened.evaluate("document.documentElement.lang") == "en"
        animated = "document.getAnimations().filter(each => each.playState === 'running').length"
        assert opened.evaluate(animated) == 0
