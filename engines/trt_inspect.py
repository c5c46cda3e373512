"""What an engine's own inspector says of attention. Needs the GPU the engine runs on.

A decoder has no softmax but the one inside its attention. So a layer that is one, by its name or
its type, is attention that was spelled out: it reads the whole cache and writes its scores to
memory.
"""

from __future__ import annotations

import json
import re
from typing import Any

from spec_export.engines.errors import EngineError
from spec_export.engines.trt_api import TensorRt

# A softmax by name, or as the kernel generator names its parts: maximum, difference, exponential.
_SOFTMAX = re.compile(r"softmax|max_?sub_?exp|sub_?exp_?sum", re.IGNORECASE)
_ONNX_NAME = re.compile(r"\[ONNX Layer: ([^\]]+)\]")


def unfused_attention(api: TensorRt, engine: Any) -> tuple[str, ...]:
    """Layers of an opened engine that spell attention out, by the name they had in the graph."""
    inspector = engine.create_engine_inspector()
    text = inspector.get_engine_information(api.module.LayerInformationFormat.JSON)
    return spelled_out(text, str(getattr(engine, "name", "")) or "the engine")


def spelled_out(report: str, engine: str) -> tuple[str, ...]:
    """The same from the inspector's report.

    Raises:
        EngineError: the report lists no layers, so that it proves nothing.
    """
    try:
        layers = json.loads(report).get("Layers", [])
    except (ValueError, AttributeError) as error:
        raise EngineError(f"the inspector's report on {engine} is not JSON: {error}") from error
    if not layers:
        raise EngineError(
            f"the inspector lists no layers of {engine}, so whether attention was fused is "
            "unknown; build the bundle anew with this version"
        )
    found = [_described(layer) for layer in layers if _SOFTMAX.search(_kind(layer))]
    return tuple(dict.fromkeys(found))


def _kind(layer: Any) -> str:
    """What a layer is called and of which type it is; one built without details is only a name."""
    if not isinstance(layer, dict):
        return str(layer)
    return " ".join(str(layer.get(key, "")) for key in ("Name", "LayerType", "TacticName"))


def _described(layer: Any) -> str:
    if not isinstance(layer, dict):
        return str(layer)
    origin = _ONNX_NAME.findall(str(layer.get("Metadata", "")))
    name = str(layer.get("Name", "a layer"))
    return f"{', '.join(origin)} ({name})" if origin else name
