"""Names of precisions that are compared, and the options of `build` that make them."""

from __future__ import annotations

from dataclasses import replace

from spec_export.engines.errors import RequestError
from spec_export.engines.graphs import BY_ROW, QuantizationSpec

AS_BUILT = "float32"
DEFAULT = "int8+head,int4+head"
_WEIGHTS = {
    "int8": QuantizationSpec("int8", "rtn", 32, False, None, None, BY_ROW),
    "int4": QuantizationSpec("int4", "awq", 32, True, None, None, BY_ROW),
}
_MOST = 6


def parse_precisions(text: str | None) -> dict[str, QuantizationSpec]:
    """`int8,int4+head+kv`: formats of weights, with the head in 8 bits, with caches in 8 bits.

    Raises:
        RequestError: something else.
    """
    text = DEFAULT if text is None else text
    found: dict[str, QuantizationSpec] = {}
    for name in filter(None, (part.strip() for part in text.split(","))):
        weights, *rest = name.split("+")
        if weights not in _WEIGHTS or not set(rest) <= {"head", "kv"} or len(set(rest)) < len(rest):
            raise RequestError(
                f"--precisions {name}: int8 or int4, and perhaps +head (the head in int8) and +kv "
                "(caches in int8), separated by commas"
            )
        found[name] = replace(
            _WEIGHTS[weights],
            head="int8" if "head" in rest else None,
            kv="int8" if "kv" in rest else None,
        )
    if not 1 <= len(found) <= _MOST:
        raise RequestError(f"--precisions {text}: 1 to {_MOST} of them")
    return found


def flags(wanted: QuantizationSpec) -> str:
    """The options of `build` that make a precision."""
    given = [
        f"--weights {wanted.weights}",
        wanted.head and f"--head {wanted.head}",
        wanted.kv and f"--kv {wanted.kv}",
    ]
    return " ".join(part for part in given if part)
