"""Time and memory of loading a checkpoint, against timm and transformers.

    python benchmarks/weights.py

Loading: ViT-B/16 with fresh weights, written once in each format; every contestant goes from the file to a model in evaluation
mode, files in the page cache, interleaved in one process. Memory: the peak resident set of a process of its own, above its
memory after the imports. Detection: from the path to the report on a header, for H/14.
"""

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measure
import torch

MEMORY = """
import sys
from pathlib import Path
{imports}
def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
before = resident("VmRSS")
{load}
print(resident("VmHWM") - before)
"""
OPERATORS = """
import torch
library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def write_forms(folder: Path) -> dict[str, Path]:
    """Write B/16 in every compared format."""
    import vitrail
    from vitrail.checkpoints.artifact import CheckpointContract
    from vitrail.checkpoints.convert import write_and_verify

    config = vitrail.configure("B/16", init="deit")
    contract = CheckpointContract(config, preprocessing=vitrail.Preprocessing())
    state = vitrail.build_from(config).state_dict()
    forms = {"vitrail": "artifact.safetensors", "timm": "timm.safetensors", "hf": "hf", "big_vision": "b16.npz"}
    for to, name in forms.items():
        write_and_verify(contract, dict(state), folder / name, to)
    write_and_verify(contract, dict(state), folder / "timm.pth", "timm")
    return {**{to: folder / name for to, name in forms.items()}, "pth": folder / "timm.pth"}


def loading(paths: dict[str, Path], rounds: int) -> list[dict[str, Any]]:
    """Measure the seconds from file to model."""
    import timm
    import transformers
    from safetensors.torch import load_file

    import vitrail

    def by_timm() -> Any:
        model = timm.create_model("vit_base_patch16_224")
        model.load_state_dict(load_file(paths["timm"]))
        return model.eval()

    def by_timm_path() -> Any:
        return timm.create_model("vit_base_patch16_224", checkpoint_path=str(paths["timm"])).eval()

    def by_transformers() -> Any:
        return transformers.AutoModelForImageClassification.from_pretrained(paths["hf"]).eval()

    def with_processor() -> Any:
        return by_transformers(), transformers.AutoImageProcessor.from_pretrained(paths["hf"])

    def and_read() -> Any:
        model, processor = with_processor()
        return model, processor, [float(parameter.detach().sum()) for parameter in model.parameters()]

    contestants = {
        "vitrail, its artifact (checksums compared)": lambda: vitrail.load(paths["vitrail"]),
        "vitrail, timm's safetensors": lambda: vitrail.load(paths["timm"]),
        "vitrail, transformers' directory": lambda: vitrail.load(paths["hf"]),
        "vitrail, PyTorch's .pth": lambda: vitrail.load(paths["pth"]),
        "vitrail, Google's .npz": lambda: vitrail.load(paths["big_vision"]),
        "timm, create_model + load_state_dict": by_timm,
        "timm, create_model(checkpoint_path=)": by_timm_path,
        "transformers, from_pretrained": by_transformers,
        "transformers, and its processor": with_processor,
        "transformers, and every weight read once": and_read,
    }
    seconds = measure.interleave(contestants, rounds)
    rows = [{"who": who, "seconds": measure.median(times), "worst": max(times)} for who, times in seconds.items()]
    for row in rows:
        print(f"{row['who']:<50}{row['seconds']:7.3f} s   worst {row['worst']:.3f}")
    found = {row["who"]: row["seconds"] for row in rows}
    timm_best = min(found["timm, create_model + load_state_dict"], found["timm, create_model(checkpoint_path=)"])
    ours = found["vitrail, transformers' directory"]
    ratios = {"timm / vitrail, the same file": timm_best / found["vitrail, timm's safetensors"]}
    for who in ("from_pretrained", "and its processor", "and every weight read once"):
        ratios[f"transformers, {who} / vitrail"] = found[f"transformers, {who}"] / ours
    for name, ratio in ratios.items():
        print(f"{name:<50}{ratio:7.2f}     target 1.5")
    return [*rows, ratios]


def memory(paths: dict[str, Path]) -> list[dict[str, Any]]:
    """Measure the peak resident set of loading, as a multiple of the file size."""
    jobs = {
        "vitrail, its artifact": (
            "import vitrail.checkpoints.load",
            f"vitrail.load({str(paths['vitrail'])!r})",
            "vitrail",
        ),
        "vitrail, timm's safetensors": (
            "import vitrail.checkpoints.load",
            f"vitrail.load({str(paths['timm'])!r})",
            "timm",
        ),
        "vitrail, transformers' directory": (
            "import vitrail.checkpoints.load",
            f"vitrail.load({str(paths['hf'])!r})",
            "hf",
        ),
        "timm": (
            f"{OPERATORS}\nimport timm\nfrom safetensors.torch import load_file",
            f"m = timm.create_model('vit_base_patch16_224'); m.load_state_dict(load_file({str(paths['timm'])!r}))",
            "timm",
        ),
        "transformers": (
            f"{OPERATORS}\nfrom transformers import ViTForImageClassification as V",
            f"m = V.from_pretrained({str(paths['hf'])!r})",
            "hf",
        ),
    }
    rows = []
    for who, (imports, load, form) in jobs.items():
        script = MEMORY.format(imports=imports, load=load)
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        path = paths[form] / "model.safetensors" if paths[form].is_dir() else paths[form]
        ratio = int(result.stdout.split()[-1]) / path.stat().st_size
        rows.append({"who": who, "peak": int(result.stdout.split()[-1]), "of_file": ratio})
        print(f"{who:<50}{ratio:7.2f} × the file size" + ("     target 1.15" if who.startswith("vitrail") else ""))
    return rows


def recognising(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure the seconds to detect H/14 from its header; the values are a hole in the file and never read."""
    import vitrail
    from vitrail.checkpoints.card import build_report
    from vitrail.checkpoints.formats.timm import map_vit
    from vitrail.checkpoints.keys import compute_expected_shapes
    from vitrail.checkpoints.load import inspect_checkpoint

    config = vitrail.configure("H/14")
    entries, at = {}, 0
    for name, shape in compute_expected_shapes(map_vit(config), config).items():
        end = at + 4 * int(torch.tensor(shape).prod())
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    header = json.dumps(entries).encode()
    path = folder / "h14.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + at)
    times = []
    for _ in range(rounds):
        from vitrail.checkpoints import keys

        keys.build_meta_state.cache_clear()
        begin = time.perf_counter()
        with inspect_checkpoint(path) as found:
            build_report(found, None)
        times.append(time.perf_counter() - begin)
    size = path.stat().st_size
    print(
        f"detecting H/14 ({size / 2**30:.2f} GB): first {times[0]:.3f} s, median {measure.median(times):.3f} s   target 0.5 s"
    )
    return {"bytes": size, "first": times[0], "median": measure.median(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = {"recognising": recognising(folder, options.rounds)}
        paths = write_forms(folder)
        rows |= {"loading": loading(paths, options.rounds), "memory": memory(paths)}
    print(f"written to {measure.save('weights', rows)}")


if __name__ == "__main__":
    main()
