"""Tests of `vitrail inspect`: the command, its files, and its page in Chromium."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.analysis.figure_data import made_shown
from tests.data.spoilt import bomb, encoded, photograph, put
from tests.e2e.test_report import CONTRAST
from vitrail.analysis import trace_image
from vitrail.analysis.figures import terminal as in_terminal
from vitrail.analysis.figures.image_view import ImageView
from vitrail.analysis.figures.overlay import MAP_STRENGTH
from vitrail.analysis.inputs import CheckedFiles, InspectedModel, make_images
from vitrail.analysis.inspect import FILTER_COUNT, VIEWS, select_distance_files
from vitrail.analysis.page.data import pack_image
from vitrail.analysis.page.page import ImagePanel, render_inspection_page
from vitrail.cli import inspect as command
from vitrail.cli import main
from vitrail.data.preprocessing import Preprocessing
from vitrail.reports.colours import HEAT_CMAP, colour_table

NAMES = ("cat", "dog", "</script><script>document.title='owned'</script>")


def small(**given):
    torch.manual_seed(0)
    options = {"patch": 8, "width": 24, "depth": 3, "heads": 2, "image_size": 32, "classes": 3} | given
    return vitrail.build(**options)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Save a small model with labels and preprocessing."""
    path = tmp_path_factory.mktemp("model") / "small.safetensors"
    vitrail.save(small(), path, labels=NAMES, preprocessing=Preprocessing((32, 32), (36, 36)))
    return path


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Create images of unusual sizes, two with the same name."""
    root = tmp_path_factory.mktemp("photographs")
    put(root / "a.jpg", encoded(photograph(1)))
    put(root / "tall.png", encoded(photograph(2, (33, 201)), "PNG"))
    put(root / "below" / "a.jpg", encoded(photograph(3)))
    return root


def ran(*arguments, capsys):
    """Run the command in this process; return its exit code, standard output and standard error."""
    code = main(["inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def inspected(model, photographs, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "looked"
    result = subprocess.run(
        [sys.executable, "-m", "vitrail", "inspect", model, photographs, "--out", out, "--at", "20,9", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return out, json.loads(result.stdout), result


def test_every_image_and_the_model_have_figures_and_arrays(inspected):
    out, report, result = inspected
    assert result.stderr == ""
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["a", "a-2", "tall"]
    assert {path.name for path in out.iterdir() if path.is_file()} == {
        *("distance.png", "positions.png", "filters.png", "model.npz", "index.html", "inspect.json")
    }
    figures = {"attention", "attention-at", "rollout", "relevance", "tokens", "heads", "patches"}
    for each in report["images"]:
        folder = out / each["folder"]
        assert {path.name for path in folder.iterdir()} == {*(f"{name}.png" for name in figures), "arrays.npz"}
        for path in folder.glob("*.png"):
            with Image.open(path) as image:
                assert image.width > 1000
                assert np.asarray(image.convert("L")).std() > 10
    assert report["skipped"] == []
    assert json.loads((out / "inspect.json").read_text())["finished"]


def test_arrays_equal_the_analysis_of_the_crop(inspected, model, photographs):
    out, report, _ = inspected
    loaded = vitrail.load(model)
    stored = np.load(out / "tall" / "arrays.npz")
    assert stored["picture"].shape == (32, 32, 3)
    with Image.open(photographs / "tall.png") as image:
        image = loaded.preprocessing(image)[None]
    seen = trace_image(loaded, image, at=(1, 2))
    for name in ("attention", "attention_at", "rollout", "relevance", "norms", "between"):
        np.testing.assert_allclose(stored[name], getattr(seen, name), atol=1e-6, err_msg=name)
    each = next(each for each in report["images"] if each["folder"] == "tall")
    assert each["patch"] == {"row": 1, "column": 2}
    assert each["predicted"][0]["class"] == int(seen.logits.argmax())
    assert sum(one["probability"] for one in each["predicted"]) == pytest.approx(1)
    whole = np.load(out / "model.npz")
    assert whole["distance.mean"].shape == (3, 2)
    assert int(whole["distance.pictures"]) == 3
    assert whole["filters.tiles"].shape[1:] == (8, 8, 3)
    assert whole["positions.similarity"].shape == (4, 4, 4, 4)


def test_output_has_the_path_and_the_patch(model, photographs, tmp_path, capsys):
    code, stdout, stderr = ran(
        *(model, photographs / "a.jpg", "--out", tmp_path / "out", "--view", "rollout", "--at", "31,0"), capsys=capsys
    )
    assert (code, stderr) == (0, "")
    lines = stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path}/out/a  ")
    assert lines[0].endswith("patch in row 1, column 4")
    assert lines[-1] == str(tmp_path / "out" / "index.html")
    assert {path.name for path in (tmp_path / "out" / "a").iterdir()} == {"rollout.png", "relevance.png", "arrays.npz"}


def test_unreadable_images_are_listed_and_skipped(model, photographs, tmp_path, capsys):
    bad = tmp_path / "bad"
    good = encoded(photograph(1))
    put(bad / "zero.jpg", b"")
    put(bad / "short.jpg", good[:-2000])
    put(bad / "words.jpg", b"404: there was no such picture")
    put(bad / "bomb.png", bomb())
    put(bad / "line\nbreak.jpg", b"")
    os.mkfifo(bad / "pipe.jpg")
    code, stdout, stderr = ran(
        *(model, bad, photographs / "a.jpg", tmp_path / "gone.jpg", "--out", tmp_path / "out", "--view", "rollout"),
        capsys=capsys,
    )
    assert code == 1
    lines = stderr.splitlines()
    assert len(lines) == 7
    assert all(line.startswith("vitrail inspect: skipped ") for line in lines)
    for name, why in {
        "zero.jpg": "zero byte",
        "short.jpg": "truncated",
        "words.jpg": "not an image",
        "bomb.png": "megapixels",
        "pipe.jpg": "pipe",
        "gone.jpg": "no such file",
        "break.jpg": "zero byte",
    }.items():
        assert sum(name in line and why in line for line in lines) == 1, name
    assert (tmp_path / "out" / "a" / "rollout.png").is_file()
    code, stdout, stderr = ran(model, bad, "--out", tmp_path / "none", "--view", "rollout", capsys=capsys)
    assert (code, stdout) == (2, "")
    assert stderr.splitlines()[-1].startswith("vitrail inspect: no image could be read")
    assert not (tmp_path / "none").exists()
    for asked in (["--out", tmp_path / "far", "--view", "distance"], ["--terminal"], ["--terminal", "distance"]):
        code, stdout, stderr = ran(model, bad, *asked, capsys=capsys)
        assert (code, stdout) == (2, "")
        assert len(stderr.splitlines()) == 1
        assert stderr.startswith("vitrail inspect: no image could be read: ")
        assert stderr.count(str(bad)) == 3
        assert stderr.endswith("; and 3 more\n")
        assert not (tmp_path / "far").exists()
    code, _, stderr = ran(
        *(model, bad, photographs / "a.jpg", "--terminal", "--out", tmp_path / "both", "--view", "rollout"),
        capsys=capsys,
    )
    assert code == 1
    assert len(stderr.splitlines()) == 6  # each once, though both outputs skipped it
    code, stdout, stderr = ran(model, bad, photographs / "a.jpg", "--terminal", "distance", capsys=capsys)
    assert code == 1
    assert len(stderr.splitlines()) == 6
    assert "over 1 image:" in stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --out DIR, or --terminal"),
        (["--json"], "give --out DIR, or --terminal"),
        (["--json", "--terminal"], "leave one of them out"),
        (["--json", "--terminal", "distance", "--out", "{tmp}/new"], "leave one of them out"),
        (["--out", "/proc/x/new"], "cannot make the directory /proc/x/new: "),
        (["--out", "{tmp}/new", "--at", "32,0"], "--at must be 0,0 to 31,31 of the preprocessed image, got 32,0"),
        (["--out", "{tmp}/new", "--layers", "4"], "layer must be 1 to 3, got 4"),
        (["--out", "{tmp}/new", "--target", "dogg"], "no such class. did you mean 'dog'?"),
        (["--out", "{tmp}/new", "--target", "3"], "--target must be 0 to 2, got 3"),
        (["--out", "{tmp}/new", "--size", "33"], "33"),
        (["--out", "{tmp}/new", "--device", "tpu"], "unknown device 'tpu'"),
        (["--out", "{tmp}/taken"], "not written by an inspection"),
        (["--out", "{tmp}/taken/file"], "is a file"),
    ],
)
def test_user_errors_are_one_line_and_write_nothing(model, photographs, tmp_path, capsys, arguments, message):
    put(tmp_path / "taken" / "file", b"mine")
    code, stdout, stderr = ran(
        *(model, photographs / "a.jpg", *(each.format(tmp=tmp_path) for each in arguments)), capsys=capsys
    )
    assert (code, stdout) == (2, "")
    assert len(stderr.splitlines()) == 1
    assert message in stderr
    assert not (tmp_path / "new").exists()


def test_images_named_like_output_files_do_not_collide(model, tmp_path, capsys):
    names = ("index.html", "distance.png", "Positions.png", "filters.png", "model.npz", "inspect.json")
    for number, name in enumerate(names):
        put(tmp_path / "in" / f"{name}.png", encoded(photograph(number), "PNG"))
    out = tmp_path / "out"
    asked = [option for view in ("rollout", "distance", "positions", "filters") for option in ("--view", view)]
    code, stdout, stderr = ran(model, tmp_path / "in", "--out", out, *asked, "--json", capsys=capsys)
    assert (code, stderr) == (0, "")
    report = json.loads(stdout)
    assert {each["folder"] for each in report["images"]} == {f"{name}-2" for name in names}
    assert all((out / f"{name}-2" / "rollout.png").is_file() for name in names)
    assert all((out / name.lower()).is_file() for name in names)


def test_a_folder_named_like_an_image_is_searched(model, photographs, tmp_path, capsys):
    shutil.copytree(photographs / "below", tmp_path / "in" / "folder.png")
    code, stdout, stderr = ran(
        *(model, tmp_path / "in", "--out", tmp_path / "out", "--view", "rollout", "--json"), capsys=capsys
    )
    assert (code, stderr) == (0, "")
    assert [each["folder"] for each in json.loads(stdout)["images"]] == ["a"]


def test_models_without_usable_preprocessing_are_refused(photographs, tmp_path, capsys):
    vitrail.save(small(), tmp_path / "bare.safetensors", labels=NAMES)
    five = Preprocessing((32, 32), (36, 36)).with_channels(5)
    vitrail.save(small(channels=5), tmp_path / "five.safetensors", labels=NAMES, preprocessing=five)
    run = tmp_path / "run"
    put(run / "run.json", b"{}")
    put(run / "best.safetensors", b"")
    for where, message in {
        tmp_path / "bare.safetensors": "save it again with vitrail.save(…, preprocessing=…)",
        tmp_path / "five.safetensors": "takes 5 channels, images have 1, 3 or 4: ",
        run: f"is an unfinished run: continue it with vitrail train --resume {run}, "
        f"or use {run}/best.safetensors, its best so far",
    }.items():
        code, stdout, stderr = ran(where, photographs, "--out", tmp_path / "out", capsys=capsys)
        assert (code, stdout) == (2, "")
        assert len(stderr.splitlines()) == 1
        assert message in stderr
        assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("error")
def test_an_image_of_one_patch_gives_no_warnings(model, photographs, tmp_path, capsys):
    code, _, stderr = ran(
        *(model, photographs / "a.jpg", "--size", "8", "--out", tmp_path / "out", "--view", "distance"), capsys=capsys
    )
    assert (code, stderr) == (0, "")


def test_a_resnet_and_an_empty_folder_are_refused(photographs, tmp_path, capsys):
    vitrail.save(vitrail.build("R26x0.25", classes=3, image_size=32), tmp_path / "r.safetensors")
    code, _, stderr = ran(tmp_path / "r.safetensors", photographs, "--out", tmp_path / "out", capsys=capsys)
    assert code == 2
    assert stderr.startswith("vitrail inspect: ")
    assert "does not support BiT ResNets" in stderr
    (tmp_path / "empty").mkdir()
    code, _, stderr = ran(tmp_path / "r.safetensors", tmp_path / "empty", "--out", tmp_path / "out", capsys=capsys)
    assert code == 2
    assert "has no images" in stderr


def test_targets_by_name_or_index_and_other_sizes(model, photographs, tmp_path, capsys):
    shapes = {}
    for target, size in (("DOG", "32"), ("1", "48x64")):
        code, stdout, _ = ran(
            *(model, photographs / "a.jpg", "--out", tmp_path / "out", "--view", "rollout", "--view", "positions"),
            *("--target", target, "--size", size, "--json"),
            capsys=capsys,
        )
        assert code == 0
        assert json.loads(stdout)["images"][0]["target"] == {"class": 1, "name": "dog"}
        shapes[size] = np.load(tmp_path / "out" / "a" / "arrays.npz")["rollout"].shape
        where = np.load(tmp_path / "out" / "model.npz")["positions.similarity"].shape
    assert shapes == {"32": (4, 4), "48x64": (6, 8)}
    assert where == (6, 8, 6, 8)


@pytest.mark.parametrize(
    "slots",
    [
        {"position": "relative"},
        {"position": "rotary2d", "pool": "mean", "registers": 2},
        {"position": "none", "pool": "mean"},
        {"position": "sincos2d", "classes": None, "channels": 1},
        {"prefix": "class+distillation"},
        {"embed": "conv-stem"},
    ],
    ids=str,
)
def test_every_kind_of_model_can_be_inspected(slots, photographs, tmp_path, capsys):
    made = small(**slots)
    channels = slots.get("channels", 3)
    pipeline = Preprocessing((32, 32), (32, 32)).with_channels(channels)
    vitrail.save(made, tmp_path / "model.safetensors", preprocessing=pipeline)
    views = [part for view in ("rollout", "tokens", "positions", "patches") for part in ("--view", view)]
    code, _, stderr = ran(
        tmp_path / "model.safetensors", photographs / "a.jpg", "--out", tmp_path / "out", *views, capsys=capsys
    )
    assert (code, stderr) == (0, "")
    assert (tmp_path / "out" / "positions.png").exists() == (slots.get("position") != "none")
    assert (tmp_path / "out" / "a" / "relevance.png").exists() == ("classes" not in slots)
    assert (tmp_path / "out" / "index.html").stat().st_size > 20_000


def test_unusual_image_modes_are_converted(model, tmp_path, capsys):
    put(tmp_path / "print.jpg", encoded(photograph(4).convert("CMYK")))
    put(tmp_path / "deep.png", encoded(Image.fromarray(np.arange(1600, dtype=np.uint16).reshape(40, 40) * 40), "PNG"))
    put(tmp_path / "moves.gif", encoded(photograph(5), "GIF", save_all=True, append_images=[photograph(6)]))
    put(tmp_path / "dot.png", encoded(photograph(7).resize((1, 1)), "PNG"))
    code, stdout, stderr = ran(model, tmp_path, "--terminal", "patches", capsys=capsys)
    assert (code, stderr) == (0, "")
    named = [line.partition(":")[0] for line in stdout.splitlines() if re.match(r"\w+\.\w+: ", line)]
    assert named == ["deep.png", "dot.png", "moves.gif", "print.jpg"]


def test_limit_is_reported(model, photographs, tmp_path, capsys):
    code, stdout, _ = ran(
        *(model, photographs, "--out", tmp_path / "out", "--view", "rollout", "--limit", "2"), capsys=capsys
    )
    assert code == 0
    assert len([path for path in (tmp_path / "out").iterdir() if path.is_dir()]) == 2
    assert "2 of 3 images are drawn: --limit 3 draws all" in stdout


@pytest.mark.parametrize("view", in_terminal.TERMINAL_VIEWS)
def test_terminal_views_have_no_colours_in_pipes(model, photographs, capsys, view, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    code, stdout, stderr = ran(model, photographs / "a.jpg", "--terminal", view, capsys=capsys)
    assert (code, stderr) == (0, "")
    assert "\033" not in stdout
    assert len(stdout.splitlines()) >= 4
    if view not in ("distance", "positions", "filters"):
        assert stdout.splitlines()[-1].startswith("a.jpg: ")


def test_terminals_get_colours(model, photographs):
    arguments = [sys.executable, "-m", "vitrail", "inspect", str(model), str(photographs / "a.jpg"), "--terminal"]
    script = f"import os, pty, sys\ncode = pty.spawn({arguments!r})\nsys.exit(os.waitstatus_to_exitcode(code))"
    wants = {
        "\033[38;2;": {"TERM": "xterm-256color", "COLORTERM": "truecolor"},
        "\033[38;5;": {"TERM": "xterm-256color", "COLORTERM": ""},
    }
    for escape, environment in wants.items():
        environment = {**os.environ, **environment}
        environment.pop("NO_COLOR", None)
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120, env=environment)
        assert result.returncode == 0
        assert escape.encode() in result.stdout
        assert "▀".encode() in result.stdout


def test_number_of_filters(model, photographs, tmp_path, capsys):
    for asked, count in (((), 23), (("--filters", "5"), 5)):  # of 24 filters there are 23 components
        code, _, _ = ran(
            model, photographs / "a.jpg", "--out", tmp_path / "out", "--view", "filters", *asked, capsys=capsys
        )
        assert code == 0
        assert len(np.load(tmp_path / "out" / "model.npz")["filters.tiles"]) == count


def test_distances_use_128_images_or_the_limit():
    files = [Path(f"{k}.jpg") for k in range(300)]
    assert [len(select_distance_files(files, limit)) for limit in (1, 200, 400)] == [128, 200, 300]


def test_large_images_are_measured_one_at_a_time(photographs):
    images = make_images(CheckedFiles.from_paths([str(photographs / "a.jpg")] * 9))
    for size, most in ((32, [8, 1]), (208, [3, 3, 3]), (512, [1] * 9)):  # 16, 676 and 4,096 patches
        model = vitrail.build(patch=8, width=24, depth=1, heads=2, image_size=size)
        inspected = InspectedModel(model, Preprocessing((size, size), (size, size)), "")
        read, skipped = [], []
        assert [len(batch) for batch in inspected.iter_batches(images, read, skipped, "", None)] == most
        assert (read, skipped) == (list(range(9)), [])


def test_help_imports_no_torch_and_lists_the_views():
    assert (command.DEFAULT_IMAGES, command.DEFAULT_FILTERS) == (12, FILTER_COUNT)
    assert command.VIEWS == VIEWS
    assert command.TERMINAL_VIEWS == in_terminal.TERMINAL_VIEWS
    heavy = "{'torch', 'numpy', 'matplotlib'}"
    code = (
        f"import sys; from vitrail.cli import build_parser; build_parser(); print(sorted({heavy} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "[]\n", result.stderr


# The page.


GREY = 100
GROUND = 0.4 * GREY + 0.6 * (18 + 0.72 * GREY)  # maps begin at 60 %


def on_grey(name, **given) -> ImageView:
    """Return a uniform grey image, so that every pixel of the map is known."""
    shown = made_shown(name, layers=3, heads=2, grid=(4, 5), patch=8, at=(2, 3), **given)
    shown.pixels[:] = GREY
    return ImageView(shown.name, shown.pixels, shown.trace, NAMES * 4, shown.model)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Write a page of three images, the last on a coarser grid; return its path and the images."""
    made = small(depth=3, heads=2)
    pictures = [on_grey("one.png"), on_grey(NAMES[2], seed=1), on_grey("coarse.png", seed=2, coarse=(2, 3))]
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(
        render_inspection_page(
            NAMES[2], made, [ImagePanel(pack_image(each), ["one/rollout.png"]) for each in pictures], []
        )
    )
    return path, pictures


def visit(browser, path: Path, width=1280, scheme="light"):
    """Open a page and return it with the list of its console messages, errors and network requests."""
    context = browser.new_context(viewport={"width": width, "height": 1400}, color_scheme=scheme)
    opened, messages = context.new_page(), []
    opened.set_default_timeout(60_000)
    opened.on("console", lambda message: messages.append(message.text))
    opened.on("pageerror", lambda error: messages.append(str(error)))
    opened.on(
        "request", lambda asked: messages.append(asked.url) if not asked.url.startswith(("file:", "data:")) else None
    )
    opened.goto(path.as_uri())
    wait_for(opened, "document.documentElement.dataset.ready === '0'")
    return opened, messages


def on_stage(opened) -> np.ndarray:
    """Return the colour near the top left corner of every patch, where no outline is drawn: [h, w, 3]."""
    return np.array(
        opened.evaluate("""() => {
          const stage = document.getElementById("stage"), context = stage.getContext("2d");
          const [h, w] = now.grid, side = stage.width / w, found = [];
          for (let y = 0; y < h; y++) for (let x = 0; x < w; x++)
            found.push([...context.getImageData((x + .5) * side, (y + .5) * side, 1, 1).data].slice(0, 3));
          return found;
        }""")
    )


def expected(values: np.ndarray) -> np.ndarray:
    """Return the colours of a map [h, w] over grey."""
    codes = np.round(values.astype(np.float64) / values.max() * 255)
    part = 0.6 * (0.12 + 0.76 * (codes / 255) ** 0.8)[..., None]
    return ((1 - part) * GROUND + part * colour_table(HEAT_CMAP)[codes.astype(int)]).reshape(-1, 3)


def wait_for(opened, true):
    """Poll a condition: the content security policy of the page forbids `wait_for_function`, which evaluates strings."""
    for _ in range(600):
        if opened.evaluate(true):
            return
        opened.wait_for_timeout(50)
    raise AssertionError(f"never became true: {true}")


def point(opened, row, column):
    box = opened.locator("#stage").bounding_box()
    opened.mouse.move(box["x"] + (column + 0.5) * box["width"] / 5, box["y"] + (row + 0.5) * box["height"] / 4)
    wait_for(opened, f"document.getElementById('explore').dataset.patch === '{row},{column}'")


def test_hover_draws_the_attention_of_the_patch(browser, written):
    path, pictures = written
    opened, messages = visit(browser, path)
    seen = pictures[0].trace
    np.testing.assert_allclose(on_stage(opened), expected(seen.attention[2].mean(0)), atol=3)
    opened.locator("#layer").fill("2")
    opened.locator("#head").fill("1")
    np.testing.assert_allclose(on_stage(opened), expected(seen.attention[1, 0]), atol=3)
    for row, column in ((0, 0), (2, 3), (3, 4)):
        point(opened, row, column)
        want = seen.between[1, 0, row * 5 + column].astype(np.float32).reshape(4, 5)
        np.testing.assert_allclose(on_stage(opened), expected(want), atol=3)
    most = np.unravel_index(want.argmax(), want.shape)
    assert f"most goes to row {most[0] + 1}, column {most[1] + 1}" in opened.locator("#caption").inner_text()
    opened.mouse.move(0, 0)
    wait_for(opened, "document.getElementById('explore').dataset.patch === ''")
    np.testing.assert_allclose(on_stage(opened), expected(seen.attention[1, 0]), atol=3)
    assert messages == []
    opened.context.close()


def test_click_selects_a_head(browser, written):
    path, pictures = written
    opened, _ = visit(browser, path)
    buttons = opened.locator("#heads button")
    assert buttons.locator("b").all_inner_texts() == ["mean", "head 1", "head 2"]
    buttons.nth(2).click()
    assert buttons.nth(2).get_attribute("aria-pressed") == "true"
    np.testing.assert_allclose(on_stage(opened), expected(pictures[0].trace.attention[2, 1]), atol=3)
    every = opened.evaluate("[all.width, all.height]")
    assert every == [3 * 6 - 1, 2 * 5 - 1]
    box = opened.locator("#all").bounding_box()
    opened.mouse.click(box["x"] + 3, box["y"] + 3)
    state = opened.evaluate("({...document.getElementById('explore').dataset})")
    assert (state["layer"], state["head"]) == ("1", "1")
    opened.context.close()


def test_page_works_with_the_keyboard(browser, written):
    path, pictures = written
    opened, messages = visit(browser, path)
    seen, state = pictures[0].trace, "({...document.getElementById('explore').dataset})"
    opened.locator("#stage").focus()
    assert opened.evaluate("getComputedStyle(stage).outlineStyle") != "none"
    opened.keyboard.press("ArrowDown")
    assert opened.evaluate(state)["patch"] == "2,3"  # the selected patch comes first
    row, column = seen.at
    for key, down, across in (("ArrowUp", -1, 0), ("ArrowLeft", 0, -1), ("ArrowRight", 0, 1), ("ArrowUp", -1, 0)):
        opened.keyboard.press(key)
        row, column = min(3, max(0, row + down)), min(4, max(0, column + across))
        assert opened.evaluate(state)["patch"] == f"{row},{column}"
    want = seen.between[2, :, row * 5 + column].astype(np.float32).mean(0).reshape(4, 5)
    np.testing.assert_allclose(on_stage(opened), expected(want), atol=4)
    opened.keyboard.press("Escape")
    assert opened.evaluate(state)["patch"] == ""
    opened.locator("#layer").focus()
    opened.keyboard.press("ArrowLeft")
    assert opened.evaluate(state)["layer"] == "2"
    assert opened.locator("#layer").get_attribute("aria-valuetext") == "2 of 3"
    opened.locator("#tab-attention").focus()
    opened.keyboard.press("ArrowRight")
    assert opened.evaluate(state)["tab"] == "rollout"
    np.testing.assert_allclose(on_stage(opened), expected(seen.rollout), atol=3)
    opened.keyboard.press("ArrowRight")
    assert opened.evaluate(state)["tab"] == "relevance"
    np.testing.assert_allclose(on_stage(opened), expected(seen.relevance), atol=3)
    opened.keyboard.press("ArrowRight")
    colours = seen.colours[2].reshape(-1, 3) * 255
    np.testing.assert_allclose(on_stage(opened), (1 - 0.6 * 0.94) * GROUND + 0.6 * 0.94 * colours, atol=3)
    assert messages == []
    opened.context.close()


def test_click_keeps_the_patch_for_another_image(browser, written):
    path, pictures = written
    opened, messages = visit(browser, path)
    point(opened, 1, 1)
    opened.mouse.down()
    opened.mouse.up()
    opened.mouse.move(0, 0)
    opened.locator("[name=image]").nth(1).check(force=True)
    wait_for(opened, "document.documentElement.dataset.ready === '1'")
    want = pictures[1].trace.between[2, :, 6].astype(np.float32).mean(0).reshape(4, 5)
    np.testing.assert_allclose(on_stage(opened), expected(want), atol=4)
    assert opened.locator("#file").inner_text() == NAMES[2]
    assert opened.title() == f"Attention of {NAMES[2]}"  # escaped
    assert not opened.locator("#coarse").is_visible()
    opened.locator("[name=image]").nth(2).check(force=True)
    wait_for(opened, "document.documentElement.dataset.ready === '2'")
    assert "coarser grid of 2×3 cells of 2×2 patches" in opened.locator("#coarse").inner_text()
    cell = (
        pictures[2].trace.between[2, :, 0].astype(np.float32).mean(0).reshape(2, 3)
    )  # of the patch in row 2, column 2
    wide = np.kron(cell, np.ones((2, 2)))[:4, :5]
    np.testing.assert_allclose(on_stage(opened), expected(wide), atol=4)
    assert messages == []
    opened.context.close()


def test_strength_0_shows_the_image(browser, written):
    opened, _ = visit(browser, written[0])
    opened.locator("#strength").fill("0")
    assert np.abs(on_stage(opened) - GREY).max() <= 2
    opened.context.close()


def test_maps_begin_at_60_percent(browser, written):
    opened, _ = visit(browser, written[0])
    assert opened.locator("#strength").input_value() == "60"
    assert opened.locator("#strength").get_attribute("aria-valuetext") == "60 %"
    assert opened.evaluate("MAP_STRENGTH") == MAP_STRENGTH  # of the page and of the figures
    opened.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_fits_a_phone_with_enough_contrast(browser, written, inspected, scheme):
    for path in (written[0], inspected[0] / "index.html"):
        opened, messages = visit(browser, path, 390, scheme)
        for width in (390, 820, 1280):
            opened.set_viewport_size({"width": width, "height": 900})
            for tab in ("attention", "rollout", "tokens"):
                opened.locator(f"#tab-{tab}").click()
                assert opened.evaluate("document.documentElement.scrollWidth") <= width
                assert opened.evaluate(CONTRAST) == []
        assert opened.evaluate("[...document.images].filter(i => !i.complete || !i.naturalWidth).length") == 0
        assert messages == []
        opened.context.close()


def test_page_is_self_contained(inspected):
    text = (inspected[0] / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", text)
    assert "default-src &#x27;none&#x27;" in text
    assert text.count("<script") == text.count("</script>") == 2 + len(inspected[1]["images"])


@pytest.mark.parametrize("views", [["heads"], ["patches"], ["heads", "patches", "rollout"]], ids=str)
def test_heads_and_patches_are_embedded_in_the_page(browser, model, photographs, tmp_path, capsys, views):
    asked = [part for view in views for part in ("--view", view)]
    code, _, _ = ran(model, photographs, "--out", tmp_path / "out", *asked, capsys=capsys)
    assert code == 0
    alone = tmp_path / "alone.html"
    shutil.copy(tmp_path / "out" / "index.html", alone)  # without the files beside it
    opened, messages = visit(browser, alone)
    shown = opened.locator(".of-image:visible")
    assert shown.evaluate_all("parts => parts.map(part => part.dataset.view)") == [v for v in views if v != "rollout"]
    assert opened.locator("#stage").is_visible() == ("rollout" in views)
    image = shown.first.locator("img")
    first = image.get_attribute("src")
    opened.locator("[name=image]").nth(1).check(force=True)
    wait_for(opened, "document.documentElement.dataset.ready === '1'")
    assert image.get_attribute("src") != first
    wait_for(opened, "[...document.images].every(i => i.complete && i.naturalWidth)")
    assert image.evaluate("i => i.naturalWidth") > 1000
    assert messages == []
    opened.context.close()


def test_figures_are_embedded_in_the_page(browser, inspected, tmp_path):
    shutil.copy(inspected[0] / "index.html", tmp_path / "alone.html")
    opened, messages = visit(browser, tmp_path / "alone.html")
    sources = opened.evaluate("[...document.images].map(i => i.src.slice(0, 5))")
    assert set(sources) == {"data:"}
    assert len(sources) == 3 + 2 + 3  # thumbs; heads and patches; distance, positions and filters
    wait_for(opened, "[...document.images].every(i => i.complete && i.naturalWidth)")
    assert messages == []
    opened.context.close()
