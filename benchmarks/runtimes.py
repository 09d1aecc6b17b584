"""Speed, size and agreement of each runtime for the same model.

    python benchmarks/runtimes.py                              DeiT-Ti and S/16, everything: about 15 minutes on two free cores
    python benchmarks/runtimes.py --models Ti --rounds 5
    python benchmarks/runtimes.py --only "torch fp32" "openvino fp32" "openvino int8"

Every file is exported first; then all are interleaved in one process, with one image (latency) and sixteen (throughput).
DeiT-Ti has its published weights if they are in ../shared/weights, and its agreement with PyTorch is measured on the ImageNet
samples; S/16 has random weights: only speed and size are measured. int8 is calibrated on generated images for S/16, and for
DeiT-Ti on other samples than those compared, with every layer in int8, so that the speed is that of int8.
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch

import vitrail
from vitrail.data.decode import open_image as opened_picture
from vitrail.data.preprocessing import Preprocessing
from vitrail.deploy.export.comparison import generate_images
from vitrail.deploy.export.export import SUFFIXES, convert_onnx, open_own_file, write_fp32_onnx, write_model
from vitrail.deploy.export.graph import write_onnx
from vitrail.deploy.export.quantise import Quantiser, has_vnni
from vitrail.deploy.runtimes.base import ModelContract, Runtime
from vitrail.deploy.runtimes.exported import openvino_core
from vitrail.deploy.runtimes.open import build_contract
from vitrail.inference import TorchRuntime, run_pixels

SHARED = Path(__file__).parents[2] / "shared"
WEIGHTS, SAMPLES = SHARED / "weights" / "deit_tiny_patch16_224.safetensors", SHARED / "data" / "imagenet-samples"
NARROW = ("fp32", "fp16", "bf16", "int8")
FORMS = ("torch fp32", "torch bf16", *(f"{to} {precision}" for to in ("onnx", "openvino") for precision in NARROW))


def subject(name: str, aside: Path) -> tuple[Any, ModelContract]:
    """Return a model and its contract."""
    if name == "Ti" and WEIGHTS.exists():
        path = WEIGHTS
    else:
        path = aside / f"{name}.safetensors"
        pipeline = Preprocessing((224, 224), (248, 248), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
        vitrail.save(vitrail.build(f"{name}/16"), path, preprocessing=pipeline)
    model = vitrail.load(path)
    return model, build_contract(path, path, model)


def pictures(name: str, contract: ModelContract) -> tuple[np.ndarray, np.ndarray, str]:
    """Return the images to compare, those for the calibration of int8, and their description."""
    if name != "Ti" or not (WEIGHTS.exists() and SAMPLES.exists()):
        return (
            generate_images(contract.preprocessing, 32),
            generate_images(contract.preprocessing, 32, seed=1),
            "generated",
        )
    made = []
    for path in sorted(SAMPLES.iterdir()):
        with opened_picture(str(path), path.name) as image:
            made.append(contract.preprocessing.to_pixels(image).numpy())
    return np.stack(made[1::2]), np.stack(made[::4]), "every second of the ImageNet samples"


def contestants(
    name: str, model: Any, contract: ModelContract, calibration: np.ndarray, wanted: list[str], aside: Path
) -> tuple[dict[str, Runtime], dict[str, int], dict[str, str]]:
    """Return every runtime and precision that this machine can run, the bytes of its file, and the reasons for missing ones."""
    found: dict[str, Runtime] = {}
    sizes: dict[str, int] = {}
    left_out: dict[str, str] = {}
    between, rounded = aside / f"{name}.onnx", aside / f"{name}.int8.onnx"
    write_fp32_onnx(model, contract, between, uint8=True)
    if any(form.endswith("int8") for form in wanted):
        quantiser = Quantiser(between, calibration)
        write_onnx(quantiser.quantise_layers(quantiser.layer_names), rounded)
    can = list(openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))
    for form in wanted:
        to, precision = form.split()
        if to == "torch":
            found[form] = TorchRuntime(model, contract.preprocessing, precision=precision)
            continue
        if form == "openvino bf16" and "BF16" not in can:
            left_out[form] = f"this processor computes in {', '.join(can)}"
            continue
        place = aside / f"{name}-{precision}{SUFFIXES[to]}"
        convert_onnx(
            rounded if precision == "int8" else between, replace(contract, precision=precision), place, to, True
        )
        found[form] = open_own_file(place)[0]
        sizes[form] = sum(file.stat().st_size for file in (place, place.with_suffix(".bin")) if file.exists())
    if "torch fp32" in wanted:
        place = aside / f"{name}.pt2"
        write_model(model, contract, place, "torch", True)
        found["torch exported"] = open_own_file(place)[0]
        sizes["torch exported"] = place.stat().st_size
    return found, sizes, left_out


def row(
    name: str, batch: int, runtimes: dict[str, Runtime], pixels: np.ndarray, rounds: int, seconds: float
) -> dict[str, Any]:
    """Measure all contestants, interleaved, with one batch size."""
    few = pixels[:batch]
    runs: dict[str, Callable[[], Any]] = {form: lambda run=run: run(few) for form, run in runtimes.items()}
    times = measure.interleave(runs, rounds, at_least=seconds)
    speed = {form: batch / measure.median(each) for form, each in times.items()}
    base = speed["torch fp32"] if "torch fp32" in speed else next(iter(speed.values()))
    print(f"{name}/16, batch {batch}, {len(next(iter(times.values())))} rounds")
    for form, value in speed.items():
        print(
            f"  {form:<18}{1000 * batch / value:>10.2f} ms{value:>10.1f} pictures/s   {value / base:.2f}×", flush=True
        )
    return {
        "work": f"{name}/16, batch {batch}",
        "pictures_per_second": speed,
        "rounds": len(next(iter(times.values()))),
    }


def markdown(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table for docs/export.md."""
    lines = ["| model | runtime | file | same answer | largest difference | one picture | 16 at once, a second | |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for about in (row for row in rows if "forms" in row):
        one, many = (
            next(row["pictures_per_second"] for row in rows if row.get("work") == f"{about['model']}, batch {batch}")
            for batch in (1, 16)
        )
        base = many.get("torch fp32", next(iter(many.values())))
        for form, told in about["forms"].items():
            size = "–" if told["bytes"] is None else f"{told['bytes'] / 2**20:.1f} MB"
            same = f"{told['agreement']:.1%}" if about["source"] != "generated" else "–"
            lines.append(
                f"| {about['model']} | {form} | {size} | {same} | {told['largest_difference']:.1e} | "
                f"{1000 / one[form]:.1f} ms | {many[form]:.1f} | {many[form] / base:.2f}× |"
            )
        lines += [f"| {about['model']} | {form} | not run: {why} ||||||" for form, why in about["left_out"].items()]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("Ti", "S"), default=["Ti", "S"])
    parser.add_argument("--only", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=20.0, help="minimum seconds per row")
    parser.add_argument("--pictures", type=int, default=100, help="maximum number of images to compare")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="vitrail-") as directory:
        for name in options.models:
            model, contract = subject(name, Path(directory))
            judged, calibration, source = pictures(name, contract)
            judged = judged[: options.pictures]
            runtimes, sizes, left_out = contestants(name, model, contract, calibration, options.only, Path(directory))
            reference = run_pixels(TorchRuntime(model, contract.preprocessing), judged)
            told = {}
            for form, runtime in runtimes.items():
                logits = run_pixels(runtime, judged)
                told[form] = {
                    "largest_difference": float(np.abs(logits - reference).max()),
                    "agreement": float((logits.argmax(1) == reference.argmax(1)).mean()),
                    "bytes": sizes.get(form),
                }
                print(f"  {form:<18}{told[form]}", flush=True)
            about = {"model": f"{name}/16", "pictures": len(judged), "source": source, "forms": told}
            rows.append(
                about | {"left_out": left_out, "vnni": has_vnni(), "largest_logit": float(abs(reference).max())}
            )
            rows += [row(name, batch, runtimes, judged, options.rounds, options.seconds) for batch in (1, 16)]
    print(f"written to {measure.save('runtimes', rows)}")
    print("\n".join(markdown(rows)))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
