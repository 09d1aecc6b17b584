"""Run the notebooks and save them with their outputs.

    python examples/notebooks/run.py [NAME …]        or: make notebooks

Each runs in an empty folder, which is deleted afterwards. Notebook 2 takes PHOTOS, a folder of class folders, and WEIGHTS, a
checkpoint, from the environment if they are set; the saved outputs are from photographs of clothing (CC0) and DeiT-Ti.
"""

import argparse
import base64
import io
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

HERE = Path(__file__).parent


def run_notebook(path: Path, folder: Path, timeout: float = 600) -> nbformat.NotebookNode:
    """Run a notebook in a folder and return it with its outputs, without what differs from run to run."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=resources, record_timing=False).execute()
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for number, cell in enumerate(notebook.cells, 1):
        cell.id = f"cell-{number}"
        cell.metadata = {}
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = shrink_png(output.data["image/png"])
    return notebook


def shrink_png(text: str) -> str:
    """Return a PNG in base64 with a palette of 256 colours, if that is smaller."""
    made = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(text))) as image:
        image.convert("RGB").quantize(256, kmeans=2).save(made, "PNG", optimize=True)
    return min(text, base64.b64encode(made.getvalue()).decode(), key=len)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks to run, such as quick-start [all]")
    names = parser.parse_args().names or sorted(path.stem for path in HERE.glob("*.ipynb"))
    for name in names:
        path = HERE / f"{name}.ipynb"
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(run_notebook(path, Path(folder)), path)
        print(f"{path.name}  {path.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
