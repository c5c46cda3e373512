"""Texts that quantizers go by, as token ids: a file of the user's, or some of several kinds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from spec_export.calibration.default_texts import TEXTS
from spec_export.calibration.prompts import read_prompts
from spec_export.engines.errors import RequestError

_LONGEST = 512  # tokens of a text that are looked at
_LARGEST_BYTES = 256 << 20
_KEY = "input_ids"


def token_texts(tokenizer: Path, file: Path | None) -> list[list[int]]:
    """Read texts.

    Args:
        tokenizer: of the model.
        file: a text a line, `.jsonl` with `prompt` or `turns`, or `.npz` whose `input_ids` are
            `[n, length]`, as Polygraphy, nvidia-modelopt and onnxruntime's readers are given them;
            None: the texts of this package.

    Raises:
        RequestError: the file is missing, of another kind, or holds nothing.
    """
    if file is not None and file.suffix == ".npz":
        return _ids(file)
    encoder = Tokenizer.from_file(str(tokenizer))
    contents = [*TEXTS] if file is None else [prompt.text for prompt in read_prompts(file)]
    found = [encoder.encode(text).ids[:_LONGEST] for text in contents]
    texts = [text for text in found if text]
    if not texts:
        raise RequestError(f"{file} has no tokens to calibrate on")
    return texts


def _ids(file: Path) -> list[list[int]]:
    try:
        if file.stat().st_size > _LARGEST_BYTES:
            raise RequestError(f"{file} is too large: at most {_LARGEST_BYTES} bytes are read")
        with np.load(file, allow_pickle=False) as arrays:
            if _KEY not in arrays:
                raise RequestError(f"{file} has no array {_KEY!r}")
            found = arrays[_KEY]
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, KeyError, NotImplementedError) as error:
        raise RequestError(f"{file} is no .npz file of arrays: {error}") from error
    except Exception as error:  # zipfile and zlib have errors of their own
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{file} cannot be read: {error}") from error
    if found.ndim not in (2, 3) or found.dtype.kind not in "iu" or not found.size:
        raise RequestError(
            f"{file}: {_KEY} is {found.dtype} {list(found.shape)}; expected were whole numbers "
            "[n, length]"
        )
    rows = found.reshape(-1, found.shape[-1]).astype(np.int64)
    if int(rows.min()) < 0:
        raise RequestError(f"{file}: {_KEY} has an id below 0")
    return [row[:_LONGEST].tolist() for row in rows]
