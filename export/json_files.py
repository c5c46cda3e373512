"""Read JSON objects that come with a checkpoint: of bounded size, no key twice.

The same reader serves `config.json` and the header inside a safetensors file. Knows nothing of
what the keys mean.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spec_export.engines.errors import CheckpointError

MAX_JSON_BYTES = 64 << 20  # a shard index of a 400B model is about 1 MB


def read_json_object(path: Path, limit_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Args:
        path: the file.
        limit_bytes: a larger file is refused unread.

    Raises:
        CheckpointError: the file cannot be read, is too large, or is not one JSON object.
    """
    try:
        size = path.stat().st_size
        if size > limit_bytes:
            raise CheckpointError(
                f"{path} has {size} bytes; at most {limit_bytes} are read as JSON"
            )
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return parse_json_object(content, str(path))


def parse_json_object(content: bytes, what: str) -> dict[str, Any]:
    """Parse one JSON object; `what` names it in the error.

    Raises:
        CheckpointError: not UTF-8, not JSON, nested too deeply, a key twice, or not an object.
    """
    try:
        parsed = json.loads(content.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON ({error}); download it again") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{what} holds a JSON {type(parsed).__name__}, expected an object")
    return parsed


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        twice = next(key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"key {twice!r} appears twice")
    return unique
