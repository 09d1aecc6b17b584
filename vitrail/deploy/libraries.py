"""The other runtimes' libraries, imported so that they report to nobody.

Both send word of their use to their makers unless told otherwise, OpenVINO as soon as it is imported. Here nothing leaves the
machine that nobody asked to send.
"""

import os
import sys
from typing import Any


def onnxruntime() -> Any:
    """ONNX Runtime, or one line about how to get it. It looks at ORT_DISABLE_TELEMETRY; whoever set that has decided."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime as found
    except ImportError:
        raise ValueError("ONNX Runtime is not installed: pip install 'vitrail[onnx]'") from None
    return found


def openvino() -> Any:
    """OpenVINO, or one line about how to get it. Where its telemetry cannot be imported, it does without."""
    reporting = "openvino_telemetry"
    hidden = "openvino" not in sys.modules and reporting not in sys.modules
    if hidden:
        sys.modules[reporting] = None  # type: ignore[assignment]
    try:
        import openvino as found
    except ImportError:
        raise ValueError("OpenVINO is not installed: pip install 'vitrail[openvino]'") from None
    finally:
        if hidden:
            del sys.modules[reporting]
    return found
