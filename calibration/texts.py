"""Texts that quantizers go by, as token ids: a file of the user's, or some of several kinds."""

from __future__ import annotations

import stat
import zipfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from spec_export.calibration.default_texts import TEXTS
from spec_export.calibration.prompts import read_prompts
from spec_export.engines.errors import RequestError

_LONGEST = 512  # tokens of a text that are looked at
_LARGEST_BYTES = 256 << 20
_KEY = "input_ids"
_SHOWN = 120  # characters of what a library says of a file


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
        found = _array(file)
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror or error}") from error
    except RequestError:
        raise
    except Exception as error:  # numpy, zipfile and zlib have many of their own
        raise RequestError(f"{file} is no .npz file of arrays: {str(error)[:_SHOWN]}") from error
    if found.ndim not in (2, 3) or found.dtype.kind not in "iu" or not found.size:
        raise RequestError(
            f"{file}: {_KEY} is {found.dtype} {list(found.shape)}; expected were whole numbers "
            "[n, length]"
        )
    if int(found.min()) < 0:
        raise RequestError(f"{file}: {_KEY} has an id below 0")
    rows = found.reshape(-1, found.shape[-1])
    return [row[:_LONGEST].tolist() for row in rows]


def _array(file: Path) -> np.ndarray:
    """The array of ids; no more is unpacked than is allowed, whatever the file says of itself."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise RequestError(f"{file} cannot be read: it is not a plain file")
    if not zipfile.is_zipfile(file):
        raise RequestError(f"{file} is no .npz file of arrays; write it with numpy.savez")
    with zipfile.ZipFile(file) as packed:
        sizes = {entry.filename: entry.file_size for entry in packed.infolist()}
    if max(file.stat().st_size, sizes.get(f"{_KEY}.npy", 0)) > _LARGEST_BYTES:
        raise RequestError(f"{file} is too large: at most {_LARGEST_BYTES} bytes are read")
    with np.load(file, allow_pickle=False) as arrays:
        if _KEY not in arrays:
            raise RequestError(f"{file} has no array {_KEY!r}")
        found: np.ndarray = arrays[_KEY]
    return found
