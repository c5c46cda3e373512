"""GGUF headers from strangers: cut, lying, or with any byte changed."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest

from spec_export.engines.errors import CheckpointError
from spec_export.export.checkpoint import open_checkpoint
from spec_export.export.gguf_config import config_from_gguf
from spec_export.export.gguf_file import read_gguf
from tests.tiny_checkpoints import (
    save_gguf,
    tiny_config,
    tiny_model,
)


@pytest.fixture(scope="module")
def llama():
    return tiny_model(tiny_config("llama"))


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory, llama):
    return save_gguf(tmp_path_factory.mktemp("gguf") / "llama.gguf", llama)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGML" + bytes(64), b"\x80\x02}q\x00."])
def test_a_file_that_is_no_gguf(tmp_path, content):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        open_checkpoint(str(tmp_path / "m.gguf"))


def test_a_gguf_file_may_end_anywhere(tmp_path, gguf_path):
    content = gguf_path.read_bytes()
    cut = tmp_path / "cut.gguf"
    # Densely through the header, then a few times through the tensors.
    for length in [*range(0, 12000, 13), *range(12000, len(content), 40009), len(content) - 1]:
        cut.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            read_gguf(cut)


def header(*counts: int, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + body


def key(name: bytes, kind: int, body: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + body


LYING_GGUF = {
    "tensors": (header(2**60, 0), "claims 1152921504606846976 tensors"),
    "keys": (header(0, 2**60), "metadata keys"),
    "array": (header(0, 1, body=key(b"a", 9, struct.pack("<IQ", 4, 2**60))), "elements in a"),
    "strings": (header(0, 1, body=key(b"a", 9, struct.pack("<IQ", 8, 2**60))), "strings in a"),
    "string": (header(0, 1, body=key(b"a", 8, struct.pack("<Q", 2**60))), "bytes of text"),
    "nested": (header(0, 1, body=key(b"a", 9, struct.pack("<IQ", 9, 1))), "unknown type 9"),
    "type": (header(0, 1, body=key(b"a", 77, bytes(8))), "unknown type 77"),
    "twice": (header(0, 2, body=2 * key(b"a", 4, bytes(4)) + bytes(8)), "a appears twice"),
    "version": (b"GGUF" + struct.pack(">I", 3) + bytes(64), "version 50331648"),
    "dims": (
        header(1, 0, body=struct.pack("<QcI", 1, b"t", 9) + bytes(96)),
        "tensor t has 9 dimensions",
    ),
    "kind": (
        header(1, 0, body=struct.pack("<QcIQIQ", 1, b"t", 1, 32, 99, 0) + bytes(96)),
        "tensor t is of ggml type 99",
    ),
    "beyond": (
        header(1, 0, body=struct.pack("<QcIQIQ", 1, b"t", 1, 32, 0, 2**62) + bytes(96)),
        "truncated: tensor t ends at byte",
    ),
    "block": (
        header(1, 0, body=struct.pack("<QcIQIQ", 1, b"t", 1, 33, 8, 0) + bytes(96)),
        "cannot be stored as Q8_0",
    ),
}


@pytest.mark.parametrize("case", LYING_GGUF)
def test_a_gguf_header_that_lies_is_refused_at_once(tmp_path, case):
    """The reader of the `gguf` package loops over a count of 2^60."""
    content, message = LYING_GGUF[case]
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_gguf(tmp_path / "m.gguf")


def test_a_gguf_header_with_any_byte_changed_is_read_or_refused(tmp_path, gguf_path):
    content = bytearray(gguf_path.read_bytes())
    generator = np.random.default_rng(0)
    changed = tmp_path / "changed.gguf"
    for position in generator.integers(4, 12000, 400):
        kept, content[position] = content[position], int(generator.integers(256))
        changed.write_bytes(content)
        content[position] = kept
        with contextlib.suppress(CheckpointError):  # anything else fails the test
            config_from_gguf(read_gguf(changed))
