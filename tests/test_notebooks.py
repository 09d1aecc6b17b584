"""The notebooks run as they stand, and are saved with small outputs that readers on GitHub and on the site see."""

import importlib.util
import json
import re
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
CLOTHING = ROOT.parent / "shared" / "data" / "clothing"
DEIT = ROOT.parent / "shared" / "weights" / "deit_tiny_patch16_224.safetensors"


def run_notebook(name: str, folder: Path) -> str:
    """Run a notebook in a folder and return what it prints."""
    pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'vitrail[dev]'")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install 'vitrail[dev]'")
    spec = importlib.util.spec_from_file_location("run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    done = module.run_notebook(FOLDER / f"{name}.ipynb", folder)
    outputs = [output for cell in done.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    return "".join(output.get("text", "") for output in outputs)


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path):
    for name in ("PHOTOS", "WEIGHTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_saved_outputs_are_complete_small_and_free_of_machine_paths(path: Path):
    assert path.stat().st_size < 300_000
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))  # run once, from top to bottom
    assert {output["output_type"] for cell in code for output in cell["outputs"]} == {"stream", "display_data"}
    assert not re.search(r"/(home|root|tmp|work|Users)/", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_to_files(path: Path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert links
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_table_lists_every_notebook():
    listed = re.findall(
        r"\]\(notebooks/([\w-]+)\.ipynb\)", (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    )
    assert sorted(listed) == [path.stem for path in NOTEBOOKS]


@pytest.mark.slow
def test_the_quick_start_runs(tmp_path):
    printed = run_notebook("quick-start", tmp_path)
    assert "no errors" in printed
    assert "accuracy" in printed
    assert (tmp_path / "runs" / "digits-scratch-small-1" / "report.html").is_file()


@pytest.mark.slow
def test_a_vit_from_scratch_runs_and_equals_vitrail(tmp_path):
    printed = run_notebook("vit-from-scratch", tmp_path)  # its cells compare with vitrail.build
    assert float(re.findall(r"largest difference of the logits: (\S+)", printed)[0]) < 1e-4
    assert float(re.findall(r"test accuracy (\S+) %", printed)[0]) > 30  # of 10 classes


@pytest.mark.slow
def test_fine_tune_and_inspect_runs_without_photos_and_weights(tmp_path):
    printed = run_notebook("fine-tune-and-inspect", tmp_path)
    assert "(16, 16) pixels" in printed
    assert (tmp_path / "even-or-odd" / "train" / "odd").is_dir()


@pytest.mark.slow
@pytest.mark.skipif(not (CLOTHING.is_dir() and DEIT.is_file()), reason="no photographs or weights in ../shared")
def test_fine_tune_and_inspect_runs_with_photos_and_deit(tmp_path, monkeypatch):
    for split in ("train", "validation"):
        for label in ("dress", "shoes"):
            names = sorted(path.name for path in (CLOTHING / split / label).iterdir())[6:]
            copytree(CLOTHING / split / label, tmp_path / "small" / split / label, ignore=ignore_patterns(*names))
    monkeypatch.setenv("PHOTOS", str(tmp_path / "small"))
    monkeypatch.setenv("WEIGHTS", str(DEIT))
    printed = run_notebook("fine-tune-and-inspect", tmp_path)
    assert "5,717,416 parameters, 12 layers, (224, 224) pixels" in printed
