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


def flags(target: str, draft: str | None) -> str | None:
    """The options of `build` that make a pairing; None where no options make it.

    Args:
        target: name of its precision.
        draft: name of its precision; None: look-up.
    """
    made = {n: parse_precisions(n)[n] for n in (target, draft) if n is not None and n != AS_BUILT}
    of_target, of_draft = made.get(target), None if draft is None else made.get(draft)
    shared = {(spec.head, spec.kv) for spec in made.values()}
    is_half_kv = (
        draft is not None
        and len(made) < len({target, draft})
        and any(spec.kv for spec in made.values())
    )
    if len(shared) > 1 or is_half_kv:
        return None
    given = []
    if of_target is not None:
        given.append(f"--weights {of_target.weights}")
    if of_draft is not None and (of_target is None or of_draft.weights != of_target.weights):
        given.append(f"--draft-weights {of_draft.weights}")
    if of_target is not None and draft == AS_BUILT:
        given.append("--draft-weights none")
    for head, kv in shared:
        given += [f"--head {head}"] if head else []
        given += [f"--kv {kv}"] if kv else []
    return " ".join(given)
