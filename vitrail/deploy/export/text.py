"""Export of a text tower: token ids to unit vectors, compared with the model, with the tokeniser beside the file.

The image tower is exported as any other model. The metadata has the scale and the bias of the logits of both, and the cleaning of
texts before the tokeniser.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.tokenizer import Tokenizer
from vitrail.deploy import RUNTIME_SUFFIXES
from vitrail.deploy.export.graph import OPSET, check_onnx_installed, clean_metadata, silence_exporter, write_onnx
from vitrail.deploy.runtimes import exported
from vitrail.models.two_towers import TwoTowers
from vitrail.prompts import trim_tokens
from vitrail.utils.files import stage_output
from vitrail.utils.json import to_json

if TYPE_CHECKING:
    from onnx import ModelProto

METADATA_KEY = "vitrail.text"
TARGETS = ("onnx", "openvino")
COMPARED = 64  # texts of random tokens
TOLERANCE = 1e-3  # of a value of a unit vector


class TextGraph(nn.Module):
    """Token ids [B, T] to unit vectors [B, F]."""

    def __init__(self, towers: TwoTowers) -> None:
        super().__init__()
        self.text = towers.text

    def forward(self, tokens: Tensor) -> Tensor:
        return F.normalize(self.text(tokens), dim=-1)


@dataclass(frozen=True)
class TextExport:
    """The files that were written, and how far they differ from the model."""

    file: Path
    tokenizer: Path | None
    runtime: str
    context: int
    features: int
    largest_difference: float

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as values for JSON."""
        paths = {"file": str(self.file), "tokenizer": None if self.tokenizer is None else str(self.tokenizer)}
        numbers = {"context": self.context, "features": self.features, "largest_difference": self.largest_difference}
        return paths | {"runtime": self.runtime} | numbers


def export_text(towers: TwoTowers, path: Path) -> TextExport:
    """Write the text tower of a model, verify it, and return the result; a file that differs is not kept."""
    target = RUNTIME_SUFFIXES.get(path.suffix)
    if target not in TARGETS:
        raise ValueError(f"{path}: a text tower is written as .onnx or .xml (OpenVINO)")
    check_onnx_installed()
    towers = towers.eval()
    with stage_output(path, 4 * sum(parameter.numel() for parameter in towers.text.parameters())) as staged:
        if target == "openvino":
            with tempfile.TemporaryDirectory(prefix="vitrail-") as folder:
                write_onnx(build_proto(towers), Path(folder) / "text.onnx")
                convert(Path(folder) / "text.onnx", towers, staged)
        else:
            write_onnx(build_proto(towers), staged)
        difference = compare(towers, staged, target)
        if difference > TOLERANCE:
            differs = f"the {target} file differs from the model by {difference:.2g}, more than {TOLERANCE:g}"
            raise ValueError(f"{path}: {differs}: not kept")
        name = None
        if isinstance(towers.tokenizer, Tokenizer):
            name = f"{path.stem}.tokenizer.json"
            spec = json.dumps(towers.tokenizer.as_transformers(), ensure_ascii=False)
            (staged.parent / name).write_text(spec, encoding="utf-8")
    beside = None if name is None else path.parent / name
    return TextExport(path, beside, target, towers.config.text.context, towers.text.feature_dim, difference)


def describe(towers: TwoTowers) -> str:
    """Return the metadata of the file: what is needed beside it to classify images by words."""
    bias = None if towers.logits.bias is None else towers.logits.bias.item()
    clean = towers.tokenizer.clean if isinstance(towers.tokenizer, Tokenizer) else None
    about = {"version": 1, "config": to_json(towers.config.text), "clean": clean}
    return json.dumps(about | {"scale": towers.logits.scale.exp().item(), "bias": bias}, ensure_ascii=False)


def build_proto(towers: TwoTowers) -> "ModelProto":
    """Return the ONNX graph: `tokens` int64 [batch, context] to `features` [batch, F]."""
    example = torch.zeros(2, towers.config.text.context, dtype=torch.long)
    shapes = {"tokens": {0: torch.export.Dim("batch")}}
    names: dict[str, Any] = {"input_names": ["tokens"], "output_names": ["features"]}
    with silence_exporter(), torch.no_grad():
        program = torch.export.export(TextGraph(towers).eval(), (example,), dynamic_shapes=shapes, strict=False)
        written = torch.onnx.export(program, **names, opset_version=OPSET, external_data=False, verbose=False)
    assert written is not None
    proto = written.model_proto
    proto.producer_name = "vitrail"
    clean_metadata(proto)
    proto.metadata_props.add(key=METADATA_KEY, value=describe(towers))
    return proto


def convert(onnx_path: Path, towers: TwoTowers, path: Path) -> None:
    """Convert the ONNX file for OpenVINO."""
    library = exported.import_openvino()
    model = library.convert_model(str(onnx_path))
    model.set_rt_info(describe(towers), [METADATA_KEY])
    library.save_model(model, str(path), compress_to_fp16=False)


def compare(towers: TwoTowers, path: Path, target: str) -> float:
    """Return the largest difference of features between the file and the model, on random tokens and on the tokeniser's."""
    text = towers.config.text
    tokens = torch.randint(text.vocabulary, (COMPARED, text.context), generator=torch.Generator().manual_seed(0))
    if isinstance(towers.tokenizer, Tokenizer):
        tokens = torch.cat((tokens, towers.tokenizer(["", "a photo of a cat.", "naïve café 😀 " * text.context])))
    with torch.inference_mode():
        expected = towers.encode_texts(tokens).numpy()
        trimmed = towers.encode_texts(
            trim_tokens(text, tokens[-3:])
        ).numpy()  # as zero-shot classification computes them
    if target == "openvino":
        settings = {"INFERENCE_PRECISION_HINT": "f32"}  # some processors would compute in bf16
        found = exported.import_openvino().compile_model(str(path), "CPU", settings)(tokens.numpy())
        found = next(iter(found.values()))
    else:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        found = np.asarray(session.run(None, {"tokens": tokens.numpy()})[0])
    return float(max(np.abs(found - expected).max(), np.abs(found[-3:] - trimmed).max()))
