"""What a single ONNX file holds; weights are never read."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_export.console import size
from spec_export.engines.errors import IntegrityError
from spec_export.making_report import Rows

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class OnnxFile:
    """Description of an ONNX file.

    Attributes:
        path: the file.
        bytes: its size, external data not included.
        ir_version: of the format.
        producer: what the file says made it.
        opsets: version by domain; the standard domain is empty.
        inputs: each as `name: type[dims]`.
        outputs: likewise.
        operators: how often each occurs, functions and subgraphs included.
        weights: initializers.
        weights_bytes: of them, wherever they lie.
        external: size of each external-data file; None where it is missing.
    """

    path: str
    bytes: int
    ir_version: int
    producer: str
    opsets: dict[str, int]
    inputs: list[str]
    outputs: list[str]
    operators: dict[str, int]
    weights: int
    weights_bytes: int
    external: dict[str, int | None]


def read_onnx(path: Path) -> OnnxFile:
    """Describe an ONNX file.

    Raises:
        MissingExtra: the extra `[build]` is not installed.
        IntegrityError: it is no ONNX file, or an incomplete one.
    """
    from spec_export.engines.extras import require

    require("build", "onnx", "onnx_ir")
    import onnx_ir as ir

    try:
        model = ir.load(path)
        external = _external(model, path.parent)
    except Exception as error:  # of protobuf, or whatever its content runs into
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise IntegrityError(f"{path} is not a complete ONNX file: {cause}") from error
    weights = list(model.graph.initializers.values())
    return OnnxFile(
        path=str(path),
        bytes=path.stat().st_size,
        ir_version=model.ir_version,
        producer=" ".join(filter(None, (model.producer_name, model.producer_version))),
        opsets=dict(model.opset_imports),
        inputs=[_value(value) for value in model.graph.inputs],
        outputs=[_value(value) for value in model.graph.outputs],
        operators=_operators(model),
        weights=len(weights),
        weights_bytes=sum(value.const_value.nbytes for value in weights if value.const_value),
        external=external,
    )


def onnx_rows(found: OnnxFile) -> Rows:
    """The description in rows."""
    opsets = ", ".join(f"{name or 'standard'} {number}" for name, number in found.opsets.items())
    count = sum(found.operators.values())
    operators = ", ".join(f"{name} {number}" for name, number in found.operators.items())
    return [
        ("file", f"{found.path} ({size(found.bytes)})"),
        ("format", f"IR version {found.ir_version}, opset {opsets}"),
        ("made with", found.producer or "not said"),
        *(("input" if i == 0 else "", value) for i, value in enumerate(found.inputs)),
        *(("output" if i == 0 else "", value) for i, value in enumerate(found.outputs)),
        ("operators", f"{count}: {operators}"),
        ("weights", f"{found.weights} tensors, {size(found.weights_bytes)}"),
        *(
            ("external", f"{name} ({'missing' if held is None else size(held)})")
            for name, held in found.external.items()
        ),
    ]


def onnx_object(found: OnnxFile) -> dict[str, Any]:
    """The description as a JSON object."""
    return {"kind": "onnx", **asdict(found)}


def _value(value: ir.Value) -> str:
    dims = "?" if value.shape is None else ", ".join(map(str, value.shape))
    kind = "?" if value.dtype is None else value.dtype.name.lower()
    return f"{value.name}: {kind} [{dims}]"


def _operators(model: ir.Model) -> dict[str, int]:
    count: Counter[str] = Counter()
    for nodes in (model.graph.all_nodes(), *(f.all_nodes() for f in model.functions.values())):
        for node in nodes:
            count[f"{node.domain}.{node.op_type}" if node.domain else node.op_type] += 1
    return dict(count.most_common())


def _external(model: ir.Model, folder: Path) -> dict[str, int | None]:
    names = {
        str(location)
        for value in model.graph.initializers.values()
        if (location := getattr(value.const_value, "location", None)) is not None
    }
    files = {name: folder / name for name in sorted(names)}
    return {name: f.stat().st_size if f.is_file() else None for name, f in files.items()}
